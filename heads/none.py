"""No drafting: the head of plain decoding, whose tree is the root alone."""

from __future__ import annotations

from ..tree import Draft, Shape, root_draft
from .base import Accepted, DraftScores, Memory


class NoHead:
    """Proposes nothing, so that a decode step is one token of plain decoding."""

    taps: tuple[int, ...] = ()
    depth = 0
    candidates = 1

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        return root_draft(accepted.root), None
