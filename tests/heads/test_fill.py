"""How trees are filled: by rank, or grown, against the obvious slow forms."""

from __future__ import annotations

import heapq
from typing import Any

import pytest
import torch
from torch import Tensor

from kit import KINDS, PlainScores, any_head, target, tokenizer
from treedraft.heads import Accepted
from treedraft.infer import Sampler, Sampling, Target
from treedraft.tree import TIE, DynamicTree, Tree

TEXT = torch.randint(13, 96, (2, 12), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(target("llama_gqa"), tokenizer())


def given(model: Target, head: Any) -> Accepted:
    features = model.features(TEXT, torch.full((2,), 12), head.taps).clone()
    return Accepted(features, TEXT.roll(-1, 1), torch.tensor([11, 7]), torch.zeros(2, dtype=torch.int64), 11)


def slow_dynamic(drafter: Any, accepted: Accepted, tree: DynamicTree, row: int) -> set[tuple[int, ...]]:
    """EAGLE-2's tree of a row as paths of tokens: every beam node by its own chain of head calls."""
    beam: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    pool: list[tuple[float, tuple[int, ...]]] = []
    for _ in range(tree.depth):
        found = []
        for total, path in beam:
            logits, state, _ = drafter.begin(accepted, None)
            for token in path:
                logits, state = drafter.extend(state, torch.zeros(2, 1, dtype=torch.int64), torch.tensor([[token]] * 2))
            best = logits[row, -1].float().log_softmax(-1).topk(tree.width)
            found += [
                (total + v - TIE, (*path, i)) for v, i in zip(best.values.tolist(), best.indices.tolist(), strict=True)
            ]
        pool += found
        beam = heapq.nlargest(tree.width, found)
    return {path for _, path in heapq.nlargest(tree.size - 1, pool)}


def paths(draft: Any, row: int) -> set[tuple[int, ...]]:
    nodes = range(1, draft.size)
    return {tuple(draft.tokens[row, draft.ancestors[row, n]].tolist()[1:]) for n in nodes if draft.valid[row, n]}


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "medusa"])
def test_a_step_wise_head_grows_the_tree_of_eagle_2(model: Target, kind: str) -> None:
    drafter: Any = any_head(model, kind, 4).for_decoding(torch.float32)
    accepted, tree = given(model, drafter), DynamicTree(12, 3, 4)
    draft, _ = drafter.propose(accepted, None, tree, PlainScores())
    for row in range(2):
        assert paths(draft, row) == slow_dynamic(drafter, accepted, tree, row)
    assert draft.levels == 4


def test_medusa_heads_grow_the_best_tree_of_their_marginals(model: Target) -> None:
    drafter: Any = any_head(model, "medusa", 3).for_decoding(torch.float32)
    accepted, size = given(model, drafter), 20
    draft, _ = drafter.propose(accepted, None, DynamicTree(size, 3, 2), PlainScores())
    for row in range(2):
        laws = []
        logits, beam, _ = drafter.begin(accepted, None)
        for _ in range(3):
            laws.append(logits[row, 0].log_softmax(-1).sort(descending=True))
            if len(laws) < 3:
                logits, beam = drafter.extend(beam, torch.zeros(2, 1), torch.zeros(2, 1))
        heap: list[tuple[float, tuple[int, ...]]] = [(-laws[0].values[0].item() + TIE, (0,))]
        best: set[tuple[int, ...]] = set()
        while len(best) < size - 1:
            cost, ranks = heapq.heappop(heap)
            best.add(tuple(laws[d].indices[r].item() for d, r in enumerate(ranks)))
            last = laws[len(ranks) - 1].values
            heapq.heappush(
                heap, (cost + last[ranks[-1]].item() - last[ranks[-1] + 1].item(), (*ranks[:-1], ranks[-1] + 1))
            )
            if len(ranks) < 3:
                heapq.heappush(heap, (cost - laws[len(ranks)].values[0].item() + TIE, (*ranks, 0)))
        assert paths(draft, row) == best


