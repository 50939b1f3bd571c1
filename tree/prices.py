"""What a round costs by its parts, and the size that its chances pay for.

N tree nodes, root included   e nodes of a level that are asked
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Prices:
    """Seconds of a round's parts for one batch size and context: ``forward[N]``, N = 0 unused; ``step[e]``."""

    forward: tuple[float, ...]
    begin: float
    step: tuple[float, ...]
    overhead: float

    @property
    def plain(self) -> float:
        return self.forward[1] + self.overhead


def best_size(
    rows: Sequence[Sequence[float]], prices: Prices, drafting: float, size: int, rate: float
) -> tuple[int, float]:
    """The N whose tokens less ``rate`` * seconds are most, and that, for rows of chances in falling order.

    >>> flat = Prices((0.0, 10.0, 10.0, 10.0, 30.0), 0.0, (0.0,), 0.0)
    >>> best_size([[0.5, 0.2, 0.1]], flat, 0.0, 4, 0.1)
    (3, 0.7)
    """
    kept = float(len(rows))
    fixed = rate * (drafting + prices.overhead)
    best, most = 1, kept - rate * prices.forward[1] - fixed
    for nodes in range(2, min(size, 1 + max((len(row) for row in rows), default=0)) + 1):
        kept += sum(row[nodes - 2] for row in rows if nodes - 2 < len(row))
        found = kept - rate * prices.forward[nodes] - fixed
        if found > most:
            best, most = nodes, found
    return best, most
