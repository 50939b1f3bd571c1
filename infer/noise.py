"""Counter-based Gumbel noise: the same for a request wherever, whenever and beside whomever it is decoded.

The noise of a token id at a text position is a pure function of (seed, position, token id). It is made with integer
arithmetic, so its bits are equal on every device: SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom
number generators") over the token ids, started from a key that hashes seed and position with the same mixer.

M rows   W token ids
"""

from __future__ import annotations

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_POSITION = 0xD1B54A32D192ED03
_WORD = (1 << 64) - 1

DRAWS, COINS, RESIDUALS = 1, 2, 3
"""Streams of noise apart from the target's own: a head's draws, a rule's coins, its draws after a rejection."""


def _signed(word: int) -> int:
    """A 64-bit word as the int64 with the same bits: torch wraps products and sums of int64 like unsigned ones."""
    word &= _WORD
    return word - (1 << 64) if word >> 63 else word


def _mix_(z: Tensor) -> Tensor:
    """SplitMix64's output function on int64, in place. ``>>`` copies the sign, so shifted-in bits are masked off."""
    z ^= (z >> 30) & ((1 << 34) - 1)
    z *= _signed(_MIX_1)
    z ^= (z >> 27) & ((1 << 37) - 1)
    z *= _signed(_MIX_2)
    z ^= (z >> 31) & ((1 << 33) - 1)
    return z


def noise_bits(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """32 random bits for every row and token id, as int64 in [0, 2^32).

    seeds: [M] int64, positions: [M] int64, ids: [W] int64. Returns [M, W].
    """
    key = _mix_(seeds + _signed(_GAMMA))
    key = _mix_(key + positions * _signed(_POSITION))
    state = key[:, None] + (ids * _signed(_GAMMA) + _signed(_GAMMA))
    return (_mix_(state) >> 32) & 0xFFFFFFFF


def gumbel(seeds: Tensor, positions: Tensor, ids: Tensor) -> Tensor:
    """Standard Gumbel noise [M, W] in fp64: -log(-log u) with u = (bits + 0.5) / 2^32, never 0 or 1.

    In fp32 the largest u would round to 1 and its noise to infinity.
    """
    u = noise_bits(seeds, positions, ids).double().add_(0.5).mul_(2.0**-32)
    return u.log_().neg_().log_().neg_()


def stream_seeds(seeds: Tensor, stream: int, root_position: Tensor) -> Tensor:
    """Seeds [B] of a stream of noise that belongs to one step, known by the position of its root [B].

    Rules that weigh p against q need draws, coins and residual draws that are independent of each other and of every
    other step's: positions that are drafted again after a rejection must not meet the same noise.
    """
    key = _mix_(seeds + _signed(stream * _MIX_2))
    return _mix_(key + root_position * _signed(_GAMMA)) & ((1 << 63) - 1)


def row_seed(seed: int, index: int) -> int:
    """The seed of request ``index`` in a call with ``seed``; request 0 has the call's own.

    >>> row_seed(7, 0), row_seed(7, 1) != row_seed(7, 2), row_seed(7, 1) != row_seed(8, 1)
    (7, True, True)
    """
    if index == 0:
        return seed
    state = torch.tensor([_signed(seed + index * _GAMMA)])
    return int(_mix_(state)) & ((1 << 63) - 1)
