"""``treedraft demo``: the whole path on a real model, from prompts to a table of what drafting gains."""

from __future__ import annotations

import json as json_format
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.panel import Panel
from rich.text import Text
from typer import Exit, Option

from .bench import MODES, bench
from .bench_table import show
from .console import out
from .demo_prompts import held_out_rows, training_rows
from .distill import account, distill_to
from .options import DEFAULT_TARGET, DEFAULT_TREE, NO_HEADS, DType, Seed, Target
from .parts import Parts, fit_heads, open_parts, prompt_ids
from .report import write_json, write_rows

if TYPE_CHECKING:
    from ..data import Prompt

WORK = Path("runs/demo")
RESULT = Path("demo.json")
SHIPPED = Path(__file__).parents[1] / "examples" / "smollm2-135m" / "eagle3"
"""EAGLE-3 heads for the default target that come with a checkout."""
EXAMPLE = "Example: treedraft demo --target HuggingFaceTB/SmolLM2-360M-Instruct --work runs/demo-360m"


class DemoError(ValueError):
    """A demo that cannot run here."""


@dataclass(frozen=True)
class Scale:
    """How much of everything."""

    prompts: int
    """Prompts that the target answers for training."""
    answer_tokens: int
    answer_temperature: float
    answer_batch: int
    epochs: int
    rows_per_step: int
    heads: int
    draft_vocabulary: int | None
    chooser_prompts: int
    """Held-out prompts on which the best heads are chosen."""
    bench_prompts: int
    """Held-out prompts, others than those, of the table at the end."""
    bench_tokens: int
    repeats: int
    tree: str


FULL = Scale(
    prompts=340,
    answer_tokens=64,
    answer_temperature=0.0,
    answer_batch=32,
    epochs=5,
    rows_per_step=8,
    heads=3,
    draft_vocabulary=8192,
    chooser_prompts=12,
    bench_prompts=10,
    bench_tokens=48,
    repeats=2,
    tree="best:3",
)
FAST = replace(
    FULL,
    prompts=16,
    answer_tokens=12,
    epochs=1,
    heads=2,
    draft_vocabulary=None,
    chooser_prompts=2,
    bench_prompts=2,
    bench_tokens=8,
    repeats=1,
    tree="best:4",
)


@dataclass
class Steps:
    """Announces the steps and keeps the time that each one took, in seconds."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def step(self, name: str, what: str) -> Iterator[None]:
        console = out()
        console.rule(f"[bold]{len(self.seconds) + 1}. {what}", align="left")
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start
        console.print(f"{self.seconds[name]:.0f} s", style="dim")


def command(
    target: Target = DEFAULT_TARGET,
    work: Annotated[Path, Option(help="Folder for answers and heads; one begun there is gone on with.")] = WORK,
    json: Annotated[Path, Option("--json", help="File for the result of the last step, for machines.")] = RESULT,
    seed: Seed = 0,
    dtype: DType = "auto",
    fast: Annotated[bool, Option("--fast", help="A few prompts and tokens only: works, gains nothing.")] = False,
) -> None:
    """Show the whole path on a real model: let it answer the prompts that come with treedraft, train Medusa heads on
    its answers, decode prompts that it has not seen with a tree of candidates, and compare the speed with Hugging Face
    generate. On two CPU cores this takes about ten minutes; the default target needs no account and no hub. Started
    again, it goes on where it stopped."""
    scale = FAST if fast else FULL
    _claim(work, {"target": target, "dtype": dtype, "seed": seed, **asdict(scale)})
    prompts = _write_prompts(work, scale)
    steps = Steps()
    with steps.step("target", f"Get the target, {target}"):
        parts = open_parts(target, NO_HEADS, "", dtype, work=scale.prompts * scale.answer_tokens)
    with steps.step("answers", f"Let it answer {scale.prompts} prompts"):
        _answer(parts, prompts["train"], work, scale, seed)
    with steps.step("training", f"Train {scale.heads} Medusa heads on its answers"):
        heads = _train(parts, {"spec": target, "dtype": dtype}, work, scale, seed)
    parts = fit_heads(parts.target, str(heads), scale.tree)
    with steps.step("answer", "Decode a prompt that it has not seen"):
        _show_answer(parts, prompts["bench"][0], scale.bench_tokens)
    with steps.step("bench", "Compare the speed on prompts that it has not seen"):
        result = _bench(parts, target, prompts["bench"], scale, seed)
    result["settings"] |= {"heads": str(heads), "tree": scale.tree, "prompts": str(work / "bench.jsonl")}
    result["step_seconds"] = steps.seconds
    show(result)
    if target == DEFAULT_TARGET and SHIPPED.is_dir():
        with steps.step("shipped", "The same prompts with EAGLE-3 heads that come with the examples"):
            result["shipped"] = _bench_shipped(parts, target, prompts["bench"], scale, seed)
        show(result["shipped"])
    write_json(result, json)
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in steps.seconds.items())
    whole = sum(steps.seconds.values())
    out().print(f"Steps: {took}; together {whole:.0f} s. The table is also in {json}.", soft_wrap=True)


def _claim(work: Path, settings: dict[str, Any]) -> None:
    """Makes the folder this demo's own. Raises DemoError if it holds one with other settings."""
    place = work / "settings.json"
    if place.exists():
        found = json_format.loads(place.read_text())
        pairs = [(name, found.get(name), value) for name, value in settings.items()]
        other = [f"{name} {was}, now {value}" for name, was, value in pairs if was != value]
        if other:
            raise DemoError(f"{work} holds a demo with other settings ({'; '.join(other)}): choose another with --work")
    elif work.exists() and any(work.iterdir()):
        raise DemoError(f"{work} holds something else: choose another folder with --work")
    write_json(settings, place)


