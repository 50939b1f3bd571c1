"""Whatever an engine would do to a folder without a word is a fault here."""

import dataclasses
from typing import Any

import pytest
import torch

from kit import any_head, target, tokenizer
from treedraft.heads.formats import Checkpoint, check, rope_of, to_checkpoint
from treedraft.heads.formats.files import describe_tensors
from treedraft.infer import Target

IDS = torch.arange(1, 90, 2)
TAPS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def model() -> Target:
    return Target(target("llama_gqa"), tokenizer(), name="llama_gqa")


@pytest.fixture(scope="module")
def made(model: Target) -> dict[tuple[str, str], Checkpoint]:
    heads = {kind: any_head(model, kind, draft_ids=IDS) for kind in ("medusa", "eagle", "eagle3")}
    wanted = [("medusa", "vllm"), ("medusa", "tgi"), ("eagle", "vllm"), ("eagle", "sglang")]
    wanted += [("eagle3", engine) for engine in ("vllm", "sglang", "speculators", "llamacpp")]
    return {
        (kind, engine): to_checkpoint(heads[kind], engine, "t", model.config.to_dict(), torch.float32)
        for kind, engine in wanted
    }


def changed(read: Checkpoint, config: dict[str, Any] | None = None, **tensors: torch.Tensor | None) -> Checkpoint:
    """With other settings (None removes one) and tensors; their names have _ for the dots."""
    settings = {name: value for name, value in {**read.config, **(config or {})}.items() if value is not DROP}
    kept = {
        name: value for name, value in read.tensors.items() if tensors.get(name.replace(".", "_"), value) is not None
    }
    new = {name: tensors.get(name.replace(".", "_"), value) for name, value in kept.items()}
    return dataclasses.replace(read, config=settings, tensors=new)


DROP = object()


def faults_of(read: Checkpoint, engine: str, model: Target, report: Any = None) -> str:
    return "; ".join(check(read, engine, model.facts, model.layers(), rope_of(model.config.to_dict()), report))


def test_a_fresh_export_has_no_fault(made: dict[tuple[str, str], Checkpoint], model: Target) -> None:
    for (_, engine), read in made.items():
        assert faults_of(read, engine, model) == ""


@pytest.mark.parametrize(
    ("kind", "engine", "config", "fault"),
    [
        ("medusa", "vllm", {"medusa_fc_bias": False}, "vllm drops the biases of all blocks"),
        ("medusa", "vllm", {"medusa_fc_bias": DROP}, "vllm has no such parameter and drops it"),
        ("medusa", "vllm", {"original_lm_head": False}, "lm_heads.0.weight missing: vllm leaves it random"),
        ("medusa", "vllm", {"num_key_value_heads": 2}, "all as num_heads: the last one wins"),
        ("medusa", "vllm", {"num_hidden_layers": 4}, "blocks.0.layers.1.weight missing"),
        ("medusa", "vllm", {"model_type": DROP}, "model_type is missing"),
        ("medusa", "tgi", {"architectures": ["MedusaModel"]}, "loads no Medusa heads at all"),
        ("medusa", "tgi", {"base_model_name_or_path": DROP}, "base_model_name_or_path is missing"),
        ("eagle", "vllm", {"architectures": ["LlamaForCausalLMEagle"]}, "architectures must be"),
        ("eagle", "sglang", {"architectures": ["LlamaForCausalLM"]}, "architectures must be"),
        ("eagle", "vllm", {"tie_word_embeddings": DROP}, "tie_word_embeddings must be written and false"),
        ("eagle", "vllm", {"rope_theta": 1e6}, "rope_theta is 1000000.0, the target's is 10000.0"),
        ("eagle", "vllm", {"rope_theta": DROP}, "rope_theta is missing"),
        ("eagle", "vllm", {"max_position_embeddings": 64}, "below the target's 256"),
        ("eagle", "vllm", {"num_key_value_heads": 4}, "layers.0.self_attn.k_proj.weight has shape"),
        ("eagle3", "vllm", {"draft_vocab_size": DROP}, "draft_vocab_size is missing"),
        ("eagle3", "vllm", {"draft_vocab_size": 96}, "d2t with the whole vocabulary"),
        ("eagle3", "vllm", {"norm_before_residual": DROP}, "norm_before_residual must be written"),
        ("eagle3", "speculators", {"norm_before_residual": DROP}, "norm_before_residual must be written"),
        ("eagle3", "speculators", {"model_type": "llama"}, "not taken for a speculators checkpoint"),
        ("eagle3", "sglang", {TAPS: [0, 1, 2]}, "are not one apart"),
        ("eagle3", "vllm", {TAPS: [2, 3, 4]}, "are not one apart"),
        ("eagle3", "sglang", {"eagle_config": DROP}, "SGLang falls back to its default layers"),
        ("eagle3", "vllm", {TAPS: [1, 1, 3]}, "must be distinct and ascending"),
        ("eagle3", "vllm", {"num_hidden_layers": 2}, "num_hidden_layers must be 1"),
        ("eagle3", "vllm", {"vocab_size": 80}, "vocab_size is 80, the target's is 96"),
        ("eagle3", "vllm", {"hidden_size": "64"}, "sizes of the configuration are no whole numbers"),
        ("eagle3", "llamacpp", {"norm_output": True}, "norm_output is true, which llamacpp ignores"),
    ],
)
def test_a_setting_that_an_engine_reads_otherwise_is_named(
    made: dict[tuple[str, str], Checkpoint], model: Target, kind: str, engine: str, config: dict[str, Any], fault: str
) -> None:
    assert fault in faults_of(changed(made[kind, engine], config), engine, model)


