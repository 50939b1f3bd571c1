"""Token recycling: a token is followed by what the target last held likely after it (Luo et al., arXiv 2408.08696).

B batch rows   A accepted path length, root included   M accepted positions of all rows   F feature width
V target vocabulary   R successors kept of a token

The paper reads the target's logits of all verified nodes. A drafter here is handed the features of accepted positions,
so the target's output layer is applied to those once more, and what rejected nodes would have taught is not learned.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from ..tree import Draft, Shape
from .base import Accepted, DraftScores, HeadError, Memory, TargetLayers
from .readout import ReadOut, prepare
from .source import ANY_RANK, MOST_LEVELS, Candidate, Rows, draft_trees

CHUNK = 256
"""Positions of a prompt whose logits are held at once."""


@dataclass(frozen=True)
class RecyclingConfig:
    """What is kept of the target's logits."""

    num_target_layers: int
    """The tapped layer: the output of the final norm, which this id names."""
    successors: int = 8
    """R."""
    belief: float = 0.6
    """What the probability after a token's last occurrence is multiplied with after its next: measured, see
    docs/training-free.md."""
    kind: Literal["recycling"] = "recycling"

    def __post_init__(self) -> None:
        faults = []
        if self.num_target_layers < 1:
            faults.append(f"num_target_layers must be at least 1, got {self.num_target_layers}")
        if self.successors < 1:
            faults.append(f"successors must be at least 1, got {self.successors}")
        if not 0.0 < self.belief <= 1.0:
            faults.append(f"belief must lie in (0, 1], got {self.belief}")
        if faults:
            raise HeadError("token recycling cannot be set up: " + "; ".join(faults))


class SuccessorTable:
    """One row's tokens and their latest successors, best first. Written in place."""

    def __init__(self, first: int) -> None:
        self._successors: dict[int, list[Candidate[int]]] = {}
        self._root = first

    @property
    def start(self) -> int:
        """The root: the state is a token."""
        return self._root

    def children(self, state: int) -> list[Candidate[int]]:
        return self._successors.get(state, [])

    def learn(self, following: int, successors: list[Candidate[int]]) -> None:
        """One position on: ``successors`` of the last token, which ``following`` follows."""
        self._successors[self._root] = successors
        self._root = following


class Recycling:
    """Drafts from a table of successors for each row. The target's output layer is borrowed, packed where it helps."""

    depth = MOST_LEVELS
    candidates = ANY_RANK

    def __init__(self, config: RecyclingConfig, target: TargetLayers) -> None:
        self.config = config
        weight = target.output.weight
        if config.successors > weight.shape[0]:
            raise HeadError(f"{config.successors} successors asked for, the target's vocabulary has {weight.shape[0]}")
        self._dtype = weight.dtype
        self._logits: ReadOut = prepare(target.output, weight.dtype)[0]

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.num_target_layers,)

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """Successors of successors, in a tree of any shape. The request's law and noise are not looked at."""
        assert memory is None or isinstance(memory, Rows)
        if memory is None:
            assert accepted.first is not None, "token recycling reads the whole text: Accepted.first is missing"
            tables = tuple(SuccessorTable(token) for token in accepted.first.tolist())
        else:
            tables = memory.tables
        for row, following, successors in self._read(accepted):
            tables[row].learn(following, successors)
        draft = draft_trees(tables, [table.start for table in tables], tree, accepted.tokens.device)
        return draft, Rows(tables)

    def _read(self, accepted: Accepted) -> Iterator[tuple[int, int, list[Candidate[int]]]]:
        """Of every accepted position in order: its row, the token that follows it, and the successors of its own."""
        real = torch.arange(accepted.tokens.shape[1], device=accepted.count.device) < accepted.count[:, None]  # [B, A]
        features = accepted.features[real].to(self._dtype)  # [M, F]
        best = [self._best(features[i : i + CHUNK]) for i in range(0, len(features), CHUNK)]
        row = real.nonzero()[:, :1]
        table = torch.cat([row.double(), accepted.tokens[real][:, None].double(), torch.cat(best)], 1)
        count = self.config.successors
        for entry in table.tolist():  # the step's one transfer
            number, following, *rest = entry
            pairs = zip(rest[:count], rest[count:], strict=True)
            yield int(number), int(following), [(int(i), share, int(i)) for i, share in pairs if share > 0.0]

    def _best(self, features: Tensor) -> Tensor:
        """[M, F] to the ids of the R best tokens and what is believed of them, [M, 2 R] in double precision."""
        logits = self._logits(features).float()
        best = logits.topk(self.config.successors)
        shares = self.config.belief * (best.values - logits.logsumexp(-1, keepdim=True)).exp()
        return torch.cat([best.indices.double(), shares.double()], 1)