def _write_prompts(work: Path, scale: Scale) -> dict[str, list[Prompt]]:
    """Prompts to train on, to choose heads by, and to end with, as files that the other commands can use too."""
    from ..data import read_prompts

    held_out = held_out_rows()
    rows = {
        "train": training_rows()[: scale.prompts],
        "choose": held_out[1::2][: scale.chooser_prompts],
        "bench": held_out[::2][: scale.bench_prompts],
    }
    for name, part in rows.items():
        write_rows(part, work / f"{name}.jsonl")
    return {name: read_prompts(work / f"{name}.jsonl") for name in rows}


def _answer(parts: Parts, prompts: list[Prompt], work: Path, scale: Scale, seed: int) -> None:
    from ..infer import Sampling

    law = Sampling(temperature=scale.answer_temperature)
    done = distill_to(parts, prompts, work / "answers.jsonl", law, scale.answer_tokens, seed, scale.answer_batch)
    out().print(account(done), soft_wrap=True)


def _train(parts: Parts, target: dict[str, str], work: Path, scale: Scale, seed: int) -> Path:
    """Trains, or goes on training; gives the folder of the best heads. Raises Exit if it was stopped by a signal."""
    from ..train import parse_config, train

    config = parse_config(
        {
            "target": target,
            "data": {"paths": [str(work / "answers.jsonl")], "prompts": str(work / "choose.jsonl")},
            "checkpoint": {"out": str(work / "train")},
            "heads": {"num_heads": scale.heads, "draft_vocab_size": scale.draft_vocabulary},
            "optim": {"epochs": scale.epochs, "lr": 2e-3},
            "batch": {"rows_per_step": scale.rows_per_step},
            "eval": {"tree": scale.tree, "max_new_tokens": scale.bench_tokens, "prompts": scale.chooser_prompts},
            "seed": seed,
        },
        source="demo",
    )
    result = train(config, parts.target, resume=True)
    if result.exit_code:
        raise Exit(result.exit_code)
    return result.heads


def _show_answer(parts: Parts, prompt: Prompt, max_new_tokens: int) -> None:
    from ..infer import Run, generate
    from .painting import ACCEPTED, Painter, legend

    painter, run, text = Painter(parts.target.tokenizer), Run(), Text()
    ids = prompt_ids(parts.target, [prompt])
    for chunk in generate(parts.target, ids, head=parts.head, tree=parts.tree, max_new_tokens=max_new_tokens, run=run):
        text.append_text(painter.paint(chunk))
    console = out()
    console.print(Panel(text, title=Text(prompt.messages[-1]["content"]), title_align="left"))
    console.print(legend((ACCEPTED, "drafted and accepted"), ("", "the target's own")))
    if run.stats.rounds:
        console.print(f"{run.stats.tokens} tokens in {run.stats.rounds} rounds: τ {run.stats.tau:.2f}")


def _bench_shipped(parts: Parts, target: str, prompts: list[Prompt], scale: Scale, seed: int) -> dict[str, Any]:
    """The table for heads of more data and time than the demo has."""
    eagle = fit_heads(parts.target, str(SHIPPED), DEFAULT_TREE)
    result = _bench(eagle, target, prompts, replace(scale, repeats=1), seed)
    result["settings"] |= {"heads": str(SHIPPED), "tree": DEFAULT_TREE}
    return result


def _bench(parts: Parts, target: str, prompts: list[Prompt], scale: Scale, seed: int) -> dict[str, Any]:
    from ..infer import Sampling

    ids = prompt_ids(parts.target, prompts)
    return bench(parts, target, ids, Sampling(), scale.bench_tokens, seed, scale.repeats, MODES)
