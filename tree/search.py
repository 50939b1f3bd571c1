"""Static trees of every size from a rank record, and the methods of papers to compare them with.

S answer tokens   K depths   N tree nodes, root included   D depth of the tree   W width, candidates of a node

The N - 1 most frequent rank paths are the best tree for the average position. Decoding does not visit the average
position but the starts of its own rounds: so paths are recounted on the starts that the tree itself visits until it
stays the same, the best tree by its walk is kept, and single nodes are then exchanged while the walk gains by it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .record import Record
from .spec import best_tree
from .topology import Tree
from .walk import Walk, walk

RankPath = tuple[int, ...]
RECOUNTS = 8
SMOOTHING = 16.0
"""Observations that the head's average at a depth counts for where paths are rare."""
EXCHANGED = 6
"""Trees up to this size are improved by exchanging nodes; larger ones only gained on what they were built on."""
OFFERED = 6
"""New nodes that are tried in place of each leaf."""


@dataclass(frozen=True)
class Limits:
    """What a tree may not exceed: D and W."""

    depth: int
    width: int = 10


def found_trees(record: Record, sizes: Iterable[int], limits: Limits) -> dict[int, Tree]:
    """The best trees of these sizes N for the walks of this record, by recounting and exchange.

    A size that the limits do not allow, or for which no path was seen, gives a smaller tree.
    """
    trees: dict[int, Tree] = {}
    starts = np.ones(len(record.ranks), dtype=bool)
    for size in sorted(set(sizes)):
        tree, walked = _recounted(record, size, starts, limits)
        if size <= EXCHANGED:
            tree, walked = _exchanged(record, tree, walked, limits)
        trees[size], starts = tree, walked.starts
    return trees


def position_tree(record: Record, size: int, limits: Limits) -> Tree:
    """The N - 1 most frequent rank paths of all positions: the optimum of the position average."""
    return _most_frequent(path_shares(record, np.ones(len(record.ranks), dtype=bool), limits), size, limits)


def greedy_product_tree(record: Record, size: int, limits: Limits) -> Tree:
    """Medusa's: best first by the product of each head's accuracy by rank (Cai et al. 2024, section 2.3.3)."""
    table = accuracies(record, np.ones(len(record.ranks), dtype=bool), limits)
    return best_tree(table.tolist(), size)


def sequoia_tree(record: Record, size: int, limits: Limits) -> Tree:
    """Sequoia's dynamic programme (Chen et al. 2024, arXiv 2402.12374, section 4.1): the tree of the largest expected
    acceptance if the chance of a candidate depends on its rank alone, with at most D levels and W children."""
    ranks = record.ranks.numpy()[:, : limits.depth]
    reached = _reached(ranks, np.ones(len(ranks), dtype=bool), limits)
    right = [np.sum((ranks == r) & reached) for r in range(limits.width)]
    shares = np.array(right) / max(reached.sum(), 1)
    return Tree.from_paths(_sequoia_paths(shares, size, limits.depth))


def accuracies(record: Record, starts: np.ndarray, limits: Limits) -> np.ndarray:
    """[D, W] the share of ``starts`` [S] at which candidate r of depth d is the true token, whatever came before."""
    ranks = record.ranks.numpy()[starts, : limits.depth]
    there = np.maximum((ranks >= 0).sum(0), 1) if len(ranks) else np.ones(limits.depth)
    return np.stack([(ranks == r).sum(0) / there for r in range(limits.width)], 1)


def path_shares(record: Record, starts: np.ndarray, limits: Limits) -> dict[RankPath, float]:
    """The share of ``starts`` [S] whose true path begins so, for every path within the limits that occurs.

    A node's share of its parent is drawn towards the average of its depth and rank, by SMOOTHING observations.
    """
    ranks = record.ranks.numpy()[starts, : limits.depth]
    average = accuracies(record, starts, limits)
    counts: Counter[RankPath] = Counter()
    for row in ranks.tolist():
        path: RankPath = ()
        for rank in row:
            if not 0 <= rank < limits.width:
                break
            path = (*path, rank)
            counts[path] += 1
    shares: dict[RankPath, float] = {(): 1.0}
    for path in sorted(counts, key=len):
        above = len(ranks) if len(path) == 1 else counts[path[:-1]]
        usual = SMOOTHING * average[len(path) - 1, path[-1]]
        shares[path] = shares[path[:-1]] * (counts[path] + usual) / (above + SMOOTHING)
    return shares


def compared(record: Record, judge: Record, trees: Mapping[str, Tree]) -> list[dict[str, object]]:
    """One row for each tree: nodes, its walk on both records, the interval on the second."""
    rows: list[dict[str, object]] = []
    for name, tree in trees.items():
        judged = walk(judge, tree)
        low, high = judged.interval()
        rows.append(
            {
                "name": name,
                "nodes": tree.size,
                "tau_build": walk(record, tree).tau,
                "tau": judged.tau,
                "interval": [low, high],
                "tau_without_loops": judged.tau_without_loops,
            }
        )
    return rows


