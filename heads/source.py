"""Trees of candidates from tables on the host: what drafters without a network have in common.

B batch rows   A accepted path length, root included   N tree nodes, root included

A table answers, for a state of one row, which tokens may follow and how far each is believed. Everything here is
Python on short lists; tensors are made once a step, when the rows are packed.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from ..tree import Draft, Shape, Tree, make_draft
from .base import Accepted, Memory

S = TypeVar("S")
T = TypeVar("T")

MOST_LEVELS = 64
"""Drafted levels that a table is asked for at most: it has no limit of its own."""

ANY_RANK = 2**31 - 1
"""The draft vocabulary of tables: a rank that a node has no candidate for stays empty, so none is refused."""

Candidate = tuple[int, float, S]
"""A token, its probability in (0, 1], and the state after it."""


class Source(Protocol[S]):
    """The table of one row."""

    @property
    def start(self) -> S:
        """The state after all that was read."""
        ...

    def children(self, state: S) -> Sequence[Candidate[S]]:
        """The candidates for the next token, best first, each token once."""
        ...


class TextTable(Source[S], Protocol[S]):
    """The table of one row that is made from the row's tokens alone."""

    def read(self, tokens: Sequence[int]) -> None:
        """Appends tokens, in place."""
        ...


@dataclass(frozen=True)
class Rows(Generic[T]):
    """A drafter's memory: a table for each of the B rows, this batch's own and written in place."""

    tables: tuple[T, ...]

    def select(self, rows: Tensor) -> Rows[T]:
        return Rows(tuple(self.tables[row] for row in rows.tolist()))

    def join(self, other: Rows[T]) -> Rows[T]:
        return Rows(self.tables + other.tables)


@dataclass(frozen=True)
class Trie:
    """The drafted tree of one row as lists over its nodes, the root first and parents before children.

    parents: -1 for the root   scores: log of the confidence in a node's path, 0 for the root   depths: 0 for the root
    """

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    depths: list[int]

    @staticmethod
    def of_root(token: int) -> Trie:
        return Trie([token], [-1], [0.0], [0])

    def add(self, token: int, parent: int, score: float) -> int:
        """Appends a node (in place); its id."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.depths.append(self.depths[parent] + 1)
        return len(self.tokens) - 1


def accepted_tokens(accepted: Accepted) -> list[list[int]]:
    """The tokens that the target has just read of every row, on the host, in one transfer. The last one is the root."""
    first = accepted.tokens[:, :0] if accepted.first is None else accepted.first[:, None]
    lengths = accepted.count[:, None] + first.shape[1]
    rows = torch.cat([first, accepted.tokens, lengths], 1).tolist()
    return [row[: row[-1]] for row in rows]


def propose_from_text(
    blank: Callable[[], TextTable[S]], accepted: Accepted, memory: Memory | None, tree: Shape
) -> tuple[Draft, Rows[TextTable[S]]]:
    """``Drafter.propose`` for tables that read tokens alone; ``blank`` makes the table of a row that starts."""
    assert memory is None or isinstance(memory, Rows)
    read = accepted_tokens(accepted)
    tables = tuple(blank() for _ in read) if memory is None else memory.tables
    for table, tokens in zip(tables, read, strict=True):
        table.read(tokens)
    draft = draft_trees(tables, [tokens[-1] for tokens in read], tree, accepted.tokens.device)
    return draft, Rows(tables)


def draft_trees(sources: Sequence[Source[S]], roots: Sequence[int], tree: Shape, device: torch.device) -> Draft:
    """The shape ``tree`` filled for every row from its own table; a static one by rank, a dynamic one best first."""
    if isinstance(tree, Tree):
        tries = [fill_by_rank(source, root, tree) for source, root in zip(sources, roots, strict=True)]
    else:
        grown = zip(sources, roots, strict=True)
        tries = [grow_best_first(source, root, tree.size, tree.depth, tree.width) for source, root in grown]
    return pack(tries, tree.size, device)


def fill_by_rank(source: Source[S], root: int, tree: Tree) -> Trie:
    """A static shape: a node takes its parent's candidate of its rank, or is left out with all below it."""
    trie = Trie.of_root(root)
    states: list[S] = [source.start]
    place = [0] * tree.size  # node of the shape to node of the trie, -1 if it is left out
    children: dict[int, Sequence[Candidate[S]]] = {}
    for node in range(1, tree.size):
        up = place[tree.parents[node]]
        if up >= 0 and up not in children:
            children[up] = source.children(states[up])
        if up < 0 or tree.ranks[node] >= len(children[up]):
            place[node] = -1
            continue
        token, share, state = children[up][tree.ranks[node]]
        place[node] = trie.add(token, up, trie.scores[up] + log(share))
        states.append(state)
    return trie


def grow_best_first(source: Source[S], root: int, size: int, depth: int, width: int) -> Trie:
    """The ``size`` - 1 likeliest paths, at most ``depth`` long, of the ``width`` best candidates at a node."""
    trie = Trie.of_root(root)
    families: list[Sequence[Candidate[S]]] = []  # the candidates of each node that was asked, best first
    heap: list[
        tuple[float, int, int, int]
    ] = []  # -score, family, which of it, its parent: of each family the next best
    node, state = 0, source.start
    while len(trie.tokens) < size:
        if trie.depths[node] < depth and (family := source.children(state)[:width]):
            heapq.heappush(heap, (-trie.scores[node] - log(family[0][1]), len(families), 0, node))
            families.append(family)
        if not heap:
            break
        score, number, rank, parent = heapq.heappop(heap)
        token, _, state = families[number][rank]
        node = trie.add(token, parent, -score)
        if rank + 1 < len(families[number]):
            share = families[number][rank + 1][1]
            heapq.heappush(heap, (-trie.scores[parent] - log(share), number, rank + 1, parent))
    return trie


def pack(tries: Sequence[Trie], size: int, device: torch.device) -> Draft:
    """B tries of at most ``size`` nodes as one draft of that width. Padding comes last: parent -1, score -inf."""
    blank = [size - len(trie.tokens) for trie in tries]
    rows = zip(tries, blank, strict=True)
    columns = [(t.tokens + [0] * n, t.parents + [-1] * n, [1] * len(t.tokens) + [0] * n) for t, n in rows]
    packed = torch.tensor(columns, dtype=torch.int64, device=device)  # [B, 3, N]
    scores = [trie.scores + [float("-inf")] * n for trie, n in zip(tries, blank, strict=True)]
    levels = 1 + max(max(trie.depths) for trie in tries)
    draft = make_draft(packed[:, 0], packed[:, 1], packed[:, 2].bool(), levels)
    return replace(draft, scores=torch.tensor(scores, device=device))
