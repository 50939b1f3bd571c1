"""Runs a serving engine in an environment of its own."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("vllm_worker.py")


class EngineError(ValueError):
    """The engine could not be run, or stopped: the message ends with what it said last."""


def run_vllm(python: Path, job: Mapping[str, Any]) -> dict[str, Any]:
    """What ``vllm_worker`` made of the job. Raises EngineError."""
    with tempfile.TemporaryDirectory() as work:
        given, found = Path(work) / "job.json", Path(work) / "found.json"
        given.write_text(json.dumps(job))
        try:
            done = subprocess.run([python, WORKER, given, found], capture_output=True, text=True)
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
