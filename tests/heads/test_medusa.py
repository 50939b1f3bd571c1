from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kit import PlainScores, medusa_config, random_heads, ring_heads, target, tokenizer
from treedraft.heads import Accepted, HeadError, MedusaConfig, build_head
from treedraft.infer import Target
from treedraft.tree import Tree


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(target("llama_gqa"), tokenizer())


def accepted(features: torch.Tensor, count: list[int]) -> Accepted:
    batch, width = features.shape[:2]
    tokens = torch.arange(batch * width).view(batch, width) % 96
    return Accepted(features, tokens, torch.tensor(count), torch.tensor([7] * batch), 7 + width)


def test_fresh_heads_are_the_identity(model: Target) -> None:
    head = build_head(medusa_config(model, 3, num_layers=2), model.layers())
    features = torch.randn(2, 5, 64)
    everywhere = torch.ones(2, 5, dtype=torch.bool)
    assert torch.equal(head.predict(features, torch.zeros(2, 5), everywhere), features.flatten(0, 1).expand(3, -1, -1))


def test_stacked_blocks_have_weights_of_their_own(model: Target) -> None:
    head = build_head(medusa_config(model, 3, num_layers=4), model.layers())
    weights = [p for n, p in head.named_parameters() if n.endswith("linear.weight")]
    assert len({id(w) for w in weights}) == len({w.data_ptr() for w in weights}) == 12


def test_a_node_takes_its_depths_head_and_its_ranks_candidate(model: Target) -> None:
    head: Any = random_heads(model, 3)
    features = torch.randn(2, 4, 64)
    tree = Tree.from_paths([[0], [1], [0, 0], [0, 2], [1, 1], [0, 0, 3]])
    draft, memory = head.propose(accepted(features, [4, 2]), None, tree, PlainScores())
    assert memory is None
    rows, bias = model.output_layer().weight, model.output_layer().bias
    for b, last in ((0, 3), (1, 1)):
        assert draft.tokens[b, 0] == (b * 4 + last) % 96  # the root is the last counted token
        for node in range(1, tree.size):
            block = head.blocks[tree.depths[node] - 1]
            ranked = F.linear(block(features[b, last]), rows, bias).argsort(descending=True)
            assert draft.tokens[b, node] == ranked[tree.ranks[node]]


@pytest.mark.parametrize("output", ["shared", "own"])
def test_the_copy_for_decoding_drafts_what_training_predicts(model: Target, output: str) -> None:
    draft_ids = torch.arange(1, 96, 2)
    head = build_head(medusa_config(model, 3, output=output, draft_vocab_size=48), model.layers(), draft_ids)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    features = torch.randn(1, 6, 64)
    last = torch.arange(6)[None] == 5
    hidden = head.predict(features, torch.zeros(1, 6), last)
    layer = head.output()
    trained = torch.stack([F.linear(hidden[k, 0], *layer.of_head(k)) for k in range(3)])
    seen: list[torch.Tensor] = []

    class Record(PlainScores):
        def __call__(self, logits: torch.Tensor, positions: torch.Tensor, ids: torch.Tensor | None) -> torch.Tensor:
            assert positions.tolist() == [[14 + len(seen)]]  # 7 + 6 features: the root stands at 13
            assert torch.equal(ids, draft_ids)  # type: ignore[arg-type]
            seen.append(logits)
            return logits

    draft, _ = head.for_decoding(torch.float32).propose(accepted(features, [6]), None, Tree.chain(3), Record())
    torch.testing.assert_close(torch.cat(seen, 1)[0], trained, atol=1e-5, rtol=1e-5)
    assert draft.tokens[0, 1:].tolist() == draft_ids[trained.argmax(-1)].tolist()


def test_own_output_layers_start_as_the_targets_effective_embedding() -> None:
    for name in ("llama_mha_tied", "qwen3_headdim"):
        stock: Any = target(name)
        tied = Target(stock, tokenizer())
        head: Any = build_head(medusa_config(tied, 2, output="own"), tied.layers())
        assert head.own_output is not None
        for weight in head.own_output:
            assert weight.shape == (96, 64)
            assert torch.equal(weight, stock.get_input_embeddings().weight)
            assert weight.data_ptr() != stock.get_input_embeddings().weight.data_ptr()


def test_a_shared_output_layer_is_neither_trained_nor_saved(model: Target) -> None:
    head = build_head(medusa_config(model, 2), model.layers())
    assert sum(p.numel() for p in head.parameters()) == 2 * (64 * 64 + 64)
    assert not any("output" in name for name in head.state_dict())


def test_configurations_that_cannot_be_name_every_fault() -> None:
    with pytest.raises(HeadError) as error:
        MedusaConfig(num_heads=0, num_layers=0, hidden_size=8, vocab_size=9, num_target_layers=1, draft_vocab_size=10)
    for fault in (
        "num_heads must be at least 1",
        "num_layers must be at least 1",
        "draft_vocab_size must lie in 1..9, got 10",
    ):
        assert fault in str(error.value)


def test_a_configuration_of_another_target_is_refused(model: Target) -> None:
    with pytest.raises(HeadError, match=r"96 x 64 .* the configuration says 80 x 64"):
        build_head(MedusaConfig(num_heads=1, hidden_size=64, vocab_size=80, num_target_layers=4), model.layers())


def test_exact_heads_name_the_tokens_to_come() -> None:
    ring = Target(target("markov_ring"), tokenizer())
    head = ring_heads(ring, 3).for_decoding(torch.float32)
    features = ring.features(torch.tensor([[18]]), torch.tensor([1]), (4,))  # after w5
    draft, _ = head.propose(
        Accepted(features, torch.tensor([[19]]), torch.tensor([1]), torch.tensor([0]), 1),
        None,
        Tree.chain(3),
        PlainScores(),
    )
    assert draft.tokens.tolist() == [[19, 20, 21, 22]]
