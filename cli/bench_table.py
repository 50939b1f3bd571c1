"""The bench result as a person reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

from .console import out

TITLES = {"hf_generate": "Hugging Face generate", "plain": "treedraft, no heads", "tree": "treedraft, tree"}
PARTS = {
    "draft": "draft",
    "matrices": "forward: matrices",
    "attention": "forward: attention",
    "rest": "forward: other operations, Python",
    "verify": "verify",
    "commit": "commit",
    "other": "between rounds",
}
OTHERS = {"tree_vs_hf_generate": "Hugging Face generate", "tree_vs_plain": "treedraft without heads"}


def show(result: Mapping[str, Any]) -> None:
    """Prints the tables, the ratios and whether the modes wrote the same text."""
    console = out()
    modes = result["modes"]
    console.print(_speeds(modes))
    if any("phase_seconds" in figures for figures in modes.values()):
        console.print(_phases(modes))
    if result.get("profile"):  # Hugging Face alone has none
        console.print(_profile(result["profile"]))
    for name, ratio in result["ratio"].items():
        console.print(_gain(OTHERS[name], ratio), soft_wrap=True)
    same = result["identical"]
    console.print(
        f"Same text in {', '.join(TITLES[mode] for mode in same['modes'])}: {same['equal']} of {same['rows']} prompts; "
        f"parted at a near-tie of the target: {same['near_ties']}; different: {same['different']}.",
        style="bold red" if same["different"] else None,
        soft_wrap=True,
    )


def _gain(other: str, ratio: float) -> str:
    if ratio < 1:
        return f"[bold red]Drafting loses: {ratio:.2f} times the speed of {other}.[/]"
    return f"The tree decodes at [bold]{ratio:.2f}[/] times the speed of {other}."


def _speeds(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(title="Tokens per second")
    table.add_column("", no_wrap=True)
    for title in ("with\nprefill", "without\nprefill", "first\ntoken", "spread over\nrepeats", "τ"):
        table.add_column(title, justify="right")
    for name, figures in modes.items():
        table.add_row(
            TITLES[name],
            f"{figures['tokens_per_second']:.1f}",
            f"{figures['tokens_per_second_decode']:.1f}",
            f"{1e3 * figures['time_to_first_token']:.0f} ms",
            f"{figures['spread']:.0%}",
            "" if figures.get("tau") is None else f"{figures['tau']:.2f}",
        )
    return table


def _phases(modes: Mapping[str, Mapping[str, Any]]) -> Table:
    counted = {name: figures["phase_seconds"] for name, figures in modes.items() if "phase_seconds" in figures}
    table = Table(title="Where the time goes")
    table.add_column("", no_wrap=True)
    for phase in next(iter(counted.values())):
        table.add_column(phase, justify="right")
    for name, seconds in counted.items():
        total = sum(seconds.values()) or 1.0
        table.add_row(TITLES[name], *(f"{part / total:.0%}" for part in seconds.values()))
    return table


def _profile(found: Mapping[str, Mapping[str, Any]]) -> Table:
    able = next(iter(found.values()))
    table = Table(title="Milliseconds of a round")
    table.add_column("")
    for mode, figures in found.items():
        table.add_column(f"{TITLES[mode]}\nn = {figures['nodes']}", justify="right")
    for part, title in PARTS.items():
        table.add_row(title, *(f"{figures['ms'][part]:.1f}" for figures in found.values()))
    table.add_section()
    table.add_row("all", *(f"{figures['ms']['round']:.1f}" for figures in found.values()), style="bold")
    table.add_row("a forward's least here", *(f"{figures['floor_ms']:.1f}" for figures in found.values()))
    table.caption = (
        f"{able['gb_per_second']:.1f} GB/s and {able['gflops_per_second']:,.0f} GFLOP/s measured; a forward reads "
        f"{able['weights_mb']:,.0f} MB of weights"
    )
    return table
