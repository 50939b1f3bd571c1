"""Rounds of chain decoding, prompt by prompt: what engines that draft chains are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..heads import Head
    from ..infer import Target


@dataclass(frozen=True)
class ChainRow:
    """One prompt's tokens, and the drafted tokens that each of its finished rounds accepted.

    The last round is left out: the end of the text cuts it, and engines count that cut differently.
    """

    ids: list[int]
    accepted: list[int]


def chain_rounds(
    target: Target, head: Head, prompts: Sequence[Sequence[int]], steps: int, max_new_tokens: int
) -> list[ChainRow]:
    """Greedy decoding with chains of ``steps`` drafted tokens, one prompt at a time, in the target's own precision."""
    from ..infer import generate
    from ..tree import Tree

    rows = [ChainRow([], []) for _ in prompts]
    drafter = head.for_decoding(target.dtype)
    stream = generate(
        target, prompts, head=drafter, tree=Tree.chain(steps), max_new_tokens=max_new_tokens, batch_size=1
    )
    for chunk in stream:
        row = rows[chunk.row]
        if row.ids and chunk.reason is None:
            row.accepted.append(chunk.drafted)
        row.ids.extend(chunk.ids)
    return rows


def by_position(rounds: Sequence[Sequence[int]], steps: int) -> tuple[int, list[int]]:
    """Rounds in all, and those that accepted at least one, two, ... drafted tokens.

    >>> by_position([[0, 2], [1]], 2)
    (3, [2, 1])
    """
    flat = [accepted for row in rounds for accepted in row]
    return len(flat), [sum(accepted > place for accepted in flat) for place in range(steps)]
