"""Random choices as a callback, and the exact enumeration of everything that a function which uses it can do.

k options of a choice
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from torch import Tensor

from .noise import RESIDUALS

T = TypeVar("T")


class Choose(Protocol):
    """Draws an index in proportion to ``weights`` [k] >= 0, never one of weight 0.

    stream: which noise the draw belongs to, COINS or RESIDUALS of ``noise``; an enumeration has no use for it.
    """

    def __call__(self, weights: Tensor, stream: int = RESIDUALS) -> int: ...


def outcomes(run: Callable[[Choose], T]) -> Iterator[tuple[float, T]]:
    """Every outcome of ``run`` with its probability: run again and again, with another tape of choices each time.

    A tape is replayed and then the first possible option is taken at every further choice; the other options that were
    met there are the next tapes. Outcomes that several tapes lead to come several times.

    >>> import torch
    >>> coin = torch.tensor([0.25, 0.75])
    >>> list(outcomes(lambda choose: "heads" if choose(coin) == 0 else f"tails, {choose(coin)}"))
    [(0.25, 'heads'), (0.1875, 'tails, 0'), (0.5625, 'tails, 1')]
    """
    tapes: list[list[int]] = [[]]
    while tapes:
        chance, result, branches = _replay(run, tapes.pop())
        tapes += reversed(branches)
        yield chance, result


def _replay(run: Callable[[Choose], T], planned: list[int]) -> tuple[float, T, list[list[int]]]:
    """One tape that starts as ``planned``: its probability, its outcome, and the tapes that branch off behind that."""
    taken: list[int] = []
    branches: list[list[int]] = []
    chance = 1.0

    def choose(weights: Tensor, stream: int = RESIDUALS) -> int:
        nonlocal chance
        values = weights.tolist()
        whole = sum(values)
        shares = [value / whole for value in values]
        if len(taken) < len(planned):
            option = planned[len(taken)]
        else:
            option, *others = (i for i, share in enumerate(shares) if share > 0.0)
            branches.extend([*taken, other] for other in others)
        taken.append(option)
        chance *= shares[option]
        return option

    result = run(choose)
    return chance, result, branches
