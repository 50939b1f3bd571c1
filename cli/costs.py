"""Where cost tables are kept, and which one belongs to this machine, number format, target and heads."""

from __future__ import annotations

import hashlib
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..infer import Target
    from ..tree import CostTable, Place


def place_of(target: Target, heads: str) -> Place:
    """This machine with the target as it was loaded and the heads of a folder (or "")."""
    from ..heads import heads_hash, target_hash
    from ..infer import machine
    from ..tree import Place

    facts = machine()
    name = f"{facts['processor']}, {facts['cores']} cores, {facts['threads']} threads"
    if facts["accelerator"] and target.device.type == "cuda":
        name = str(facts["accelerator"])
    own = heads_hash(heads) if Path(heads).is_dir() else heads
    return Place(name, target.number_format, target.forward_name, target_hash(target.facts), own)


def costs_file(place: Place) -> Path:
    """Where the table of a place is kept: $TREEDRAFT_CACHE or ~/.cache/treedraft, in ``costs``."""
    from ..heads import native

    name = hashlib.sha256("|".join(astuple(place)).encode()).hexdigest()[:16]
    return native.cache_folder() / "costs" / f"{name}.json"


def find_costs(place: Place, file: Path | None = None) -> CostTable | None:
    """The kept table of a place, or None; or the one in ``file``. Raises CostError for a file of another place."""
    from ..tree import check_place, load_costs

    kept = file or costs_file(place)
    if file is None and not kept.is_file():
        return None
    table = load_costs(kept)
    check_place(table.place, place, kept)
    return table
