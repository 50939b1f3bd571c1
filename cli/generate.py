"""``treedraft generate``: answers to one prompt, streamed, or to a file of prompts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from tqdm import tqdm
from typer import BadParameter, Option

from .answers import Answers
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
from .parts import Parts, next_turn, open_parts, prompt_ids, read_some_prompts
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
    out_file: Annotated[
        Path | None,
        Option(
            "--out", help="Also append each answer to this JSONL file as it ends; an unfinished one is gone on with."
        ),
    ] = None,
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
    written; answers to a file of prompts are printed as each one ends, and the next prompt takes its place in the
    batch. With --out the same command goes on where an interrupted one stopped. With the coupled rule, the default,
    heads change the speed and never the text."""
    from ..infer import Sampling

    law = Sampling(temperature, top_k, top_p, min_p, repetition_penalty)
    if turns == "all" and rule != "coupled" and not law.greedy:
        raise BadParameter("--turns all needs --rule coupled: follow-ups are asked in a history of its answers")
    first = _asked(prompt, prompts, turns, limit)
    drafting = {} if rule == "coupled" or law.greedy else {"rule": rule, "heads": heads, "tree": tree}
    settings = {"target": target, "adapter": None if adapter is None else str(adapter), "dtype": dtype, **asdict(law)}
    settings |= {"max_new_tokens": max_new_tokens, "stop": stop or [], **drafting}
    journal = Answers(out_file, settings, seed)
    journal.check(first)
    parts = open_parts(
        target, heads, tree, dtype, adapter, compile, len(first) * max_new_tokens, min(batch_size, len(first))
    )
    note_rule(rule, law, parts.head)
    options = {"sampling": law, "max_new_tokens": max_new_tokens, "stop_strings": stop or (), "rule": rule}
    coloured = interactive() if color is None else color
    _answer_in_turns(parts, first, journal, {**options, "batch_size": batch_size}, coloured)


def _asked(prompt: str | None, prompts: Path | None, turns: TurnsName, limit: int | None) -> list[Prompt]:
    from ..data import Prompt

    if prompt is not None and prompts is None:
        return [Prompt("prompt", None, ({"role": "user", "content": prompt},))]
    if prompts is not None and prompt is None:
        return read_some_prompts(prompts, turns, limit)
    raise BadParameter("give either --prompt TEXT or --prompts FILE")


def _answer_in_turns(
    parts: Parts, first: Sequence[Prompt], answers: Answers, options: Mapping[str, Any], coloured: bool
) -> None:
    """Asks the prompts that have no answer yet, then their follow-ups in the history of the answers, and so on."""
    from ..infer import Run

    asked, turn, place, found = list(first), 1, 0, 0
    run, start = Run(), time.perf_counter()
    while asked:
        answers.check(asked)
        todo = [(p, answers.seed_of(place + i)) for i, p in enumerate(asked) if p.id not in answers.rows]
        found += len(asked) - len(todo)
        run.completions.clear()
        _answer(parts, todo, answers, {**options, "run": run}, coloured, alone=len(first) == 1 and turn == 1)
        place, turn = place + len(asked), turn + 1
        asked = next_turn(asked, [answers.rows[prompt.id]["text"] for prompt in asked], turn)
    _print_closing(run, time.perf_counter() - start, found)


def _answer(
    parts: Parts,
    asked: Sequence[tuple[Prompt, int]],
    answers: Answers,
    options: Mapping[str, Any],
    coloured: bool,
    alone: bool,
) -> None:
    """Decodes prompts with these seeds; prints, keeps and writes each answer when it ends."""
    from ..data import append_row, open_journal
    from ..infer import generate

    prompts = [prompt for prompt, _ in asked]
    ids, seeds = prompt_ids(parts.target, prompts), [seed for _, seed in asked]
    stream = generate(parts.target, ids, head=parts.head, tree=parts.tree, row_seeds=seeds, synchronize=True, **options)
    # Answers that are printed to a terminal say themselves how far it is.
    bar = tqdm(total=len(prompts), desc="answering", unit=" prompts", disable=alone or interactive() or None)
    with open_journal(answers.path) if answers.path else nullcontext() as file, bar:
        for chunk in _printed(stream, prompts, parts.target.tokenizer, coloured, alone):
            if chunk.reason is not None:
                prompt = prompts[chunk.row]
                answers.rows[prompt.id] = answers.row(prompt, options["run"].completions[chunk.row])
                if file:
                    append_row(file, answers.rows[prompt.id])
                bar.update()


def _printed(
    stream: Iterator[Chunk], asked: Sequence[Prompt], tokenizer: Any, coloured: bool, alone: bool
) -> Iterator[Chunk]:
    """The chunks, printed: one prompt streams; of several, each answer is shown when it ends, under its id."""
    from .painting import ACCEPTED, Painter, legend

    console = out(coloured)
    painters = [Painter(tokenizer, ACCEPTED if coloured else "") for _ in asked]
    waiting = [Text(f"[{prompt.id}] ", end="\n\n") for prompt in asked]
    for chunk in stream:
        painted = painters[chunk.row].paint(chunk)
        if alone:
            console.print(painted, end="", soft_wrap=True)
        else:
            waiting[chunk.row].append_text(painted)
            if chunk.reason is not None:
                console.print(waiting[chunk.row], soft_wrap=True)
        yield chunk
    if alone and asked:
        console.print()
    if coloured and asked:
        console.print(legend((ACCEPTED, "drafted and accepted"), ("", "the target's own")))


def _print_closing(run: Run, seconds: float, found: int) -> None:
    stats = run.stats
    if found:
        note(f"{found} answers were in the file already")
    line = f"{stats.tokens} tokens in {seconds:.1f} s, {stats.tokens / seconds:.1f} tokens/s with the prefill"
    note(f"{line}; τ {stats.tau:.2f} over {stats.rounds} rounds" if stats.rounds else line)
