"""Charts as PNG files, by matplotlib (the extra ``report``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .charts import COLOURS, Bars, Chart, Diagram, Lines, layout

STYLES = ("-", "--", ":", "-.", (0, (8, 2)), (0, (4, 1)))


def can_draw() -> bool:
    return find_spec("matplotlib") is not None


def write_pngs(charts: Sequence[Chart], folder: Path) -> list[Path]:
    """One file a chart, each written whole or not at all."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    written = []
    for chart in charts:
        figure, axes = pyplot.subplots(figsize=(6.4, 3.8), layout="constrained")
        axes.set_title(chart.title, fontsize=10, loc="left")
        if isinstance(chart, Lines):
            _lines(axes, chart)
        elif isinstance(chart, Bars):
            _bars(axes, chart)
        else:
            _diagram(axes, chart)
        file = folder / f"{chart.name}.png"
        draft = file.with_name(f".{file.name}.{os.getpid()}")
        figure.savefig(draft, format="png", dpi=150)
        pyplot.close(figure)
        draft.replace(file)
        written.append(file)
    return written


def _lines(axes: Any, chart: Lines) -> None:
    for i, line in enumerate(chart.lines):
        colour = COLOURS[i % len(COLOURS)]
        axes.plot(line.xs, line.ys, STYLES[i % len(STYLES)], color=colour, marker=".", label=line.label)
        if line.low:
            axes.fill_between(line.xs, line.low, line.high, color=colour, alpha=0.15, linewidth=0)
        if line.marked is not None:
            x, y = line.xs[line.marked], line.ys[line.marked]
            axes.plot([x], [y], "o", markersize=11, markerfacecolor="none", color="black")
            axes.annotate(f"chosen: {x:g}", (x, y), (0, 9), textcoords="offset points", ha="center", fontsize=8)
    if chart.level:
        axes.axhline(chart.level[0], color="grey", linewidth=1, linestyle="--")
        axes.annotate(chart.level[1], (1, chart.level[0]), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.x)
    axes.set_ylabel(chart.y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _bars(axes: Any, chart: Bars) -> None:
    thick = 0.8 / max(len(chart.series), 1)
    for i, (label, row) in enumerate(zip(chart.series, chart.values, strict=True)):
        places = [j + (i - (len(chart.series) - 1) / 2) * thick for j in range(len(row))]
        axes.bar(places, row, thick * 0.95, label=label, color=COLOURS[i % len(COLOURS)])
    tilted = max(map(len, chart.groups), default=0) * len(chart.groups) > 70
    axes.set_xticks(range(len(chart.groups)), chart.groups, rotation=28 if tilted else 0, fontsize=8)
    axes.set_ylabel(chart.y)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=8)


def _diagram(axes: Any, chart: Diagram) -> None:
    places = layout(chart.parents)
    for node in range(1, len(places)):
        (x1, d1), (x2, d2) = places[chart.parents[node]], places[node]
        axes.plot([x1, x2], [-d1, -d2], color=COLOURS[0], linewidth=1 + 9 * chart.shares[node], zorder=1)
    crowded = max(x for x, _ in places) > 14
    for node, (x, depth) in enumerate(places):
        axes.scatter([x], [-depth], s=130, color="white", edgecolors="black", zorder=2)
        axes.text(x, -depth, "r" if node == 0 else str(chart.ranks[node]), ha="center", va="center", fontsize=7)
        if node and not crowded:
            axes.text(x, -depth - 0.2, f"{chart.shares[node]:.0%}", ha="center", va="top", fontsize=7)
    axes.margins(0.12)
    axes.axis("off")
