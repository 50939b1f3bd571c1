"""``treedraft tree size``: how many nodes pay, on this machine or on paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import BadParameter, Option

from .console import note, out
from .options import Json
from .report import write_json
from .tree_cost import numbers

if TYPE_CHECKING:
    from ..tree import Choice

EXAMPLE = (
    "Example: treedraft tree size --trees runs/demo/heads/trees.json --costs costs.json; on paper: treedraft tree size "
    "--parameters 6.7e9 --weights fp16 --bandwidth 3.35e12 --flops 990e12 --acceptance 0.8 --draft-share 0.05"
)

TreesFile = Annotated[Path | None, Option("--trees", help="A file of treedraft tree search.")]
CostsFile = Annotated[Path | None, Option("--costs", help="A file of treedraft tree cost.")]


def command(
    trees: TreesFile = None,
    costs: CostsFile = None,
    batches: Annotated[str | None, Option(help="Batch sizes, separated by commas; by default those measured.")] = None,
    contexts: Annotated[str | None, Option(help="Tokens in the cache, likewise.")] = None,
    save: Annotated[Path | None, Option(help="Write the tree chosen for the first batch and context here.")] = None,
    parameters: Annotated[float | None, Option(help="On paper: weights that a forward reads.")] = None,
    weights: Annotated[str, Option(help="On paper: their number format.")] = "bf16",
    bandwidth: Annotated[float | None, Option(help="On paper: bytes read in a second.")] = None,
    flops: Annotated[float | None, Option(help="On paper: operations in a second.")] = None,
    acceptance: Annotated[float, Option(help="On paper: chance that a drafted token is accepted.")] = 0.8,
    draft_share: Annotated[
        float, Option(help="On paper: time to draft a token, as a share of a plain forward's.")
    ] = 0.05,
    json: Json = None,
) -> None:
    """Choose how many nodes pay: committed tokens per second are τ(N) over the time of a round with N nodes, for each
    batch size and context length. N = 1, not to draft, is among the choices, and said plainly if it is the best. With
    --parameters, --bandwidth and --flops instead of files: the bounds of a machine and a model on paper."""
    paper = (parameters, bandwidth, flops)
    if any(value is not None for value in paper):
        if trees or costs or not all(value is not None and value > 0 for value in paper):
            raise BadParameter("on paper it takes --parameters, --bandwidth and --flops, all positive, and no files")
        if not 0 <= acceptance <= 1 or draft_share < 0:
            raise BadParameter("--acceptance must lie in 0..1 and --draft-share not below 0")
        result = on_paper(parameters or 0.0, weights, bandwidth or 0.0, flops or 0.0, acceptance, draft_share)
    else:
        if not (trees and costs):
            raise BadParameter("name --trees and --costs, or --parameters, --bandwidth and --flops")
        result = measured(trees, costs, batches, contexts, save)
    if json:
        write_json(result, json)


def measured(trees: Path, costs: Path, batches: str | None, contexts: str | None, save: Path | None) -> dict[str, Any]:
    """Prints and gives the choice for each batch and context. Raises CostError for files of different heads."""
    from dataclasses import asdict

    from ..tree import CostError, best_choice, explained, load_costs, load_family, save_tree, sized

    family, table = load_family(trees), load_costs(costs)
    if family.heads and (family.heads, family.target) != (table.place.heads, table.place.target):
        raise CostError(f"{costs} was measured for other heads or another target than those of {trees}")
    rows = []
    for batch in numbers(batches, "batches") if batches else table.batches:
        for context in numbers(contexts, "contexts") if contexts else table.contexts:
            choices = sized(family, table, batch, context)
            out().print(_table(choices, batch, context))
            out().print(explained(choices)[:1].upper() + explained(choices)[1:] + ".", soft_wrap=True)
            best = best_choice(choices)
            rows.append(
                {
                    "batch": batch,
                    "context": context,
                    "nodes": best.nodes,
                    "why": explained(choices),
                    "choices": [asdict(choice) for choice in choices],
                }
            )
    if save:
        save_tree(family.tree(rows[0]["nodes"]), save)
        note(f"Wrote the tree of {rows[0]['nodes']} nodes to {save}")
    return {"machine": table.place.machine, "dtype": table.place.dtype, "sizes": rows}


def on_paper(
    parameters: float, weights: str, bandwidth: float, flops: float, acceptance: float, draft_share: float
) -> dict[str, Any]:
    """Prints and gives the bounds of a model and a machine."""
    from ..tree import BYTES, Roofline, best_chain, chain_speedup, chain_tokens

    if weights not in BYTES:
        raise BadParameter(f"--weights: expected one of {', '.join(BYTES)}, got {weights!r}")
    paper = Roofline(parameters, BYTES[weights], bandwidth, flops)
    best, gain = best_chain(paper, acceptance, draft_share)
    table = Table(title="Chains on paper")
    for title in ("γ", "tokens a round", "forward, ms", "speed-up", "tokens/s"):
        table.add_column(title, justify="right")
    plain = paper.forward(1)
    for drafted in sorted({0, 1, 2, 3, 4, 6, 8, 12, 16, best}):
        speedup = chain_speedup(paper, acceptance, drafted, draft_share)
        table.add_row(
            str(drafted),
            f"{chain_tokens(acceptance, drafted):.2f}",
            f"{1e3 * paper.forward(drafted + 1):.2f}",
            f"{speedup:.2f}",
            f"{speedup / plain:.0f}",
            style="bold" if drafted == best else None,
        )
    out().print(table)
    out().print(
        f"A forward takes at least {1e3 * plain:.2f} ms, so plain decoding at most {1 / plain:.0f} tokens/s; up to "
        f"{paper.free_nodes} positions cost no more. Best γ = {best}: {gain:.2f} times plain decoding, at most "
        f"{gain / plain:.0f} tokens/s.",
        soft_wrap=True,
    )
    return {
        "forward_seconds": plain,
        "free_nodes": paper.free_nodes,
        "best_drafted": best,
        "speedup": gain,
        "tokens_per_second": gain / plain,
    }


def _table(choices: Sequence[Choice], batch: int, context: int) -> Table:
    from ..tree import best_choice

    best = best_choice(choices)
    table = Table(title=f"{batch} rows, {context} tokens cached")
    for title in ("N", "τ", "95 % interval", "round, ms", "tokens/s", "gain"):
        table.add_column(title, justify="right")
    shown = [c for c in choices if c.nodes <= 8 or c.nodes % 4 == 0 or c is best]
    for choice in shown:
        low, high = choice.interval
        table.add_row(
            str(choice.nodes),
            f"{choice.tau:.2f}",
            f"{low:.2f}-{high:.2f}",
            f"{1e3 * choice.seconds:.1f}",
            f"{choice.speed:.1f}",
            f"{choice.gain:.2f}",
            style="bold" if choice is best else None,
        )
    return table
