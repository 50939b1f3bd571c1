"""The walk of a static tree through recorded text: what decoding with it would have done, without decoding.

P answers   S answer tokens   K depths   D depth of the tree

A round at answer token s accepts the longest prefix of the true ranks that the tree holds and the next round starts
behind its bonus token. Averages over all positions overstate the mean accepted length, since decoding starts its
rounds where it is rewarded least; so the walk is followed from start to start, to the end or the budget of the answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from .record import Record, RecordError
from .topology import Tree

Counts = np.ndarray
RESAMPLES = 2000


@dataclass(frozen=True)
class Walk:
    """Counts of each of the P answers; ``accepted``: [P, K + 1], rounds by the drafted tokens that they kept.

    starts: [S] bool, the answer tokens that were roots of a round
    depths: [S], the nodes of the true path that the tree holds after each token
    """

    rounds: Counts
    kept: Counts
    loop_rounds: Counts
    loop_kept: Counts
    accepted: Counts
    starts: np.ndarray
    depths: np.ndarray

    @property
    def tau(self) -> float:
        """Mean accepted length, NaN without rounds."""
        return _ratio(self.kept.sum(), self.rounds.sum())

    @property
    def tau_without_loops(self) -> float:
        return _ratio(self.kept.sum() - self.loop_kept.sum(), self.rounds.sum() - self.loop_rounds.sum())

    @property
    def accept_by_depth(self) -> list[float]:
        """The share of rounds that accepted at least d drafted tokens, d = 0, 1, ..., D."""
        totals = self.accepted.sum(0)[::-1].cumsum()[::-1]
        deepest = int(np.flatnonzero(totals).max(initial=0))
        return [_ratio(n, totals[0]) for n in totals[: deepest + 1]]

    def accepted_counts(self) -> Counter[int]:
        """Rounds by the number of drafted tokens they kept, as ``Stats.accepted`` counts them."""
        return Counter({d: int(n) for d, n in enumerate(self.accepted.sum(0)) if n})

    def interval(self, seed: int = 0, share: float = 0.95) -> tuple[float, float]:
        """Bootstrap interval of tau over answers: rounds of one answer are not independent, answers are."""
        low, high = np.quantile(self._resampled(seed), [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)

    def gain_interval(self, other: Walk, seed: int = 0, share: float = 0.95) -> tuple[float, float]:
        """Bootstrap interval of this tau less that of ``other`` on the same answers, which are drawn in pairs."""
        gains = self._resampled(seed) - other._resampled(seed)
        low, high = np.quantile(gains, [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)

    def _resampled(self, seed: int) -> np.ndarray:
        count = len(self.rounds)
        drawn = np.random.default_rng(seed).integers(0, count, (RESAMPLES, count))
        return self.kept[drawn].sum(1) / np.maximum(self.rounds[drawn].sum(1), 1)


def walk(record: Record, tree: Tree) -> Walk:
    """What decoding the record's prompts with ``tree`` does: in fp32 the very counts, for heads whose answers do not
    depend on the drafted tree (all kinds here: what they read of the text is the same from every start).

    Raises RecordError if the tree is deeper than the record.
    """
    return follow(record, reach(record, tree))


def reach(record: Record, tree: Tree) -> np.ndarray:
    """[S] the length of the longest prefix of each row's true ranks that the tree holds."""
    if tree.depth > record.origin.depth:
        raise RecordError(
            f"the tree is {tree.depth} deep, the record knows {record.origin.depth} depths: record with --depth "
            f"{tree.depth}"
        )
    ranks = record.ranks.numpy()
    children = np.full((tree.size, tree.width), -1)
    for node in range(1, tree.size):
        children[tree.parents[node], tree.ranks[node]] = node
    node = np.zeros(len(ranks), dtype=np.int64)
    depths = np.zeros(len(ranks), dtype=np.int64)
    alive = np.ones(len(ranks), dtype=bool)
    for depth in range(tree.depth):
        rank = ranks[:, depth]
        known = (rank >= 0) & (rank < tree.width)
        step = np.where(known, children[node, np.where(known, rank, 0)], -1)
        alive &= step >= 0
        depths += alive
        node = np.where(alive, step, 0)
    return depths


def follow(record: Record, depths: np.ndarray) -> Walk:
    """The walk of a tree that accepts ``depths`` [S] nodes at each start. Nothing is accepted behind an answer's end:
    the ranks there are NOT_THERE, so that a round's last kept token is drafted or the bonus, as in decoding."""
    loops, steps = record.loops.numpy(), depths.tolist()
    answers = len(record.lengths)
    rounds, kept, loop_rounds, loop_kept = (np.zeros(answers, dtype=np.int64) for _ in range(4))
    accepted = np.zeros((answers, record.origin.depth + 1), dtype=np.int64)
    starts = np.zeros(len(steps), dtype=bool)
    for answer, (offset, length) in enumerate(zip(record.offsets, record.lengths, strict=True)):
        at, last = offset, offset + length - 1
        while at < last:
            drafted = steps[at]
            taken = min(drafted + 1, last - at)
            starts[at] = True
            rounds[answer] += 1
            kept[answer] += taken
            accepted[answer, drafted] += 1
            if loops[at + 1]:
                loop_rounds[answer] += 1
                loop_kept[answer] += taken
            at += taken
    return Walk(rounds, kept, loop_rounds, loop_kept, accepted, starts, depths)


def by_category(record: Record, walked: Walk) -> Mapping[str, float]:
    """Mean accepted length of each category."""
    groups = sorted(set(record.categories))
    chosen = {name: np.array([c == name for c in record.categories]) for name in groups}
    return {name: _ratio(walked.kept[rows].sum(), walked.rounds[rows].sum()) for name, rows in chosen.items()}


def _ratio(part: float, whole: float) -> float:
    return float(part) / float(whole) if whole else float("nan")
