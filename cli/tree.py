"""``treedraft tree``: the commands that find, size and show trees."""

from __future__ import annotations

import typer

from . import tree_cost, tree_record, tree_report, tree_search, tree_show, tree_size

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Find the tree that pays here: record ranks once, search, measure costs, choose the size, look.",
)
for name, module in (
    ("record", tree_record),
    ("search", tree_search),
    ("cost", tree_cost),
    ("size", tree_size),
    ("show", tree_show),
    ("report", tree_report),
):
    paragraph = " ".join((module.command.__doc__ or "").split())
    app.command(
        name=name,
        help=paragraph,
        short_help=paragraph.partition(". ")[0].partition(": ")[0] + ".",
        epilog=module.EXAMPLE,
    )(module.command)
