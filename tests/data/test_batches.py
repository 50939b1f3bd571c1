import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treedraft.data import DataError, Encoded, collate, plan_epoch, slice_step
from treedraft.data.batches import EMPTY_ROW

lengths_of_rows = st.lists(st.integers(1, 500), min_size=1, max_size=200)


@given(lengths_of_rows, st.integers(1, 33), st.integers(0, 5), st.integers(0, 5))
def test_an_epoch_holds_every_row_once_and_full_steps(lengths: list[int], rows: int, seed: int, epoch: int):
    steps = plan_epoch(lengths, rows, seed, epoch)
    assert all(len(step) == rows for step in steps)
    real = [row for step in steps for row in step if row != EMPTY_ROW]
    assert sorted(real) == list(range(len(lengths)))
    assert len(steps) == -(-len(lengths) // rows)
    assert all(EMPTY_ROW not in step for step in steps[:-1])
    assert steps == plan_epoch(lengths, rows, seed, epoch)


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_processes_and_micro_batches_together_hold_the_step(world_size: int, accumulation: int, size: int):
    step = list(range(world_size * accumulation * size))
    parts = [slice_step(step, world_size, rank, accumulation) for rank in range(world_size)]
    assert all(len(part) == accumulation and all(len(micro) == size for micro in part) for part in parts)
    assert sorted(row for part in parts for micro in part for row in micro) == step


def test_epochs_and_seeds_differ():
    lengths = list(range(1, 101))
    plans = [plan_epoch(lengths, 4, seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert len({str(plan) for plan in plans}) == 4


def test_rows_of_like_length_share_a_step():
    lengths = torch.randint(1, 1000, (640,), generator=torch.Generator().manual_seed(0)).tolist()
    padded = sum(8 * max(lengths[row] for row in step) for step in plan_epoch(lengths, 8, 0, 0))
    shuffled = sum(8 * max(lengths[i : i + 8]) for i in range(0, 640, 8))
    assert padded < 1.15 * sum(lengths)
    assert shuffled > 1.7 * sum(lengths)


def test_one_row_makes_one_step():
    assert plan_epoch([9], 32, seed=1, epoch=0) == [[0] + [EMPTY_ROW] * 31]


def test_no_rows_and_uneven_steps_are_refused():
    with pytest.raises(DataError, match="0 rows"):
        plan_epoch([], 4, 0, 0)
    with pytest.raises(DataError, match="6 rows a step do not divide into 2 processes x 2 accumulated batches"):
        slice_step([0, 1, 2, 3, 4, 5], 2, 0, 2)


@pytest.mark.parametrize("pad", [0, 3, 5])
def test_padding_is_known_by_position_and_not_by_value(pad: int):
    rows = [Encoded("a", [20, 21, 5], [0, 1, 1], False), None, Encoded("b", [22, 5], [0, 1], False)]
    batch = collate(rows, pad)
    assert batch.tokens.tolist() == [[20, 21, 5], [pad, pad, pad], [22, 5, pad]]
    assert batch.mask.tolist() == [[False, True, True], [False, False, False], [False, True, False]]
    assert batch.lengths.tolist() == [3, 1, 2]
