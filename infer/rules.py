"""The lossless rule: which drafted path the target confirms, and which token follows it.

B batch rows   N tree nodes   D depth of the tree   A accepted path length, root included   V target vocabulary

At a node the next token is argmax(log p + G) (see ``sampling``). The walk starts at the root and goes to the child that
carries that token, until no child does; the token that no child carried is the bonus. The text is therefore the one
that plain decoding with the same seed writes, for every tree however it was grown (Daliri et al. 2024, arXiv
2408.07978, for one draft; Rowan et al. 2025, arXiv 2506.05632, for lists). Rows of logits that the walk does not reach
are not processed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..tree import Draft, path_nodes
from .path import Path
from .sampling import Sampler
from .text import Text

Rule = Callable[[Draft, Tensor, Text, Sampler], Path]


def lossless(draft: Draft, logits: Tensor, text: Text, sampler: Sampler) -> Path:
    """The accepted path and the bonus token of every row.

    logits: [B, N, V], row i of a batch row being the target's after node i; ``text`` ends with the root.
    Logits that are not finite are reported by the path when it is read.
    """
    if sampler.is_argmax:
        return _match(draft, *_argmax(logits))
    return _walk(draft, logits, text, sampler)


def _argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """argmax over V, ties to the lowest id, and whether it can be trusted: NaN and +inf surface in the maximum."""
    best = logits.max(-1)
    return best.indices, torch.isfinite(best.values)


def _match(draft: Draft, best: Tensor, finite: Tensor) -> Path:
    """Greedy: all nodes at once. best: [B, N] the target's token after each node, finite: [B, N]."""
    parents = draft.parents.clamp(min=0)
    matches = draft.valid & (draft.tokens == best.gather(1, parents))
    matches[:, 0] = True
    accepted = (matches[:, None, :] | ~draft.ancestors).all(-1) & draft.valid  # [B, N]
    last = torch.where(accepted, draft.depth, -1).argmax(-1)  # siblings differ, so the deepest one is unique
    return _path(draft, last, best, finite)


def _walk(draft: Draft, logits: Tensor, text: Text, sampler: Sampler) -> Path:
    """Node after node, for the rows that still walk."""
    batch, device = logits.shape[0], logits.device
    walking = torch.arange(batch, device=device)
    node = torch.zeros(batch, dtype=torch.int64, device=device)
    chosen = torch.zeros(batch, draft.size, dtype=torch.int64, device=device)
    finite = torch.ones(batch, draft.size, dtype=torch.bool, device=device)
    while len(walking):
        at = node[walking]
        contexts = text.with_path(draft, walking, at) if sampler.reads_context else ()
        positions = text.lengths[walking] + draft.depth[walking, at]
        scores = sampler.target_scores(logits[walking, at], walking, positions, contexts)
        chosen[walking, at], finite[walking, at] = _argmax(scores)
        takes = draft.tokens == chosen.gather(1, node[:, None])
        children = (draft.valid & (draft.parents == node[:, None]) & takes)[walking]
        found = children.any(-1)
        walking = walking[found]
        node[walking] = children[found].int().argmax(-1)
    return _path(draft, node, chosen, finite)


def _path(draft: Draft, last: Tensor, best: Tensor, finite: Tensor) -> Path:
    """The path that ends in ``last`` [B]; the tokens it emits are the target's own after each of its nodes."""
    rows = torch.arange(len(last), device=last.device)
    nodes = path_nodes(draft.ancestors, last, draft.levels)
    return Path(nodes, draft.depth[rows, last] + 1, best.gather(1, nodes), finite.gather(1, nodes).all(-1))
