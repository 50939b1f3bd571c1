"""What the report draws, as data: lines, bars and trees. Rendered as SVG for the page and as PNG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Okabe and Ito's colours, which colour-blind readers tell apart; lines also differ in dash and bars in order.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
DASHES = ("", "7 4", "2 3", "9 3 2 3", "12 4", "4 2")


@dataclass(frozen=True)
class Line:
    """ys over xs; low and high: the band of an interval; marked: the index of the chosen point."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    marked: int | None = None
    unit: str = ""


@dataclass(frozen=True)
class Lines:
    """A chart of lines. level: a horizontal line and what it means."""

    name: str
    title: str
    x: str
    y: str
    lines: Sequence[Line]
    level: tuple[float, str] | None = None
    from_zero: bool = False


@dataclass(frozen=True)
class Bars:
    """Groups of bars: values[series][group]; ``percent`` writes shares."""

    name: str
    title: str
    y: str
    groups: Sequence[str]
    series: Sequence[str]
    values: Sequence[Sequence[float]]
    percent: bool = False


@dataclass(frozen=True)
class Diagram:
    """A tree: parents and ranks of the nodes, and the share of rounds that accept each."""

    name: str
    title: str
    parents: Sequence[int]
    ranks: Sequence[int]
    shares: Sequence[float]


Chart = Lines | Bars | Diagram


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``.

    >>> ticks(0, 47), ticks(1.0, 2.3)
    ([0, 10, 20, 30, 40], [1.0, 1.5, 2.0])
    """
    span = max(high - low, 1e-9)
    magnitude = 10.0 ** math.floor(math.log10(span / count))
    step = next(s * magnitude for s in (1, 2, 5, 10) if s * magnitude * count >= span)
    first = math.ceil(low / step - 1e-9)
    made = []
    while first * step <= high + 1e-9:
        value = round(first * step, 10)
        made.append(int(value) if step >= 1 and value == int(value) else value)
        first += 1
    return made


def layout(parents: Sequence[int]) -> list[tuple[float, int]]:
    """Places of a tree's nodes: leaves side by side, a parent over the middle of its children; (across, depth).

    >>> layout([-1, 0, 1, 0])
    [(0.5, 0), (0.0, 1), (0.0, 2), (1.0, 1)]
    """
    children: list[list[int]] = [[] for _ in parents]
    depth = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depth[node] = depth[parent] + 1
    across = [0.0] * len(parents)
    free = 0.0
    for node in _leaves_first(children):
        if children[node]:
            across[node] = (across[children[node][0]] + across[children[node][-1]]) / 2
        else:
            across[node], free = free, free + 1.0
    return list(zip(across, depth, strict=True))


def _leaves_first(children: Sequence[Sequence[int]]) -> list[int]:
    """Nodes so that children come before their parents, from the left."""
    order: list[int] = []
    waiting: list[tuple[int, bool]] = [(0, False)]
    while waiting:
        node, seen = waiting.pop()
        if seen:
            order.append(node)
        else:
            waiting.append((node, True))
            waiting += [(child, False) for child in reversed(children[node])]
    return order
