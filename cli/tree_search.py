"""``treedraft tree search``: static trees of every size from a rank record."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from rich.table import Table
from typer import Option

from .console import out
from .options import Json
from .report import write_json

if TYPE_CHECKING:
    from ..tree import Family, Record, Tree

EXAMPLE = (
    "Example: treedraft tree search --record runs/demo/ranks.safetensors --out runs/demo/train/best/heads/trees.json"
)
COMPARED = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
CALIBRATED_ON = 8
"""Calibration is taken from the starts that the tree of so many nodes visits."""

RecordFile = Annotated[Path, Option("--record", help="A file of treedraft tree record.")]


def command(
    record: RecordFile,
    nodes: Annotated[int, Option(min=2, help="The largest tree, root included.")] = 64,
    depth: Annotated[int | None, Option(min=1, help="Most levels; by default all of the record's.")] = None,
    width: Annotated[int, Option(min=1, help="Most candidates of a node.")] = 10,
    out_file: Annotated[
        Path | None, Option("--out", help="The trees by size; as trees.json in a heads folder, --tree auto reads it.")
    ] = None,
    json: Json = None,
) -> None:
    """Find good static trees of every size from a record of ranks: built on every other answer, judged on the rest.
    Compares them with Medusa's greedy product, Sequoia's dynamic programme, the most frequent rank paths of all
    positions, and published trees. --tree FILE:8 takes the tree of 8 nodes."""
    from ..tree import Limits, RecordError, load_record, save_family

    found = load_record(record)
    if len(found.lengths) < 2:
        raise RecordError(f"{record} holds {len(found.lengths)} answers: half builds and half judges, it takes 2")
    limits = Limits(min(depth or found.origin.depth, found.origin.depth), width)
    build, judge = found.halves()
    family = search(build, judge, range(2, nodes + 1), limits)
    if not family.members:
        raise RecordError(f"{record}: no candidate of rank below {width} was ever right, so there is no tree to find")
    rivals = _rivals(build, [n for n in COMPARED if n <= nodes], limits)
    rows = compare_rows(build, judge, family, rivals)
    if out_file:
        save_family(family, out_file)
    out().print(_table(rows, found))
    if json:
        write_json({"rows": rows, "prompts_built": len(build.lengths), "prompts_judged": len(judge.lengths)}, json)


def search(build: Record, judge: Record, sizes: Sequence[int] | range, limits: Any) -> Family:
    """The trees found on ``build`` with what they do on ``judge``."""
    from ..tree import Family, Member, expected_acceptance, fit_record, found_trees, walk

    trees = found_trees(build, sizes, limits)
    members = {}
    for size, tree in trees.items():
        walked = walk(judge, tree)
        if tree.size == size:
            members[size] = Member(tree, walked.tau, walked.interval(), tuple(walked.accept_by_depth))
    typical = trees[min(trees, key=lambda n: abs(n - CALIBRATED_ON))]
    starts = walk(build, typical).starts
    return Family(
        members,
        expected_acceptance(build, starts, limits.width),
        fit_record(build, starts),
        build.origin.heads,
        build.origin.target,
        {
            **build.about,
            "prompts_built": len(build.lengths),
            "prompts_judged": len(judge.lengths),
            "depth": limits.depth,
            "width": limits.width,
        },
    )


def compare_rows(
    build: Record, judge: Record, family: Family, rivals: dict[int, dict[str, Tree]]
) -> list[dict[str, Any]]:
    """For each size the found tree and its rivals: tau on both halves, and the found tree's gain with its interval."""
    from ..tree import walk

    rows = []
    for size, trees in rivals.items():
        if size not in family.members:
            continue
        own = walk(judge, family.members[size].tree)
        for method, tree in {"found": family.members[size].tree, **trees}.items():
            judged = walk(judge, tree)
            rows.append(
                {
                    "nodes": size,
                    "method": method,
                    "depth": tree.depth,
                    "tau_build": walk(build, tree).tau,
                    "tau": judged.tau,
                    "interval": list(judged.interval()),
                    "tau_without_loops": judged.tau_without_loops,
                    "found_gain_interval": list(own.gain_interval(judged)),
                }
            )
    return rows


def _rivals(build: Record, sizes: Sequence[int], limits: Any) -> dict[int, dict[str, Tree]]:
    from ..tree import PUBLISHED, greedy_product_tree, position_tree, published_tree, sequoia_tree

    made: dict[int, dict[str, Tree]] = {}
    for size in sizes:
        trees = {
            "greedy product": greedy_product_tree(build, size, limits),
            "Sequoia": sequoia_tree(build, size, limits),
            "position average": position_tree(build, size, limits),
        }
        trees |= {name: published_tree(name, size, limits.depth) for name in PUBLISHED}
        made[size] = {name: tree for name, tree in trees.items() if tree.size == size}
    return made


def _table(rows: Sequence[dict[str, Any]], record: Record) -> Table:
    table = Table(title="Mean accepted length τ of static trees")
    for title in ("nodes", "τ built on", "τ judged", "95 % interval", "without loops", "found gains"):
        table.add_column(title, justify="right")
    table.columns[0].justify = "left"
    last = None
    for row in rows:
        if last not in (None, row["nodes"]):
            table.add_section()
        last = row["nodes"]
        low, high = row["interval"]
        gain = row["found_gain_interval"]
        own = row["method"] == "found"
        table.add_row(
            f"{row['nodes']} {row['method']}",
            f"{row['tau_build']:.3f}",
            f"{row['tau']:.3f}",
            f"{low:.2f}-{high:.2f}",
            f"{row['tau_without_loops']:.3f}",
            "" if own else f"{gain[0]:+.3f} to {gain[1]:+.3f}",
            style="bold" if own else None,
        )
    table.caption = (
        f"{len(record.lengths)} answers, {sum(record.lengths):,} tokens: every other one to build on, the rest to judge"
    )
    return table
