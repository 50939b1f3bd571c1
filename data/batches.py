"""Which rows make up which optimiser step, and rows to padded tensors.

B batch rows   T text positions
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .records import DataError, Encoded

EMPTY_ROW = -1
"""Stands for a row that carries mask 0, where a step has fewer rows than it should."""

_POOL_STEPS = 8


@dataclass(frozen=True)
class Batch:
    """Rows padded on the right.

    tokens: [B, T] int64
    mask: [B, T] bool, True where the token is supervised
    lengths: [B] int64, the real tokens of every row, at least 1
    """

    tokens: Tensor
    mask: Tensor
    lengths: Tensor


def plan_epoch(lengths: Sequence[int], rows_per_step: int, seed: int, epoch: int) -> list[list[int]]:
    """The rows of every optimiser step of an epoch: each row once, every step ``rows_per_step`` long.

    Depends on nothing but the arguments; the number of processes and of accumulated batches do not enter, and a resumed
    run finds the same plan. Rows of like length share a step (sorted within pools of eight steps) to save padding; the
    steps are shuffled. What does not fill a step comes last, filled up with EMPTY_ROW. Raises DataError for no rows.

    >>> plan_epoch([5], rows_per_step=4, seed=0, epoch=0)
    [[0, -1, -1, -1]]
    """
    if not lengths or rows_per_step < 1:
        raise DataError(f"cannot plan an epoch of {len(lengths)} rows in steps of {rows_per_step} rows")
    generator = torch.Generator().manual_seed(_key(seed, epoch))
    order: list[int] = torch.randperm(len(lengths), generator=generator).tolist()
    full = len(order) - len(order) % rows_per_step
    pool = _POOL_STEPS * rows_per_step
    steps = []
    for begin in range(0, full, pool):
        rows = sorted(order[begin : min(begin + pool, full)], key=lambda row: lengths[row])
        steps += [rows[i : i + rows_per_step] for i in range(0, len(rows), rows_per_step)]
    steps = [steps[i] for i in torch.randperm(len(steps), generator=generator).tolist()]
    if full < len(order):
        rest = sorted(order[full:], key=lambda row: lengths[row])
        steps.append(rest + [EMPTY_ROW] * (rows_per_step - len(rest)))
    return steps


def slice_step(step: Sequence[int], world_size: int, rank: int, accumulation: int) -> list[list[int]]:
    """The ``accumulation`` micro-batches of one process: disjoint between processes, together the whole step.

    Raises DataError unless the rows divide evenly.

    >>> slice_step([0, 1, 2, 3, 4, 5, 6, 7], world_size=2, rank=1, accumulation=2)
    [[2, 3], [6, 7]]
    """
    size, rest = divmod(len(step), world_size * accumulation)
    if rest or not size:
        raise DataError(
            f"{len(step)} rows a step do not divide into {world_size} processes x {accumulation} accumulated batches: "
            f"choose a multiple of {world_size * accumulation}"
        )
    starts = [(micro * world_size + rank) * size for micro in range(accumulation)]
    return [list(step[start : start + size]) for start in starts]


def collate(rows: Sequence[Encoded | None], pad_id: int) -> Batch:
    """Rows padded on the right to the longest; None becomes a row of one pad token that is not supervised."""
    length = max((len(row.ids) for row in rows if row), default=1)
    tokens = torch.full((len(rows), length), pad_id, dtype=torch.int64)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for b, row in enumerate(rows):
        if row:
            tokens[b, : len(row.ids)] = torch.tensor(row.ids)
            mask[b, : len(row.mask)] = torch.tensor(row.mask, dtype=torch.bool)
    return Batch(tokens, mask, torch.tensor([len(row.ids) if row else 1 for row in rows]))


def _key(seed: int, epoch: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{epoch}".encode()).digest()[:8], "big") >> 1
