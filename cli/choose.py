"""Trees chosen from what was measured: those that a heads folder carries, and this machine's cost table."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from .console import note
from .costs import find_costs, place_of

if TYPE_CHECKING:
    from ..heads import Drafter
    from ..infer import Target
    from ..tree import DynamicTree, Family, Tree

CONTEXT = 256
"""Cached tokens that a tree is chosen for where nothing else is said."""
SCHEDULED_DEPTH, SCHEDULED_WIDTH = 5, 4
FORM = "scheduled:NODES[:DEPTH[:WIDTH]]"


def chosen_tree(target: Target, heads: str, rows: int) -> Tree | None:
    """What pays for ``rows`` rows, if the folder has trees by size and this machine a cost table; else None.

    Says what was chosen, and why nothing is drafted if that is it (N = 1).
    """
    from ..tree import best_choice, explained, sized

    family = folder_family(heads, target)
    costs = find_costs(place_of(target, heads)) if family is not None else None
    if family is None or costs is None:
        return None
    choices = sized(family, costs, rows, CONTEXT)
    note(f"Tree for {rows} rows, chosen by measurement: {explained(choices)}.")
    return family.tree(best_choice(choices).nodes)


def scheduled_tree(spec: str, target: Target, heads: str, drafter: Drafter) -> DynamicTree:
    """The dynamic tree with a confidence schedule that ``scheduled:16:5:4`` names.

    Raises TreeError for a name of another form or a tree that does not fit, CostError without a cost table.
    """
    from ..tree import CostError, DynamicTree, Schedule, TreeError

    kind, *rest = spec.split(":")
    if kind != "scheduled" or not 1 <= len(rest) <= 3 or not all(part.isdigit() for part in rest):
        raise TreeError(f"no tree called {spec!r}: expected {FORM}")
    numbers = [int(part) for part in rest]
    size = numbers[0]
    depth = numbers[1] if len(numbers) > 1 else min(drafter.depth, SCHEDULED_DEPTH, max(1, size - 1))
    width = numbers[2] if len(numbers) > 2 else min(SCHEDULED_WIDTH, drafter.candidates, max(1, size - 1))
    costs = find_costs(place_of(target, heads))
    if costs is None:
        raise CostError(
            f"{spec} needs to know what a round costs here with these heads: run treedraft tree cost --heads {heads}"
        )
    family = folder_family(heads, target)
    learnt = ((), ()) if family is None else (family.acceptance, family.calibration)
    tree = DynamicTree(size, depth, width, Schedule(costs, *learnt))
    tree.check_fits(drafter.depth, drafter.candidates)
    return tree


def folder_family(heads: str, target: Target) -> Family | None:
    """The trees by size that a heads folder carries, or None. Raises TreeError for those of other heads or targets."""
    from ..heads import heads_hash, target_hash
    from ..tree import FAMILY_FILE, TreeError, load_family

    file = Path(heads) / FAMILY_FILE
    if not file.is_file():
        return None
    family = load_family(file)
    faults = ["other heads"] if family.heads != heads_hash(heads) else []
    faults += ["another target"] if family.target != target_hash(target.facts) else []
    if faults:
        raise TreeError(
            f"{file} was found for {' and '.join(faults)}: record and search anew (treedraft tree record, search), "
            "or remove it"
        )
    return family
