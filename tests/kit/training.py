"""Small training runs: rows, configurations, and a program that runs them in processes of their own.

``python -m kit.training here|forked JOBS.json`` (with this folder's parent on the path) runs jobs one after the other:
in this process, as ``accelerate launch`` needs it, or each in a forked child, so that a child may be killed. Then the
exit codes are printed, negative for a signal.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from treedraft.infer import Target
from treedraft.train import StepReport, TrainConfig, leave_processes, parse_config, train

from .targets import FIRST_WORD, WORDS, target
from .words import tokenizer


def tiny(name: str, **options: Any) -> Target:
    """A kit target wrapped, with a word tokenizer."""
    return Target(target(name), tokenizer(**options), name=name)


def words(start: int, count: int) -> str:
    """``count`` words of the ring from w<start> on."""
    return " ".join(f"w{(start + i) % (WORDS - FIRST_WORD)}" for i in range(count))


def chat(start: int, count: int) -> dict[str, Any]:
    """A record: one word asks, ``count`` ring words answer."""
    turns = [("user", words(start, 1)), ("assistant", words(start + 1, count))]
    return {"id": f"r{start}-{count}", "messages": [{"role": role, "content": text} for role, text in turns]}


def ring_text(start: int, count: int) -> dict[str, Any]:
    """A record of ring words alone, all but the first supervised."""
    ids = [FIRST_WORD + (start + i) % (WORDS - FIRST_WORD) for i in range(count)]
    return {"id": f"ring{start}", "input_ids": ids, "loss_mask": [0] + [1] * (count - 1)}


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(rows: Path, out: Path, *overrides: str) -> TrainConfig:
    """A small run: 2 heads, 4 rows a step, no evaluation."""
    content = {
        "target": {"spec": "unused"},
        "data": {"paths": [str(rows)], "max_length": 64},
        "checkpoint": {"out": str(out)},
        "heads": {"num_heads": 2},
        "batch": {"rows_per_step": 4, "micro_rows": 4},
        "optim": {"lr": 1e-3, "warmup": 0.1},
        "eval": {"tree": "chain:2", "max_new_tokens": 8},
        "seed": 1,
    }
    return parse_config(content, overrides)


def weights(checkpoint: Path) -> dict[str, torch.Tensor]:
    """The heads' tensors in a checkpoint."""
    return load_file(checkpoint / "heads" / "heads.safetensors")


def assert_same_weights(ours: Path, theirs: Path, atol: float = 0.0) -> None:
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=0.0, atol=atol)


def forty_rows(folder: Path) -> Path:
    """A file of forty short chats of unequal lengths: ten steps an epoch."""
    return write_rows(folder / "rows.jsonl", [chat(i, 3 + i % 7) for i in range(40)])


def record(reports: list[StepReport], stop_at: int = 0, number: int = signal.SIGTERM) -> Any:
    """An ``on_step`` that keeps the reports and, after step ``stop_at``, sends this process a signal."""

    def note(report: StepReport) -> None:
        reports.append(report)
        if report.step == stop_at:
            os.kill(os.getpid(), number)

    return note


class Killed(Exception):
    """Ends a run in this process without any saving, as a kill does."""


def killed_at(step: int) -> Any:
    def note(report: StepReport) -> None:
        if report.step == step:
            raise Killed

    return note


def kill_at(step: int) -> Any:
    """An ``on_step`` that ends the process, with no chance to clean up, after this step."""

    def kill(report: StepReport) -> None:
        if report.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return kill


def end_last_process_at(step: int) -> Any:
    """An ``on_step`` with which the last process of a launch asks itself to stop after this step."""

    def ask(report: StepReport) -> None:
        if report.step == step and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    return ask


def run_job(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    hooks = [kill_at(job["kill_at"])] if "kill_at" in job else []
    hooks += [end_last_process_at(job["end_at"])] if "end_at" in job else []
    settings = config(Path(job["rows"]), Path(job["out"]), *job.get("overrides", []))
    train(settings, tiny(job["target"]), resume=job.get("resume", False), on_step=hooks[0] if hooks else None)


def _in_child(job: dict[str, Any]) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            run_job(job)
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    wanted = json.loads(Path(sys.argv[2]).read_text())
    if sys.argv[1] == "forked":
        print(json.dumps([_in_child(job) for job in wanted]))
    else:
        for each in wanted:
            run_job(each)
        leave_processes()
