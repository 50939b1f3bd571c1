"""Runs a serving engine in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .chains import ChainRow, by_position

TOKENS, SHARE = 2, 0.02
"""Acceptance at a position may differ by so many tokens, or by this share of the rounds."""

WORKER = Path(__file__).with_name("vllm_worker.py")


class EngineError(ValueError):
    """The engine could not be run, or stopped: the message ends with what it said last."""


def run_vllm(python: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """What ``vllm_worker`` made of the job. Raises EngineError."""
    with tempfile.TemporaryDirectory() as work:
        given, found = Path(work) / "job.json", Path(work) / "found.json"
        given.write_text(json.dumps(job))
        worker = (
            Path(work) / "vllm_worker.py"
        )  # a copy: beside it, modules named like Python's own would be found first
        worker.write_text(WORKER.read_text())
        try:
            done = subprocess.run([python, worker, given, found], capture_output=True, text=True)
        except OSError as error:
            raise EngineError(f"{python} cannot be run: {error}") from error
        if done.returncode or not found.is_file():
            said = "\n".join([*done.stdout.splitlines()[-15:], *done.stderr.splitlines()[-15:]])
            raise EngineError(f"vLLM stopped with code {done.returncode}:\n{said}")
        return json.loads(found.read_text())


def steps_between(steps: Sequence[int]) -> list[int]:
    """Accepted drafted tokens of the rounds between the prefill's own token and the last round.

    >>> steps_between([1, 3, 1, 2])
    [2, 0]
    """
    return [grown - 1 for grown in steps[1:-1]]


def vllm_job(
    target: str, prompts: Sequence[Sequence[int]], end_ids: Sequence[int], max_new_tokens: int, dtype: str = "float32"
) -> dict[str, Any]:
    """What ``vllm_worker`` is asked, but for ``speculative``."""
    room = max(map(len, prompts)) + max_new_tokens + 64  # drafts may reach beyond the last token
    job = {"target": target, "dtype": dtype, "prompts": prompts, "end_ids": list(end_ids)}
    return {**job, "max_new_tokens": max_new_tokens, "max_model_len": room}


def speculation(kind: str, folder: Path, steps: int) -> dict[str, Any]:
    """vLLM's setting for heads of a folder: chains of ``steps``."""
    return {"method": kind, "model": str(folder.resolve()), "num_speculative_tokens": steps}


def judge(ours: Sequence[ChainRow], plain: Mapping[str, Any], served: Mapping[str, Any], steps: int) -> dict[str, Any]:
    """Compares vLLM with heads to vLLM without (tokens), and to chain decoding here (tokens, acceptance by position).

    Passes if the tokens with and without heads are equal for every prompt and acceptance agrees, on the prompts whose
    tokens are equal here and there, within TOKENS or SHARE at every position.
    """
    equal = [a["ids"] == b["ids"] for a, b in zip(plain["rows"], served["rows"], strict=True)]
    same = [row["ids"] == mine.ids for row, mine in zip(served["rows"], ours, strict=True)]
    theirs = [steps_between(row["steps"]) for row, keep in zip(served["rows"], same, strict=True) if keep]
    mine = [row.accepted for row, keep in zip(ours, same, strict=True) if keep]
    rounds, accepted = by_position(mine, steps)
    engine_rounds, engine_accepted = by_position(theirs, steps)
    allowed = max(TOKENS, SHARE * rounds)
    gaps = [rounds - engine_rounds, *(a - b for a, b in zip(accepted, engine_accepted, strict=True))]
    return {
        "vllm": served["version"],
        "tokens": sum(len(row["ids"]) for row in served["rows"]),
        "equal_with_and_without_heads": equal,
        "equal_to_treedraft": same,
        "treedraft": {"rounds": rounds, "accepted_by_position": accepted},
        "engine": {"rounds": engine_rounds, "accepted_by_position": engine_accepted},
        "rounds_equal": sum(a == b for a, b in zip(mine, theirs, strict=True)),
        "seconds": {
            "plain": sum(row["seconds"] for row in plain["rows"]),
            "heads": sum(row["seconds"] for row in served["rows"]),
        },
        "pass": all(equal) and rounds > 0 and all(abs(gap) <= allowed for gap in gaps),
    }
