"""Linear layers with weights packed once for oneDNN: what a CPU needs for a few rows at a time.

An ordinary ``F.linear`` lays the weight out anew for every product of 2 to 32 rows. Packed once, a forward over 8
nodes costs little more than one over a single node, which is what makes a small tree pay on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PackedLinear(nn.Module):
    """A linear layer for inference on the CPU, equal to ``source`` to rounding. Holds no Parameter."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")

    def dense_weight(self) -> Tensor:
        """The weight [out, in] in its ordinary layout, the same bits that were packed."""
        return self._packed.to_dense()

    @property
    def bias(self) -> Tensor | None:
        return self._bias


def can_pack(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether this CPU multiplies packed weights of ``dtype``: fp32 always, bf16 where the processor knows it."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_linears(module: nn.Module) -> None:
    """Replaces every ``nn.Linear`` below ``module`` (subclasses excepted) by a PackedLinear, one after the other."""
    for name, child in module.named_children():
        if type(child) is nn.Linear:
            setattr(module, name, PackedLinear(child.weight, child.bias))
        else:
            pack_linears(child)
