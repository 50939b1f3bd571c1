"""Published heads, read for a target: Medusa, EAGLE-1/2/3, speculators and SpecForge checkpoints.

Every fault is named by the file's own names, all of them at once: tensors missing, unexpected or mis-shaped, settings
that this project's heads cannot follow. Nothing is guessed silently; what was assumed is handed back as notes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ..base import Head, HeadError, TargetFacts, TargetLayers
from ..files import build_head
from . import medusa
from .files import Checkpoint
from .filling import IGNORED, Imported, fill, size_faults
from .import_eagle import import_eagle


def import_checkpoint(read: Checkpoint, target: TargetLayers, facts: TargetFacts) -> Imported:
    """Heads in fp32 for a target. Raises HeadError."""
    tensors, config, renamed = _without_prefix(read.tensors), read.config, read.tensors.keys()
    names = set(tensors)
    if "kind" in config and "head" in config:
        raise HeadError("these are treedraft's own heads: pass the folder to --heads")
    if any(name.startswith("hydra_") for name in names) or "hydra_num_heads" in config:
        raise HeadError("Hydra checkpoints of the paper's repository are not read: train Hydra heads, or import others")
    if medusa.is_medusa(config, names):
        imported = _import_medusa(config, tensors, target, facts)
    else:
        imported = import_eagle(config, tensors, target, facts)
    if set(renamed) != names:
        imported.notes.append('"model." in front of names was dropped')
    return imported


def _without_prefix(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix("model."): value for name, value in tensors.items()}


def _import_medusa(
    config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetLayers, facts: TargetFacts
) -> Imported:
    faults = size_faults(config, facts)
    made, table, notes = medusa.read_config(config, tensors, target, facts.num_layers)
    if "token_map" in tensors:
        faults.append("token_map: a truncated vocabulary is not read")
    head = build_head(made, target)
    shared = set() if made.output == "own" else medusa.shared_names(tensors)
    if "bias" not in {name.rsplit(".", 1)[1] for name in table if name.startswith("blocks")}:
        notes.append("blocks without biases: they are zero")
    fill(head, table, tensors, faults, allowed={*shared, *IGNORED}, blank=_biases(head, table))
    return Imported(head, notes)


def _biases(head: Head, table: Mapping[str, str]) -> set[str]:
    """Our biases that the layout leaves out."""
    return {name for name in head.state_dict() if name.endswith(".bias") and name not in table}
