"""Filling a tree with candidates level by level, for every kind of head: a static shape, or one that grows.

B batch rows   N tree nodes, root included   D depth of the tree   W draft vocabulary
n nodes of a level   e of them that are asked for candidates   R candidates ranked at a node
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..tree import TIE, Draft, DynamicTree, Shape, Tree, choose_nodes
from .base import Accepted, DraftScores, Memory


class Steps(Protocol):
    """A head that answers one level at a time. What it knows of the drafted paths is the ``beam``, passed along."""

    @property
    def draft_ids(self) -> Tensor | None: ...

    def begin(self, accepted: Accepted, memory: Memory | None) -> tuple[Tensor, Any, Memory | None]:
        """Reads what was accepted: logits [B, 1, W] of the token after the root, the root's beam, the new memory."""
        ...

    def extend(self, beam: Any, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Any]:
        """One level on: logits [B, e, W] after ``tokens`` [B, e], whose parents [B, e] index the last beam.

        A head that does not look at the drafted tokens returns [B, 1, W], the same for all e.
        """
        ...


def fill(
    head: Steps, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores, width: int = 0
) -> tuple[Draft, Memory | None]:
    """A draft of the shape of ``tree``, and the new memory. A dynamic tree's own width gives way to ``width``."""
    if isinstance(tree, Tree):
        return _fill_static(head, accepted, memory, tree, scores)
    if tree.schedule is not None:
        from .scheduled import grow_scheduled  # which reads ``Steps`` here

        return grow_scheduled(head, accepted, memory, tree, tree.schedule, scores)
    return _grow(head, accepted, memory, tree, scores, width or tree.width)


def _fill_static(
    head: Steps, accepted: Accepted, memory: Memory | None, tree: Tree, scores: DraftScores
) -> tuple[Draft, Memory | None]:
    """A node takes its parent's candidate of its rank."""
    root, ids = accepted.root, head.draft_ids
    logits, beam, memory = head.begin(accepted, memory)  # [B, 1, W]
    batch, width = len(root), logits.shape[-1]
    tokens = root[:, None].repeat(1, tree.size)
    laws = logits.new_zeros(batch, tree.size, width, dtype=torch.float32) if scores.keeps_laws else None
    asked = torch.zeros(1, dtype=torch.int64, device=root.device)  # [e] node ids whose candidates the logits are
    levels = tree.levels(root.device)
    for depth, level in enumerate(levels, 1):
        if laws is not None:  # draws of their own at every node, even where the law is the same
            logits = logits.expand(-1, len(asked), -1)
            laws[:, asked] = scores.law(logits, ids)
        ranking = scores(logits, _positions(accepted, depth, logits), ids)  # [B, e or 1, W]
        ranked = ranking.topk(level.width).indices.expand(-1, len(asked), -1)  # [B, e, R]
        drafted = ranked[:, level.parent, level.rank]  # [B, n]
        drafted = drafted if ids is None else ids[drafted]
        tokens[:, level.nodes] = drafted
        if depth < len(levels):
            asked = level.nodes[level.expanded]
            parents = level.expanded_parent.expand(batch, -1)
            logits, beam = head.extend(beam, parents, drafted[:, level.expanded])
    draft = tree.draft(tokens)
    if laws is not None:
        draft = Draft(tokens, draft.parents, draft.valid, draft.depth, draft.ancestors, draft.levels, laws, ids)
    return draft, memory


def _grow(
    head: Steps, accepted: Accepted, memory: Memory | None, tree: DynamicTree, scores: DraftScores, width: int
) -> tuple[Draft, Memory | None]:
    """EAGLE-2's expansion and rerank (Li et al. 2024, arXiv 2406.16858, section 4): one head call a level.

    Each of the ``width`` best nodes of a level gives ``width`` candidates; the best N - 1 of all become nodes. For
    heads whose levels do not depend on the drafted tokens and a width of N - 1 this is best-first search.
    """
    root, ids = accepted.root, head.draft_ids
    logits, beam, memory = head.begin(accepted, memory)
    reached = torch.zeros(len(root), 1, device=root.device)  # [B, e] scores of the nodes that are asked
    asked = torch.zeros(len(root), 1, dtype=torch.int64, device=root.device)  # [B, e] 1 + their place in the pool
    tokens, parents, totals, size = [], [], [], 0
    for depth in range(1, tree.depth + 1):
        belief = scores.confidence(scores(logits, _positions(accepted, depth, logits), ids))  # [B, e or 1, W]
        best = belief.topk(min(width, belief.shape[-1]))
        total = (reached[:, :, None] + best.values - TIE).flatten(1)  # [B, e * R]
        taken = best.indices if ids is None else ids[best.indices]
        taken = taken.expand(-1, asked.shape[1], -1)
        count = taken.shape[-1]
        tokens.append(taken.flatten(1))
        parents.append(asked.repeat_interleave(count, 1))
        totals.append(total)
        if depth < tree.depth:
            reached, chosen = total.topk(min(width, total.shape[1]))
            asked = size + chosen + 1
            logits, beam = head.extend(beam, chosen // count, tokens[-1].gather(1, chosen))
        size += total.shape[1]
    draft = choose_nodes(
        root, torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(totals, 1), tree.size, tree.depth + 1
    )
    return draft, memory


def _positions(accepted: Accepted, depth: int, logits: Tensor) -> Tensor:
    """[B, e]: where tokens of this depth stand."""
    return (accepted.root_position + depth)[:, None].expand(-1, logits.shape[1])
