"""One optimiser step over all its rows: accumulated parts, all processes, and what must be finite."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data import Batch
from ..infer import TargetError
from .joint import Drift, follows, split_counts
from .material import TrainError
from .noise import with_noise
from .run import Run, sum_over_processes
from .schedule import learning_rate, micro_batches
from .step import Counts, step_totals


@dataclass(frozen=True)
class StepReport:
    """One optimiser step, over all processes. ``step`` counts from 1; ``rows`` are the names of its rows."""

    step: int
    rows: list[str]
    loss: float
    counts: Counts
    learning_rate: float
    gradient_norm: float
    seconds: float
    drift: Drift | None = None
    """Of the adapter, where one is trained."""


def optimiser_step(run: Run, step: int, stop: bool) -> StepReport | None:
    """Optimiser step ``step`` = 0, 1, ...; None, before any work, if a process was asked to ``stop``.

    Raises TrainError or TargetError naming what is not finite, before any weight changes.
    """
    began, accelerator = time.perf_counter(), run.accelerator
    rows = run.plan.rows(step)
    where = f"step {step + 1}, rows {run.features.names(rows)}"
    parts = micro_batches(rows, accelerator.num_processes, accelerator.process_index, run.config.batch.micro_rows)
    batches = [run.features.batch(part) for part in parts]
    totals = _step_totals(run, batches, stop)
    if totals is None:
        return None
    rate = learning_rate(run.config.optim, step, run.total_steps)
    for group in run.optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    packed = _gradients(run, step, parts, batches, totals, where)
    _check_loss(run, packed[0], where)
    norm = accelerator.clip_grad_norm_([p for _, p in run.trained()], run.config.optim.clip or math.inf)
    assert norm is not None
    _check_gradients(run, norm.item(), where)
    run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    loss = (totals.new_tensor(run.weights) * packed[0] / totals.clamp(min=1)).sum().item()
    names = [run.features.rows[i].id for i in rows if i >= 0]
    counts, drift = split_counts(packed, run.head.steps)
    return StepReport(step + 1, names, loss, counts, rate, norm.item(), time.perf_counter() - began, drift)


def _gradients(run: Run, step: int, parts: list[list[int]], batches: list[Batch], totals: Tensor, where: str) -> Tensor:
    """Backward over this process's parts of a step; afterwards every process holds the gradient of the whole step.

    Returns the packed counts of the whole step, a column for each term of the loss.
    """
    accelerator = run.accelerator
    # Accelerate divides a loss by its accumulation steps and DDP averages gradients over processes: both undone here.
    scale = accelerator.gradient_accumulation_steps * accelerator.num_processes
    packed = torch.zeros(4, len(totals), dtype=torch.float64, device=totals.device)
    for i, (part, batch) in enumerate(zip(parts, batches, strict=True)):
        try:
            features, teacher = run.features.of(part, batch)
            features = with_noise(features, run.config.loss.noise, run.config.seed, step, part)
        except TargetError as error:
            raise TargetError(f"training stopped at {where}, before its weights changed: {error}") from error
        with nullcontext() if i + 1 == len(parts) else accelerator.no_sync(run.model):
            loss, counts = run.model(features.to(run.dtype), teacher, batch.tokens, batch.mask, totals)
            accelerator.backward(loss * scale)
        packed += counts
    return sum_over_processes(accelerator, packed)


def _step_totals(run: Run, batches: list[Batch], stop: bool) -> Tensor | None:
    """What each term of the loss is divided by: counts of the whole step, all parts and processes, before any backward.

    None if any process was asked to stop, so that all do at the same step.
    """
    steps, ids, outside = run.head.steps, run.head.draft_ids, run.config.loss.outside
    totals = torch.stack([step_totals(b.tokens, b.mask, steps, ids, outside) for b in batches]).sum(0)
    if run.adapter is not None:
        totals = torch.cat([totals, torch.stack([follows(b.mask).sum() for b in batches]).sum(0, keepdim=True)])
    shared = sum_over_processes(run.accelerator, torch.cat([totals, totals.new_tensor([float(stop)])]))
    return None if shared[-1] > 0 else shared[:-1]


def _check_loss(run: Run, losses: Tensor, where: str) -> None:
    bad = [str(k) for k, value in enumerate(losses.tolist()) if not math.isfinite(value)]
    if bad:
        named = [f"head {', '.join(k for k in bad if int(k) < run.head.steps)}"] if int(bad[0]) < run.head.steps else []
        named += ["the adapter's KL"] if int(bad[-1]) == run.head.steps else []
        raise TrainError(
            f"training stopped at {where}: the loss of {' and '.join(named)} is not finite (heads in "
            f"{run.config.precision}, target in {run.target.dtype}). Weights and checkpoints are as before the step; "
            "try a lower optim.lr, or precision fp32"
        )


def _check_gradients(run: Run, norm: float, where: str) -> None:
    if not math.isfinite(norm):
        bad = [name for name, p in run.trained() if p.grad is not None and not p.grad.isfinite().all()]
        raise TrainError(
            f"training stopped at {where}: the gradient is not finite in {', '.join(bad) or 'its norm'} (heads in "
            f"{run.config.precision}). Weights and checkpoints are as before the step; try a lower optim.lr, or "
            "precision fp32"
        )
