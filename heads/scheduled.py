"""Growing a tree under a confidence schedule: as many levels and nodes as pay.

B batch rows   N tree nodes, root included   W draft vocabulary   e nodes of a level that are asked   R candidates
"""

from __future__ import annotations

import torch

from ..tree import Draft, DynamicTree, Row, Schedule
from .base import Accepted, DraftScores, Memory
from .fill import Steps
from .source import Trie, pack


def grow_scheduled(
    head: Steps, accepted: Accepted, memory: Memory | None, tree: DynamicTree, schedule: Schedule, scores: DraftScores
) -> tuple[Draft, Memory | None]:
    """At most ``tree.depth`` levels of ``tree.width`` candidates, and at most ``tree.size`` nodes; see ``Schedule``.

    Each level is brought to the host, since whether another one pays is decided there: a wait for the device a level.
    """
    root, ids, batch = accepted.root, head.draft_ids, len(accepted.count)
    prices = schedule.prices(batch, accepted.reach, tree.size, tree.width)
    logits, beam, memory = head.begin(accepted, memory)
    schedule.begin(batch)
    drafting = prices.begin
    asked = [[0]] * batch  # the nodes that are asked: 0 for the root, else 1 + their place in the row's pool
    for depth in range(1, tree.depth + 1):
        positions = (accepted.root_position + depth)[:, None].expand(-1, logits.shape[1])
        belief = scores.confidence(scores(logits, positions, ids))  # [B, e or 1, W]
        best = belief.topk(min(tree.width, belief.shape[-1]))
        tokens = best.indices if ids is None else ids[best.indices]
        before = [len(row.tokens) for row in schedule.rows()]
        schedule.offer(depth, asked, best.values.tolist(), tokens.tolist())
        if depth == tree.depth:
            break
        chosen = schedule.next_level(depth, prices, drafting, tree.size, tree.width)
        if not chosen:
            break
        wide = best.indices.shape[-1]
        above = [[(i - start) // wide for i in row] for row, start in zip(chosen, before, strict=True)]
        taken = [[row.tokens[i] for i in places] for row, places in zip(schedule.rows(), chosen, strict=True)]
        drafting += prices.step[len(chosen[0])]
        asked = [[i + 1 for i in places] for places in chosen]
        packed = torch.tensor([above, taken], device=root.device)
        logits, beam = head.extend(beam, packed[0], packed[1])
    admitted = schedule.admit(prices, drafting, tree.size)
    tries = [
        _trie(root_token, row, places)
        for root_token, row, places in zip(root.tolist(), schedule.rows(), admitted, strict=True)
    ]
    return pack(tries, 1 + max(len(places) for places in admitted), root.device), memory


def _trie(root: int, row: Row, places: list[int]) -> Trie:
    trie, nodes = Trie.of_root(root), {0: 0}
    for place in places:
        nodes[place + 1] = trie.add(row.tokens[place], nodes[row.parents[place]], row.raw[place])
    return trie
