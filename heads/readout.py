"""Output layers of heads: applied as they are while training, prepared once for decoding.

n rows   H hidden size   W draft vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .base import Output
from .linear import PackedLinear, can_pack

ReadOut = Callable[[Tensor], Tensor]
"""Hidden rows [..., H] to logits [..., W]."""


def prepare(output: Output, dtype: torch.dtype) -> list[ReadOut]:
    """The layer of each head that has its own, else the one of all, in ``dtype``, packed where the CPU gains by it."""
    bias = None if output.bias is None else output.bias.to(dtype)
    weights = [weight.detach().to(dtype) for weight in output.own or (output.weight,)]
    if can_pack(dtype, output.weight.device):
        return [PackedLinear(weight, bias) for weight in weights]
    return [partial(F.linear, weight=weight, bias=bias) for weight in weights]


def read_out(prepared: Sequence[ReadOut], output: Output, k: int, hidden: Tensor) -> Tensor:
    """Logits of head k, by the prepared layers where there are some."""
    if prepared:
        return prepared[min(k, len(prepared) - 1)](hidden)
    weight, bias = output.of_head(k)
    return F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype))
