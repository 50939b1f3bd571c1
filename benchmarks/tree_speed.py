"""Trees side by side in one interleaved run: tokens a second and tau of each, with intervals over prompts.

    python benchmarks/tree_speed.py --heads HEADS --prompts FILE --tree none --tree trees.json:4 --tree scheduled:8

The first tree is what the others are compared with, batch by batch. Of scheduled trees also: calibration error before
and after, rounds that were left plain, and what the schedule itself took of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from treedraft.cli.parts import fit_heads, open_parts, prompt_ids, read_some_prompts
from treedraft.cli.speed import Decode, Timing
from treedraft.infer import Run, Sampling, generate, machine, row_seed, versions
from treedraft.infer.timing import now
from treedraft.tree import Reliability, Schedule

TIMED = ("offer", "next_level", "admit", "learn", "begin", "drafts")


@dataclass
class Seen:
    """What the schedules of all runs with one tree saw."""

    before: Reliability = field(default_factory=Reliability)
    after: Reliability = field(default_factory=Reliability)
    drafted: int = 0
    plain: int = 0
    seconds: float = 0.0

    def add(self, schedule: Schedule, seconds: float) -> None:
        for own, other in ((self.before, schedule.before), (self.after, schedule.after)):
            for name in ("counts", "claimed", "happened"):
                setattr(own, name, [a + b for a, b in zip(getattr(own, name), getattr(other, name), strict=True)])
        self.drafted += schedule.drafted_rounds
        self.plain += schedule.plain_rounds
        self.seconds += seconds


def main(
    heads: Annotated[str, typer.Option(help="As for treedraft bench.")],
    prompts: Annotated[Path, typer.Option(help="JSONL.")],
    tree: Annotated[list[str], typer.Option(help="none or as for --tree of treedraft bench; repeat.")],
    target: Annotated[str, typer.Option()] = "smollm2-135m",
    every: Annotated[int, typer.Option()] = 10,
    max_new_tokens: Annotated[int, typer.Option()] = 48,
    batch_size: Annotated[int, typer.Option()] = 1,
    temperature: Annotated[float, typer.Option()] = 0.0,
    repeats: Annotated[int, typer.Option()] = 1,
    dtype: Annotated[str, typer.Option()] = "auto",
    longest: Annotated[int, typer.Option(help="Leave out prompts of more tokens.")] = 100_000,
    minutes: Annotated[float, typer.Option(help="Stop after so long; what was finished by all trees counts.")] = 60.0,
) -> None:
    read = read_some_prompts(prompts, "first", None)
    parts = open_parts(target, heads, "chain:1", dtype, None, "auto", 10**6)
    ids = [row for row in prompt_ids(parts.target, read) if len(row) <= longest][::every]
    spent = _time_schedules()
    seen: dict[str, Seen] = {}
    decoders: dict[str, Decode] = {}
    for spec in tree:
        shape = None if spec == "none" else fit_heads(parts.target, heads, spec)
        decoders[spec] = _decoder(parts.target, shape, Sampling(temperature), max_new_tokens, seen, spec, spent)
    timings = _in_turns(decoders, [ids[i : i + batch_size] for i in range(0, len(ids), batch_size)], repeats, minutes)
    ids = ids[: batch_size * len(timings[tree[0]][0])]
    console = Console(width=130)
    console.print(machine(), versions(), f"{len(ids)} prompts, batch {batch_size}, temperature {temperature}, {dtype}")
    console.print(_table(timings))
    for spec, found in seen.items():
        whole = sum(t.seconds - t.first_seconds for r in timings[spec] for t in r)
        console.print(
            f"{spec}: ECE {found.before.ece:.3f} before, {found.after.ece:.3f} calibrated; {found.drafted} drafted"
            f" and {found.plain} plain rounds; the schedule took {found.seconds / (whole or 1.0):.1%} of the time"
        )
    answers = {spec: [ids for t in repeats_of[0] for ids in t.answers] for spec, repeats_of in timings.items()}
    first = next(iter(answers.values()))
    console.print(f"Same text in all: {all(own == first for own in answers.values())}")


def _in_turns(
    decoders: dict[str, Decode], batches: Sequence[Sequence[Sequence[int]]], repeats: int, minutes: float
) -> dict[str, list[list[Timing]]]:
    """Timings [repeat][batch] of every tree, each batch begun by another one; a warm-up on the first is left out."""
    names, until = list(decoders), time.perf_counter() + 60 * minutes
    timings: dict[str, list[list[Timing]]] = {name: [[] for _ in range(repeats)] for name in names}
    for name in names:
        decoders[name](0, batches[0])
    for number, batch in enumerate(batches):
        for repeat in range(repeats):
            turn = (repeat + number) % len(names)
            for name in names[turn:] + names[:turn]:
                timings[name][repeat].append(decoders[name](number * len(batches[0]), batch))
        if time.perf_counter() > until:
            break
    return timings


def _decoder(
    target: Any, shape: Any, law: Sampling, most: int, seen: dict[str, Seen], spec: str, spent: list[float]
) -> Decode:
    def decode(row: int, prompts: Sequence[Sequence[int]]) -> Timing:
        run, first, start, before = Run(), None, now(target.device), spent[0]
        for _ in generate(
            target,
            prompts,
            head=None if shape is None else shape.head,
            tree=None if shape is None else shape.tree,
            sampling=law,
            row_seeds=[row_seed(0, row + i) for i in range(len(prompts))],
            max_new_tokens=most,
            batch_size=len(prompts),
            run=run,
            synchronize=True,
        ):
            first = first or now(target.device) - start
        seconds = now(target.device) - start
        if run.schedule is not None:
            seen.setdefault(spec, Seen()).add(run.schedule, spent[0] - before)
        answers = [run.completions[i].ids for i in range(len(prompts))]
        return Timing(answers, seconds, first or seconds, run.stats)

    return decode


def _time_schedules() -> list[float]:
    """Adds up what the schedule's methods take, in the one number of the list."""
    spent = [0.0]

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            result = method(*args, **options)
            spent[0] += time.perf_counter() - start
            return result

        return run

    for name in TIMED:
        setattr(Schedule, name, timed(getattr(Schedule, name)))
    return spent