def _recounted(record: Record, size: int, starts: np.ndarray, limits: Limits) -> tuple[Tree, Walk]:
    """The best walked of the trees that recounting passes through."""
    best: tuple[Tree, Walk] | None = None
    seen: set[Tree] = set()
    for first in (np.ones_like(starts), starts):
        visited = first
        for _ in range(RECOUNTS):
            tree = _most_frequent(path_shares(record, visited, limits), size, limits)
            if tree in seen:
                break
            seen.add(tree)
            walked = walk(record, tree)
            visited = walked.starts
            if best is None or _better(walked, best[1]):
                best = tree, walked
    assert best is not None
    return best


def _exchanged(record: Record, tree: Tree, walked: Walk, limits: Limits) -> tuple[Tree, Walk]:
    """Takes a leaf away and adds another node while the walk gains by it: of all exchanges the best one each time."""
    while True:
        shares = path_shares(record, walked.starts, limits)
        paths = set(tree.paths[1:])
        trials = []
        for leaf in [p for p in paths if not any(q[:-1] == p for q in paths)]:
            rest = paths - {leaf}
            offers = [p for p in shares if p and p not in paths and (p[:-1] in rest or len(p) == 1)]
            offers = heapq.nlargest(OFFERED, offers, key=lambda p: shares[p])
            trials += [Tree.from_paths([*rest, offer]) for offer in offers]
        results = [(trial, walk(record, trial)) for trial in trials]
        best = max(results, key=lambda result: result[1].tau, default=None)
        if best is None or not _better(best[1], walked):
            return tree, walked
        tree, walked = best


def _better(one: Walk, other: Walk) -> bool:
    return bool(one.kept.sum() * other.rounds.sum() > other.kept.sum() * one.rounds.sum())


def _most_frequent(shares: Mapping[RankPath, float], size: int, limits: Limits) -> Tree:
    """The N - 1 largest shares; a child's is no larger than its parent's, so they form a tree."""
    ranked = sorted((p for p in shares if p), key=lambda p: (-shares[p], len(p), p))
    return Tree.from_paths(ranked[: size - 1])


def _reached(ranks: np.ndarray, starts: np.ndarray, limits: Limits) -> np.ndarray:
    """[S, D] whether all true tokens before this depth were within the width, and there is one at this depth."""
    within = (ranks >= 0) & (ranks < limits.width)
    before = np.concatenate([np.ones((len(ranks), 1), dtype=bool), within[:, :-1]], 1).cumprod(1).astype(bool)
    return before & starts[:, None]


def _sequoia_paths(shares: Sequence[float] | np.ndarray, size: int, depth: int) -> list[RankPath]:
    """best[l][m]: the most tokens that a tree of m nodes and at most l levels below its root keeps."""
    grown = np.zeros((depth + 1, size + 1))
    grown[:, 1:] = 1.0  # the root alone
    splits: dict[tuple[int, int, int], int] = {}  # (levels, nodes, children so far) -> nodes of the last child
    children: dict[tuple[int, int], int] = {}
    for level in range(1, depth + 1):
        held = np.full(size + 1, -np.inf)
        held[1] = 1.0
        best, count = held.copy(), np.zeros(size + 1, dtype=int)
        for child, share in enumerate(shares, 1):
            wider = np.full(size + 1, -np.inf)
            for nodes in range(2, size + 1):
                own = np.arange(1, nodes)
                totals = held[nodes - own] + share * grown[level - 1, own]
                at = int(totals.argmax())
                wider[nodes] = totals[at]
                splits[level, nodes, child] = int(own[at])
            held = wider
            better = held > best
            best[better], count[better] = held[better], child
        grown[level] = best
        for nodes in range(1, size + 1):
            children[level, nodes] = int(count[nodes])
    paths: list[RankPath] = []
    _unfold(depth, size, (), splits, children, paths.append)
    return paths


def _unfold(
    level: int,
    nodes: int,
    path: RankPath,
    splits: Mapping[tuple[int, int, int], int],
    children: Mapping[tuple[int, int], int],
    add: Callable[[RankPath], None],
) -> None:
    """The paths of the tree that the programme chose for ``nodes`` nodes below and including ``path``."""
    if level == 0 or nodes <= 1:
        return
    for child in range(children[level, nodes], 0, -1):
        own = splits[level, nodes, child]
        add((*path, child - 1))
        _unfold(level - 1, own, (*path, child - 1), splits, children, add)
        nodes -= own
