"""Learning rate and rows of every optimiser step, as functions of the step: nothing to save, nothing to lose."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..data import plan_epoch, slice_step
from ..data.batches import EMPTY_ROW
from .config import OptimConfig


def learning_rate(optim: OptimConfig, step: int, total: int) -> float:
    """The rate of step 0..total-1: a linear rise over the first ``warmup`` share, then a cosine to ``min_ratio``.

    >>> optim = OptimConfig(lr=1.0, warmup=0.2, min_ratio=0.1)
    >>> [round(learning_rate(optim, step, 10), 2) for step in range(10)]
    [0.5, 1.0, 0.97, 0.87, 0.72, 0.55, 0.38, 0.23, 0.13, 0.1]
    """
    rising = round(optim.warmup * total)
    if step < rising:
        return optim.lr * (step + 1) / rising
    falling = (step - rising + 1) / max(total - rising, 1) if rising else step / max(total - 1, 1)
    return optim.lr * (optim.min_ratio + (1 - optim.min_ratio) * 0.5 * (1 + math.cos(math.pi * falling)))


@dataclass(frozen=True)
class Plan:
    """Which rows every optimiser step of a run has. The number of processes does not enter."""

    lengths: tuple[int, ...]
    rows_per_step: int
    seed: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(len(self.lengths) / self.rows_per_step)

    def position(self, step: int) -> tuple[int, int]:
        """(epoch, steps done in it) after ``step`` optimiser steps."""
        return divmod(step, self.steps_per_epoch)

    def rows(self, step: int) -> list[int]:
        """Row indices of optimiser step 0, 1, ...; -1 fills a step up."""
        epoch, index = self.position(step)
        return _epoch(self, epoch)[index]


def micro_batches(step: Sequence[int], world_size: int, rank: int, micro_rows: int) -> list[list[int]]:
    """One process's share of a step, at most ``micro_rows`` rows at a time; every process has as many parts.

    Rows that only fill up are left out, except where a part would have none.

    >>> micro_batches([7, 3, 5, -1], world_size=2, rank=0, micro_rows=1)
    [[7], [5]]
    >>> micro_batches([7, 3, 5, -1], world_size=2, rank=1, micro_rows=1)
    [[3], [-1]]
    """
    parts = math.ceil(len(step) / (world_size * micro_rows))
    width = math.ceil(len(step) / (world_size * parts)) * world_size * parts
    filled = [*step, *[EMPTY_ROW] * (width - len(step))]
    shares = slice_step(filled, world_size, rank, parts)
    return [[row for row in share if row != EMPTY_ROW] or [EMPTY_ROW] for share in shares]


@lru_cache(maxsize=2)
def _epoch(plan: Plan, epoch: int) -> list[list[int]]:
    steps = plan_epoch(plan.lengths, plan.rows_per_step, plan.seed, epoch)
    assert len(steps) == plan.steps_per_epoch
    return steps
