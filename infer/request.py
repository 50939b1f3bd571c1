"""One row of a batch on the host: what it has emitted, when it ends, what it counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .detokenizer import Detokenizer, find_stop
from .stats import LoopFinder, Stats


@dataclass(frozen=True)
class Chunk:
    """Tokens that one round gave one request. ``reason`` is None until the last: "end", "stop", "asked" or "length".

    ``drafted`` of the ids were drafted and accepted, the rest is the target's own next token.
    """

    row: int
    ids: list[int]
    text: str
    drafted: int
    reason: str | None


@dataclass
class Request:
    """A request while it runs.

    A run is cut at the first end token (kept in the ids, not shown in the text), right after the first stop string, or
    at the budget, whichever comes first; on the same token an end or a stop is the reason before the length. Or where
    ``stop_after``, told the ids so far after each of them, says so ("asked").
    """

    index: int
    prompt: Sequence[int]
    seed: int
    budget: int
    end_ids: frozenset[int]
    stop_strings: Sequence[str]
    tokenizer: Any
    stop_after: Callable[[Sequence[int]], bool] | None = None
    ids: list[int] = field(default_factory=list)
    text: str = ""
    reason: str | None = None
    stats: Stats = field(default_factory=lambda: Stats(prompts=1))

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)
        self._loops = LoopFinder()
        if self.budget == 0:
            self.reason = "length"

    def take_first(self, token: int) -> Chunk:
        """The token that the prefill itself gives; it belongs to no round."""
        ids, text, _ = self._take([token])
        return Chunk(self.index, ids, text, 0, self.reason)

    def take_round(self, emitted: Sequence[int]) -> Chunk:
        """A round's accepted tokens and its bonus token, cut where the run ends."""
        position = len(self.prompt) + len(self.ids) - 1
        ids, text, loops = self._take(emitted)
        drafted = min(len(ids), len(emitted) - 1)
        self.stats.count_round(len(ids), drafted, loops, position)
        return Chunk(self.index, ids, text, drafted, self.reason)

    def _take(self, emitted: Sequence[int]) -> tuple[list[int], str, bool]:
        """Appends tokens until one ends the run; gives them, their text, and whether the first repeats a 4-gram."""
        kept: list[int] = []
        loops = False
        start = len(self.text)
        for token in emitted:
            kept.append(token)
            self.ids.append(token)
            repeats = self._loops.repeats(token)
            loops = repeats if len(kept) == 1 else loops
            if token in self.end_ids:
                self.reason = "end"
            elif self.stop_strings:
                self._show([token])
            if self.reason is None and self.stop_after is not None and self.stop_after(self.ids):
                self.reason = "asked"
            if self.reason is None and len(self.ids) >= self.budget:
                self.reason = "length"
            if self.reason is not None:
                break
        if not self.stop_strings:
            self._show(kept)
        if self.reason in ("end", "asked", "length"):
            self.text += self._detokenizer.finish()
        self.stats.tokens += len(kept)
        return kept, self.text[start:], loops

    def _show(self, ids: Sequence[int]) -> None:
        fresh = self._detokenizer.push(ids)
        self.text += fresh
        end = find_stop(self.text, self.stop_strings, len(fresh)) if fresh and self.stop_strings else None
        if end is not None:
            self.text = self.text[:end]
            self.reason = "stop"
