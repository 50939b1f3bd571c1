"""``treedraft prepare``: what data files become before they are trained on."""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.table import Table
from typer import Option

from .console import out, quiet_transformers
from .options import DEFAULT_TARGET, Json, Target
from .report import write_json

if TYPE_CHECKING:
    from ..data import Encoded, Summary

EXAMPLE = "Example: treedraft prepare --data chats.jsonl --target smollm2-135m --show 3"


def command(
    data: Annotated[list[str], Option(help="JSONL, JSON or Parquet file, datasets folder or hub id; may be repeated.")],
    target: Target = DEFAULT_TARGET,
    max_length: Annotated[int, Option(min=2, help="Rows are cut to this many tokens.")] = 2048,
    split: Annotated[str | None, Option(help="Split of a datasets folder or hub id.")] = None,
    answers: Annotated[
        Literal["all", "last"], Option(help="Assistant turns that are supervised: all, or the last alone.")
    ] = "all",
    max_repeat_share: Annotated[
        float, Option(min=0, max=1, help="Leave out answers of distill that repeat more of their word 4-grams.")
    ] = 0.5,
    show: Annotated[int, Option(min=0, help="Print the first so many rows, supervised tokens coloured.")] = 0,
    json: Json = None,
) -> None:
    """Read conversations as training does: through the target's own chat template to tokens and a mask of the tokens
    that are supervised. Prints how many rows were read, used and skipped, and why. Loads the target's tokenizer, not
    its weights, and writes nothing unless told to."""
    from ..data import prepare, read_rows
    from ..infer import load_tokenizer, versions

    sources = [read_rows(source, split) for source in data]  # missing files are refused before the tokenizer is loaded
    quiet_transformers()
    tokenizer = load_tokenizer(target)
    rows, summary = prepare(chain.from_iterable(sources), tokenizer, max_length, answers, max_repeat_share)
    _show_rows(rows, tokenizer, show)
    out().print(_table(summary))
    if json:
        settings = {"target": target, "data": data, "split": split, "answers": answers}
        settings["max_repeat_share"] = max_repeat_share
        write_json({**summary.to_dict(), "settings": settings, "versions": versions()}, json)


def _show_rows(rows: list[Encoded], tokenizer: Any, count: int) -> None:
    from ..data import show
    from .painting import SUPERVISED, UNSUPERVISED, legend

    console = out()
    for row in islice(rows, count):
        cut = ", cut" if row.truncated else ""
        console.print(f"{row.id}: {len(row.ids)} tokens, {sum(row.mask)} supervised{cut}", style="bold", markup=False)
        console.print(show(row, tokenizer), soft_wrap=True)
        console.print()
    if count:
        console.print(legend((SUPERVISED, "supervised"), (UNSUPERVISED, "prompt, not supervised")))


def _table(summary: Summary) -> Table:
    table = Table(show_header=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column()
    table.add_row("rows read", f"{summary.read:,}", "")
    table.add_row("rows used", f"{summary.used:,}", f"{summary.truncated:,} cut at {summary.max_length:,} tokens")
    for kind, reasons in (("skipped", summary.skipped), ("note", summary.notes)):
        for reason, names in reasons.items():
            some = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            table.add_row(kind, f"{len(names):,}", f"{reason} ({some})")
    table.add_row("tokens", f"{summary.tokens:,}", "")
    table.add_row("supervised tokens", f"{summary.supervised:,}", f"{summary.supervised / summary.tokens:.0%} of all")
    return table
