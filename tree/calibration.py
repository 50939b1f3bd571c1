"""Confidences made chances: p = sigmoid(a * logit(c) + b) for each depth, fitted on records and refitted from rounds.

c: the head's confidence in a candidate whose parent was right; p: the chance that the candidate is right. At
temperature > 0 the confidence is the coupled one, and ``a`` takes the place of a temperature of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from .record import Record

SHARPEST = 1e-5
"""Confidences are kept this far from 0 and 1."""
PRIOR = 50.0
"""Observations that what a fit starts from counts for."""
NEWTON_STEPS = 25
BINS = 10


def logit(log_confidence: float) -> float:
    """logit(c) from log c."""
    c = min(max(math.exp(log_confidence), SHARPEST), 1.0 - SHARPEST)
    return math.log(c / (1.0 - c))


def sigmoid(x: float) -> float:
    """
    >>> sigmoid(0.0), sigmoid(-800.0)
    (0.5, 0.0)
    """
    return 1.0 / (1.0 + math.exp(-x)) if x > -700 else 0.0


@dataclass
class Logistic:
    """One depth's a and b, and what was seen so far as a 2 x 2 information matrix; refitted one label at a time.

    A step is Newton's on the one observation, with all earlier ones as the quadratic that they left (assumed-density
    filtering): no pass over old rounds, a microsecond a label.
    """

    a: float = 1.0
    b: float = 0.0
    haa: float = PRIOR * 0.25
    hab: float = 0.0
    hbb: float = PRIOR * 0.25

    def chance(self, z: float) -> float:
        return sigmoid(self.a * z + self.b)

    def learn(self, z: float, right: bool) -> None:
        """In place: one candidate of logit ``z`` whose parent was right."""
        p = self.chance(z)
        weight = max(p * (1.0 - p), 1e-4)
        self.haa += weight * z * z
        self.hab += weight * z
        self.hbb += weight
        error = float(right) - p
        whole = self.haa * self.hbb - self.hab * self.hab
        self.a += (self.hbb * z - self.hab) * error / whole
        self.b += (self.haa - self.hab * z) * error / whole


def fit_record(record: Record, starts: np.ndarray) -> tuple[tuple[float, float], ...]:
    """a and b of every depth from ``starts`` [S] of a record; (1, 0) where there is nothing to fit."""
    ranks, beliefs = record.ranks.numpy()[starts], record.beliefs.numpy()[starts]
    fits, reached = [], np.ones(len(ranks), dtype=bool)
    for depth in range(record.origin.depth):
        known = reached & (ranks[:, depth] >= 0)
        confidence = np.exp(beliefs[known, depth])
        right = ranks[known, depth, None] == np.arange(confidence.shape[1])
        fits.append(fit_logistic(confidence.ravel(), right.ravel()))
        reached = known & (ranks[:, depth] < beliefs.shape[2])
    return tuple(fits)


def fit_logistic(confidence: np.ndarray, right: np.ndarray) -> tuple[float, float]:
    """a and b of the likeliest sigmoid(a * logit(confidence) + b), drawn slightly towards (1, 0); Newton's method."""
    c = np.clip(confidence.astype(float), SHARPEST, 1 - SHARPEST)
    x = np.stack([np.log(c / (1 - c)), np.ones_like(c)], 1)
    theta, start = np.array([1.0, 0.0]), np.array([1.0, 0.0])
    pull = np.eye(2)
    for _ in range(NEWTON_STEPS):
        p = 1 / (1 + np.exp(-np.clip(x @ theta, -30, 30)))
        gradient = x.T @ (right - p) - pull @ (theta - start)
        step = np.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + pull, gradient)
        theta = theta + step
        if np.abs(step).max() < 1e-8:
            break
    return float(theta[0]), float(theta[1])


@dataclass
class Reliability:
    """Chances that were claimed against what happened, in ten bins; counts, divided at the edge."""

    counts: list[int] = field(default_factory=lambda: [0] * BINS)
    claimed: list[float] = field(default_factory=lambda: [0.0] * BINS)
    happened: list[int] = field(default_factory=lambda: [0] * BINS)

    def add(self, chance: float, right: bool) -> None:
        at = min(int(chance * BINS), BINS - 1)
        self.counts[at] += 1
        self.claimed[at] += chance
        self.happened[at] += right

    @property
    def ece(self) -> float:
        """Expected calibration error: the mean distance of claim and share over bins, by their counts; NaN if empty.

        >>> seen = Reliability()
        >>> for right in (True, False): seen.add(0.75, right)
        >>> seen.ece
        0.25
        """
        total = sum(self.counts)
        gaps = [abs(c - h) for c, h in zip(self.claimed, self.happened, strict=True)]
        return sum(gaps) / total if total else float("nan")


def expected_acceptance(record: Record, starts: np.ndarray, width: int) -> tuple[tuple[float, ...], ...]:
    """[D][W] the share of ``starts`` at which candidate r of depth d is right, where all before were candidates."""
    ranks = record.ranks.numpy()[starts]
    table, reached = [], np.ones(len(ranks), dtype=bool)
    for depth in range(record.origin.depth):
        total = max(int(reached.sum()), 1)
        table.append(tuple(float((ranks[reached, depth] == r).sum() / total) for r in range(width)))
        reached = reached & (ranks[:, depth] >= 0) & (ranks[:, depth] < width)
    return tuple(table)
