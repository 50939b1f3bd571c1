"""Where the milliseconds of a round go, beside what the machine could do: ``treedraft bench --profile``.

n positions of a forward   N tree nodes, root included
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from ..infer import Run, complete
from ..infer.timing import now

if TYPE_CHECKING:
    from ..heads import Drafter
    from ..infer import Target
    from ..tree import Shape
    from .speed import Request

ROUNDS = 24
"""Tokens that are decoded under the profiler, and again without."""
MATRICES = ("mm", "addmm", "baddbmm", "bmm")
"""Operations that multiply by weights, besides all that are called linear."""
ATTENTION = "scaled_dot_product_attention"
COPY_BYTES = 2**28
MATRIX_SIZE = 1536


@dataclass(frozen=True)
class Machine:
    """What the machine can do at most, measured: bytes it reads and operations of a large product, in a second."""

    bytes_per_second: float
    flops_per_second: float

    def floor(self, weights: int, parameters: int, nodes: int) -> float:
        """Seconds that a forward over n = ``nodes`` positions cannot go below: its weights read once, its products."""
        return max(weights / self.bytes_per_second, 2 * parameters * nodes / self.flops_per_second)


def measure_machine(dtype: torch.dtype, device: torch.device) -> Machine:
    """The best of several tries each."""
    numbers = torch.ones(COPY_BYTES // dtype.itemsize, dtype=dtype, device=device)
    square = torch.ones(MATRIX_SIZE, MATRIX_SIZE, dtype=dtype, device=device)
    read, multiply = (_best(f, device) for f in (numbers.sum, lambda: square @ square))
    return Machine(COPY_BYTES / read, 2 * MATRIX_SIZE**3 / multiply)


def profile_rounds(
    target: Target, head: Drafter | None, tree: Shape | None, prompt: Sequence[int], request: Request
) -> dict[str, float]:
    """Milliseconds of a round by what they are spent on; they add up to ``round``.

    draft: the whole of it; matrices, attention: within the target's forward; rest: its other operations and Python;
    verify, commit, other: outside of both. Phases are timed without the profiler, which slows every call; only the
    times of matrices and attention are taken from it.
    """
    options: dict[str, Any] = {
        "head": head,
        "tree": tree,
        "sampling": request.sampling,
        "seed": request.seed,
        "max_new_tokens": ROUNDS + 1,
        "end_ids": (),
        "batch_size": 1,
    }
    complete(target, [prompt], **options)
    run = Run()
    complete(target, [prompt], run=run, synchronize=True, **options)
    rounds, seconds = run.stats.rounds, run.stats.phase_seconds
    inside = _inside_forwards(target, lambda: complete(target, [prompt], **options))
    phases = {phase: 1e3 * seconds[phase] / rounds for phase in ("draft", "forward", "verify", "commit", "rest")}
    parts = {name: total / rounds for name, total in inside.items()}
    return {
        "round": sum(phases.values()),
        "draft": phases["draft"],
        **parts,
        "rest": phases["forward"] - sum(parts.values()),
        "verify": phases["verify"],
        "commit": phases["commit"],
        "other": phases["rest"],
    }


def roofline(target: Target, nodes: int, machine: Machine) -> dict[str, float]:
    """The least milliseconds of a forward over n = ``nodes`` positions on this machine, and what they come from."""
    weights, parameters = target.weights_read()
    return {
        "nodes": nodes,
        "weights_mb": weights / 1e6,
        "gb_per_second": machine.bytes_per_second / 1e9,
        "gflops_per_second": machine.flops_per_second / 1e9,
        "floor_ms": 1e3 * machine.floor(weights, parameters, nodes),
    }


def _inside_forwards(target: Target, decode: Callable[[], object]) -> dict[str, float]:
    """Milliseconds of matrices and attention inside the forwards of ``decode``, those of the prefill left out."""
    forward = target.forward

    def marked(*args: Any) -> Any:
        prefill = len(args) == 6  # which alone says whose logits it keeps
        with record_function("prefill" if prefill else "forward"):
            return forward(*args)

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's own lines would mix with the progress
    target.forward = marked  # type: ignore[method-assign]
    try:
        kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (target.device.type == "cuda")
        with profile(activities=kinds) as found:
            decode()
    finally:
        del target.forward  # type: ignore[misc]  # the method is the class's again
    totals = {"matrices": 0.0, "attention": 0.0}
    for event in found.events() or ():
        if event.name == "forward":
            _add_parts(event, totals, target.device.type == "cuda")
    return totals


def _add_parts(event: Any, totals: dict[str, float], device: bool) -> None:
    for child in event.cpu_children:
        name = child.name.rpartition("::")[2]
        part = "attention" if name == ATTENTION else "matrices" if _multiplies(name) else None
        if part is None:
            _add_parts(child, totals, device)
        else:
            totals[part] += (child.device_time_total if device else child.cpu_time_total) / 1e3


def _multiplies(name: str) -> bool:
    return "linear" in name or name in MATRICES


def _best(f: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(8):
        start = now(device)
        f()
        seconds.append(now(device) - start)
    return min(seconds)
