"""What reading of published heads has in common: strict filling, and comparison with the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base import Head, HeadError, TargetFacts

IGNORED = ("verifier_lm_head.weight", "verifier_norm.weight", "mask_hidden")
"""Tensors that some checkpoints hold and no head reads."""


@dataclass(frozen=True)
class Imported:
    """Heads, and what was assumed or left out on the way, in words."""

    head: Head
    notes: list[str]


def size_faults(config: Mapping[str, Any], facts: TargetFacts) -> list[str]:
    """Sizes of the configuration that are not the target's, in words."""
    return [
        f"{name} is {config[name]!r}, the target's is {wanted}"
        for name, wanted in (("hidden_size", facts.hidden_size), ("vocab_size", facts.vocab_size))
        if config.get(name) is not None and config[name] != wanted
    ]


def compare_rows(name: str, found: Tensor, wanted: Tensor, faults: list[str]) -> None:
    """Whether ``found`` is the target's ``wanted`` at its own precision; if not, a fault."""
    if found.shape != wanted.shape:
        faults.append(f"{name} has shape {tuple(found.shape)}, expected {tuple(wanted.shape)}")
    elif not torch.equal(found, wanted.detach().cpu().to(found.dtype)):
        faults.append(f"{name} is not the target's, which these heads read: they belong to another target")


def fill(
    head: Head,
    table: Mapping[str, str],
    tensors: Mapping[str, Tensor],
    faults: list[str],
    allowed: set[str],
    blank: set[str],
) -> None:
    """Loads the tensors into the head. Raises HeadError with ``faults`` and those of the tensors, by the file's names.

    blank: our tensors that the layout leaves out
    """
    state = head.state_dict()
    assert set(table) | blank == set(state), sorted(set(state) ^ (set(table) | blank))
    named = set(table.values())
    faults = list(faults)
    faults += [f"{name} missing" for name in sorted(named - set(tensors))]
    faults += [f"{name} unexpected" for name in sorted(set(tensors) - named - allowed)]
    faults += sorted(
        {
            f"{theirs} has shape {tuple(tensors[theirs].shape)}, expected {tuple(state[ours].shape)}"
            for ours, theirs in table.items()
            if theirs in tensors and tensors[theirs].shape != state[ours].shape
        }
    )
    faults += sorted(
        {
            f"{theirs} holds {tensors[theirs].dtype}, expected floating point"
            for theirs in named & set(tensors)
            if not tensors[theirs].is_floating_point()
        }
    )
    if faults:
        raise HeadError("the checkpoint cannot be imported: " + "; ".join(faults))
    head.load_state_dict(
        {name: tensors[table[name]].float() if name in table else value for name, value in state.items()}
    )
