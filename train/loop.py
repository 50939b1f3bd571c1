"""The training loop: optimiser steps, evaluation by decoding, checkpoints, and a clean end."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

import torch
from accelerate.utils import gather_object
from tqdm import tqdm

from ..infer import Target, load_target
from .checkpoint import ADAPTER_FOLDER, BEST, HEADS_FOLDER, Progress, find_checkpoint, save_checkpoint
from .config import TrainConfig
from .evaluate import Evaluation
from .folders import clear_leftovers, step_folder
from .material import TrainError
from .measure import keep_best, measure
from .optimise import StepReport, optimiser_step
from .rng import capture_rng
from .run import Run, check_config, end_accelerator, set_up, start_accelerator
from .stopping import StopSignals
from .tracking import count_values, speaker, start_tracker


@dataclass(frozen=True)
class Result:
    """How a run ended. ``heads`` is the folder to decode with: best/heads if tau was measured, else the last ones.

    ``adapter`` lies beside it where an adapter was trained, and is a part of the target that they draft for.
    """

    step: int
    total_steps: int
    stopped_by: Signals | None
    checkpoint: Path
    heads: Path
    adapter: Path | None
    best_tau: float | None
    evaluation: dict[str, Any] | None
    """The last evaluation of this call; None if there was none."""

    @property
    def exit_code(self) -> int:
        """0, or 128 + the signal that stopped the run."""
        return 0 if self.stopped_by is None else 128 + self.stopped_by


def train(
    config: TrainConfig,
    target: Target | None = None,
    *,
    resume: bool | Path = False,
    on_step: Callable[[StepReport], None] | None = None,
) -> Result:
    """Trains heads as configured; loads the target unless one is given. Returns when done or stopped by a signal.

    resume: True goes on from the newest whole checkpoint in ``checkpoint.out`` (fresh if there is none), a folder from
    that one. ``on_step`` is called after every optimiser step, before its checkpoint.
    Raises ConfigError, CheckpointError, TargetError, DataError, HeadError or TrainError, all ValueErrors.
    """
    tree = check_config(config)
    out = Path(config.checkpoint.out)
    found = find_checkpoint(out, resume)
    accelerator = start_accelerator(config)
    say = speaker(accelerator)
    say(f"starting fresh in {out}" if found is None else f"going on from {found}")
    if target is None:
        settings = config.target
        place, pack = str(accelerator.device), not config.adapter.enabled
        # Never in the compiled part, which may be there when training starts and gone when it resumes, or the reverse.
        model = settings.spec, settings.dtype, place, settings.attention, pack, settings.adapter
        target = load_target(*model, compile="off")
    with ExitStack() as ending:
        run, progress = set_up(config, tree, target, accelerator, found, say, ending)
        if accelerator.is_main_process:
            clear_leftovers(out)
        start_tracker(accelerator, config, out)
        with StopSignals() as stop:
            progress, evaluation = _run_steps(run, progress, stop, on_step)
    end_accelerator(accelerator)
    _check_target(target, progress, say)
    return _result(run, progress, evaluation, stop.received if progress.step < run.total_steps else None)


def leave_processes() -> None:
    """Closes the process group of a launch, once all training in this process is done: open at exit, it may abort."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _run_steps(
    run: Run, progress: Progress, stop: StopSignals, on_step: Callable[[StepReport], None] | None
) -> tuple[Progress, Evaluation | None]:
    """Steps until the end or a signal; evaluates and saves when it is time, and saves at the end in any case."""
    config, evaluation = run.config, None
    first, saved = progress.step, progress.step
    bar = tqdm(
        total=run.total_steps, initial=first, desc="training", disable=None if run.accelerator.is_main_process else True
    )
    while progress.step < run.total_steps:
        report = optimiser_step(run, progress.step, stop.received is not None)
        if report is None:
            break
        epoch, step_of_epoch = run.plan.position(report.step)
        progress = replace(progress, step=report.step, epoch=epoch, step_of_epoch=step_of_epoch)
        _log_step(run, report, bar)
        if on_step is not None:
            on_step(report)
        last = report.step == run.total_steps
        if last or _is_time(config.eval.every, report.step):
            evaluation = measure(run, report.step)
            progress = keep_best(run, progress, evaluation)
        if last or _is_time(config.checkpoint.every, report.step):
            _save(run, progress)
            saved = report.step
    bar.close()
    if progress.step > saved:
        _save(run, progress)
    if progress.step < run.total_steps:
        run.say(f"stopped after step {progress.step} of {run.total_steps}, saved; go on with --resume")
    elif first == run.total_steps:
        run.say(f"nothing left to do: all {run.total_steps} steps are done")
    return progress, evaluation


def _is_time(every: int | None, step: int) -> bool:
    return every is not None and step % every == 0


def _log_step(run: Run, report: StepReport, bar: tqdm) -> None:
    values = {"loss": report.loss, "learning_rate": report.learning_rate, "gradient_norm": report.gradient_norm}
    values |= {"seconds": report.seconds, "positions": report.counts.positions[0].item()}
    values |= report.drift.values("train") if report.drift else {}
    run.accelerator.log(values | count_values(report.counts, "train"), step=report.step)
    bar.update()
    bar.set_postfix(loss=f"{report.loss:.3f}", refresh=False)
    if report.step % max(1, run.total_steps // 10) == 0:
        positions = report.counts.positions.clamp(min=1)
        top1 = " ".join(f"{share:.2f}" for share in (report.counts.hits / positions).tolist())
        drift = f"; {report.drift}" if report.drift else ""
        done = f"step {report.step} of {run.total_steps}: loss {report.loss:.4f}"
        run.say(f"{done}, teacher-forced top-1 by head {top1}{drift}")


def _save(run: Run, progress: Progress) -> None:
    generators = gather_object([capture_rng()])
    if run.accelerator.is_main_process:
        keep = run.config.checkpoint.keep
        facts, adapter = run.target.facts, run.adapter
        save_checkpoint(run.out, run.head, facts, adapter, run.optimizer, generators, progress, keep)
    run.accelerator.wait_for_everyone()


def _check_target(target: Target, progress: Progress, say: Callable[[str], None]) -> None:
    if target.fingerprint() != progress.origin.target:
        raise TrainError("the target's weights changed during training: the heads belong to no known target")
    say("0 bytes of the target changed")


def _result(run: Run, progress: Progress, evaluation: Evaluation | None, stopped_by: Signals | None) -> Result:
    folder = step_folder(run.out, progress.step)
    chosen = folder if progress.best_tau is None else run.out / BEST
    heads = chosen / HEADS_FOLDER
    run.say(
        f"heads in {heads}" + ("" if progress.best_tau is None else f", the best measured tau {progress.best_tau:.3f}")
    )
    return Result(
        progress.step,
        run.total_steps,
        stopped_by,
        folder,
        heads,
        None if run.adapter is None else chosen / ADAPTER_FOLDER,
        progress.best_tau,
        None if evaluation is None else evaluation.to_dict(),
    )
