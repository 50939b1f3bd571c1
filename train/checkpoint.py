"""What a checkpoint holds, and how a run goes on from it.

    step-000015/heads/          config.json, heads.safetensors: the fp32 weights, ready to decode with
    step-000015/adapter/        the target's adapter, if one is trained: adapter_config.json, adapter_model.safetensors
    step-000015/training.pt     optimiser state and random generators (tensors and plain values, read with weights_only)
    step-000015/progress.json   steps done, best tau, and what a resumed run must have in common with this one
    step-000015/manifest.json   sizes and SHA-256 of the files above, written last
    best/heads/, best/adapter/  those with the largest measured tau; best/evaluation.json says how it was measured

The learning rate and the order of the rows are functions of the step and the seed, so they need no state of their own.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from ..heads import Head, TargetFacts, TargetLayers, load_head, save_head
from ..infer import adapter_hash
from .adapter import Adapter, save_adapter
from .features import Where
from .folders import CheckpointError, check_whole, check_writable, latest, rotate, step_folder, steps_in, write_folder
from .settings import changed_keys

HEADS_FOLDER, ADAPTER_FOLDER = "heads", "adapter"
BEST = "best"
TRAINING_FILE = "training.pt"
PROGRESS_FILE = "progress.json"


@dataclass(frozen=True)
class Origin:
    """What makes a run the same run: its settings (flat), its rows and its target."""

    settings: dict[str, Any]
    rows: str
    """Hash over ids, tokens and masks of the training rows."""
    target: str
    """The target's fingerprint."""


@dataclass(frozen=True)
class Progress:
    """Where a run stands after ``step`` optimiser steps."""

    step: int
    epoch: int
    step_of_epoch: int
    """The loader's position: optimiser steps done in ``epoch``."""
    best_tau: float | None
    features: Where
    origin: Origin


def save_heads(folder: Path, head: Head, facts: TargetFacts, adapter: Adapter | None) -> None:
    """Writes heads/ into ``folder`` and, where an adapter is trained, adapter/ beside it, which the heads then name."""
    if adapter is not None:
        facts = replace(facts, adapter_hash=save_adapter(adapter, folder / ADAPTER_FOLDER))
    save_head(head, folder / HEADS_FOLDER, facts)


def save_checkpoint(
    out: Path,
    head: Head,
    facts: TargetFacts,
    adapter: Adapter | None,
    optimizer: torch.optim.Optimizer,
    generators: list[dict[str, Any]],
    progress: Progress,
    keep: int,
) -> Path:
    """Writes step-NNNNNN whole or not at all, then deletes all but the newest ``keep``. Returns the folder.

    ``generators``: the captured random state of every process, by rank.
    """
    folder = step_folder(out, progress.step)

    def fill(place: Path) -> None:
        save_heads(place, head, facts, adapter)
        torch.save({"optimizer": optimizer.state_dict(), "generators": generators}, place / TRAINING_FILE)
        (place / PROGRESS_FILE).write_text(json.dumps(asdict(progress), indent=2) + "\n")

    write_folder(folder, fill)
    rotate(out, keep)
    return folder


def find_checkpoint(out: Path, resume: bool | Path) -> Path | None:
    """The checkpoint a run in ``out`` goes on from: None to start fresh. Changes nothing.

    resume False: refuses if ``out`` holds another run's. True: the newest whole one, None if there are none. A folder:
    that one. Raises CheckpointError naming the folder and the file.
    """
    check_writable(out)
    present = steps_in(out)
    if resume is False:
        names = [path.name for _, path in present] + [BEST] * (out / BEST).exists()
        if names:
            raise CheckpointError(
                f"{out} holds {', '.join(names)} of another run; "
                "go on from its newest checkpoint with --resume, or choose another folder with checkpoint.out"
            )
        return None
    if resume is True:
        return latest(out)
    check_whole(resume)
    later = [path.name for step, path in present if step > read_progress(resume).step]
    if later:
        raise CheckpointError(
            f"{out} holds later checkpoints than {resume}: {', '.join(later)}; move them away, or choose another folder"
        )
    return resume


def read_progress(folder: Path) -> Progress:
    """The progress in a whole checkpoint. Raises CheckpointError naming the file."""
    file = folder / PROGRESS_FILE
    try:
        content = json.loads(file.read_text())
        origin = Origin(**content.pop("origin"))
        return Progress(**content, origin=origin)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        known = ", ".join(f.name for f in fields(Progress))
        raise CheckpointError(f"{file} cannot be read (expected {known}): {error}") from error


def check_same_run(folder: Path, saved: Origin, now: Origin) -> None:
    """Raises CheckpointError naming every setting that alters training and changed, other rows, another target."""
    faults = changed_keys(saved.settings, now.settings)
    if saved.rows != now.rows:
        faults.append("the training rows are others than those of the checkpoint")
    if saved.target != now.target:
        faults.append("the target's weights are others than those of the checkpoint")
    if faults:
        raise CheckpointError(
            f"{folder} cannot be resumed, since what it was trained with changed: {'; '.join(faults)}. "
            "Undo that, or start a new run with another checkpoint.out"
        )


def load_heads(folder: Path, facts: TargetFacts, target: TargetLayers) -> Head:
    """The fp32 heads of a checkpoint, ready to be trained on; with the adapter beside them, if there is one."""
    if (folder / ADAPTER_FOLDER).is_dir():
        facts = replace(facts, adapter_hash=adapter_hash(folder / ADAPTER_FOLDER))
    return load_head(folder / HEADS_FOLDER, facts, target)


def load_training_state(folder: Path, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Puts the optimiser's state back; returns the random states by rank. Raises CheckpointError naming the file."""
    file = folder / TRAINING_FILE
    try:
        state = torch.load(file, map_location="cpu", weights_only=True)
        optimizer.load_state_dict(state["optimizer"])
        return state["generators"]
    except (OSError, RuntimeError, KeyError, ValueError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
