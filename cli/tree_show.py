"""``treedraft tree show``: a tree in the terminal, with what was measured of its nodes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from rich.table import Table
from rich.tree import Tree as Drawing
from typer import Argument, BadParameter, Option

from .console import out

if TYPE_CHECKING:
    import numpy as np

    from ..tree import Record, Tree

EXAMPLE = "Example: treedraft tree show runs/demo/heads/trees.json:8 --record runs/demo/ranks.safetensors"
HEADS = 8
"""For names such as best:8: as deep as any tree of a few nodes."""


def command(
    tree: Annotated[str, Argument(help="chain:4, best:8, medusa-63, FILE:8 (of tree search) or a tree file.")],
    record: Annotated[
        Path | None, Option(help="A file of treedraft tree record: shows how often each node is accepted.")
    ] = None,
) -> None:
    """Draw a static tree in the terminal: its candidates by rank and, with a record, the share of rounds that accept
    each of them, the mean accepted length and its interval."""
    from ..tree import DynamicTree, load_record, parse_tree

    shape = parse_tree(tree, HEADS)
    if isinstance(shape, DynamicTree):
        raise BadParameter(
            f"{tree} grows anew at each step, at most {shape.size} nodes and {shape.depth} levels: no one shape"
        )
    found = None if record is None else load_record(record)
    console = out()
    console.print(drawing(shape, None if found is None else node_shares(found, shape)))
    console.print(f"{shape.size} nodes with the root, {shape.depth} levels, at most {shape.width} candidates of a node")
    if found is not None:
        console.print(_figures(found, shape))


def node_shares(record: Record, tree: Tree) -> np.ndarray:
    """[N] the share of the walk's rounds that accept each node; the root's is 1."""
    import numpy as np

    from ..tree import walk

    walked = walk(record, tree)
    ranks = record.ranks.numpy()[walked.starts]
    accepted = walked.depths[walked.starts]
    shares = np.ones(tree.size)
    for node, path in enumerate(tree.paths):
        if path:
            shares[node] = np.mean((accepted >= len(path)) & (ranks[:, : len(path)] == path).all(1))
    return shares


def drawing(tree: Tree, shares: np.ndarray | None) -> Drawing:
    """The tree for the terminal; a bar shows how often a node is accepted."""
    drawn = [Drawing("root")]
    for node in range(1, tree.size):
        label = f"candidate {tree.ranks[node]}"
        if shares is not None:
            label += f"  {shares[node]:.1%} [cyan]{'█' * round(30 * shares[node])}[/]"
        drawn.append(drawn[tree.parents[node]].add(label))
    return drawn[0]


def _figures(record: Record, tree: Tree) -> Table:
    from ..tree import by_category, walk

    walked = walk(record, tree)
    low, high = walked.interval()
    table = Table(title=f"Predicted from {len(record.lengths)} answers, {sum(record.lengths):,} tokens")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_row("τ", f"{walked.tau:.3f}", style="bold")
    table.add_row("95 % interval", f"{low:.3f}-{high:.3f}")
    table.add_row("without loops", f"{walked.tau_without_loops:.3f}", end_section=True)
    for depth, share in enumerate(walked.accept_by_depth[1:], 1):
        table.add_row(f"rounds that accept at least {depth}", f"{share:.1%}")
    table.add_section()
    for category, tau in by_category(record, walked).items():
        table.add_row(f"τ of {category}", f"{tau:.3f}")
    return table
