"""Learning rate and rows of a step are functions of the step."""

from __future__ import annotations

import pytest

from treedraft.train.config import OptimConfig
from treedraft.train.schedule import Plan, learning_rate, micro_batches


@pytest.mark.parametrize(("warmup", "first"), [(0.0, 1.0), (0.1, 0.1), (1.0, 0.01)])
def test_the_rate_rises_to_its_peak_and_ends_at_the_least_share(warmup: float, first: float):
    optim = OptimConfig(lr=1.0, warmup=warmup, min_ratio=0.1)
    rates = [learning_rate(optim, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(first)
    assert max(rates) == 1.0
    peak = rates.index(1.0)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert rates[-1] == pytest.approx(1.0 if warmup == 1.0 else 0.1)


def test_a_single_step_runs_at_the_full_rate():
    assert learning_rate(OptimConfig(lr=0.5), 0, 1) == 0.5


def test_every_row_is_seen_once_an_epoch_in_an_order_of_its_own():
    plan = Plan(tuple([5] * 10), rows_per_step=4, seed=0)
    assert plan.steps_per_epoch == 3
    epochs = [[row for step in range(3 * e, 3 * e + 3) for row in plan.rows(step)] for e in range(2)]
    for epoch in epochs:
        assert sorted(row for row in epoch if row >= 0) == list(range(10))
        assert len(epoch) == 12
    assert epochs[0] != epochs[1]
    assert plan.position(7) == (2, 1)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("micro_rows", [1, 3, 8, 100])
@pytest.mark.parametrize("rows", [1, 8, 10])
def test_processes_share_a_step_without_overlap_in_equally_many_parts(world: int, micro_rows: int, rows: int):
    step = list(range(rows))
    shares = [micro_batches(step, world, rank, micro_rows) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    assert all(1 <= len(part) <= micro_rows for share in shares for part in share)
    assert sorted(row for share in shares for part in share for row in part if row >= 0) == step
