"""The bench result as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .console import out

TITLES = {"hf_generate": "Hugging Face generate", "plain": "treedraft, no heads", "tree": "treedraft, tree"}
OTHERS = {"tree_vs_hf_generate": "Hugging Face generate", "tree_vs_plain": "treedraft without heads"}


def show(result: Mapping[str, Any]) -> None:
    """Prints the table, the ratios and whether the modes wrote the same text."""
    console = out()
    console.print(_table(result["modes"]))
    for name, ratio in result["ratio"].items():
        console.print(_gain(OTHERS[name], ratio))
    same = result["identical"]
    console.print(
        f"Same text in {', '.join(same['modes'])}: {same['equal']} of {same['rows']} prompts; "
        f"parted at a near-tie of the target: {same['near_ties']}; different: {same['different']}",
        style="bold red" if same["different"] else None,
    )


def _gain(other: str, ratio: float) -> str:
    if ratio < 1:
        return f"[bold red]Drafting loses: {ratio:.2f} times the speed of {other}.[/]"
    return f"The tree decodes at [bold]{ratio:.2f}[/] times the speed of {other}."


def _table(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="Tokens per second, one prompt at a time")
    table.add_column("mode")
    for title in ("tok/s", "tok/s after\nthe prefill", "first\ntoken", "spread", "τ"):
        table.add_column(title, justify="right")
    table.add_column("where the time goes")
    for name, figures in modes.items():
        table.add_row(
            TITLES[name],
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['tokens_per_second_decode']:.1f}",
            f"{1e3 * figures['time_to_first_token']:.0f} ms",
            f"{figures['spread']:.0%}",
            "" if figures.get("tau") is None else f"{figures['tau']:.2f}",
            _phases(figures.get("phase_seconds", {})),
        )
    return table


def _phases(seconds: Mapping[str, float]) -> str:
    total = sum(seconds.values())
    return ", ".join(f"{name} {part / total:.0%}" for name, part in seconds.items()) if total else ""
