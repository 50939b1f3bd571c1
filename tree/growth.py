"""Dynamic trees: which of the candidates that heads scored become nodes. Knows no model.

B batch rows   N tree nodes, root included   P candidates in the pool

A candidate's score is the log of the product of the confidences on its path, so no child scores above its parent, and
the N - 1 best candidates form a tree (Li et al. 2024, "EAGLE-2", arXiv 2406.16858, section 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .schedule import Schedule
from .topology import Draft, Tree, TreeError, make_draft

TIE = 1e-4
"""What a level costs: a child never ties with its parent, even if the head is certain of it."""


@dataclass(frozen=True)
class DynamicTree:
    """A tree that every row grows for itself at every step: the ``size`` - 1 likeliest paths, root included in size.

    depth: D, levels of candidates
    width: candidates taken at a node, and nodes of a level that are asked for candidates in turn
    schedule: what decides how much of that is used at a step (see ``schedule``); None uses all of it
    """

    size: int
    depth: int
    width: int
    schedule: Schedule | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, got {getattr(self, name)}"
            for name in ("size", "depth", "width")
            if getattr(self, name) < 1
        ]
        if faults:
            raise TreeError("not a dynamic tree: " + "; ".join(faults))

    def check_fits(self, heads: int, candidates: int) -> None:
        """Raises TreeError if it is deeper than ``heads`` or wider than the draft vocabulary of ``candidates``."""
        faults = []
        if self.depth > heads:
            faults.append(f"it is {self.depth} deep, but there are {heads} heads")
        if self.width > candidates:
            faults.append(f"it takes {self.width} candidates of a node, the draft vocabulary has {candidates}")
        if faults:
            raise TreeError("the tree does not fit the heads: " + "; ".join(faults) + "; choose another with --tree")

    def to_dict(self) -> dict[str, object]:
        """For JSON reports."""
        return {
            "nodes": self.size,
            "depth": self.depth,
            "width": self.width,
            "dynamic": True,
            "scheduled": self.schedule is not None,
        }


Shape = Tree | DynamicTree
"""What ``--tree`` names: one shape for all rows and steps, or a recipe for growing one."""


def choose_nodes(root: Tensor, tokens: Tensor, parents: Tensor, scores: Tensor, size: int, levels: int) -> Draft:
    """The ``size`` - 1 best candidates of every row as a draft.

    root: [B]; tokens, parents, scores: [B, P], a candidate's parent being 0 for the root and 1 + its index in the pool
    for another candidate, which comes before it; -inf marks a candidate that is none. ``levels``: D + 1.

    >>> tokens, parents = torch.tensor([[5, 6, 7, 8]]), torch.tensor([[0, 0, 1, 2]])
    >>> draft = choose_nodes(torch.tensor([4]), tokens, parents, torch.tensor([[-1.0, -3.0, -2.0, -4.0]]), 3, 3)
    >>> draft.tokens, draft.parents
    (tensor([[4, 5, 7]]), tensor([[-1,  0,  1]]))
    """
    batch, pool = tokens.shape
    count = min(size - 1, pool)
    best = scores.topk(count)
    real = best.values > float("-inf")
    chosen, order = torch.where(real, best.indices, best.indices + pool).sort(-1)  # parents first, padding last
    real, chosen = real.gather(1, order), chosen % pool
    place = torch.zeros(batch, pool + 1, dtype=torch.int64, device=tokens.device)
    place.scatter_(1, chosen + 1, torch.arange(1, count + 1, device=tokens.device).expand(batch, -1))
    up = place.gather(1, parents.gather(1, chosen))
    first = torch.full_like(root, -1)[:, None]
    draft = make_draft(
        torch.cat([root[:, None], tokens.gather(1, chosen)], 1),
        torch.cat([first, torch.where(real, up, -1)], 1),
        torch.cat([torch.ones_like(first, dtype=torch.bool), real], 1),
        levels,
    )
    return replace(draft, scores=torch.cat([torch.zeros_like(scores[:, :1]), scores.gather(1, chosen)], 1))