@pytest.mark.parametrize("kind", KINDS)
def test_sampled_drafts_carry_the_law_that_each_nodes_children_were_drawn_from(model: Target, kind: str) -> None:
    ids = torch.arange(0, 96, 3)
    drafter: Any = any_head(model, kind, 3, ids).for_decoding(torch.float32)
    accepted = given(model, drafter)
    sampler = Sampler(Sampling(temperature=0.7), torch.tensor([1, 2]), drafts="sampled")
    scores = sampler.draft_scores((), 96, accepted.root_position)
    tree = Tree.from_paths([[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0]])
    draft, _ = drafter.propose(accepted, None, tree, scores)
    assert draft.laws is not None
    assert torch.equal(draft.ids, ids)
    logits, beam, _ = drafter.begin(accepted, None)
    torch.testing.assert_close(draft.laws[:, 0], (logits[:, 0] / 0.7).log_softmax(-1))
    for node in (n for n in range(1, tree.size) if n in tree.parents):
        path = [n for n in range(1, tree.size) if draft.ancestors[0, node, n]]
        logits, beam, _ = drafter.begin(accepted, None)
        for n in path:
            logits, beam = drafter.extend(beam, torch.zeros(2, 1, dtype=torch.int64), draft.tokens[:, n : n + 1])
        torch.testing.assert_close(draft.laws[:, node], (logits[:, 0] / 0.7).log_softmax(-1), atol=1e-3, rtol=1e-3)


def test_plain_and_coupled_drafts_carry_no_laws(model: Target) -> None:
    drafter: Any = any_head(model, "eagle3").for_decoding(torch.float32)
    accepted = given(model, drafter)
    for drafts in ("coupled", "top-k"):
        sampler = Sampler(Sampling(temperature=0.7), torch.tensor([1, 2]), drafts=drafts)  # type: ignore[arg-type]
        draft, _ = drafter.propose(accepted, None, Tree.chain(2), sampler.draft_scores((), 96, accepted.root_position))
        assert draft.laws is None


def test_sampled_children_are_drawn_without_replacement_and_anew_at_every_root(model: Target) -> None:
    drafter: Any = any_head(model, "medusa", 1).for_decoding(torch.float32)
    accepted, seen = given(model, drafter), set()
    sampler = Sampler(Sampling(temperature=1.0), torch.tensor([1, 2]), drafts="sampled")
    for root in range(20):
        scores = sampler.draft_scores((), 96, torch.tensor([root, root]))
        draft, _ = drafter.propose(accepted, None, Tree.from_paths([[0], [1], [2]]), scores)
        children = draft.tokens[0, 1:].tolist()
        assert len(set(children)) == 3
        seen.add(tuple(children))
    assert len(seen) > 10


def test_a_first_drawn_child_follows_the_heads_law() -> None:
    class Flat:
        draft_ids = None

        def begin(self, accepted: Accepted, memory: Any) -> tuple[Tensor, Any, Any]:
            return torch.tensor([0.1, 0.2, 0.3, 0.4]).log().expand(len(accepted.count), 1, 4), None, None

    from treedraft.heads import fill

    rows = 4000
    accepted = Accepted(
        torch.zeros(rows, 1, 1),
        torch.zeros(rows, 1, dtype=torch.int64),
        torch.ones(rows, dtype=torch.int64),
        torch.zeros(rows, dtype=torch.int64),
        1,
    )
    sampler = Sampler(Sampling(temperature=1.0), torch.arange(rows), drafts="sampled")
    draft, _ = fill(Flat(), accepted, None, Tree.chain(1), sampler.draft_scores((), 4, accepted.root_position))  # type: ignore[arg-type]
    shares = torch.bincount(draft.tokens[:, 1], minlength=4) / rows
    assert (shares - torch.tensor([0.1, 0.2, 0.3, 0.4])).abs().max() < 0.03
