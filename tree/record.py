"""Rank records: where the true token stood among a head's candidates, at every position of held-out text.

P answers   S answer tokens, of all answers one behind the other   K depths   R candidates whose confidence is kept

Only the true path can be accepted, so a head's candidates after the true tokens decide every static tree: from one
record any tree's walk follows exactly (see ``walk``), without decoding again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

FORMAT = 1
HEADER = "treedraft_record"
NOT_THERE = -1
"""The rank of a token that the answer does not have, behind its end, or that the draft vocabulary lacks."""


class RecordError(ValueError):
    """A record that cannot be used: the message names every fault and what to do."""


@dataclass(frozen=True)
class Origin:
    """What a record was taken of. Records of unlike origin are never mixed."""

    heads: str
    """Hash of the heads' files."""
    target: str
    """Hash of the target's sizes, output embedding, tokenizer and adapter."""
    dtype: str
    prompts: str
    """Hash of the prompts as token ids."""
    sampling: Mapping[str, Any]
    seed: int
    max_new_tokens: int
    depth: int
    """K."""


@dataclass(frozen=True)
class Record:
    """What one pass over the answers to prompts found.

    lengths: P answers in tokens; the first token of an answer is the prefill's
    starts: P positions of the first answer tokens, that is the lengths of the prompts
    ranks: [S, K] int32, row s is a round whose root is answer token s: ``ranks[s, d]`` is where the token d + 1 further
    on stood among the candidates at depth d + 1 after the true tokens before it, 0 for the best, or NOT_THERE
    beliefs: [S, K, R] fp32, the log of the head's confidence in its R best candidates there, -inf where none is known
    loops: [S] bool, whether the 4-gram that ends at the token occurred before in the answer
    names, categories: of the first P of ``count`` prompts; fewer than ``count`` is a record that was interrupted
    about: names of the heads and the target, machine and versions, for reports
    """

    origin: Origin
    lengths: tuple[int, ...]
    starts: tuple[int, ...]
    ranks: Tensor
    beliefs: Tensor
    loops: Tensor
    names: tuple[str, ...]
    categories: tuple[str, ...]
    count: int
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return len(self.lengths) == self.count

    @property
    def offsets(self) -> tuple[int, ...]:
        """Where each answer's rows begin."""
        return (0, *accumulate(self.lengths))[:-1]

    def select(self, answers: Sequence[int]) -> Record:
        """A record of some of the answers."""
        offsets = self.offsets
        rows = [range(offsets[a], offsets[a] + self.lengths[a]) for a in answers]
        index = torch.tensor([row for span in rows for row in span], dtype=torch.int64)
        names, categories = ([part[a] for a in answers] for part in (self.names, self.categories))
        lengths, starts = ([part[a] for a in answers] for part in (self.lengths, self.starts))
        return Record(
            self.origin, tuple(lengths), tuple(starts), self.ranks[index], self.beliefs[index], self.loops[index],
            tuple(names), tuple(categories), len(answers), self.about,
        )  # fmt: skip

    def halves(self) -> tuple[Record, Record]:
        """Every other answer to build trees on, and the rest to judge them by."""
        return self.select(range(0, len(self.lengths), 2)), self.select(range(1, len(self.lengths), 2))

    def joined(self, other: Record) -> Record:
        """These answers and behind them those of ``other``, both parts of one run."""
        pairs = ((getattr(self, name), getattr(other, name)) for name in ("ranks", "beliefs", "loops"))
        ranks, beliefs, loops = (torch.cat(pair) for pair in pairs)
        lengths, starts = self.lengths + other.lengths, self.starts + other.starts
        names, categories = self.names + other.names, self.categories + other.categories
        return Record(
            self.origin, lengths, starts, ranks, beliefs, loops, names, categories, self.count, self.about
        )  # fmt: skip


def save_record(record: Record, path: str | Path) -> None:
    """Writes a record, atomically."""
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "format": FORMAT,
        **{name: getattr(record, name) for name in ("lengths", "starts", "names", "categories", "count")},
        "origin": asdict(record.origin),
        "about": dict(record.about),
    }
    tensors = {"ranks": record.ranks, "beliefs": record.beliefs, "loops": record.loops}
    draft = file.with_name(f".{file.name}.{os.getpid()}")
    save_file({k: v.contiguous() for k, v in tensors.items()}, draft, metadata={HEADER: json.dumps(header)})
    draft.replace(file)


def load_record(path: str | Path) -> Record:
    """Reads a record. Raises RecordError for files that are none, FileNotFoundError for those that are not there."""
    if not Path(path).is_file():
        raise FileNotFoundError(2, "no record", str(path))
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # no mapping
    except (SafetensorError, OSError, ValueError) as error:
        raise RecordError(f"{path} is no rank record: {error}") from error
    if header.get("format") != FORMAT:
        raise RecordError(
            f"{path} is no rank record of format {FORMAT} (found {header.get('format')!r}): treedraft tree record "
            "writes them"
        )
    try:
        origin = Origin(**header["origin"])
        lengths, starts, names, categories = (tuple(header[n]) for n in ("lengths", "starts", "names", "categories"))
        ranks, beliefs, loops = (tensors[name] for name in ("ranks", "beliefs", "loops"))
    except (KeyError, TypeError) as error:
        raise RecordError(f"{path} is no rank record: {error}") from error
    rows = sum(lengths)
    if not (ranks.shape == (rows, origin.depth) and beliefs.shape[:2] == ranks.shape and loops.shape == (rows,)):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise RecordError(f"{path} is broken: {rows} answer tokens and {origin.depth} depths, but {shapes}")
    count, about = header["count"], header["about"]
    return Record(origin, lengths, starts, ranks, beliefs, loops, names, categories, count, about)


def check_origin(found: Origin, wanted: Origin, path: str | Path) -> None:
    """Raises RecordError, naming all that differs, unless the record at ``path`` is of this origin."""
    labels = {"heads": "other heads", "target": "another target", "prompts": "other prompts"}
    faults = [
        labels.get(f.name, f"{f.name} {getattr(found, f.name)!r}, expected {getattr(wanted, f.name)!r}")
        for f in fields(Origin)
        if getattr(found, f.name) != getattr(wanted, f.name)
    ]
    if faults:
        raise RecordError(f"{path} was recorded with {'; '.join(faults)}: record anew into another file")


def check_heads(found: Origin, heads: str, target: str, path: str | Path) -> None:
    """Raises RecordError unless the record at ``path`` is of these heads and this target, both as hashes."""
    faults = ["other heads"] if found.heads != heads else []
    faults += ["another target"] if found.target != target else []
    if faults:
        raise RecordError(f"{path} was recorded with {' and '.join(faults)}: its ranks say nothing of these")
