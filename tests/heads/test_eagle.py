"""EAGLE heads: which layers they read, the geometry and positions they share with the target, what they are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kit import any_config, any_head, target, tokenizer
from treedraft.heads import Eagle3Config, HeadError, LayerShape, build_head, default_taps, load_head, save_head
from treedraft.infer import Target
from treedraft.infer.shape import layer_shape

KINDS = ("eagle", "eagle3")


def loaded(name: str) -> Target:
    return Target(target(name), tokenizer())


@pytest.mark.parametrize("layers", range(1, 40))
def test_default_taps_are_distinct_valid_and_ascending(layers: int) -> None:
    taps = default_taps(layers)
    assert list(taps) == sorted(set(taps))
    assert 0 <= taps[0] <= taps[-1] < layers
    assert len(taps) == min(3, layers)


def test_small_targets_get_layers_of_their_own_and_they_are_written_down(tmp_path: Path) -> None:
    small = loaded("llama_3layers")
    head: Any = any_head(small, "eagle3")
    save_head(head, tmp_path, small.facts)
    assert head.taps == (0, 1, 2)
    assert '"tapped_layers": [\n      0,\n      1,\n      2\n    ]' in (tmp_path / "config.json").read_text()


@pytest.mark.parametrize("taps", [(0, 1, 9), (2, 1), (1, 1), (), (-1, 2)])
def test_layers_that_cannot_be_tapped_are_refused_with_the_valid_range(taps: tuple[int, ...]) -> None:
    config = any_config(loaded("llama_gqa"), "eagle3")
    with pytest.raises(HeadError, match=r"tapped_layers must be distinct, ascending and in 0\.\.3, got"):
        replace(config, tapped_layers=taps)


def test_a_configuration_names_all_its_faults() -> None:
    layer = LayerShape(64, 128, 4, 2, 0)
    with pytest.raises(
        HeadError, match=r"head_dim must be at least 1, got 0.*steps must be.*draft_vocab_size must lie in"
    ):
        Eagle3Config(64, 96, 4, (1, 2), layer, steps=0, draft_vocab_size=97)
    with pytest.raises(
        HeadError, match=r"num_attention_heads \(4\) must be a multiple of layer.num_key_value_heads \(3\)"
    ):
        Eagle3Config(64, 96, 4, (1, 2), LayerShape(64, 128, 4, 3, 16))


def test_the_targets_geometry_is_read_and_not_computed() -> None:
    shape = layer_shape(loaded("qwen3_headdim").config)
    assert (shape.head_dim, shape.num_key_value_heads, shape.num_attention_heads) == (32, 2, 4)
    head: Any = any_head(loaded("qwen3_headdim"), "eagle3")
    assert head.layer.self_attn.q_proj.weight.shape == (4 * 32, 2 * 64)
    assert head.layer.self_attn.k_proj.weight.shape == (2 * 32, 2 * 64)
    assert head.layer.self_attn.o_proj.weight.shape == (64, 4 * 32)


@pytest.mark.parametrize("kind", KINDS)
def test_the_rotary_base_is_the_targets_and_it_matters(kind: str) -> None:
    model = loaded("qwen2_bias")
    config = any_config(model, kind)
    assert config.layer.rope_parameters["rope_theta"] == 1_000_000.0
    other = replace(config, layer=replace(config.layer, rope_parameters={"rope_type": "default", "rope_theta": 1e4}))
    ours, theirs = any_head(model, kind), build_head(other, model.layers())
    theirs.load_state_dict(ours.state_dict())
    tokens = torch.randint(13, 96, (1, 60), generator=torch.Generator().manual_seed(0))
    features = model.features(tokens, torch.tensor([60]), ours.taps)
    last = torch.arange(60)[None] == 59
    assert (ours.predict(features, tokens, last) - theirs.predict(features, tokens, last)).abs().max() > 1e-2


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_scaled_rotary_positions_are_those_of_the_targets_library(kind: str) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from treedraft.heads.layer import rotary_frequencies

    settings = {
        "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4},
        "yarn": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4, "original_max_position_embeddings": 64},
        "llama3": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
            "rope_theta": 5e5,
        },
    }[kind]
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, rope_parameters=settings, max_position_embeddings=256)  # type: ignore[arg-type]
    made = LlamaRotaryEmbedding(config)
    frequencies, scale = rotary_frequencies(layer_shape(config))
    assert torch.equal(frequencies, made.inv_freq)  # type: ignore[arg-type]
    assert scale == pytest.approx(made.attention_scaling)


def test_frequencies_stay_in_fp32_in_a_half_precision_copy() -> None:
    drafter: Any = any_head(loaded("llama_gqa"), "eagle3").for_decoding(torch.bfloat16)
    assert drafter.layer._rope[0].dtype == torch.float32
    assert next(iter(drafter.state_dict().values())).dtype == torch.bfloat16


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_the_targets_is_neither_saved_nor_trained(kind: str, tmp_path: Path) -> None:
    model = loaded("llama_mha_tied")
    head = any_head(model, kind)
    save_head(head, tmp_path, model.facts)
    names = set(load_file(tmp_path / "heads.safetensors"))
    assert not any("embed" in name for name in names)
    assert any("lm_head" in name for name in names) == (kind == "eagle3")
    assert not any(name.endswith("bias") for name in names)
    assert ("input_layernorm.weight" in names) == (kind == "eagle3")


def test_the_output_layer_of_eagle_3_starts_as_the_targets_rows() -> None:
    for name in ("llama_mha_tied", "llama_pad128", "qwen3_headdim"):
        model, ids = loaded(name), torch.arange(0, 96, 2)
        head: Any = build_head(any_config(model, "eagle3", draft_ids=ids), model.layers(), ids)
        assert torch.equal(head.lm_head.weight, model.output_layer().weight[ids])
        whole: Any = build_head(any_config(model, "eagle3"), model.layers())
        assert torch.equal(whole.lm_head.weight, model.output_layer().weight)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saved_heads_read_back_with_their_vocabulary(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, ids = loaded("llama_pad128"), torch.arange(3, 123, 3)
    head = any_head(model, kind, draft_ids=ids)
    save_head(head, tmp_path, model.facts, dtype)
    read = load_head(tmp_path, model.facts, model.layers())
    assert read.config == head.config
    assert read.draft_ids is not None and torch.equal(read.draft_ids, ids)  # noqa: PT018
    for name, value in head.state_dict().items():
        assert torch.equal(read.state_dict()[name], value.to(dtype).float())


def test_a_draft_vocabulary_that_was_swapped_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model, ids = loaded("llama_gqa"), torch.arange(0, 96, 2)
    save_head(any_head(model, "eagle3", draft_ids=ids), tmp_path, model.facts)
    tensors = load_file(tmp_path / "heads.safetensors")
    save_file({**tensors, "draft_ids": ids + 1}, tmp_path / "heads.safetensors")
    with pytest.raises(HeadError, match="draft_ids are not the ones"):
        load_head(tmp_path, model.facts, model.layers())
