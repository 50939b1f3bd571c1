"""Published checkpoints, made by hand in each layout: exact logits, and every fault named at once."""

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from kit import target, tokenizer
from treedraft.heads import Eagle3, HeadError
from treedraft.heads.formats import Checkpoint, import_checkpoint, read_checkpoint
from treedraft.infer import Target

H, V, LAYER = 64, 96, "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
FLAT = {
    "model_type": "llama",
    "hidden_size": H,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 256,
    "vocab_size": V,
}


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(target("llama_gqa"), tokenizer(), name="llama_gqa")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return 0.2 * torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def layer(name: str, width: int) -> dict[str, Tensor]:
    shapes = {"self_attn.q_proj": (64, width), "self_attn.k_proj": (32, width), "self_attn.v_proj": (32, width)}
    shapes |= {"self_attn.o_proj": (64, 64), "mlp.gate_proj": (128, 64), "mlp.up_proj": (128, 64)}
    shapes |= {"mlp.down_proj": (64, 128)}
    made = {f"{name}.{part}.weight": noise(*shape, seed=i) for i, (part, shape) in enumerate(shapes.items())}
    return made | {f"{name}.post_attention_layernorm.weight": 1 + noise(64, seed=9)}


def imported(model: Target, config: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    return import_checkpoint(Checkpoint(config, tensors), model.layers(), model.facts).head


def text(model: Target, head: Any) -> tuple[Tensor, Tensor, Tensor]:
    tokens = torch.randint(0, V, (1, 20), generator=torch.Generator().manual_seed(1))
    features = model.features(tokens, torch.tensor([20]), head.taps).clone()
    return features, tokens.roll(-1, 1), torch.ones(1, 20, dtype=torch.bool)


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("own", [True, False])
def test_the_papers_medusa_layout(model: Target, prefix: str, own: bool) -> None:
    blocks = {f"{prefix}{k}.0.linear.weight": noise(H, H, seed=k) for k in range(3)}
    biases = {f"{prefix}{k}.0.linear.bias": noise(H, seed=k) for k in range(3)}
    rows = [noise(V, H, seed=k) if own else model.output_layer().weight.detach() for k in range(3)]
    outputs = {f"{prefix}{k}.1.weight": rows[k] for k in range(3)}
    config = {"medusa_num_heads": 3, "medusa_num_layers": 1, "base_model_name_or_path": "t"}
    head = imported(model, config, {**blocks, **biases, **outputs})
    assert head.config.output == ("own" if own else "shared")
    features, tokens, rows_read = text(model, head)
    for k, hidden in enumerate(head.predict(features, tokens, rows_read)):
        x = features[0]
        x = x + F.silu(F.linear(x, blocks[f"{prefix}{k}.0.linear.weight"], biases[f"{prefix}{k}.0.linear.bias"]))
        assert torch.equal(F.linear(hidden, head.output().of_head(k)[0]), F.linear(x, rows[k]))


def test_vllms_medusa_layout_with_one_output_layer_and_two_blocks(model: Target) -> None:
    tensors = {f"blocks.{k}.layers.{i}.weight": noise(H, H, seed=2 * k + i) for k in range(2) for i in range(2)}
    shared = noise(V, H, seed=7)
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 2, "medusa_fc_bias": False}
    head = imported(model, config, {**tensors, "lm_head.weight": shared})
    features, tokens, rows = text(model, head)
    for k, hidden in enumerate(head.predict(features, tokens, rows)):
        x = features[0]
        for i in range(2):
            x = x + F.silu(F.linear(x, tensors[f"blocks.{k}.layers.{i}.weight"]))
        assert torch.equal(F.linear(hidden, head.output().of_head(k)[0]), F.linear(x, shared))


def decoder_layer(model: Target, name: str, tensors: dict[str, Tensor]) -> LlamaDecoderLayer:
    """Hugging Face's own layer with the weights of a checkpoint."""
    made = LlamaDecoderLayer(cast(LlamaConfig, model.config), 0).eval()
    own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    missing, unexpected = made.load_state_dict(own, strict=False)
    assert (missing, unexpected) == (["input_layernorm.weight"], [])
    return made


