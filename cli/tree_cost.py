"""``treedraft tree cost``: what a round costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from typer import BadParameter, Option

from .console import out
from .costs import costs_file, place_of
from .options import DEFAULT_TARGET, SMALL_TREE, Adapter, Compile, DType, Heads, Target
from .parts import open_parts

if TYPE_CHECKING:
    from ..tree import CostTable

EXAMPLE = "Example: treedraft tree cost --heads runs/demo/train/best/heads --contexts 256,1024 --batches 1,4"

Contexts = Annotated[str, Option(help="Tokens in the cache, separated by commas.")]
Batches = Annotated[str, Option(help="Batch sizes, separated by commas.")]


def command(
    heads: Heads,
    target: Target = DEFAULT_TARGET,
    adapter: Adapter = None,
    nodes: Annotated[int, Option(min=1, help="The largest n of T(n).")] = 64,
    contexts: Contexts = "256,1024",
    batches: Batches = "1,4",
    repeats: Annotated[int, Option(min=1, help="Forwards of each size; the median counts.")] = 9,
    dtype: DType = "auto",
    compile: Compile = "auto",
    out_file: Annotated[
        Path | None, Option("--out", help="Where to keep the table; by default ~/.cache/treedraft/costs.")
    ] = None,
) -> None:
    """Measure what a round costs here: T(n) of the target for n = 1 to 64 new tokens at several context lengths and
    batch sizes, the draft by depth and width, and the fixed overhead. The table is kept for this machine and number
    format; treedraft tree size and dynamic trees with a schedule read it."""
    from tqdm import tqdm

    from ..infer import Plan, check_levels, machine, measure_costs, spread_nodes, versions
    from ..tree import save_costs

    lengths, rows = numbers(contexts, "contexts"), numbers(batches, "batches")
    parts = open_parts(target, heads, SMALL_TREE, dtype, adapter, compile, 10**6)
    if parts.head is not None:
        check_levels(parts.head, 1)
    place = place_of(parts.target, heads)
    fitting = tuple(n for n in lengths if n + nodes <= parts.target.context)
    if not fitting:
        raise BadParameter(f"no context of {contexts} leaves room for {nodes} nodes in {parts.target.context} tokens")
    plan = Plan(spread_nodes(nodes), fitting, rows, repeats)
    with tqdm(total=plan.steps, desc="cost", unit="forward", disable=None) as bar:
        table = measure_costs(parts.target, parts.head, place, plan, bar.update)
    about = {"heads": heads, "target": target, "repeats": repeats, "machine": machine(), "versions": versions()}
    table = type(table)(table.place, table.forwards, table.drafts, table.overhead, about)
    file = out_file or costs_file(place)
    save_costs(table, file)
    show_costs(table)
    out().print(f"Kept in {file}", soft_wrap=True)


def numbers(text: str, name: str) -> tuple[int, ...]:
    """Positive numbers separated by commas, ascending. Raises BadParameter."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) for part in parts):
        raise BadParameter(f"--{name}: expected numbers separated by commas, as in 1,4, got {text!r}")
    return tuple(sorted({int(part) for part in parts}))


def show_costs(table: CostTable) -> None:
    """T(n) in milliseconds, a column for each batch and context, with the draft and the rest below."""
    shown = Table(title="T(n): a forward over n new tokens of each row, ms")
    shown.add_column("n", justify="right")
    for line in table.forwards:
        shown.add_column(f"{line.batch} rows\n{line.context} cached", justify="right")
    for n in sorted({n for line in table.forwards for n in line.nodes}):
        times = [dict(zip(line.nodes, line.seconds, strict=True)).get(n) for line in table.forwards]
        shown.add_row(str(n), *("" if s is None else f"{1e3 * s:.1f}" for s in times))
    console = out()
    console.print(shown)
    for draft in table.drafts:
        steps = zip(draft.widths, draft.steps, strict=True)
        levels = ", ".join(f"{1e3 * s:.2f} ms for {w} nodes" for w, s in steps)
        console.print(f"Draft of {draft.batch} rows: {1e3 * draft.begin:.2f} ms, each further level {levels}.")
    for batch, seconds in table.overhead.items():
        console.print(f"All else in a round of {batch} rows: {1e3 * seconds:.2f} ms.")
    console.print(f"{table.place.machine}; {table.place.dtype}; {table.place.forward}.", soft_wrap=True)
