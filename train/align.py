"""The only place that shifts: which token, at which position, each head is trained on.

B batch rows   T text positions   K heads   t a position   k a head, 0..K-1

The head reads the feature of position t. The target has already written the token at t+1, which is the root of the
tree and comes from the target itself; head 0 drafts the token after it, head 1 the one after that:

    position      t        t+1      t+2      t+3      t+4
    token         read     root     head 0   head 1   head 2
    target's law of it     at t     at t+1   at t+2   at t+3

So head k at position t predicts the token at t+2+k, and the target's own law of that token stands at t+1+k.
"""

from __future__ import annotations

import torch
from torch import Tensor


def next_tokens(tokens: Tensor) -> Tensor:
    """The token one further, for ``Head.predict``: [B, T] to [B, T]. The last column is padding, 0.

    >>> next_tokens(torch.tensor([[5, 6, 7]]))
    tensor([[6, 7, 0]])
    """
    return _shift(tokens, 1)


def align(tokens: Tensor, mask: Tensor, num_heads: int) -> tuple[Tensor, Tensor]:
    """What every head is trained on: ``tokens`` and ``mask`` [B, T] to labels [K, B, T] int64 and valid [K, B, T] bool.

    ``mask`` is nonzero where a token was written by the target (supervised). Position t counts for head k when the
    root (t+1) and every token up to t+2+k is supervised, that is, when decoding could stand there: a draft starts
    only after a token that the target has written. Nothing past the row's end counts. Where ``valid`` is False the
    label is meaningless. Padding is known by its mask, never by the value of a token.

    The prompt is 5 6, the answer 7 8 9, then padding. The first draft starts when 7 is the root (t = 1):

    >>> tokens = torch.tensor([[5, 6, 7, 8, 9, 0]])
    >>> mask = torch.tensor([[0, 0, 1, 1, 1, 0]])
    >>> labels, valid = align(tokens, mask, num_heads=2)
    >>> labels[0]
    tensor([[7, 8, 9, 0, 0, 0]])
    >>> valid[0].int()
    tensor([[0, 1, 1, 0, 0, 0]], dtype=torch.int32)
    >>> labels[1]
    tensor([[8, 9, 0, 0, 0, 0]])
    >>> valid[1].int()
    tensor([[0, 1, 0, 0, 0, 0]], dtype=torch.int32)
    """
    written = mask.bool()
    reach = _shift(written, 1)  # the root
    labels, valid = [], []
    for k in range(num_heads):
        reach = reach & _shift(written, 2 + k)
        labels.append(_shift(tokens, 2 + k))
        valid.append(reach)
    return torch.stack(labels), torch.stack(valid)


def teacher_index(valid: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Where the target's law of the valid labels of head k stands: valid [K, B, T] to row [m] and position [m].

    They index the target's final features [B, T, H], in the order of ``valid[k].nonzero()``: the law of the token at
    t+2+k is the target's output at t+1+k.

    >>> _, valid = align(torch.tensor([[5, 6, 7, 8, 9, 0]]), torch.tensor([[0, 0, 1, 1, 1, 0]]), num_heads=2)
    >>> teacher_index(valid, 0)[1], teacher_index(valid, 1)[1]
    (tensor([2, 3]), tensor([3]))
    """
    row, position = valid[k].nonzero(as_tuple=True)
    return row, position + 1 + k


def _shift(values: Tensor, by: int) -> Tensor:
    """``values[:, t + by]`` at t, zero (False) past the end."""
    shifted = torch.zeros_like(values)
    if by < values.shape[1]:
        shifted[:, : values.shape[1] - by] = values[:, by:]
    return shifted
