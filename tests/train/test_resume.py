"""Stopping, resuming, and what a run leaves in its folder."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from kit.training import (
    Killed,
    assert_same_weights,
    chat,
    config,
    forty_rows,
    killed_at,
    record,
    tiny,
    write_rows,
)
from treedraft.infer import Target
from treedraft.train import CheckpointError, CheckpointWarning, StepReport, train
from treedraft.train.folders import faults_of, latest


@pytest.mark.parametrize("features", ["online", "memory"])
def test_a_run_killed_in_the_second_epoch_repeats_the_uninterrupted_one(tmp_path: Path, gqa: Target, features: str):
    rows = forty_rows(tmp_path)
    options = ("optim.epochs=3", f"data.features={features}", "data.features_gib=1")
    whole: list[StepReport] = []
    train(config(rows, tmp_path / "whole", *options), gqa, on_step=record(whole))
    assert len(whole) == 30
    settings = config(rows, tmp_path / "cut", *options, "checkpoint.every=15")
    with pytest.raises(Killed):
        train(settings, gqa, on_step=killed_at(17))
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
        train(settings, gqa, on_step=killed_at(12))
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
    with pytest.raises(CheckpointError, match=r"holds step-000002 of another run; .*--resume"):
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


def test_the_best_heads_of_another_run_are_not_overwritten(tmp_path: Path, gqa: Target):
    (tmp_path / "run" / "best" / "heads").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds best of another run"):
        train(config(forty_rows(tmp_path), tmp_path / "run"), gqa)


def test_a_place_that_cannot_hold_checkpoints_is_refused_at_once(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot go into .*file/run: .*file is not a folder"):
        train(config(tmp_path / "absent.jsonl", tmp_path / "file" / "run"))
