"""Prompt lookup: copies what followed the last occurrence of the text's last few tokens.

Saxena 2023, "Prompt lookup decoding" (github.com/apoorvumang/prompt-lookup-decoding).

B batch rows   N tree nodes, root included   n length of an n-gram
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..tree import Draft, Shape
from .base import Accepted, DraftScores, HeadError, Memory
from .source import ANY_RANK, MOST_LEVELS, Candidate, propose_from_text

Place = tuple[int, int, int]
"""The index of the next token to copy, how many tokens before it are known to agree, and how far back it is."""


@dataclass(frozen=True)
class NGramConfig:
    """How prompt lookup searches."""

    max_n: int = 3
    """The longest n-gram that is looked for; shorter ones follow, down to one token."""
    belief: tuple[float, ...] = (0.2, 0.45, 0.6, 0.65, 0.7, 0.75, 0.8, 0.85)
    """The share of copied tokens that are right after 1, 2, ... agreeing ones; more count as the last. Only used where
    candidates of several drafters are compared: measured, see docs/training-free.md."""
    kind: Literal["ngram"] = "ngram"

    def __post_init__(self) -> None:
        faults = []
        if self.max_n < 1:
            faults.append(f"max_n must be at least 1, got {self.max_n}")
        if not self.belief or not all(0.0 < share < 1.0 for share in self.belief):
            faults.append(f"belief must be shares between 0 and 1, got {self.belief}")
        if faults:
            raise HeadError("the n-gram drafter cannot be built: " + "; ".join(faults))


class NGramTable:
    """One row's text, and where each n-gram last ended. Written in place."""

    def __init__(self, config: NGramConfig) -> None:
        self._config = config
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # n-gram to the index behind its last occurrence that has one

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens; the n-grams that end before each of them are entered now that something follows them."""
        text, ends = self._text, self._ends
        for token in tokens:
            end = len(text)
            for n in range(1, min(self._config.max_n, end) + 1):
                ends[tuple(text[end - n :])] = end
            text.append(token)

    @property
    def start(self) -> Place | None:
        text = self._text
        for n in range(min(self._config.max_n, len(text)), 0, -1):
            end = self._ends.get(tuple(text[len(text) - n :]))
            if end is not None:
                return end, n, len(text) - end
        return None

    def children(self, state: Place | None) -> list[Candidate[Place | None]]:
        """The token that followed. A copy that reaches the end of the text goes on with what it copied: loops go on."""
        if state is None:
            return []
        index, agreed, back = state
        index = index if index < len(self._text) else index - back
        share = self._config.belief[min(agreed, len(self._config.belief)) - 1]
        return [(self._text[index], share, (index + 1, agreed + 1, back))]


class NGram:
    """Drafts a chain that is copied from the row's own text. Its memory is a table for each row."""

    taps: tuple[int, ...] = ()
    depth = MOST_LEVELS
    candidates = ANY_RANK

    def __init__(self, config: NGramConfig | None = None) -> None:
        self.config = config or NGramConfig()

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """One path a row, in a tree of any shape; a row whose last token is new to it proposes nothing."""
        return propose_from_text(lambda: NGramTable(self.config), accepted, memory, tree)