def _table(timings: dict[str, list[list[Timing]]]) -> Table:
    table = Table("tree", "tokens/s without prefill", "against the first", "95 % interval", "τ", "with prefill")
    first = _sums(next(iter(timings.values())))
    for spec, repeats in timings.items():
        own = _sums(repeats)
        low, high = _interval(own, first)
        stats = [t.stats for r in repeats for t in r if t.stats is not None]
        tau = sum(s.kept for s in stats) / max(sum(s.rounds for s in stats), 1)
        every = [t for r in repeats for t in r]
        table.add_row(
            spec,
            f"{own[:, 0].sum() / own[:, 1].sum():.1f}",
            f"{_ratio(own, first):.3f}",
            f"{low:.3f} to {high:.3f}",
            f"{tau:.3f}",
            f"{sum(t.tokens for t in every) / sum(t.seconds for t in every):.1f}",
        )
    return table


def _sums(repeats: list[list[Timing]]) -> np.ndarray:
    """[batches, 2] tokens and seconds behind the first token, over repeats."""
    rows = [[(t.tokens - t.first_tokens, t.seconds - t.first_seconds) for t in r] for r in repeats]
    return np.array(rows, dtype=float).sum(0)


def _ratio(own: np.ndarray, other: np.ndarray) -> float:
    return float((own[:, 0].sum() / own[:, 1].sum()) / (other[:, 0].sum() / other[:, 1].sum()))


def _interval(own: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    rng, count = np.random.default_rng(0), len(own)
    drawn = [_ratio(own[rows], other[rows]) for rows in rng.integers(0, count, (1000, count))]
    low, high = np.quantile(drawn, [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    typer.run(main)