@pytest.mark.parametrize("bias", [True, False])
def test_the_eagle_layout_with_and_without_a_bias(model: Target, bias: bool) -> None:
    fc = {"fc.weight": noise(H, 2 * H)} | ({"fc.bias": noise(H)} if bias else {})
    tensors = {**layer("layers.0", H), **fc, "embed_tokens.weight": model.layers().embedding.clone()}
    head = imported(model, {**FLAT, "architectures": ["LlamaForCausalLM"]}, tensors)
    features, tokens, rows = text(model, head)
    reference = decoder_layer(model, "layers.0", tensors)
    reference.input_layernorm = torch.nn.Identity()  # type: ignore[assignment]
    x = F.linear(
        torch.cat([F.embedding(tokens, model.layers().embedding), features], -1), fc["fc.weight"], fc.get("fc.bias")
    )
    rotation = LlamaRotaryEmbedding(cast(LlamaConfig, model.config))(x, torch.arange(20)[None])
    causal = torch.full((20, 20), float("-inf")).triu(1)[None, None]
    wanted = reference(x, attention_mask=causal, position_embeddings=rotation)
    wanted = wanted[0] if isinstance(wanted, tuple) else wanted
    torch.testing.assert_close(head.predict(features, tokens, rows)[0], wanted[0], rtol=1e-5, atol=1e-5)


def eagle3(name: str, width: int = 40) -> tuple[dict[str, Any], dict[str, Tensor], Tensor]:
    ids = torch.arange(width) * 2 + 1
    marks = torch.zeros(V, dtype=torch.bool)
    marks[ids] = True
    tensors = {**layer(name, 2 * H), "fc.weight": noise(H, 3 * H), "norm.weight": 1 + noise(H)}
    tensors |= {
        f"{name}.input_layernorm.weight": 1 + noise(H, seed=3),
        f"{name}.hidden_norm.weight": 1 + noise(H, seed=4),
    }
    tensors |= {"lm_head.weight": noise(width, H), "d2t": ids - torch.arange(width), "t2d": marks}
    return {**FLAT, "draft_vocab_size": width, "architectures": ["LlamaForCausalLMEagle3"]}, tensors, ids


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (H,), weight, 1e-6)


def speculators(flat: dict[str, Any]) -> dict[str, Any]:
    keys = ("draft_vocab_size", "eagle_aux_hidden_state_layer_ids")
    inner = {name: value for name, value in flat.items() if name not in (*keys, "architectures")}
    return {
        "speculators_model_type": "eagle3",
        **{name: flat[name] for name in keys},
        "norm_before_residual": False,
        "transformer_layer_config": inner,
    }


