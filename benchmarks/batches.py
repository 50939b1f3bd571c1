"""Batches: tokens per second of plain decoding and of a tree by the number of rows, and where drafting stops paying.

    python benchmarks/batches.py --heads examples/smollm2-135m/eagle3 --prompts prompts.jsonl --limit 16

Every batch size decodes the same prompts, once plainly and once with the tree, in turns; a row that ends gives its
place to the next prompt. Peak memory is that of the process over the size it had after its imports.
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from treedraft.cli.parts import Parts, open_parts, prompt_ids, read_some_prompts
from treedraft.infer import Run, complete, machine, versions

SIZES = (1, 2, 4, 8, 16)


def decode(parts: Parts, ids: list[list[int]], rows: int, tokens: int, drafting: bool) -> tuple[Run, float, float]:
    """Seconds in all and seconds of prefill."""
    run, start = Run(), time.perf_counter()
    head, tree = (parts.head, parts.tree) if drafting else (None, None)
    complete(parts.target, ids, head=head, tree=tree, max_new_tokens=tokens, batch_size=rows, run=run)
    return run, time.perf_counter() - start, run.stats.phase_seconds["prefill"]


def main(
    heads: Annotated[str, typer.Option(help="Folder of trained heads, or what else drafts.")],
    prompts: Annotated[Path, typer.Option(help="JSONL file of prompts.")],
    target: Annotated[str, typer.Option(help="Hub id, local folder or smollm2-135m.")] = "smollm2-135m",
    tree: Annotated[str, typer.Option(help="As in treedraft bench.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16, fp16 or int8.")] = "auto",
    limit: Annotated[int, typer.Option(help="Prompts.")] = 16,
    every: Annotated[int, typer.Option(help="Use every n-th prompt.")] = 1,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens of each.")] = 64,
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    parts = open_parts(target, heads, tree, dtype, compile="on")
    assert parts.tree is not None
    ids = prompt_ids(parts.target, read_some_prompts(prompts, "first", limit, every))
    for drafting in (False, True):
        decode(parts, ids[:1], 1, 16, drafting)  # warm-up
    names = ("rows", "plain, tokens/s", "tree, tokens/s", "tree / plain", "without prefill", "τ", "peak memory, MiB")
    table = Table(*names)
    pays = []
    for rows in SIZES:
        shown, rates = [], []
        for drafting in (False, True):
            run, seconds, prefill = decode(parts, ids, rows, max_new_tokens, drafting)
            shown.append(run.stats.tokens / seconds)
            rates.append((run.stats.tokens - len(ids)) / (seconds - prefill))
        if rates[1] > rates[0]:
            pays.append(rows)
        peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
        parted = f"{shown[1] / shown[0]:.2f}", f"{rates[1] / rates[0]:.2f}"
        table.add_row(str(rows), *(f"{rate:.1f}" for rate in shown), *parted, f"{run.stats.tau:.2f}", f"{peak:,.0f}")
    console = Console()
    console.print(f"{target}, {parts.target.number_format}, heads {heads}, tree of {parts.tree.size} nodes")
    console.print(f"{len(ids)} prompts x {max_new_tokens} tokens, greedy", machine(), versions())
    console.print(table)
    most = f"pays up to {max(pays)} rows" if pays else "does not pay at any of these sizes"
    console.print(f"Drafting {most} (decoding alone, prefill left out).")


if __name__ == "__main__":
    typer.run(main)
