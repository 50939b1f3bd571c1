"""Features on disk: what is read is what was computed, and a killed run loses nothing that was finished."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from treedraft.train.store import FeatureStore, StoreError

ROWS = [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1, 2, 4]]


def features(row: list[int], taps: int = 2) -> torch.Tensor:
    return torch.randn(len(row), taps * 8, generator=torch.Generator().manual_seed(sum(row))).bfloat16()


def filled(folder: Path, rows: list[list[int]] = ROWS) -> FeatureStore:
    store = FeatureStore(folder, "abc", 8, (2, 4))
    for i in range(0, len(rows), 2):
        store.add(rows[i : i + 2], [features(r) for r in rows[i : i + 2]])
    return store


def test_rows_read_back_as_they_were_written_now_and_later(tmp_path: Path):
    for store in (filled(tmp_path), FeatureStore(tmp_path, "abc", 8, (2, 4))):
        for row in ROWS:
            assert row in store
            assert torch.equal(store.of(row), features(row))
    assert [1, 2] not in store


def test_a_run_may_read_some_of_the_layers_in_its_own_order(tmp_path: Path):
    filled(tmp_path)
    store = FeatureStore(tmp_path, "abc", 8, (4,))
    assert torch.equal(store.of(ROWS[0]), features(ROWS[0])[:, 8:])
    turned = FeatureStore(tmp_path, "abc", 8, (4, 2))
    assert torch.equal(turned.of(ROWS[0]), features(ROWS[0]).roll(8, 1))


def test_a_new_store_keeps_further_layers(tmp_path: Path):
    store = FeatureStore(tmp_path, "abc", 8, (4,), further=(2,))
    assert store.stored_taps == (2, 4)
    store.add([ROWS[0]], [features(ROWS[0])])
    assert torch.equal(FeatureStore(tmp_path, "abc", 8, (2, 4)).of(ROWS[0]), features(ROWS[0]))


def test_a_row_whose_line_was_cut_counts_as_absent_and_is_written_again(tmp_path: Path):
    filled(tmp_path)
    listed = tmp_path / "rows.txt"
    listed.write_text(listed.read_text()[:-3])
    store = FeatureStore(tmp_path, "abc", 8, (2, 4))
    assert ROWS[-1] not in store
    assert ROWS[0] in store
    store.add([ROWS[-1]], [features(ROWS[-1])])
    for row in ROWS:
        assert torch.equal(FeatureStore(tmp_path, "abc", 8, (2, 4)).of(row), features(row))


def test_features_without_a_line_are_overwritten(tmp_path: Path):
    filled(tmp_path, ROWS[:2])
    with (tmp_path / "tap-2.bin").open("ab") as file:  # killed between the features and their line
        file.write(b"x" * 48)
    store = FeatureStore(tmp_path, "abc", 8, (2, 4))
    store.add(ROWS[2:], [features(r) for r in ROWS[2:]])
    for row in ROWS:
        assert torch.equal(store.of(row), features(row))


def test_another_targets_store_is_refused_with_all_that_differs(tmp_path: Path):
    filled(tmp_path)
    with pytest.raises(StoreError, match=r"target: 'abc', expected 'xyz'.*hidden_size: 8, expected 16.*tapped layers"):
        FeatureStore(tmp_path, "xyz", 16, (2, 3))
