"""Suffix drafting: what followed the longest suffix of the text that occurred before, in this text or in a corpus.

A suffix automaton gives the match in amortised constant time (SAM-Decoding, Hu et al. 2024, arXiv 2411.10666), its
counts the candidates and how likely they are (SuffixDecoding, Oliaro et al. 2024, arXiv 2411.04975).

B batch rows   N tree nodes, root included   L tokens of the text that a context agrees with
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from heapq import nlargest
from operator import itemgetter
from typing import Literal

from ..tree import Draft, Shape
from .automaton import NONE, ROOT, Automaton
from .base import Accepted, DraftScores, HeadError, Memory
from .source import ANY_RANK, MOST_LEVELS, Candidate, propose_from_text

REMEMBERED = 2**16
"""Contexts of a corpus whose continuations are remembered."""

KEPT, KEPT_ANYWHERE = 8, 32
"""Followers of a context that are looked at, the most frequent ones, and those of the empty context."""

Match = tuple[int, int]
"""A state of an automaton and L, how many of the text's last tokens it agrees with."""

Place = tuple[Match, Match, int]
"""Matches in the row's own text and in the corpus, and a token that was drafted behind both, or NONE."""


@dataclass(frozen=True)
class SuffixConfig:
    """How continuations are believed.

    A context of L tokens, after which ``total`` tokens were seen, ``different`` of them different, gives a token that
    followed ``count`` times the probability (count + doubt * p) / (total + doubt), where p is its probability in the
    next shorter context and doubt is (``doubt`` + different) / L. So a long match decides by its own counts, a short
    one is doubted, and followers that vary are doubted more (Witten and Bell 1991 count novelty that way). The numbers
    were chosen on text alone, see docs/training-free.md.
    """

    doubt: float = 3.0
    contexts: int = 2
    """Contexts that are asked: the longest match, and shorter ones along the suffix links."""
    prior: float = 50.0
    """Doubt of the empty context, whose counts fill what matches leave of a tree's first level; 0 leaves it empty."""
    corpus: str = ""
    """The name of the corpus, for reports."""
    kind: Literal["suffix"] = "suffix"

    def __post_init__(self) -> None:
        faults = []
        if not self.doubt > 0.0:
            faults.append(f"doubt must be positive, got {self.doubt}")
        if self.contexts < 1:
            faults.append(f"contexts must be at least 1, got {self.contexts}")
        if self.prior < 0.0:
            faults.append(f"prior must be 0 (off) or positive, got {self.prior}")
        if faults:
            raise HeadError("the suffix drafter cannot be built: " + "; ".join(faults))


@dataclass(frozen=True)
class Followers:
    """What followed a context: how many tokens in all, how many different ones, and the most frequent of them with
    their counts, the most recent first among equals."""

    total: int
    different: int
    counts: list[tuple[int, int]]


class Known:
    """The continuations of one automaton. Those of one that does not grow are remembered, which only saves time."""

    def __init__(self, automaton: Automaton, config: SuffixConfig, grows: bool) -> None:
        self.automaton = automaton
        self.followers: Callable[[int], Followers] = partial(followers_of, automaton)
        self.shares: Callable[[Match, float], dict[int, float]] = partial(self._mix, config)
        if not grows:
            self.followers = lru_cache(REMEMBERED)(self.followers)
            self.shares = lru_cache(REMEMBERED)(self.shares)

    def _mix(self, config: SuffixConfig, match: Match, prior: float) -> dict[int, float]:
        """Probabilities by token, see SuffixConfig; the empty context takes part if it has a ``prior``."""
        contexts: list[Match] = []
        state, matched = match
        while state != ROOT and len(contexts) < config.contexts:
            contexts.append((state, matched))
            state = self.automaton.link[state]
            matched = self.automaton.length[state]
        if prior:
            contexts.append((ROOT, 0))
        shares: dict[int, float] = {}
        for state, matched in reversed(contexts):
            found = self.followers(state)
            if not found.total:
                continue  # the end of the text
            doubt = (config.doubt + found.different) / matched if matched else prior
            share = 1.0 / (found.total + doubt)
            mixed = {token: count * share for token, count in found.counts}
            for token, shorter in shares.items():
                mixed[token] = mixed.get(token, 0.0) + doubt * share * shorter
            shares = mixed
        return shares


class SuffixTable:
    """One row's text and its match in the corpus. Written in place."""

    def __init__(self, config: SuffixConfig, corpus: Known | None) -> None:
        self._prior = config.prior
        self._own, self._corpus = Known(Automaton(), config, grows=True), corpus
        self._match: Match = (ROOT, 0)

    def read(self, tokens: Sequence[int]) -> None:
        self._own.automaton.read(tokens)
        if self._corpus is not None:
            for token in tokens:
                self._match = self._corpus.automaton.advance(*self._match, token)

    @property
    def start(self) -> Place:
        """The longest suffix of the text that occurred before it ended there, and the match in the corpus."""
        text = self._own.automaton
        state = max(text.link[text.last], ROOT)
        return (state, text.length[state]), self._match, NONE

    def children(self, state: Place) -> list[Candidate[Place]]:
        """Both texts' candidates, one that both have with the larger of its probabilities.

        The empty contexts speak only at the start: further down their probabilities would be too small to matter.
        """
        own, match, token = state
        prior = self._prior if token == NONE else 0.0
        if token != NONE:
            own = self._own.automaton.advance(*own, token)
        shares = self._own.shares(own, prior)
        if self._corpus is not None:
            if token != NONE:
                match = self._corpus.automaton.advance(*match, token)
            for candidate, share in self._corpus.shares(match, prior).items():
                if share > shares.get(candidate, 0.0):
                    shares[candidate] = share
        best = sorted(shares.items(), key=itemgetter(1), reverse=True)
        return [(candidate, share, (own, match, candidate)) for candidate, share in best]


class Suffix:
    """Drafts a tree of continuations. Its memory is an automaton for each row; the corpus is never written.

    corpus: None, or an automaton from ``index_corpus``.
    """

    taps: tuple[int, ...] = ()
    depth = MOST_LEVELS
    candidates = ANY_RANK

    def __init__(self, config: SuffixConfig | None = None, corpus: Automaton | None = None) -> None:
        self.config = config or SuffixConfig()
        self._corpus = None if corpus is None else Known(corpus, self.config, grows=False)

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """The likeliest continuations, in a tree of any shape. The request's law and noise are not looked at."""
        return propose_from_text(lambda: SuffixTable(self.config, self._corpus), accepted, memory, tree)


def followers_of(automaton: Automaton, state: int) -> Followers:
    """What followed the substrings of a state, at most KEPT of it listed."""
    count, latest, total = automaton.count, automaton.latest, 0
    found = []
    for token, to in automaton.transitions(state):
        times = count[to]
        total += times
        found.append((times, latest[to], token))
    kept = KEPT if state != ROOT else KEPT_ANYWHERE
    best = nlargest(kept, found) if len(found) > kept else sorted(found, reverse=True)
    return Followers(total, len(found), [(token, times) for times, _, token in best])
