"""Runs in processes of their own: several at once under ``accelerate launch``, and killed with -9."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from kit.training import chat, config, tiny, write_rows
from treedraft.train import train
from treedraft.train.folders import faults_of

TESTS = Path(__file__).parents[1]
UNEVEN = (1, 2, 20, 40, 7, 3, 30, 12)


LAUNCH = ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"]
LAUNCH += ["--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"]
ONE_STEP = ["batch.rows_per_step=8", "optim.max_steps=1", "optim.clip=null", "optim.warmup=0", "data.features=online"]
MEASURED = [
    "data.holdout=3",
    "optim.max_steps=2",
    "eval.temperature=1.0",
    "eval.tree=best:16",
    "eval.max_new_tokens=40",
]


def run_jobs(folder: Path, mode: str, jobs: list[dict[str, Any]], launcher: list[str]) -> str:
    file = folder / "jobs.json"
    file.write_text(json.dumps(jobs))
    # On the CPU "--multi_gpu" with this variable is how accelerate launch starts several processes without MPI.
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    module = ["--module"] if launcher else ["-m"]
    command = [sys.executable, *launcher, *module, "kit.training", mode, str(file)]
    with subprocess.Popen(
        command, env=environment, cwd=folder, stdout=PIPE, stderr=PIPE, text=True, start_new_session=True
    ) as running:
        try:
            out, err = running.communicate(timeout=150)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, signal.SIGKILL)  # the launcher and what it launched
            raise
    assert running.returncode == 0, err
    return out


def state(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[int, Any]]:
    """The heads' weights and AdamW's moments; after one step the first moment is a tenth of the gradient."""
    training = torch.load(checkpoint / "training.pt", weights_only=True)
    return load_file(checkpoint / "heads" / "heads.safetensors"), training["optimizer"]["state"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(
        tmp_path_factory.mktemp("rows") / "rows.jsonl", [chat(i, count) for i, count in enumerate(UNEVEN)]
    )


@pytest.fixture(scope="module")
def two_processes(rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of four runs, one after the other, in one launch of two gloo processes."""
    out = tmp_path_factory.mktemp("two")
    steps = [*ONE_STEP, "batch.micro_rows=4"]
    jobs: list[dict[str, Any]] = [
        {"target": "llama_gqa", "out": "shared", "overrides": steps},
        {"target": "llama_gqa", "out": "own", "overrides": [*steps, "heads.output=own"]},
        {"target": "markov_rand", "out": "measured", "overrides": MEASURED},
        {"target": "llama_gqa", "out": "stopped", "overrides": ["optim.epochs=3"], "end_at": 2},
    ]
    run_jobs(out, "here", [{**job, "rows": str(rows), "out": str(out / job["out"])} for job in jobs], LAUNCH)
    saved = torch.load(out / "shared" / "step-000001" / "training.pt", weights_only=True)
    assert len(saved["generators"]) == 2  # there were two processes indeed
    return out


@pytest.mark.slow
@pytest.mark.parametrize("output", ["shared", "own"])
def test_one_step_is_the_same_in_one_batch_accumulated_and_over_two_processes(
    tmp_path: Path, rows: Path, two_processes: Path, output: str
):
    target = tiny("llama_gqa")
    for micro in (8, 1):
        options = [*ONE_STEP, f"heads.output={output}", f"batch.micro_rows={micro}"]
        train(config(rows, tmp_path / str(micro), *options), target)
    weights, moments = state(tmp_path / "8" / "step-000001")
    assert max(m["exp_avg"].abs().max() for m in moments.values()) > 1e-3  # the gradients compared are not nothing
    for other in (tmp_path / "1", two_processes / output):
        their_weights, their_moments = state(other / "step-000001")
        torch.testing.assert_close(their_weights, weights, rtol=0.0, atol=1e-5)
        for index, moment in moments.items():
            torch.testing.assert_close(their_moments[index]["exp_avg"], moment["exp_avg"], rtol=1e-4, atol=1e-7)


@pytest.mark.slow
def test_two_processes_measure_the_same_tau_as_one(tmp_path: Path, rows: Path, two_processes: Path):
    train(config(rows, tmp_path / "one", *MEASURED), tiny("markov_rand"))
    files = [folder / "best" / "evaluation.json" for folder in (tmp_path / "one", two_processes / "measured")]
    one, two = (json.loads(file.read_text()) for file in files)
    for key in ("tau", "rounds", "kept", "tokens", "prompts", "accepted_by_depth"):
        assert one[key] == two[key]
    assert one["tau"] > 1.0


@pytest.mark.slow
def test_a_signal_to_one_process_stops_all_after_the_same_step(two_processes: Path):
    assert [path.name for path in (two_processes / "stopped").iterdir()] == ["step-000002"]
    assert faults_of(two_processes / "stopped" / "step-000002") == []


@pytest.mark.slow
def test_a_run_killed_at_any_step_and_resumed_equals_the_uninterrupted_one(tmp_path: Path):
    file = write_rows(tmp_path / "rows.jsonl", [chat(i, 3 + i % 7) for i in range(22)])
    common = {"target": "llama_gqa", "rows": str(file), "overrides": ["optim.epochs=3", "checkpoint.every=4"]}
    steps = random.Random(11).sample(range(1, 19), 10)
    jobs: list[dict[str, Any]] = [{**common, "out": str(tmp_path / "whole")}]
    for step in steps:
        cut = {**common, "out": str(tmp_path / f"cut{step}")}
        jobs += [{**cut, "kill_at": step}, {**cut, "resume": True}]
    codes = json.loads(run_jobs(tmp_path, "forked", jobs, []).splitlines()[-1])
    assert codes == [0, *[-signal.SIGKILL, 0] * 10]
    whole = state(tmp_path / "whole" / "step-000018")
    for step in steps:
        torch.testing.assert_close(state(tmp_path / f"cut{step}" / "step-000018"), whole, rtol=0.0, atol=0.0)
