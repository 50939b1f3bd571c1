"""Linear layers with weights packed once for oneDNN: what a CPU needs for a few rows at a time.

An ordinary ``F.linear`` lays the weight out anew for every product of 2 to 32 rows. Packed once, a forward over 8
nodes costs little more than one over a single node, which is what makes a small tree pay on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class PackedPart(nn.Module):
    """The outputs ``start`` to ``end`` of a PackedLinear that several layers of one input share.

    A caller that knows the others multiplies by ``whole`` once; on its own a part computes the whole and keeps its own.
    """

    def __init__(self, whole: PackedLinear, start: int, end: int) -> None:
        super().__init__()
        self._whole = (whole,)  # a tuple: the shared layer is no module of any one part
        self._range = slice(start, end)

    @property
    def whole(self) -> PackedLinear:
        return self._whole[0]

    @property
    def width(self) -> int:
        """Its own outputs."""
        return self._range.stop - self._range.start

    def forward(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., end - start]."""
        return self.whole(x)[..., self._range]

    def dense_weight(self, whole: Tensor | None = None) -> Tensor:
        """Its rows of the unpacked whole, which a caller may have at hand."""
        return (self.whole.dense_weight() if whole is None else whole)[self._range]

    @property
    def bias(self) -> Tensor | None:
        return None if self.whole.bias is None else self.whole.bias[self._range]


def pack_together(linears: Sequence[nn.Linear]) -> list[PackedPart]:
    """Linear layers of one input, all with biases or all without, packed as one; a part for each, in their order."""
    biases: list[Tensor] = [linear.bias for linear in linears if linear.bias is not None]
    assert len(biases) in (0, len(linears))
    whole = PackedLinear(torch.cat([linear.weight for linear in linears]), torch.cat(biases) if biases else None)
    ends = torch.tensor([linear.out_features for linear in linears]).cumsum(0).tolist()
    return [PackedPart(whole, end - linear.out_features, end) for linear, end in zip(linears, ends, strict=True)]


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
