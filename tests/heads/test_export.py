"""Exported folders hold what was trained, in each engine's words, and import gives it back exactly."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kit import any_head, medusa_config, target, tokenizer
from treedraft.heads import Eagle3Config, HeadError, build_head
from treedraft.heads.formats import (
    SERVED,
    check,
    export,
    import_checkpoint,
    read_checkpoint,
    refusals,
    rope_of,
    to_checkpoint,
)
from treedraft.infer import Target
from treedraft.infer.shape import layer_shape

IDS = torch.arange(1, 90, 2)
PAIRS = [(kind, engine) for kind in ("medusa", "eagle", "eagle3") for engine in SERVED[kind]]


@pytest.fixture(scope="module", params=["qwen3_headdim", "qwen2_bias", "llama_pad128"])
def model(request: pytest.FixtureRequest) -> Target:
    return Target(target(request.param), tokenizer(), name=request.param)


@pytest.fixture(scope="module")
def gqa() -> Target:
    return Target(target("llama_gqa"), tokenizer(), name="llama_gqa")


def write(model: Target, head: Any, engine: str, folder: Path, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return export(head, engine, folder, model.layers(), model.facts, "the/target", model.config.to_dict(), dtype)


def said(model: Target, head: Any) -> torch.Tensor:
    """What the heads say at 20 positions over the whole vocabulary, -inf outside their own: [K, 20, V]."""
    generator = torch.Generator().manual_seed(5)
    tokens = torch.randint(0, model.facts.vocab_size, (1, 20), generator=generator)
    features = model.features(tokens, torch.tensor([20]), head.taps)
    hidden = head.predict(features, tokens.roll(-1, 1), torch.ones(1, 20, dtype=torch.bool))
    output = head.output()
    logits = torch.stack([torch.nn.functional.linear(h, output.of_head(k)[0]) for k, h in enumerate(hidden)])
    if output.ids is None:
        return logits.detach()
    whole = torch.full((*logits.shape[:2], model.facts.vocab_size), float("-inf"))
    whole[..., output.ids] = logits.detach()
    return whole


@pytest.mark.parametrize(("kind", "engine"), PAIRS)
def test_import_gives_back_what_was_exported_for_every_engine(
    tmp_path: Path, model: Target, kind: str, engine: str
) -> None:
    ids = None if model.facts.name == "qwen2_bias" else IDS
    head = any_head(model, kind, steps=2, draft_ids=ids)
    report = write(model, head, engine, tmp_path)
    read = read_checkpoint(tmp_path)
    assert check(read, engine, model.facts, model.layers(), rope_of(model.config.to_dict()), report) == []
    again = import_checkpoint(read, model.layers(), model.facts).head
    steps = min(head.steps, again.steps)
    before, after = said(model, head)[:1], said(model, again)[:1]
    assert steps
    if kind == "eagle3" or ids is None:
        assert torch.equal(after, before)
    else:  # the engine ranks the whole vocabulary
        torch.testing.assert_close(after[..., ids], before[..., ids], rtol=0, atol=1e-5)


@pytest.mark.parametrize("engine", SERVED["medusa"])
def test_output_layers_of_the_heads_own_are_written_and_read(tmp_path: Path, gqa: Target, engine: str) -> None:
    head: Any = build_head(medusa_config(gqa, output="own"), gqa.layers())
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    write(gqa, head, engine, tmp_path)
    assert torch.equal(
        said(gqa, import_checkpoint(read_checkpoint(tmp_path), gqa.layers(), gqa.facts).head), said(gqa, head)
    )


def test_geometry_rotary_base_and_layers_are_written_down(tmp_path: Path, model: Target) -> None:
    write(model, any_head(model, "eagle3"), "vllm", tmp_path)
    config = read_checkpoint(tmp_path).config
    shape = layer_shape(model.config)
    assert (config["head_dim"], config["num_key_value_heads"]) == (shape.head_dim, shape.num_key_value_heads)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == shape.rope_parameters["rope_theta"]
    assert config["max_position_embeddings"] == model.config.max_position_embeddings
    assert config["vocab_size"] == model.facts.vocab_size
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["tie_word_embeddings"] is False


def test_layers_of_a_target_of_three_layers_are_written_and_others_refused(tmp_path: Path) -> None:
    small = Target(target("llama_3layers"), tokenizer(), name="llama_3layers")
    write(small, any_head(small, "eagle3"), "vllm", tmp_path)
    assert read_checkpoint(tmp_path).config["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    with pytest.raises(HeadError, match=r"in 0\.\.2, got \[0, 1, 9\]"):
        Eagle3Config(64, 96, 3, (0, 1, 9), layer_shape(small.config))
    with pytest.raises(HeadError, match="cannot tap the embeddings"):
        to_checkpoint(any_head(small, "eagle3"), "sglang", "t", {}, torch.float32)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_draft_vocabulary_is_a_table_of_offsets(tmp_path: Path, gqa: Target, engine: str) -> None:
    ids = torch.tensor([0, 2, 3, 50, 95])
    write(gqa, any_head(gqa, "eagle3", draft_ids=ids), engine, tmp_path)
    tensors = read_checkpoint(tmp_path).tensors
    assert [i + int(offset) for i, offset in enumerate(tensors["d2t"])] == ids.tolist()
    assert tensors["t2d"].nonzero()[:, 0].tolist() == ids.tolist()
    write(gqa, any_head(gqa, "eagle3"), engine, tmp_path / "whole")
    assert "d2t" not in read_checkpoint(tmp_path / "whole").tensors


def test_what_an_engine_cannot_serve_is_refused_before_anything_is_written(tmp_path: Path, gqa: Target) -> None:
    with pytest.raises(HeadError, match="no engine; they decode in treedraft alone"):
        write(gqa, any_head(gqa, "hydra"), "vllm", tmp_path / "out")
    with pytest.raises(HeadError, match=r"sglang cannot serve medusa heads \(served by: vllm, tgi"):
        write(gqa, any_head(gqa, "medusa"), "sglang", tmp_path / "out")
    with pytest.raises(HeadError, match=r"llamacpp does not apply fc_norm.*norm_output"):
        write(gqa, any_head(gqa, "eagle3.1"), "llamacpp", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert refusals(any_head(gqa, "eagle3.1"), "vllm") == []


def test_bf16_heads_come_back_to_the_bit(tmp_path: Path, gqa: Target) -> None:
    head = any_head(gqa, "eagle3", draft_ids=IDS)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())
    report = write(gqa, head, "speculators", tmp_path, torch.bfloat16)
    assert {part["dtype"] for part in report["tensors"].values()} == {"bfloat16", "int64", "bool"}
    again = import_checkpoint(read_checkpoint(tmp_path), gqa.layers(), gqa.facts).head
    for name, value in head.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_folder_is_whole_or_absent(tmp_path: Path, gqa: Target) -> None:
    write(gqa, any_head(gqa, "medusa"), "tensorrt-llm", tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "config.json",
        "medusa_lm_head.pt",
        "medusa_lm_head.safetensors",
    ]
    json.loads((tmp_path / "config.json").read_text())
