"""The blocks written out give what the model's own forward gives, logits, features and cache, on every known family."""

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from kit import MODELS, SIZES, build
from treedraft.heads import PackedLinear, PackedPart, can_halve
from treedraft.infer import Target, TargetOutput
from treedraft.infer.cache import KVCache
from treedraft.infer.masks import causal_ancestors
from treedraft.tree import Tree

TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
LENGTHS = torch.tensor([5, 19, 12])
OTHERS: dict[str, Any] = {
    "gemma3": lambda: tf.Gemma3TextConfig(**{**SIZES, "head_dim": 32}, sliding_window=8, query_pre_attn_scalar=32),
    "smollm3": lambda: tf.SmolLM3Config(**SIZES),
    "phi3": lambda: tf.Phi3Config(**SIZES),
}


@torch.inference_mode()
def run(target: Target) -> tuple[TargetOutput, KVCache]:
    """A ragged prefill and a tree behind it."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(4, 96, (3, 19), generator=generator)
    cache = target.new_cache(3, 40)
    places = torch.arange(19).expand(3, -1)
    target.forward(tokens, places, causal_ancestors(LENGTHS, 19), cache, keep=LENGTHS[:, None] - 1)
    cache.append(LENGTHS.tolist())
    draft = TREE.draft(torch.randint(4, 96, (3, TREE.size), generator=generator))
    out = target.forward(
        draft.tokens, LENGTHS[:, None] + draft.depth, draft.ancestors, cache, taps=(1, 3, 4), keep=None
    )
    cache.append([1, 1, 1])
    return out, cache


def assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.usefixtures("compiled_part")
@pytest.mark.parametrize("how", ["plain", "packed", "compiled"])
@pytest.mark.parametrize("name", MODELS)
def test_a_ragged_tree_gives_the_logits_features_and_cache_of_the_model(name: str, how: str) -> None:
    reference = Target(build(MODELS[name]()), own_blocks=False)
    target = Target(build(MODELS[name]()), pack=how != "plain", compiled=how == "compiled")
    expected_name = "compiled" if how == "compiled" else "own blocks"
    assert (target.forward_name, reference.forward_name) == (expected_name, "transformers")
    (found, cache), (expected, other) = run(target), run(reference)
    assert_same(found.logits, expected.logits)
    assert_same(found.features, expected.features)
    for row in range(3):
        for ours, theirs in zip(cache.stored(row), other.stored(row), strict=True):
            assert_same(ours[0], theirs[0])
            assert_same(ours[1], theirs[1])


@pytest.mark.parametrize("name", MODELS)
def test_only_the_logits_that_are_asked_for_are_computed(name: str) -> None:
    target = Target(build(MODELS[name]()))
    tokens, keep = torch.arange(4, 16).view(2, 6), torch.tensor([[5, 0], [2, 2]])
    places, seen = torch.arange(6).expand(2, -1), causal_ancestors(torch.tensor([6, 6]), 6)
    every = target.forward(tokens, places, seen, target.new_cache(2, 6)).logits
    some = target.forward(tokens, places, seen, target.new_cache(2, 6), keep=keep).logits
    assert some.shape == (2, 2, 96)
    assert_same(some, every[torch.tensor([[0], [1]]), keep])


def test_half_precision_stays_near_the_model() -> None:
    config = MODELS["llama"]()
    found, expected = (run(Target(build(config).bfloat16(), own_blocks=own))[0].logits for own in (True, False))
    assert found.dtype == torch.bfloat16
    exact = run(Target(build(config), own_blocks=False))[0].logits
    off, usual = ((x.float() - exact).abs().mean().item() for x in (found, expected))
    assert off < 1.3 * usual


@pytest.mark.parametrize("name", OTHERS)
def test_another_family_runs_through_its_own_forward(name: str) -> None:
    assert Target(build(OTHERS[name]())).forward_name == "transformers"


def test_another_attention_runs_through_its_own_forward() -> None:
    assert Target(build(MODELS["llama"](), attention="eager")).forward_name == "transformers"


def test_a_model_that_only_looks_like_the_family_runs_through_its_own_forward() -> None:
    model: Any = build(MODELS["llama"]())
    block = model.model.layers[2].mlp
    block.forward = lambda x: 0.9 * type(block).forward(block, x)
    target = Target(model)
    assert target.forward_name == "transformers"


@pytest.mark.parametrize("name", MODELS)
def test_packed_layers_still_serve_the_models_own_forward(name: str) -> None:
    packed, plain = Target(build(MODELS[name]()), pack=True), Target(build(MODELS[name]()), own_blocks=False)
    tokens = torch.arange(4, 16).view(2, 6)
    with torch.inference_mode():
        assert_same(packed.model(tokens).logits, plain.model(tokens).logits)
    assert packed.fingerprint() == plain.fingerprint()


@pytest.mark.parametrize("name", MODELS)
def test_weights_born_in_bf16_are_halved_and_give_the_same_logits_and_fingerprint(name: str) -> None:
    plain, halved = (
        Target(build(MODELS[name]()).bfloat16().float()),
        Target(build(MODELS[name]()).bfloat16().float(), pack=True),
    )
    packed = [module for module in halved.model.modules() if isinstance(module, PackedLinear)]
    assert all(module.halved == can_halve(torch.zeros(1, 1)) for module in packed)
    assert_same(run(halved)[0].logits, run(plain)[0].logits)
    assert halved.fingerprint() == plain.fingerprint()
    (small, held), (large, numbers) = halved.weights_read(), plain.weights_read()
    matrices = sum(m.weight.numel() for m in plain.model.modules() if isinstance(m, torch.nn.Linear))
    assert held == numbers
    assert large - small == 2 * matrices * can_halve(torch.zeros(1, 1))


@pytest.mark.parametrize("taps", [(0, 2), (3,), (1, 4)])
@pytest.mark.parametrize("name", MODELS)
def test_features_for_training_are_those_of_the_model(name: str, taps: tuple[int, ...]) -> None:
    tokens, lengths = torch.arange(4, 28).view(2, 12), torch.tensor([12, 7])
    ours, theirs = (
        Target(build(MODELS[name]()), own_blocks=own).features(tokens, lengths, taps) for own in (True, False)
    )
    assert_same(ours[0], theirs[0])
    assert_same(ours[1, :7], theirs[1, :7])


def test_a_layer_that_takes_anothers_place_later_is_used() -> None:
    target = Target(build(MODELS["llama"]()))
    model: Any = target.model
    before = run(target)[0].logits
    model.model.layers[1].mlp.down_proj = torch.nn.Linear(96, 64, bias=False)
    model.model.layers[2].input_layernorm.weight.data = torch.full((64,), 0.5)
    changed = run(target)[0].logits
    assert (changed - before).abs().max() > 0.1
    reference = Target(model, own_blocks=False)
    assert_same(changed, run(reference)[0].logits)


def test_no_weight_is_kept_twice() -> None:
    model: Any = build(MODELS["llama"]())
    weights = sum(weight.numel() for weight in model.parameters())
    target = Target(model, pack=True)
    layer = model.base_model.layers[0]
    assert layer.mlp.gate_proj.whole is layer.mlp.up_proj.whole
    assert layer.self_attn.q_proj.whole is layer.self_attn.v_proj.whole
    assert Target(build(MODELS["llama"]())).weights_read() == target.weights_read()
    packed = [m.whole if isinstance(m, PackedPart) else m for m in model.modules() if hasattr(m, "dense_weight")]
    held = sum(whole.dense_weight().numel() for whole in {id(m): m for m in packed}.values())
    assert held + sum(weight.numel() for weight in model.parameters()) == weights
