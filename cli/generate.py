"""``treedraft generate``: answers to one prompt, streamed, or to a file of prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import BadParameter, Option

from .console import interactive, note, out
from .options import (
    DEFAULT_TARGET,
    DEFAULT_TREE,
    NO_HEADS,
    Adapter,
    BatchSize,
    Compile,
    DType,
    Heads,
    Limit,
    MaxNewTokens,
    MinP,
    RepetitionPenalty,
    Rule,
    Seed,
    Target,
    Temperature,
    TopK,
    TopP,
    TreeName,
    Turns,
    TurnsName,
)
from .parts import in_turns, open_parts, prompt_ids, read_some_prompts
from .report import write_rows
from .rules import note_rule

if TYPE_CHECKING:
    from ..data import Prompt
    from ..infer import Chunk, Run

EXAMPLE = 'Example: treedraft generate --heads runs/demo/train/best/heads --prompt "Why is the sky blue?" --seed 7'


def command(
    target: Target = DEFAULT_TARGET,
    heads: Heads = NO_HEADS,
    prompt: Annotated[str | None, Option(help="The question itself.")] = None,
    prompts: Annotated[
        Path | None, Option(help="JSONL file whose rows have prompt, messages or turns (and perhaps id, category).")
    ] = None,
    out_file: Annotated[Path | None, Option("--out", help="Also write the answers to this file, JSONL.")] = None,
    adapter: Adapter = None,
    tree: TreeName = DEFAULT_TREE,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    stop: Annotated[list[str] | None, Option(help="End an answer after this text; may be repeated.")] = None,
    seed: Seed = 0,
    dtype: DType = "auto",
    compile: Compile = "auto",
    batch_size: BatchSize = 8,
    turns: Turns = "first",
    limit: Limit = None,
    rule: Rule = "coupled",
    color: Annotated[
        bool | None, Option("--color/--no-color", help="Colour accepted drafted tokens; by default in a terminal.")
    ] = None,
) -> None:
    """Let the target answer, with heads and tree or (without heads) plainly. The text of one prompt streams as it is
    written; answers to a file of prompts are printed as each one ends. With the coupled rule, the default, heads change
    the speed and never the text."""
    from ..infer import Run, Sampling, generate

    law = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if turns == "all" and rule != "coupled" and not law.greedy:
        raise BadParameter("--turns all needs --rule coupled: follow-ups are asked in a history of its answers")
    first = _asked(prompt, prompts, turns, limit)
    parts = open_parts(
        target, heads, tree, dtype, adapter, compile, len(first) * max_new_tokens, min(batch_size, len(first))
    )
    note_rule(rule, law, parts.head)
    asked = in_turns(parts, first, law, max_new_tokens, seed, batch_size)
    run, start = Run(), time.perf_counter()
    stream = generate(
        parts.target,
        prompt_ids(parts.target, asked),
        head=parts.head,
        tree=parts.tree,
        sampling=law,
        seed=seed,
        max_new_tokens=max_new_tokens,
        stop_strings=stop or (),
        batch_size=batch_size,
        rule=rule,
        run=run,
        synchronize=True,
    )
    _print_stream(stream, asked, parts.target.tokenizer, interactive() if color is None else color)
    _print_closing(run, time.perf_counter() - start)
    if out_file:
        write_rows(_rows(run, asked), out_file)


def _asked(prompt: str | None, prompts: Path | None, turns: TurnsName, limit: int | None) -> list[Prompt]:
    from ..data import Prompt

    if prompt is not None and prompts is None:
        return [Prompt("prompt", None, ({"role": "user", "content": prompt},))]
    if prompts is not None and prompt is None:
        return read_some_prompts(prompts, turns, limit)
    raise BadParameter("give either --prompt TEXT or --prompts FILE")


def _print_stream(stream: Iterator[Chunk], asked: Sequence[Prompt], tokenizer: Any, coloured: bool) -> None:
    """One prompt streams; of several, each answer is printed when it ends, under its id."""
    from .painting import ACCEPTED, Painter, legend

    console = out(coloured)
    painters = [Painter(tokenizer, ACCEPTED if coloured else "") for _ in asked]
    waiting = [Text(f"[{prompt.id}] ", end="\n\n") for prompt in asked]
    for chunk in stream:
        painted = painters[chunk.row].paint(chunk)
        if len(asked) == 1:
            console.print(painted, end="", soft_wrap=True)
        else:
            waiting[chunk.row].append_text(painted)
            if chunk.reason is not None:
                console.print(waiting[chunk.row], soft_wrap=True)
    if len(asked) == 1:
        console.print()
    if coloured:
        console.print(legend((ACCEPTED, "drafted and accepted"), ("", "the target's own")))


def _print_closing(run: Run, seconds: float) -> None:
    stats = run.stats
    line = f"{stats.tokens} tokens in {seconds:.1f} s, {stats.tokens / seconds:.1f} tokens/s with the prefill"
    note(f"{line}; τ {stats.tau:.2f} over {stats.rounds} rounds" if stats.rounds else line)


def _rows(run: Run, asked: Sequence[Prompt]) -> list[dict[str, Any]]:
    return [
        {
            "id": prompt.id,
            "category": prompt.category,
            "text": done.text,
            "ids": done.ids,
            "reason": done.reason,
            "seed": done.seed,
            "tau": done.stats.to_dict()["tau"],
        }
        for row, prompt in enumerate(asked)
        for done in [run.completions[row]]
    ]
