"""What a round costs on one machine: T(n) of the target, the draft by depth and width, and the fixed overhead.

B batch rows   N tree nodes, root included   n new positions of a row   e nodes of a level that are asked

A table is measured once (``treedraft tree cost``) and belongs to its machine, number format, way of computing, target
and heads; used anywhere else it is refused, since the size that it chooses would be another machine's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np

from .atomic import write_atomically
from .topology import Tree

FORMAT = 1


class CostError(ValueError):
    """A cost table that cannot be used: the message names every fault and what to do."""


@dataclass(frozen=True)
class Place:
    """What a table was measured on and for. ``machine`` names processor, cores, threads and accelerator."""

    machine: str
    dtype: str
    forward: str
    """What computes a forward, ``Target.forward_name``."""
    target: str
    """Hash of the target, as in ``Origin``."""
    heads: str
    """Hash of the heads; empty without."""


@dataclass(frozen=True)
class ForwardCost:
    """Seconds of a forward of B rows over each of ``nodes`` new positions behind ``context`` cached tokens."""

    batch: int
    context: int
    nodes: tuple[int, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class DraftCost:
    """Of B rows: seconds of the first level, and of a further one that asks each of ``widths`` nodes of a row."""

    batch: int
    begin: float
    widths: tuple[int, ...]
    steps: tuple[float, ...]


@dataclass(frozen=True)
class CostTable:
    """overhead: seconds of a round outside draft and forward, by batch; about: names, versions, for reports."""

    place: Place
    forwards: tuple[ForwardCost, ...]
    drafts: tuple[DraftCost, ...]
    overhead: Mapping[int, float]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def batches(self) -> list[int]:
        return sorted({row.batch for row in self.forwards})

    @property
    def contexts(self) -> list[int]:
        return sorted({row.context for row in self.forwards})

    def forward_seconds(self, nodes: int | Sequence[int], batch: int = 1, context: int = 256) -> np.ndarray:
        """T(n) for ``nodes``, straight lines between and beyond what was measured."""
        wanted = np.atleast_1d(np.asarray(nodes, dtype=float))
        by_batch = []
        for rows in self.batches:
            lines = sorted((f for f in self.forwards if f.batch == rows), key=lambda f: f.context)
            values = np.stack([_line(np.array(f.nodes, dtype=float), np.array(f.seconds), wanted) for f in lines])
            at = np.array([f.context for f in lines], dtype=float)
            by_batch.append([_line(at, column, np.array([context], dtype=float))[0] for column in values.T])
        columns = np.array(by_batch).T
        rows = np.array(self.batches, dtype=float)
        return np.array([_line(rows, column, np.array([batch], dtype=float))[0] for column in columns])

    def begin_seconds(self, batch: int = 1) -> float:
        """The draft's first level."""
        return self._by_batch([(d.batch, d.begin) for d in self.drafts], batch)

    def step_seconds(self, width: int, batch: int = 1) -> float:
        """A further level of the draft that asks ``width`` nodes of each row."""
        wanted = np.array([width], dtype=float)
        lines = [(d.batch, _line(np.array(d.widths, dtype=float), np.array(d.steps), wanted)[0]) for d in self.drafts]
        return self._by_batch(lines, batch)

    def overhead_seconds(self, batch: int = 1) -> float:
        return self._by_batch(sorted(self.overhead.items()), batch)

    def draft_seconds(self, tree: Tree, batch: int = 1) -> float:
        """The whole draft of a static tree: nothing for the root alone."""
        if tree.size == 1:
            return 0.0
        asked = [0] * tree.depth  # nodes of each depth that have children
        for node in set(tree.parents[1:]):
            asked[tree.depths[node]] += 1
        return self.begin_seconds(batch) + sum(self.step_seconds(width, batch) for width in asked[1:])

    def round_seconds(self, tree: Tree, batch: int = 1, context: int = 256) -> float:
        """A round of ``batch`` rows with a static tree, draft, forward and all else."""
        forward = float(self.forward_seconds(tree.size, batch, context)[0])
        return self.draft_seconds(tree, batch) + forward + self.overhead_seconds(batch)

    @staticmethod
    def _by_batch(pairs: Sequence[tuple[int, float]], batch: int) -> float:
        if not pairs:
            return 0.0
        xs, ys = (np.array(column, dtype=float) for column in zip(*sorted(pairs), strict=True))
        return float(_line(xs, ys, np.array([batch], dtype=float))[0])


def save_costs(table: CostTable, path: str | Path) -> None:
    """Writes atomically; folders are made."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, **asdict(table), "overhead": {str(b): s for b, s in table.overhead.items()}}
    write_atomically(json.dumps(content, indent=1) + "\n", file)


def load_costs(path: str | Path) -> CostTable:
    """Reads a cost table. Raises CostError, FileNotFoundError if it is not there."""
    if not Path(path).is_file():
        raise FileNotFoundError(2, "no cost table", str(path))
    try:
        content = json.loads(Path(path).read_text())
        if content["format"] != FORMAT:
            raise CostError(f"{path} has format {content['format']!r}, this version reads {FORMAT}")
        return CostTable(
            Place(**content["place"]),
            tuple(
                ForwardCost(r["batch"], r["context"], tuple(r["nodes"]), tuple(r["seconds"]))
                for r in content["forwards"]
            ),
            tuple(DraftCost(r["batch"], r["begin"], tuple(r["widths"]), tuple(r["steps"])) for r in content["drafts"]),
            {int(batch): float(seconds) for batch, seconds in content["overhead"].items()},
            content["about"],
        )
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        wrong = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise CostError(f"{path} is no cost table, as treedraft tree cost writes them: {wrong}") from error


def check_place(found: Place, wanted: Place, path: str | Path) -> None:
    """Raises CostError, naming all that differs, unless the table at ``path`` was measured in this place."""
    labels = {"machine": "another machine", "heads": "other heads", "target": "another target"}
    faults = []
    for name in (f.name for f in fields(Place)):
        old, new = getattr(found, name), getattr(wanted, name)
        if old != new:
            hashed = name in ("heads", "target")
            faults.append(labels[name] if hashed else f"{labels.get(name, name)} ({old}, this is {new})")
    if faults:
        raise CostError(f"{path} was measured on or for {'; '.join(faults)}: measure here with treedraft tree cost")


def _line(xs: np.ndarray, ys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Straight lines through (xs, ys); beyond the ends the last one goes on, but never below the last value's zero."""
    if len(xs) == 1:
        return np.full(len(wanted), ys[0])
    found = np.interp(wanted, xs, ys)
    slope = max(float((ys[-1] - ys[-2]) / (xs[-1] - xs[-2])), 0.0)
    return np.where(wanted > xs[-1], ys[-1] + slope * (wanted - xs[-1]), found)
