"""Weight-only int8: linear layers rounded to 8 bits with a scale for each output, arithmetic in fp32.

The quantised target is an ordinary fp32 model whose weights happen to be q * s, so Hugging Face runs it as it is, it is
what losslessness speaks of, and packing keeps it in 8 bits without losing anything more (see heads/linear.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..heads import int8_parts

CHUNK = 4096
"""Outputs that are rounded at a time."""


@torch.no_grad()
def quantize_int8(model: nn.Module) -> None:
    """Rounds the weights of all linear layers, in place: of a tied output layer the embedding too."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            for rows in module.weight.split(CHUNK):
                rows.copy_(rounded(rows))


def rounded(weight: Tensor) -> Tensor:
    """The nearest q * s of each row of a weight [N, K] in fp32, |q| <= 127.

    Scales are numbers of bf16, so that q * s is exact in fp32 and q and s can be told from it again.

    >>> rounded(torch.tensor([[0.5, -1.0, 0.123], [0.0, 0.0, 0.0]]))
    tensor([[ 0.5039, -0.9999,  0.1260],
            [ 0.0000,  0.0000,  0.0000]])
    """
    largest = weight.abs().amax(1, keepdim=True)
    scale = torch.where(largest > 0, largest / 127, 1.0).bfloat16().float()
    return (weight / scale).round().clamp(-127, 127).add_(0.0).mul_(scale)  # no negative zeros: 8 bits have none


def is_int8(weight: Tensor) -> bool:
    """Whether a weight is one that ``quantize_int8`` left."""
    return int8_parts(weight) is not None
