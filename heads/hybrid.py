"""A head and a drafter without a network on one tree: both propose, and the best candidates of the two become nodes.

B batch rows   N tree nodes, root included   F feature width

Text that is copied is found in the text, the rest is guessed by the head. Each of the two grows its own N - 1 best
paths with scores, the log of the confidence in a path. Merged as one trie, where a path that both propose has the
larger of its scores, the N - 1 best of all are again a tree, since no child scores above its parent in either.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..tree import Draft, DynamicTree, Shape, Tree
from .base import Accepted, Drafter, DraftScores, HeadError, Memory
from .source import Trie, pack

HEAD_LEVELS = 6
"""Levels that the head is asked for at most, each at the price of a call to it; copies may be as deep as the tree."""


@dataclass(frozen=True)
class HybridConfig:
    """What the two parts are."""

    head: Any
    drafter: Any
    head_levels: int = HEAD_LEVELS
    kind: Literal["hybrid"] = "hybrid"


@dataclass(frozen=True)
class HybridMemory:
    """What the two parts remember."""

    head: Memory | None
    drafter: Memory | None

    def select(self, rows: Tensor) -> HybridMemory:
        kept = [None if memory is None else memory.select(rows) for memory in (self.head, self.drafter)]
        return HybridMemory(*kept)

    def join(self, other: HybridMemory) -> HybridMemory:
        pairs = ((self.head, other.head), (self.drafter, other.drafter))
        return HybridMemory(*(None if one is None else one.join(more) for one, more in pairs))


class Hybrid:
    """``head`` and ``drafter`` under one dynamic tree. Both must put scores on their drafts, as ``fill`` does."""

    def __init__(self, head: Drafter, drafter: Drafter, head_levels: int = HEAD_LEVELS) -> None:
        if head_levels < 1:
            raise HeadError(f"head_levels must be at least 1, got {head_levels}")
        self.config = HybridConfig(_config(head), _config(drafter), head_levels)
        self._head, self._drafter = head, drafter

    @property
    def taps(self) -> tuple[int, ...]:
        """The head's, and behind them what the other part reads besides."""
        return self._head.taps + tuple(tap for tap in self._drafter.taps if tap not in self._head.taps)

    @property
    def depth(self) -> int:
        return max(self._head.depth, self._drafter.depth)

    @property
    def candidates(self) -> int:
        return self._head.candidates

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """The best of both. Raises HeadError for a static tree, and for drafts without scores."""
        assert memory is None or isinstance(memory, HybridMemory)
        dynamic = only_dynamic(tree)
        memory = memory or HybridMemory(None, None)
        shallow = replace(dynamic, depth=min(dynamic.depth, self._head.depth, self.config.head_levels))
        # The drafter first: what it needs is at hand, while waiting for the head's scores means waiting for the device.
        found, other = self._drafter.propose(self._features(accepted, self._drafter), memory.drafter, dynamic, scores)
        guessed, own = self._head.propose(self._features(accepted, self._head), memory.head, shallow, scores)
        tries = merge(guessed, found, dynamic.size)
        return pack(tries, dynamic.size, accepted.tokens.device), HybridMemory(own, other)

    def _features(self, accepted: Accepted, part: Drafter) -> Accepted:
        """The features of the layers that one part taps."""
        if part.taps == self.taps:
            return accepted
        width = accepted.features.shape[-1] // max(len(self.taps), 1)
        columns = [accepted.features[..., i * width : (i + 1) * width] for i in map(self.taps.index, part.taps)]
        features = torch.cat(columns, -1) if columns else accepted.features[..., :0]
        return replace(accepted, features=features)


def only_dynamic(tree: Shape) -> DynamicTree:
    """The tree if it is one that a hybrid can fill, else HeadError."""
    if isinstance(tree, Tree):
        raise HeadError(
            f"a head joined with another drafter needs a tree that grows, got a fixed one of {tree.size} nodes: choose "
            f"dynamic:{max(tree.size, 2)} (in Python a DynamicTree)"
        )
    return tree


Node = tuple[int, int, float]
"""Token, parent and score."""


def merge(one: Draft, other: Draft, size: int) -> list[Trie]:
    """The best ``size`` - 1 paths of every row of two drafts with the same roots. Raises HeadError without scores."""
    return [best_of(rows, size) for rows in zip(_nodes(one), _nodes(other), strict=True)]


def best_of(drafts: Sequence[Sequence[Node]], size: int) -> Trie:
    """Drafts of one row, each a list of nodes with the root first, as one trie of at most ``size`` nodes."""
    tokens, parents, scores = [drafts[0][0][0]], [-1], [0.0]
    known: dict[tuple[int, int], int] = {}  # (parent, token) to node
    for nodes in drafts:
        place = [0]  # this draft's nodes to those of the union
        for token, parent, score in nodes[1:]:
            up = place[parent]
            node = known.setdefault((up, token), len(tokens))
            place.append(node)
            if node == len(tokens):
                tokens.append(token)
                parents.append(up)
                scores.append(score)
            else:
                scores[node] = max(scores[node], score)
    # Parents stand before their children in the union and win ties, so what is kept is closed under parents.
    ranked = sorted(range(1, len(tokens)), key=lambda node: -scores[node])[: size - 1]
    trie, kept = Trie.of_root(tokens[0]), {0: 0}
    for node in sorted(ranked):
        kept[node] = trie.add(tokens[node], kept[parents[node]], scores[node])
    return trie


def _nodes(draft: Draft) -> list[list[Node]]:
    """The real nodes of every row on the host, in one transfer."""
    if draft.scores is None:
        raise HeadError("drafts can only be joined if their nodes have scores: one part puts none on its dynamic trees")
    table = torch.stack([draft.tokens.double(), draft.parents.double(), draft.scores.double()], -1)  # [B, N, 3]
    return [[(int(t), int(p), s) for t, p, s in row if s > float("-inf")] for row in table.tolist()]


def _config(part: Drafter) -> Any:
    """The settings of a part, where it has some."""
    return getattr(part, "config", None)
