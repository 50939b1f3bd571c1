"""Whole small runs in this process: learning, resuming, stopping, refusing."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kit import target as kit_target
from kit import tokenizer
from kit.training import chat, config, ring_text, tiny, write_rows
from treedraft.data import DataError
from treedraft.heads import load_head
from treedraft.infer import Target, TargetError
from treedraft.train import CheckpointError, CheckpointWarning, ConfigError, StepReport, TrainError, train
from treedraft.train.folders import faults_of, latest
from treedraft.train.material import gather_material


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "heads" / "heads.safetensors")


def assert_same_weights(ours: Path, theirs: Path, atol: float = 0.0) -> None:
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=atol)


def forty_rows(folder: Path) -> Path:
    return write_rows(folder / "rows.jsonl", [chat(i, 3 + i % 7) for i in range(40)])


def record(reports: list[StepReport], stop_at: int = 0, number: int = signal.SIGTERM) -> Any:
    def note(report: StepReport) -> None:
        reports.append(report)
        if report.step == stop_at:
            os.kill(os.getpid(), number)

    return note


class Killed(Exception):
    pass


def kill(reports: list[StepReport], at: int) -> Any:
    """Ends the run without any saving, as a kill does."""

    def note(report: StepReport) -> None:
        reports.append(report)
        if report.step == at:
            raise Killed

    return note


@pytest.fixture(scope="module")
def gqa() -> Target:
    return tiny("llama_gqa")


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
    head = load_head(result.heads, target.facts, target.output_layer())
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


@pytest.mark.parametrize("features", ["online", "memory"])
def test_a_run_killed_in_the_second_epoch_repeats_the_uninterrupted_one(tmp_path: Path, gqa: Target, features: str):
    rows = forty_rows(tmp_path)
    options = ("optim.epochs=3", f"data.features={features}", "data.features_gib=1")
    whole: list[StepReport] = []
    train(config(rows, tmp_path / "whole", *options), gqa, on_step=record(whole))
    assert len(whole) == 30
    first: list[StepReport] = []
    settings = config(rows, tmp_path / "cut", *options, "checkpoint.every=15")
    with pytest.raises(Killed):
        train(settings, gqa, on_step=kill(first, at=17))
    rest: list[StepReport] = []
    other = config(rows, tmp_path / "cut", *options, "checkpoint.every=15", "data.features=auto")
    assert train(other, gqa, resume=True, on_step=record(rest)).step == 30
    assert [r.step for r in rest] == list(range(16, 31))
    for ours, theirs in zip(rest, whole[15:], strict=True):
        assert (ours.rows, ours.learning_rate) == (theirs.rows, theirs.learning_rate)
        assert ours.loss == pytest.approx(theirs.loss, abs=1e-6)
    assert_same_weights(tmp_path / "cut" / "step-000030", tmp_path / "whole" / "step-000030")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_stop_signal_saves_stops_and_can_be_gone_on_from(
    tmp_path: Path, gqa: Target, number: signal.Signals, code: int, capsys: pytest.CaptureFixture[str]
):
    rows, handler = forty_rows(tmp_path), signal.getsignal(number)
    settings = config(rows, tmp_path / "run", "optim.epochs=2")
    result = train(settings, gqa, on_step=record([], stop_at=7, number=number))
    assert (result.step, result.stopped_by, result.exit_code) == (7, number, code)
    assert "stopped after step 7 of 20, saved; go on with --resume" in capsys.readouterr().err
    assert signal.getsignal(number) is handler
    assert faults_of(result.checkpoint) == []
    done = train(settings, gqa, resume=True)
    assert (done.step, done.exit_code) == (20, 0)
    train(config(rows, tmp_path / "whole", "optim.epochs=2"), gqa)
    assert_same_weights(done.checkpoint, tmp_path / "whole" / "step-000020")
    again = train(settings, gqa, resume=True)
    assert again.step == 20
    assert "nothing left to do: all 20 steps are done" in capsys.readouterr().err


def test_resuming_passes_over_a_half_written_checkpoint_and_keeps_it(tmp_path: Path, gqa: Target):
    rows, out = forty_rows(tmp_path), tmp_path / "run"
    settings = config(rows, out, "optim.epochs=2", "checkpoint.every=5", "checkpoint.keep=3")
    with pytest.raises(Killed):
        train(settings, gqa, on_step=kill([], at=12))
    file = out / "step-000010" / "heads" / "heads.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(
        CheckpointError, match=r"step-000010 is broken: .*heads/heads\.safetensors has \d+ bytes, expected"
    ):
        train(settings, gqa, resume=out / "step-000010")
    with pytest.warns(CheckpointWarning, match=r"using .*step-000005.*step-000010/heads/heads\.safetensors"):
        result = train(settings, gqa, resume=True)
    assert result.step == 20
    train(config(rows, tmp_path / "whole", "optim.epochs=2"), gqa)
    assert_same_weights(out / "step-000020", tmp_path / "whole" / "step-000020")
    assert sorted(p.name for p in out.iterdir()) == [
        "step-000010",
        "step-000010.replaced",
        "step-000015",
        "step-000020",
    ]


def test_a_fresh_run_never_enters_another_runs_folder(tmp_path: Path, gqa: Target):
    rows, out = forty_rows(tmp_path), tmp_path / "run"
    train(config(rows, out, "optim.max_steps=2"), gqa)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    with pytest.raises(
        CheckpointError, match=r"holds the checkpoints of another run \(step-000002 to step-000002\).*--resume"
    ):
        train(config(rows, out, "optim.max_steps=3"), gqa)
    (out / "step-000002" / "training.pt").unlink()
    with pytest.raises(CheckpointError, match="every checkpoint"):
        train(config(rows, out, "optim.max_steps=2"), gqa, resume=True)
    del before[out / "step-000002" / "training.pt"]
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_run_cannot_be_resumed_with_what_alters_training(tmp_path: Path, gqa: Target):
    rows, out = forty_rows(tmp_path), tmp_path / "run"
    train(config(rows, out, "optim.max_steps=2"), gqa)
    changed = config(rows, out, "optim.max_steps=9", "optim.lr=0.5", "heads.num_heads=3", "batch.micro_rows=1")
    with pytest.raises(CheckpointError) as caught:
        train(changed, gqa, resume=True)
    for part in ("optim.lr: 0.001 -> 0.5", "heads.num_heads: 2 -> 3", "optim.max_steps: 2 -> 9"):
        assert part in str(caught.value)
    assert "micro_rows" not in str(caught.value)
    write_rows(rows, [chat(i, 5) for i in range(40)])
    with pytest.raises(CheckpointError, match="the training rows are others"):
        train(config(rows, out, "optim.max_steps=2"), gqa, resume=True)
    forty_rows(tmp_path)
    with pytest.raises(CheckpointError, match="the target's weights are others"):
        train(config(rows, out, "optim.max_steps=2"), tiny("qwen2_bias"), resume=True)


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path, gqa: Target):
    settings = config(forty_rows(tmp_path), tmp_path / "run", "checkpoint.every=3", "checkpoint.keep=2")
    train(settings, gqa)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["step-000009", "step-000010"]
    assert latest(tmp_path / "run") == tmp_path / "run" / "step-000010"


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


def test_nothing_to_draft_is_refused_before_training(tmp_path: Path, gqa: Target):
    rows = [{"input_ids": [20, 21, 22, 23], "loss_mask": [0, 1, 0, 1]}]
    settings = config(write_rows(tmp_path / "rows.jsonl", rows), tmp_path / "run")
    with pytest.raises(DataError, match="none of the 1 training rows has two supervised tokens in a row"):
        train(settings, gqa)
    assert not (tmp_path / "run").exists()


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
    load_head(moved.heads, target.facts, target.output_layer())
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
