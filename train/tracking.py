"""Where a run's numbers go: lines on stderr, a progress bar on a terminal, and a tracker through Accelerate."""

from __future__ import annotations

import importlib.util
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm

from .config import TrainConfig
from .evaluate import Evaluation
from .settings import flat_config
from .step import Counts


def tracker_fault(kind: str) -> str | None:
    """What is missing for a tracker of this kind, if anything."""
    if kind == "none" or importlib.util.find_spec(kind):
        return None
    return f"tracker.kind is {kind}, but the package {kind} is not installed: pip install 'treedraft[{kind}]'"


def start_tracker(accelerator: Accelerator, config: TrainConfig, out: Path) -> None:
    """Opens the configured tracker; wandb writes offline into ``out`` when nobody is logged in."""
    if config.tracker.kind == "none":
        return
    options: dict[str, Any] = {}
    if config.tracker.kind == "wandb" and accelerator.is_main_process:
        out.mkdir(parents=True, exist_ok=True)
        options = {"wandb": {"name": config.tracker.run, "dir": str(out), **_wandb_mode()}}
    name = config.tracker.project
    if config.tracker.kind == "tensorboard" and config.tracker.run:
        name = f"{name}/{config.tracker.run}"
    settings = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in flat_config(config).items()
    }
    accelerator.init_trackers(name, settings, options)


def speaker(accelerator: Accelerator) -> Callable[[str], None]:
    """Prints a line on stderr, above the progress bar if there is one; silent except in the main process."""

    def say(line: str) -> None:
        if accelerator.is_main_process:
            tqdm.write(line, file=sys.stderr)
            sys.stderr.flush()

    return say


def count_values(counts: Counts, prefix: str) -> dict[str, float]:
    """Mean loss, top-1 and coverage of each head; heads without a position are left out."""
    values: dict[str, float] = {}
    for k, positions in enumerate(counts.positions.tolist()):
        if positions:
            covered = counts.covered[k].item()
            values[f"{prefix}/head{k}/top1"] = counts.hits[k].item() / positions
            values[f"{prefix}/head{k}/coverage"] = covered / positions
            if covered:
                values[f"{prefix}/head{k}/loss"] = counts.loss[k].item() / covered
    return values


def evaluation_values(evaluation: Evaluation) -> dict[str, float]:
    """tau and acceptance by depth, for a tracker."""
    total = evaluation.total
    values = {"tau": total.tau, "tau_without_loops": total.tau_without_loops}
    values |= {f"accept/depth{d}": share for d, share in enumerate(total.accept_by_depth) if d}
    return {key: value for key, value in values.items() if math.isfinite(value)}


def evaluation_line(step: int, evaluation: Evaluation | None, proxies: Counts | None) -> str:
    """What was measured by decoding, and the teacher-forced proxies, called so."""
    parts = [f"step {step}:"]
    if evaluation is not None:
        total = evaluation.total
        depths = " ".join(f"{share:.2f}" for share in total.accept_by_depth[1:])
        parts.append(f"measured tau {total.tau:.3f} (without loops {total.tau_without_loops:.3f})")
        parts.append(f"accepted by depth {depths or '-'} over {total.prompts} prompts, {total.tokens} tokens;")
    if proxies is not None and proxies.positions.any():
        top1 = " ".join(
            f"{h / max(p, 1):.2f}" for h, p in zip(proxies.hits.tolist(), proxies.positions.tolist(), strict=True)
        )
        parts.append(f"proxy: teacher-forced top-1 by head {top1} over {int(proxies.positions[0])} held-out positions")
    return " ".join(parts)


def _wandb_mode() -> dict[str, str]:
    if "WANDB_MODE" in os.environ:
        return {}
    import wandb

    try:
        return {} if wandb.login(prompt=False) else {"mode": "offline"}
    except wandb.Error:
        return {"mode": "offline"}