@pytest.mark.parametrize("layout", ["midlayer", "layers.0", "specforge", "speculators"])
def test_eagle3_layouts_give_the_same_exact_logits(model: Target, layout: str) -> None:
    name = "midlayer" if layout in ("midlayer", "specforge") else "layers.0"
    config, tensors, ids = eagle3(name)
    if layout == "specforge":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}
    else:
        config["eagle_aux_hidden_state_layer_ids"] = [1, 2, 3]
    head = imported(model, speculators(config) if layout == "speculators" else config, tensors)
    assert isinstance(head, Eagle3)
    assert head.taps == (1, 2, 3)
    assert head.draft_ids is not None
    assert torch.equal(head.draft_ids, ids)
    state = head.state_dict()
    assert torch.equal(state["layer.self_attn.q_proj.weight"], tensors[f"{name}.self_attn.q_proj.weight"])
    features, tokens, rows = text(model, head)
    first, second = features[:, :1], tokens[:, :1]  # a text of one token: its attention is its own value
    g = F.linear(first, tensors["fc.weight"])
    e = norm(F.embedding(second, model.layers().embedding), tensors[f"{name}.input_layernorm.weight"])
    x = torch.cat([e, norm(g, tensors[f"{name}.hidden_norm.weight"])], -1)
    value = F.linear(x, tensors[f"{name}.self_attn.v_proj.weight"]).unflatten(-1, (2, 1, 16)).expand(-1, -1, -1, 2, -1)
    h = g + F.linear(value.flatten(2), tensors[f"{name}.self_attn.o_proj.weight"])
    y = norm(h, tensors[f"{name}.post_attention_layernorm.weight"])
    gate, up = (F.linear(y, tensors[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    h = h + F.linear(F.silu(gate) * up, tensors[f"{name}.mlp.down_proj.weight"])
    wanted = F.linear(norm(h, tensors["norm.weight"]), tensors["lm_head.weight"])
    found = F.linear(head.predict(first, second, rows[:, :1])[0], head.output().weight)
    torch.testing.assert_close(found, wanted[0], rtol=1e-5, atol=1e-5)


def test_rows_of_an_unsorted_draft_vocabulary_are_put_in_order(model: Target) -> None:
    config, tensors, ids = eagle3("midlayer")
    order = torch.randperm(40, generator=torch.Generator().manual_seed(2))
    mixed = {**tensors, "d2t": ids[order] - torch.arange(40), "lm_head.weight": tensors["lm_head.weight"][order]}
    head, straight = imported(model, config, mixed), imported(model, config, tensors)
    assert torch.equal(head.output().weight, straight.output().weight)
    assert torch.equal(head.draft_ids, ids)


def test_all_faults_are_named_at_once_by_the_files_names(model: Target) -> None:
    config, tensors, _ = eagle3("midlayer")
    tensors.pop("norm.weight")
    tensors |= {"surprise": torch.zeros(2), "midlayer.self_attn.k_proj.weight": torch.zeros(3, 3)}
    tensors["embed_tokens.weight"] = torch.randn(V, H)
    with pytest.raises(HeadError) as error:
        imported(model, {**config, "attention_bias": True, "norm_before_residual": True}, tensors)
    for part in (
        "norm.weight missing",
        "surprise unexpected",
        "midlayer.self_attn.k_proj.weight has shape (3, 3), expected (32, 128)",
        "attention_bias is True, which these heads do not have",
        "norm_before_residual is True",
        "embed_tokens.weight is not the target's",
    ):
        assert part in str(error.value)


def test_heads_of_other_sizes_are_refused_naming_both(model: Target) -> None:
    config, tensors, _ = eagle3("layers.0")
    with pytest.raises(HeadError, match=r"hidden_size is 48, the target's is 64; vocab_size is 80, the target's is 96"):
        imported(model, {**config, "hidden_size": 48, "vocab_size": 80}, tensors)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda d2t: d2t + torch.arange(40), "it looks like absolute ids"),
        (lambda d2t: d2t + 50, "must be distinct ids in 0..95"),
        (lambda d2t: d2t[:39], "d2t must be 40 whole numbers"),
        (lambda d2t: d2t.float(), "d2t must be 40 whole numbers, got torch.float32"),
        (lambda d2t: d2t - 1, "t2d does not mark the tokens that d2t names"),
    ],
)
def test_a_table_that_cannot_be_is_refused(model: Target, change: Any, fault: str) -> None:
    config, tensors, _ = eagle3("midlayer")
    with pytest.raises(HeadError, match=fault):
        imported(model, config, {**tensors, "d2t": change(tensors["d2t"])})


def test_a_missing_table_is_not_guessed(model: Target) -> None:
    config, tensors, _ = eagle3("midlayer")
    tensors.pop("d2t")
    with pytest.raises(HeadError, match="d2t is missing: which tokens these are cannot be known"):
        imported(model, config, tensors)


def test_layers_counted_in_two_ways_that_disagree_are_refused(model: Target) -> None:
    config, tensors, _ = eagle3("midlayer")
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
    config |= {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}}
    with pytest.raises(HeadError, match="counts outputs, one less each"):
        imported(model, config, tensors)


def test_a_checkpoint_is_read_from_shards(tmp_path: Path, model: Target) -> None:
    config, tensors, _ = eagle3("midlayer")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    table = {name: file for file, held in parts.items() for name in held}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": table}))
    (tmp_path / "config.json").write_text(json.dumps(config))
    head = import_checkpoint(read_checkpoint(tmp_path), model.layers(), model.facts).head
    assert torch.equal(head.state_dict()["fc.weight"], tensors["fc.weight"])
