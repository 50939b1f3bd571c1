"""Checkpoint folders that are whole or absent: written aside, listed in a manifest, renamed into place, verified.

A folder step-000015 is written as a hidden neighbour, every file is flushed to disk, ``manifest.json`` with sizes and
SHA-256 comes last, and one rename makes it visible. Nothing visible is ever deleted except by rotation.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d{6,})")


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written: the message names the folder, the file and what to do."""


class CheckpointWarning(UserWarning):
    """A checkpoint that is passed over."""


def step_folder(out: Path, step: int) -> Path:
    """Where the checkpoint after ``step`` optimiser steps lies."""
    return out / f"step-{step:06d}"


def steps_in(out: Path) -> list[tuple[int, Path]]:
    """All checkpoint folders, broken ones too, by ascending step."""
    if not out.is_dir():
        return []
    found = ((_STEP.fullmatch(path.name), path) for path in out.iterdir() if path.is_dir())
    return sorted((int(match[1]), path) for match, path in found if match)


def faults_of(folder: Path, read: bool = True) -> list[str]:
    """What is wrong with a folder, by file: missing, of another size, of another content. Empty if it is whole.

    Without ``read`` the contents are not hashed.
    """
    manifest = folder / MANIFEST
    try:
        listed = json.loads(manifest.read_text())["files"]
        wanted = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in listed.items()}
    except FileNotFoundError:
        return [f"{manifest} is missing: the save was interrupted"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return [f"{manifest} cannot be read"]
    faults = []
    for name, (size, digest) in wanted.items():
        file = folder / name
        if not file.is_file():
            faults.append(f"{file} is missing")
        elif file.stat().st_size != size:
            faults.append(f"{file} has {file.stat().st_size} bytes, expected {size}")
        elif read and _digest(file) != digest:
            faults.append(f"{file} has changed since it was written")
    return faults


def check_whole(folder: Path) -> None:
    """Raises CheckpointError naming every broken file of the checkpoint ``folder``."""
    if not folder.is_dir():
        raise CheckpointError(f"no checkpoint at {folder}")
    faults = faults_of(folder)
    if faults:
        raise CheckpointError(f"the checkpoint {folder} is broken: " + "; ".join(faults))


def latest(out: str | Path) -> Path | None:
    """The newest whole checkpoint in ``out``, or None if there is none at all.

    Warns (CheckpointWarning) of newer ones that are broken. Raises CheckpointError if all are broken: training must not
    start over silently.
    """
    broken = []
    for _, folder in reversed(steps_in(Path(out))):
        faults = faults_of(folder)
        if not faults:
            if broken:
                warnings.warn(
                    f"using {folder}, since newer checkpoints are broken: " + "; ".join(broken),
                    CheckpointWarning,
                    stacklevel=2,
                )
            return folder
        broken += faults
    if broken:
        raise CheckpointError(
            f"every checkpoint in {out} is broken: {'; '.join(broken)}. Nothing was changed. "
            "Restore one, or move them away to start over"
        )
    return None


def check_writable(out: Path) -> None:
    """Raises CheckpointError if ``out`` cannot be made or written to, without making it."""
    place = out
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = "is not a folder" if not place.is_dir() else "cannot be written to"
        raise CheckpointError(f"checkpoints cannot go into {out}: {place} {what}; choose another checkpoint.out")


def write_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Makes ``folder`` out of what ``fill(temporary folder)`` writes: whole or not at all.

    A folder already there under that name is kept as ``<name>.replaced``, ``.replaced-2``, ...
    Raises CheckpointError if the disk refuses.
    """
    try:
        _write_aside(folder, fill)
        _flush(folder.parent)
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be written, earlier checkpoints are as they were: {error}"
        ) from error


def _write_aside(folder: Path, fill: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{folder.name}.writing-{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    try:
        fill(aside)
        files = sorted(path for path in aside.rglob("*") if path.is_file())
        entries = {
            path.relative_to(aside).as_posix(): {"bytes": path.stat().st_size, "sha256": _digest(path)}
            for path in files
        }
        (aside / MANIFEST).write_text(json.dumps({"files": entries}, indent=2) + "\n")
        for path in (*files, aside / MANIFEST, *(p for p in aside.rglob("*") if p.is_dir()), aside):
            _flush(path)
        if folder.exists():
            folder.rename(_free_name(folder))
        aside.rename(folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def rotate(out: Path, keep: int) -> None:
    """Deletes all but the newest ``keep`` whole checkpoints; broken ones are left for a person to look at.

    A folder is renamed before it is deleted, so that a kill in between leaves no half folder in sight.
    """
    whole = [folder for _, folder in steps_in(out) if not faults_of(folder, read=False)]
    for folder in whole[:-keep]:
        hidden = folder.with_name(f".{folder.name}.deleting-{os.getpid()}")
        folder.rename(hidden)
        shutil.rmtree(hidden)


def clear_leftovers(out: Path) -> None:
    """Deletes the hidden folders that a killed save or rotation left behind."""
    if out.is_dir():
        for path in out.iterdir():
            if re.fullmatch(r"\.(step-\d+|best)\.(writing|deleting)-\d+", path.name):
                shutil.rmtree(path, ignore_errors=True)


def _free_name(folder: Path) -> Path:
    names = (folder.with_name(f"{folder.name}.replaced{'' if n == 1 else f'-{n}'}") for n in range(1, 10_000))
    return next(name for name in names if not name.exists())


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