def test_a_tensor_that_an_engine_drops_or_lacks_is_named(
    made: dict[tuple[str, str], Checkpoint], model: Target
) -> None:
    read = made["eagle3", "vllm"]
    assert "fc.weight is zero" in faults_of(changed(read, fc_weight=torch.zeros(64, 192)), "vllm", model)
    assert "lm_head.weight missing" in faults_of(changed(read, lm_head_weight=None), "vllm", model)
    assert "d2t is missing" in faults_of(changed(read, d2t=None), "vllm", model)
    assert "t2d does not mark" in faults_of(changed(read, d2t=read.tensors["d2t"] + 1), "vllm", model)
    absolute = faults_of(changed(read, d2t=IDS), "vllm", model)
    assert "it holds offsets, not ids" in absolute
    stray = dataclasses.replace(read, tensors={**read.tensors, "fc.bias": torch.ones(64)})
    assert "fc.bias: vllm has no such parameter and drops it" in faults_of(stray, "vllm", model)
    other = dataclasses.replace(read, tensors={**read.tensors, "embed_tokens.weight": torch.randn(96, 64)})
    assert "embed_tokens.weight is not the target's" in faults_of(other, "vllm", model)


def test_fc_bias_is_zero_for_sglang_and_absent_or_zero_for_vllm(
    made: dict[tuple[str, str], Checkpoint], model: Target
) -> None:
    sglang = made["eagle", "sglang"]
    assert not sglang.tensors["fc.bias"].any()
    assert "fc.bias missing: sglang leaves it random" in faults_of(changed(sglang, fc_bias=None), "sglang", model)
    vllm = made["eagle", "vllm"]
    trained = dataclasses.replace(vllm, tensors={**vllm.tensors, "fc.bias": torch.ones(64)})
    assert "fc.bias: vllm has no such parameter" in faults_of(trained, "vllm", model)
    zero = dataclasses.replace(vllm, tensors={**vllm.tensors, "fc.bias": torch.zeros(64)})
    assert faults_of(zero, "vllm", model) == ""


def test_changes_that_agree_with_themselves_are_caught_by_the_report(
    made: dict[tuple[str, str], Checkpoint], model: Target
) -> None:
    read = made["eagle3", "vllm"]
    report = {"tensors": describe_tensors(read.tensors), "config": read.config}
    assert faults_of(read, "vllm", model, report) == ""
    shifted = {TAPS: [0, 1, 2], "eagle_config": {"use_aux_hidden_state": True, TAPS: [-1, 0, 1]}}
    both = changed(read, shifted)
    assert faults_of(both, "vllm", model) == ""
    assert f"{TAPS} is [0, 1, 2], the export wrote [1, 2, 3]" in faults_of(both, "vllm", model, report)
    ids = IDS + 1
    marks = torch.zeros(96, dtype=torch.bool)
    marks[ids] = True
    moved = changed(read, d2t=read.tensors["d2t"] + 1, t2d=marks)
    assert faults_of(moved, "vllm", model) == ""
    assert "d2t was changed after the export" in faults_of(moved, "vllm", model, report)
    medusa = made["medusa", "vllm"]
    report = {"tensors": describe_tensors(medusa.tensors), "config": medusa.config}
    bare = {name: value for name, value in medusa.tensors.items() if not name.endswith(".bias")}
    dropped = changed(dataclasses.replace(medusa, tensors=bare), {"medusa_fc_bias": False})
    assert faults_of(dropped, "vllm", model) == ""
    assert "blocks.0.layers.0.bias of the export is missing" in faults_of(dropped, "vllm", model, report)
