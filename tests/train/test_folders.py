"""Checkpoint folders: whole or absent, verified, rotated."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from treedraft.train.folders import (
    CheckpointError,
    CheckpointWarning,
    check_whole,
    clear_leftovers,
    faults_of,
    latest,
    rotate,
    step_folder,
    write_folder,
)


def write(out: Path, step: int, text: str = "weights") -> Path:
    folder = step_folder(out, step)

    def fill(place: Path) -> None:
        (place / "heads").mkdir()
        (place / "heads" / "w.bin").write_text(text)
        (place / "progress.json").write_text(str(step))

    write_folder(folder, fill)
    return folder


def names(out: Path) -> list[str]:
    return sorted(path.name for path in out.iterdir())


def test_a_written_folder_is_whole_and_leaves_nothing_beside_it(tmp_path: Path):
    folder = write(tmp_path, 15)
    assert folder.name == "step-000015"
    assert faults_of(folder) == []
    assert latest(tmp_path) == folder
    assert names(tmp_path) == ["step-000015"]


def test_a_failed_write_leaves_nothing_and_keeps_what_was_there(tmp_path: Path):
    folder = write(tmp_path, 1, "first")

    def fail(place: Path) -> None:
        (place / "half").write_text("x")
        raise RuntimeError("disk")

    with pytest.raises(RuntimeError, match="disk"):
        write_folder(folder, fail)
    assert names(tmp_path) == ["step-000001"]
    assert (folder / "heads" / "w.bin").read_text() == "first"


def test_a_full_disk_is_said_plainly(tmp_path: Path):
    def fail(place: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(CheckpointError, match=r"step-000003 could not be written, earlier .*No space left"):
        write_folder(step_folder(tmp_path, 3), fail)
    assert names(tmp_path) == []


def test_a_folder_written_over_is_kept_under_another_name(tmp_path: Path):
    for text in ("first", "second", "third"):
        write(tmp_path, 1, text)
    assert names(tmp_path) == ["step-000001", "step-000001.replaced", "step-000001.replaced-2"]
    assert (tmp_path / "step-000001" / "heads" / "w.bin").read_text() == "third"
    assert (tmp_path / "step-000001.replaced" / "heads" / "w.bin").read_text() == "first"
    assert latest(tmp_path) == tmp_path / "step-000001"


def test_a_half_written_checkpoint_is_skipped_with_a_warning_that_names_it(tmp_path: Path):
    good, cut = write(tmp_path, 10), write(tmp_path, 20)
    (cut / "heads" / "w.bin").write_text("wei")
    with pytest.warns(
        CheckpointWarning, match=r"using .*step-000010.*step-000020/heads/w\.bin has 3 bytes, expected 7"
    ):
        assert latest(tmp_path) == good


@pytest.mark.parametrize(
    ("damage", "fault"),
    [
        (lambda f: (f / "heads" / "w.bin").write_text("wEights"), r"heads/w\.bin has changed since"),
        (lambda f: (f / "heads" / "w.bin").unlink(), r"heads/w\.bin is missing"),
        (lambda f: (f / "manifest.json").unlink(), r"manifest\.json is missing: the save was interrupted"),
        (lambda f: (f / "manifest.json").write_text('{"files"'), r"manifest\.json cannot be read"),
    ],
)
def test_a_broken_checkpoint_asked_for_by_name_is_refused_naming_the_file(tmp_path: Path, damage, fault: str):
    folder = write(tmp_path, 20)
    damage(folder)
    with pytest.raises(CheckpointError, match=fault):
        check_whole(folder)


def test_training_never_starts_over_when_every_checkpoint_is_broken(tmp_path: Path):
    for step in (10, 20):
        (write(tmp_path, step) / "progress.json").unlink()
    with pytest.raises(CheckpointError, match=r"every checkpoint .* is broken: .*step-000020.*step-000010"):
        latest(tmp_path)


def test_an_empty_or_absent_folder_has_no_checkpoint(tmp_path: Path):
    assert latest(tmp_path) is None
    assert latest(tmp_path / "none") is None


def test_rotation_keeps_the_newest_whole_ones_and_never_touches_broken_ones(tmp_path: Path):
    for step in (5, 10, 15, 20):
        write(tmp_path, step)
    (tmp_path / "step-000020" / "heads" / "w.bin").write_text("x")
    rotate(tmp_path, keep=2)
    assert names(tmp_path) == ["step-000010", "step-000015", "step-000020"]
    with warnings.catch_warnings(record=True):
        assert latest(tmp_path) == tmp_path / "step-000015"


def test_what_a_killed_save_left_is_cleared_and_nothing_else(tmp_path: Path):
    write(tmp_path, 5)
    for name in (".step-000010.writing-77", ".step-000001.deleting-77", ".notes", "best"):
        (tmp_path / name).mkdir()
    clear_leftovers(tmp_path)
    assert names(tmp_path) == [".notes", "best", "step-000005"]
