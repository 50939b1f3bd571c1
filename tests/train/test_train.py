"""Whole small runs in this process: what is learnt, measured and left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from kit.training import (
    assert_same_weights,
    chat,
    config,
    forty_rows,
    record,
    ring_text,
    tiny,
    weights,
    write_rows,
)
from treedraft.heads import load_head
from treedraft.infer import Target
from treedraft.train import StepReport, train
from treedraft.train.material import gather_material


def test_three_heads_learn_the_ring_each_at_its_own_offset(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = write_rows(tmp_path / "rows.jsonl", [ring_text(i, 24) for i in range(83)])
    settings = config(
        rows,
        tmp_path / "run",
        "heads.num_heads=3",
        "data.holdout=8",
        "optim.lr=0.2",
        "optim.epochs=12",
        "batch={rows_per_step: 16, micro_rows: 16}",
        "eval={tree: 'chain:3', max_new_tokens: 25}",
    )
    target, reports = tiny("markov_ring"), []
    before = target.fingerprint()
    result = train(settings, target, on_step=record(reports))
    head: Any = load_head(result.heads, target.facts, target.layers())
    assert all(block.abs().max() > 0.1 for block in head.blocks.parameters() if block.dim() == 2)
    shares = reports[-1].counts.hits / reports[-1].counts.positions
    assert shares.tolist() == [1.0, 1.0, 1.0]
    # 25 tokens: the prefill's own, then six rounds of three accepted tokens and a bonus each
    assert result.best_tau == 4.0
    assert result.evaluation is not None
    assert result.evaluation["accept_by_depth"] == [1.0, 1.0, 1.0, 1.0]
    assert (result.evaluation["prompts"], result.evaluation["tokens"]) == (8, 200)
    assert {"tau_without_loops", "tau_by_category", "settings", "machine", "versions"} <= set(result.evaluation)
    assert json.loads((tmp_path / "run" / "best" / "evaluation.json").read_text())["tau"] == 4.0
    assert target.fingerprint() == before
    said = capsys.readouterr().err
    assert "0 bytes of the target changed" in said
    assert "proxy: teacher-forced top-1 by head 1.00 1.00 1.00 over 176 held-out positions" in said


def test_a_batch_of_four_steps_like_four_of_one(tmp_path: Path, gqa: Target):
    rows = write_rows(tmp_path / "rows.jsonl", [chat(i, count) for i, count in enumerate((1, 2, 20, 40))])
    reports: list[StepReport] = []
    for micro in (4, 1):
        settings = config(rows, tmp_path / f"micro{micro}", f"batch.micro_rows={micro}", "optim.max_steps=1")
        train(settings, gqa, on_step=record(reports))
    assert reports[0].loss == pytest.approx(reports[1].loss, abs=1e-6)
    assert reports[0].gradient_norm == pytest.approx(reports[1].gradient_norm, rel=1e-5)
    assert_same_weights(tmp_path / "micro4" / "step-000001", tmp_path / "micro1" / "step-000001", atol=1e-5)


def test_one_row_is_one_step_an_epoch_and_what_is_not_measured_is_said(
    tmp_path: Path, gqa: Target, capsys: pytest.CaptureFixture[str]
):
    rows, reports = write_rows(tmp_path / "rows.jsonl", [chat(3, 6)]), []
    options = ("batch={rows_per_step: 32, micro_rows: 4}", "data.holdout=0.02", "optim.epochs=3")
    result = train(config(rows, tmp_path / "run", *options), gqa, on_step=record(reports))
    assert [r.rows for r in reports] == [["r3-6"]] * 3
    assert all(weight.any() for name, weight in weights(result.checkpoint).items() if "weight" in name)
    assert (result.best_tau, result.evaluation, result.heads) == (None, None, result.checkpoint / "heads")
    said = capsys.readouterr().err
    assert "notice: the held-out split is empty (0.02 of 1 rows)" in said
    assert "tau is not measured" in said


def test_proxies_cover_every_held_out_row_once_whatever_the_batch(
    tmp_path: Path, gqa: Target, capsys: pytest.CaptureFixture[str]
):
    rows = forty_rows(tmp_path)
    options = ("data.holdout=9", "batch.micro_rows=5", "optim.max_steps=1", "eval.max_new_tokens=2")
    train(config(rows, tmp_path / "run", *options), gqa)
    material = gather_material(config(rows, tmp_path / "run", *options), gqa, lambda line: None)
    assert (len(material.rows), len(material.held_out)) == (31, 9)
    positions = sum(sum(row.mask) - 1 for row in material.held_out)
    assert f"over {positions} held-out positions" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["llama_mha_tied", "qwen3_headdim"])
def test_own_output_layers_start_as_the_targets_and_leave_it_untouched(tmp_path: Path, name: str):
    target = tiny(name)
    before = {key: value.clone() for key, value in target.model.state_dict().items()}
    rows = forty_rows(tmp_path)
    still = train(config(rows, tmp_path / "still", "heads.output=own", "optim.lr=1e-30", "optim.max_steps=1"), target)
    embedding = target.output_layer().weight
    own = [value for key, value in weights(still.checkpoint).items() if "own_output" in key]
    assert [tuple(value.shape) for value in own] == [(96, 64)] * 2
    for value in own:  # a step at a rate of 1e-30 moves nothing but zeros
        torch.testing.assert_close(value, embedding, rtol=0.0, atol=1e-29)
    moved = train(config(rows, tmp_path / "moved", "heads.output=own", "optim.max_steps=5"), target)
    assert all(not torch.equal(v, embedding) for k, v in weights(moved.checkpoint).items() if "own_output" in k)
    load_head(moved.heads, target.facts, target.layers())
    assert all(torch.equal(value, before[key]) for key, value in target.model.state_dict().items())


def test_evaluation_does_not_disturb_training(tmp_path: Path, gqa: Target):
    rows = forty_rows(tmp_path)
    for name, options in (("often", "eval={every: 2, tree: 'chain:2', max_new_tokens: 4}"), ("never", "seed=1")):
        settings = config(rows, tmp_path / name, options, "data.holdout=4", "eval.temperature=1.0")
        train(settings, gqa)
    assert_same_weights(tmp_path / "often" / "step-000009", tmp_path / "never" / "step-000009")


def test_bf16_arithmetic_keeps_fp32_weights_and_nearly_the_same_loss(tmp_path: Path, gqa: Target):
    rows, losses = forty_rows(tmp_path), {}
    for precision in ("fp32", "bf16"):
        reports: list[StepReport] = []
        settings = config(rows, tmp_path / precision, f"precision={precision}", "optim.max_steps=3")
        result = train(settings, gqa, on_step=record(reports))
        assert all(w.dtype == torch.float32 for w in weights(result.checkpoint).values())
        losses[precision] = [r.loss for r in reports]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)


def test_a_draft_vocabulary_holds_the_frequent_words_and_the_end_tokens(
    tmp_path: Path, gqa: Target, capsys: pytest.CaptureFixture[str]
):
    settings = config(forty_rows(tmp_path), tmp_path / "run", "heads.draft_vocab_size=20", "optim.max_steps=2")
    reports: list[StepReport] = []
    result = train(settings, gqa, on_step=record(reports))
    ids = weights(result.checkpoint)["draft_ids"].tolist()
    assert len(ids) == 20
    assert set(gqa.end_ids) <= set(ids)
    assert (reports[0].counts.covered < reports[0].counts.positions).all()
    assert "draft vocabulary: 20 ids cover" in capsys.readouterr().err


def test_prompts_of_a_file_are_measured_by_category(tmp_path: Path, gqa: Target):
    prompts = [{"prompt": "w1 w2", "category": "a"}, {"prompt": "w3", "category": "b"}, {"prompt": "w4"}]
    file = write_rows(tmp_path / "prompts.jsonl", prompts)
    settings = config(forty_rows(tmp_path), tmp_path / "run", f"data.prompts={file}", "optim.max_steps=1")
    result = train(settings, gqa)
    assert result.evaluation is not None
    assert set(result.evaluation["tau_by_category"]) == {"a", "b", "all"}
    assert result.evaluation["prompts"] == 3


@pytest.mark.parametrize("kind", ["tensorboard", "wandb"])
def test_trackers_write_without_an_account(tmp_path: Path, gqa: Target, kind: str, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip(kind)
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    settings = config(
        forty_rows(tmp_path), tmp_path / "run", f"tracker.kind={kind}", "data.holdout=2", "optim.max_steps=2"
    )
    train(settings, gqa)
    pattern = "events.out.tfevents*" if kind == "tensorboard" else "*.wandb"
    assert list((tmp_path / "run").rglob(pattern))
