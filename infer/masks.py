"""Which cache slots each new position sees.

B batch rows   n new positions   S cache slots that the forward spans
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..heads import Sight


def visible_slots(lengths: Tensor, ancestors: Tensor, slots: int) -> Tensor:
    """What each new position sees: the row's cache, and of the new positions its ancestors.

    lengths: [B], ancestors: [B, n, n] bool. Returns [B, n, S] bool.

    >>> tree = torch.tensor([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], dtype=torch.bool)
    >>> visible_slots(torch.tensor([2]), tree, 5)[0].int()
    tensor([[1, 1, 1, 0, 0],
            [1, 1, 1, 1, 0],
            [1, 1, 1, 0, 1]], dtype=torch.int32)
    """
    return Sight(lengths, lengths, ancestors).seen(slots)


def causal_ancestors(counts: Tensor, width: int) -> Tensor:
    """A chain of ``counts[b]`` new positions per row as ancestors [B, width, width]; padding sees only itself."""
    place = torch.arange(width, device=counts.device)
    real = place < counts[:, None]
    chain = (place[:, None] >= place) & real[:, :, None] & real[:, None, :]
    return chain | torch.eye(width, dtype=torch.bool, device=counts.device)


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, n, S] bool to the additive mask [B, 1, n, S]: 0 where seen, the dtype's lowest number elsewhere."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, torch.finfo(dtype).min)[:, None]
