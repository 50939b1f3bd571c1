"""Evaluation during training: the real tree decode on held-out prompts, the proxies beside it, and best/."""

from __future__ import annotations

import json
from dataclasses import replace

import torch
from accelerate.utils import gather_object

from ..infer import Sampling, row_seed
from ..tree import write_atomically
from .checkpoint import BEST, Progress, save_heads
from .evaluate import Evaluation, evaluate
from .joint import Drift, split_counts
from .rng import undisturbed_rng
from .run import Run, sum_over_processes
from .step import Counts
from .tracking import count_values, evaluation_line, evaluation_values

EVALUATION_FILE = "evaluation.json"


@torch.no_grad()
def measure_proxies(run: Run) -> tuple[Counts, Drift | None]:
    """Teacher-forced counts over all held-out rows, each once, whatever the batch size and the number of processes."""
    accelerator, size = run.accelerator, run.config.batch.micro_rows
    model = accelerator.unwrap_model(run.model)
    ones = torch.ones(len(run.weights), dtype=torch.float64, device=run.target.device)
    packed = torch.zeros(4, len(ones), dtype=torch.float64, device=run.target.device)
    groups = [
        list(range(start, min(start + size, len(run.held_out.rows))))
        for start in range(0, len(run.held_out.rows), size)
    ]
    for group in groups[accelerator.process_index :: accelerator.num_processes]:
        batch = run.held_out.batch(group)
        features, teacher = run.held_out.of(group, batch)
        packed += model(features.to(run.dtype), teacher, batch.tokens, batch.mask, ones)[1]
    return split_counts(sum_over_processes(accelerator, packed), run.head.steps)


def measure(run: Run, step: int) -> Evaluation | None:
    """Decodes the held-out prompts with the tree and logs what was accepted; None without prompts.

    Leaves training's random generators as they were. Every process decodes its share of the prompts.
    """
    if not run.material.prompts and not run.material.held_out:
        return None
    config, accelerator = run.config, run.accelerator
    with undisturbed_rng():
        proxies, drift = measure_proxies(run)
        evaluation = None
        if run.material.prompts:
            mine = range(accelerator.process_index, len(run.material.prompts), accelerator.num_processes)
            share = evaluate(
                run.target,
                run.head.for_decoding(run.target.dtype),
                run.tree,
                [run.material.prompts[i] for i in mine],
                [run.material.categories[i] for i in mine],
                Sampling(temperature=config.eval.temperature),
                max_new_tokens=config.eval.max_new_tokens,
                batch_size=config.eval.batch_size,
                seed=config.seed,
                row_seeds=[row_seed(config.seed, i) for i in mine],
            )
            evaluation, *others = gather_object([share])
            for other in others:
                evaluation += other
    values = count_values(proxies, "proxy") | (evaluation_values(evaluation) if evaluation else {})
    accelerator.log(values | (drift.values("proxy") if drift else {}), step=step)
    run.say(evaluation_line(step, evaluation, proxies) + (f"; {drift}" if drift else ""))
    return evaluation


def keep_best(run: Run, progress: Progress, evaluation: Evaluation | None) -> Progress:
    """Writes best/ if tau is finite and the largest so far."""
    if evaluation is None or not evaluation.tau > (progress.best_tau or 0.0):
        return progress
    if run.accelerator.is_main_process:
        folder = run.out / BEST
        save_heads(folder, run.head, run.target.facts, run.adapter)
        content = {"step": progress.step, **evaluation.to_dict()}
        write_atomically(json.dumps(content, indent=2) + "\n", folder / EVALUATION_FILE)
    return replace(progress, best_tau=evaluation.tau)
