"""Heads for an engine: made, written, read back and compared before anyone else reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..base import Head, HeadError, TargetFacts, TargetLayers
from ..eagle import Eagle
from ..eagle3 import Eagle3
from ..medusa import Medusa
from . import conformance, eagle, medusa
from .engines import check_served, losses
from .files import Checkpoint, describe_tensors, read_checkpoint, write_checkpoint
from .importing import import_checkpoint

REPORT_FILE = "export_report.json"
SPECIAL = ("bos_token_id", "eos_token_id", "architectures")


def to_checkpoint(
    head: Head, engine: str, target: str, target_config: Mapping[str, Any], dtype: torch.dtype
) -> Checkpoint:
    """The heads in an engine's layout. Raises HeadError if it cannot serve them.

    target: what the engine will be told to serve; target_config: the target's configuration, of which SPECIAL is read
    """
    check_served(head, (engine,))
    if isinstance(head, Medusa):
        return medusa.to_checkpoint(head, engine, target, dtype)
    assert isinstance(head, Eagle | Eagle3)
    return eagle.to_checkpoint(head, engine, target, {name: target_config.get(name) for name in SPECIAL}, dtype)


def export(
    head: Head,
    engine: str,
    folder: Path,
    target: TargetLayers,
    facts: TargetFacts,
    target_name: str,
    target_config: Mapping[str, Any],
    dtype: torch.dtype,
) -> dict[str, Any]:
    """Writes the folder and checks it as the engine would read it; what the report says of it is handed back.

    Raises HeadError if the engine cannot serve the heads, or if what was written is not what was meant.
    """
    made = to_checkpoint(head, engine, target_name, target_config, dtype)
    write_checkpoint(made, folder)
    read = read_checkpoint(folder)
    faults = conformance.check(read, engine, facts, target, rope_of(target_config))
    imported = import_checkpoint(read, target, facts).head
    faults += _differences(head, imported, dtype)
    if faults:
        raise HeadError(f"the export to {folder} failed its own check: " + "; ".join(faults))
    return {
        "format": 1,
        "engine": engine,
        "kind": head.config.kind,
        "target": {**asdict(facts), "served_as": target_name},
        "lost": losses(head, engine),
        "config": read.config,
        "tensors": describe_tensors(read.tensors),
    }


def rope_of(target_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a target's configuration says of positions; nothing where its layers have other rotary settings each."""
    rope = target_config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return {"max_position_embeddings": target_config.get("max_position_embeddings"), "rope_parameters": None}
    return {"max_position_embeddings": target_config.get("max_position_embeddings"), "rope_parameters": rope}


def _differences(head: Head, read: Head, dtype: torch.dtype) -> list[str]:
    """Tensors that were read back otherwise than they were rounded, by name."""
    wanted, found = head.state_dict(), read.state_dict()
    differing = [
        f"{name} was read back as another tensor"
        for name in sorted(set(wanted) & set(found))
        if not name.startswith("own_output") and not _same(wanted[name], found[name], dtype)
    ]
    absent = sorted(name for name in set(wanted) ^ set(found) if not name.startswith("own_output"))
    differing += [f"{name} stands on one side alone" for name in absent]
    if isinstance(head, Medusa) and isinstance(read, Medusa):
        pairs = zip(medusa.whole_outputs(head), medusa.whole_outputs(read), strict=False)
        differing += [
            f"output layer {k} was read back as another" for k, (a, b) in enumerate(pairs) if not _same(a, b, dtype)
        ]
        rows = read._target[0].output.weight
        if read.own_output is None and not all(_same(a, rows, dtype) for a in medusa.whole_outputs(head)):
            differing.append("own output layers were read back as the target's")
    if isinstance(head, Eagle3) and isinstance(read, Eagle3):
        mine, theirs = head.draft_ids, read.draft_ids
        whole = head.candidates == head.config.vocab_size
        if not (theirs is None if mine is None or whole else theirs is not None and torch.equal(mine, theirs)):
            differing.append("the draft vocabulary was read back as another")
        if head.taps != read.taps or head.config.layer != read.config.layer:
            differing.append("tapped layers or sizes were read back as others")
    return differing


def _same(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    return one.shape == other.shape and torch.equal(one.detach().cpu().to(dtype), other.detach().cpu().to(dtype))
