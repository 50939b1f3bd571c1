from __future__ import annotations

import pytest
import torch

from kit import PlainScores, target, tokenizer
from treedraft.heads import Accepted, HeadError, Recycling, RecyclingConfig
from treedraft.infer import Target, complete
from treedraft.tree import DynamicTree, Tree


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(target("llama_gqa"), tokenizer())


def accepted(model: Target, texts: torch.Tensor, start: int, stop: list[int]) -> Accepted:
    """Features of the positions from ``start`` on, up to each row's ``stop``, and the tokens that follow them."""
    lengths = torch.tensor(stop)
    features = model.features(texts[:, :-1], lengths.clamp(min=1), (model.num_layers,))[:, start : max(stop)]
    first = None if start else texts[:, 0]
    begin = torch.full_like(lengths, start)
    return Accepted(features, texts[:, start + 1 : max(stop) + 1], lengths - start, begin, max(stop), first)


def successors(model: Target, text: torch.Tensor, count: int) -> dict[int, list[int]]:
    """The obvious form: the target's own best tokens after each position, a later one in place of an earlier."""
    with torch.inference_mode():
        best = model.model(text[None]).logits[0].topk(count).indices
    return dict(zip(text.tolist(), best.tolist(), strict=True))


def test_a_token_is_followed_by_what_the_target_last_held_likely(model: Target) -> None:
    texts = torch.tensor([[20, 21, 20, 22, 21, 20], [30, 31, 31, 30, 32, 33]])
    drafter = Recycling(RecyclingConfig(model.num_layers, successors=3), model.layers())
    tree = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1]])
    first, memory = drafter.propose(accepted(model, texts, 0, [3, 2]), None, tree, PlainScores())
    for row, known in ((0, 3), (1, 2)):
        root = int(texts[row, known])
        table = successors(model, texts[row, :known], 3)
        assert first.tokens[row, 0] == root
        if root not in table:
            assert first.valid[row].tolist() == [True] + [False] * 5
            continue
        children = [int(t) for t, p in zip(first.tokens[row], first.parents[row], strict=True) if p == 0]
        assert children == table[root]
    assert bool(first.valid[1, 1])  # 31 followed itself, so it was read before it became the root

    assert memory is not None
    later = accepted(model, texts[:1], 3, [5])
    second, _ = drafter.propose(later, memory.select(torch.tensor([0])), tree, PlainScores())
    table = successors(model, texts[0, :5], 3)  # the root is 20, last seen at position 2
    assert [int(t) for t, p in zip(second.tokens[0], second.parents[0], strict=True) if p == 0] == table[20]


def test_prompts_longer_than_a_chunk_are_read_whole(model: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = torch.randint(13, 96, (2, 30), generator=torch.Generator().manual_seed(1))
    drafter, shape = Recycling(RecyclingConfig(model.num_layers), model.layers()), DynamicTree(12, 4, 4)
    whole, _ = drafter.propose(accepted(model, texts, 0, [29, 17]), None, shape, PlainScores())
    monkeypatch.setattr("treedraft.heads.recycling.CHUNK", 5)
    parts, _ = drafter.propose(accepted(model, texts, 0, [29, 17]), None, shape, PlainScores())
    assert torch.equal(whole.tokens, parts.tokens)
    assert torch.equal(whole.parents, parts.parents)


def test_scores_are_the_targets_own_confidence_scaled(model: Target) -> None:
    texts = torch.tensor([[20, 21, 20, 20]])
    drafter = Recycling(RecyclingConfig(model.num_layers, successors=2, belief=0.5), model.layers())
    draft, _ = drafter.propose(accepted(model, texts, 0, [3]), None, DynamicTree(3, 1, 2), PlainScores())
    with torch.inference_mode():
        law = model.model(texts[:, :3]).logits[0, 2].softmax(-1)
    assert draft.scores is not None
    torch.testing.assert_close(draft.scores[0, 1:].exp(), 0.5 * law.topk(2).values)


def test_a_law_of_single_tokens_is_drafted_exactly_once_it_was_seen() -> None:
    ring = Target(target("markov_ring"), tokenizer())
    drafter = Recycling(RecyclingConfig(ring.num_layers), ring.layers())
    prompt = list(range(13, 40))
    done = complete(ring, [[*prompt, 13]], head=drafter, tree=Tree.chain(5), max_new_tokens=19, end_ids=())[0]
    assert done.ids == prompt[1:20]
    assert done.stats.rounds == 3  # six tokens each, after the prefill's own


def test_settings_that_cannot_be_name_every_fault(model: Target) -> None:
    with pytest.raises(HeadError) as error:
        RecyclingConfig(num_target_layers=0, successors=0, belief=2.0)
    for fault in ("num_target_layers must be at least 1", "successors must be at least 1", "belief must lie in (0, 1]"):
        assert fault in str(error.value)
    with pytest.raises(HeadError, match="97 successors asked for, the target's vocabulary has 96"):
        Recycling(RecyclingConfig(model.num_layers, successors=97), model.layers())
