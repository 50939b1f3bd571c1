"""What cannot be trained on stops a run with a plain message and saves nothing bad."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from transformers import Gemma2Config, Gemma2ForCausalLM

from kit import target as kit_target
from kit import tokenizer
from kit.training import (
    chat,
    config,
    forty_rows,
    weights,
    write_rows,
)
from treedraft.data import DataError
from treedraft.infer import Target, TargetError
from treedraft.train import ConfigError, TrainError, train
from treedraft.train.folders import latest


def test_nothing_to_draft_is_refused_before_training(tmp_path: Path, gqa: Target):
    rows = [{"input_ids": [20, 21, 22, 23], "loss_mask": [0, 1, 0, 1]}]
    settings = config(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run")
    with pytest.raises(DataError, match="none of the 1 training rows has two supervised tokens in a row"):
        train(settings, gqa)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("features", ["online", "memory"])
def test_a_target_that_overflows_stops_training_and_saves_nothing(tmp_path: Path, features: str):
    model = kit_target("llama_gqa")
    with torch.no_grad():
        model.get_parameter("model.layers.1.mlp.down_proj.weight").mul_(3e4)
    target = Target(model.half(), tokenizer(), name="broken")
    settings = config(forty_rows(tmp_path), tmp_path / "run", f"data.features={features}")
    with pytest.raises(TargetError) as caught:
        train(settings, target)
    message = str(caught.value)
    assert "non-finite features of the target in float16" in message
    assert ("step 1, rows r" if features == "online" else "rows r") in message
    assert latest(tmp_path / "run") is None


def test_a_loss_that_is_not_finite_stops_naming_step_and_rows_and_keeps_the_last_checkpoint(
    tmp_path: Path, gqa: Target
):
    settings = config(forty_rows(tmp_path), tmp_path / "run", "checkpoint.every=1", "optim.lr=1e37", "optim.warmup=0")
    with pytest.raises(TrainError, match=r"training stopped at step 2, rows r.*loss of head 0, 1 is not finite"):
        train(settings, gqa)
    assert latest(tmp_path / "run") == tmp_path / "run" / "step-000001"
    assert all(w.isfinite().all() for w in weights(tmp_path / "run" / "step-000001").values())


def test_a_gradient_that_is_not_finite_stops_naming_the_weights(
    tmp_path: Path, gqa: Target, monkeypatch: pytest.MonkeyPatch
):
    def spoil(accelerator: Accelerator, parameters: Any, norm: float) -> torch.Tensor:
        next(iter(parameters)).grad.fill_(float("inf"))
        return torch.tensor(float("inf"))

    monkeypatch.setattr(Accelerator, "clip_grad_norm_", spoil)
    settings = config(forty_rows(tmp_path), tmp_path / "run", "checkpoint.every=1")
    with pytest.raises(TrainError, match=r"step 1, rows r.*gradient is not finite in blocks\.0\.0\.linear\.weight \("):
        train(settings, gqa)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.tree=chain:5", r"eval\.tree: .*5 deep, but there are 2 heads"),
        ("eval.tree=bushy", r"eval\.tree: no tree called 'bushy'"),
    ],
)
def test_a_tree_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path, override: str, message: str):
    settings = config(tmp_path / "absent.jsonl", tmp_path / "run", override)
    with pytest.raises(ConfigError, match=message):
        train(settings)


def test_rows_beyond_the_context_are_refused_with_advice(tmp_path: Path, gqa: Target):
    rows = write_rows(tmp_path / "rows.jsonl", [chat(0, 300)])
    with pytest.raises(DataError, match=r"1 rows are longer than the target's context of 256 .*data\.max_length"):
        train(config(rows, tmp_path / "run", "data.max_length=1000"), gqa)


def test_a_soft_teacher_is_refused_for_a_target_that_caps_its_logits(tmp_path: Path, gqa: Target):
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "head_dim": 16,
    }
    torch.manual_seed(0)
    model = Gemma2ForCausalLM(
        Gemma2Config(
            **sizes,  # type: ignore[arg-type]
            vocab_size=96,
            num_key_value_heads=2,
            final_logit_softcapping=0.5,
            initializer_range=0.5,
        )
    )
    capped = Target(model.float(), tokenizer(), name="capped")
    settings = config(forty_rows(tmp_path), tmp_path / "run", "loss.teacher_weight=0.5", "optim.max_steps=1")
    with pytest.raises(TrainError, match=r"the logits of capped are not its output layer alone"):
        train(settings, capped)
    assert train(settings, gqa).step == 1
