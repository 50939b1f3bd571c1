"""The public forward of many model families verifies trees: their text with drafts is the plain one, sdpa and eager."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers as tf

from kit import SIZES, compare, random_heads
from treedraft.infer import Sampling, Target, TargetError, autoregressive, complete
from treedraft.tree import Tree

TREE = Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [1, 0, 0]])
PROMPTS = [[5, 9, 30, 41], [11] * 23]


def gpt_sizes() -> dict[str, Any]:
    return {
        "n_embd": 64,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 96,
        "n_positions": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: tf.LlamaConfig(**SIZES),
    "mistral": lambda: tf.MistralConfig(**SIZES, sliding_window=16),
    "qwen2": lambda: tf.Qwen2Config(**SIZES),
    "qwen3": lambda: tf.Qwen3Config(**SIZES, head_dim=32),
    "gemma2": lambda: tf.Gemma2Config(**SIZES, head_dim=32, sliding_window=8, query_pre_attn_scalar=32),
    "gemma3": lambda: tf.Gemma3TextConfig(**{**SIZES, "head_dim": 32}, sliding_window=8, query_pre_attn_scalar=32),
    "phi3": lambda: tf.Phi3Config(**SIZES),
    "gpt_neox": lambda: tf.GPTNeoXConfig(**{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}),
    "gpt2": lambda: tf.GPT2Config(**gpt_sizes(), initializer_range=0.2),
    "mixtral": lambda: tf.MixtralConfig(**SIZES, num_local_experts=4),
    "qwen3_moe": lambda: tf.Qwen3MoeConfig(
        **{**SIZES, "head_dim": 32}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48
    ),
    "falcon": lambda: tf.FalconConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=96,
        alibi=False,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.2,
    ),
    "smollm3": lambda: tf.SmolLM3Config(**SIZES),
}


def build(family: str, attention: str) -> tf.PreTrainedModel:
    torch.manual_seed(5)
    if family == "gemma2":  # its soft-capped attention has no sdpa form
        attention = "eager"
    return tf.AutoModelForCausalLM.from_config(FAMILIES[family](), attn_implementation=attention).float().eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_do_not_change_the_text(family: str, attention: str) -> None:
    plain = Target(build(family, attention))
    expected: list[list[int]] = [[] for _ in PROMPTS]
    for chunk in autoregressive(plain, PROMPTS, max_new_tokens=20):
        expected[chunk.row] += chunk.ids
    model = Target(build(family, attention), pack=True)
    head = random_heads(model).for_decoding(torch.float32)
    done = complete(model, PROMPTS, head=head, tree=TREE, max_new_tokens=20, batch_size=2)
    for prompt, ids, found in zip(PROMPTS, expected, done, strict=True):
        result = compare(plain, prompt, ids, found.ids, Sampling(), 0)
        assert result.equal or result.near_tie is not None


@pytest.mark.parametrize("family", FAMILIES)
def test_features_for_training_are_those_of_decoding_whatever_the_padding(family: str) -> None:
    model = Target(build(family, "sdpa"))
    taps = (1, model.num_layers)
    tokens = torch.randint(5, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    lengths = torch.tensor([12, 7])
    features = model.features(tokens, lengths, taps)
    assert features.shape == (2, 12, 2 * model.facts.hidden_size)
    with torch.inference_mode():
        states = model.model(tokens[1:, :7], output_hidden_states=True).hidden_states
    torch.testing.assert_close(features[1, :7], torch.cat([states[1], states[-1]], -1)[0], atol=1e-4, rtol=1e-4)
    other = tokens.clone()
    other[1, 7:] = 3
    torch.testing.assert_close(model.features(other, lengths, taps)[1, :7], features[1, :7])


def test_alibi_positions_are_refused_by_name() -> None:
    config = tf.FalconConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=96,
        alibi=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with pytest.raises(TargetError, match="ALiBi"):
        Target(tf.AutoModelForCausalLM.from_config(config))


def test_attention_that_does_not_follow_the_tree_is_found_at_load() -> None:
    config = tf.BloomConfig(hidden_size=64, n_layer=2, n_head=4, vocab_size=96, bos_token_id=1, eos_token_id=2)
    with pytest.raises(TargetError, match="BloomForCausalLM"):
        Target(tf.AutoModelForCausalLM.from_config(config))


def test_layers_of_an_unknown_kind_are_refused_by_name() -> None:
    model = build("llama", "sdpa")
    model.config.layer_types = ["full_attention", "chunked_attention", "linear_attention", "full_attention"]
    with pytest.raises(TargetError, match="layers of kind chunked_attention; layers of kind linear_attention"):
        Target(model)


@pytest.mark.parametrize("scaling", ["dynamic", "longrope"])
def test_rotary_scaling_that_depends_on_the_batch_is_refused_where_it_would_begin(scaling: str) -> None:
    rope = {"rope_type": scaling, "rope_theta": 10000.0, "factor": 2.0, "original_max_position_embeddings": 64}
    if scaling == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    torch.manual_seed(5)
    model = Target(tf.AutoModelForCausalLM.from_config(tf.LlamaConfig(**SIZES, rope_parameters=rope)).eval())
    assert len(complete(model, [[5, 6]], max_new_tokens=20)[0].ids) <= 20
    with pytest.raises(TargetError, match=f"'{scaling}' beyond 64 positions"):
        complete(model, [[5, 6]], max_new_tokens=80)


def test_a_model_packed_once_is_not_packed_again() -> None:
    model = build("llama", "sdpa")
    Target(model, pack=True)
    with pytest.raises(TargetError, match="packed by another Target"):
        Target(model, pack=True)
