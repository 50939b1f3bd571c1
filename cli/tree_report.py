"""``treedraft tree report``: a page to look at, and its charts as PNG files."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import BadParameter, Option

from .charts import Bars, Chart, Diagram, Line, Lines
from .console import note, out
from .tree_show import node_shares

if TYPE_CHECKING:
    from ..tree import Choice, CostTable, Family, Record, Tree

EXAMPLE = "Example: treedraft tree report --record runs/demo/ranks.safetensors --nodes 8 --out runs/demo/report"
LARGEST = 32


@dataclass(frozen=True)
class Series:
    """One record with the trees found on half of it, and what it is called in the report."""

    label: str
    record: Record
    judge: Record
    family: Family
    costs: CostTable | None

    def choices(self) -> list[Choice]:
        from ..tree import sized

        return (
            [] if self.costs is None else sized(self.family, self.costs, self.costs.batches[0], self.costs.contexts[0])
        )


def command(
    records: Annotated[
        list[Path], Option("--record", help="A file of treedraft tree record; repeat to compare heads.")
    ],
    out_dir: Annotated[Path, Option("--out", help="Folder for index.html and the PNG files.")],
    labels: Annotated[
        list[str] | None, Option("--label", help="What to call each record; by default the heads' folder.")
    ] = None,
    costs: Annotated[
        list[Path] | None, Option("--costs", help="A file of treedraft tree cost for each record, in their order.")
    ] = None,
    runs: Annotated[
        list[str] | None,
        Option("--run", help="NAME=FILE, a JSON file of treedraft bench: measured side by side, static and dynamic."),
    ] = None,
    trees: Annotated[
        list[str] | None, Option("--tree", help="A tree to draw besides the one found; repeat to compare several.")
    ] = None,
    nodes: Annotated[
        int | None, Option(min=2, help="Draw the tree of so many nodes; by default the one that pays, or 8.")
    ] = None,
    largest: Annotated[int, Option(min=2, help="The largest tree to search.")] = LARGEST,
    png: Annotated[bool, Option("--png/--no-png", help="Also write the charts as PNG (the extra report).")] = True,
) -> None:
    """Write a page that works offline: the tree with acceptance on every edge, τ and tokens/s by number of nodes with
    the chosen size, T(n), acceptance by depth and by category, static against dynamic; several heads or trees side by
    side. Hover for the numbers."""
    from ..tree import write_atomically
    from .png import can_draw, write_pngs
    from .report_page import page

    measured = [_run(text) for text in runs or ()]
    made = _series(records, labels or [], costs or [], largest)
    charts = report_charts(made, trees or [], nodes, measured)
    out_dir.mkdir(parents=True, exist_ok=True)
    write_atomically(page(charts, made, measured), out_dir / "index.html")
    out().print(f"{out_dir / 'index.html'}: {len(charts)} charts of {len(made)} heads", soft_wrap=True)
    if png and can_draw():
        out().print(f"{len(write_pngs(charts, out_dir))} PNG files beside it")
    elif png:
        note("No PNG files: they need matplotlib, pip install 'treedraft[report]'")


def _series(records: Sequence[Path], labels: Sequence[str], costs: Sequence[Path], largest: int) -> list[Series]:
    """Raises RecordError or CostError, BadParameter where labels or costs do not go with the records."""
    from ..tree import CostError, Limits, RecordError, load_costs, load_record
    from .tree_search import search

    for option, given in (("--label", labels), ("--costs", costs)):
        if given and len(given) != len(records):
            raise BadParameter(
                f"{len(given)} of {option} for {len(records)} records: name one for each, in their order"
            )
    made = []
    for i, file in enumerate(records):
        record = load_record(file)
        if len(record.lengths) < 2:
            raise RecordError(f"{file} holds {len(record.lengths)} answers: half builds and half judges, it takes 2")
        build, judge = record.halves()
        table = load_costs(costs[i]) if costs else None
        if table is not None and (table.place.heads, table.place.target) != (record.origin.heads, record.origin.target):
            raise CostError(f"{costs[i]} was measured for other heads or another target than {file}")
        family = search(build, judge, range(2, largest + 1), Limits(record.origin.depth))
        if not family.members:
            raise RecordError(f"{file}: no candidate was ever right, so there is no tree to show")
        name = labels[i] if labels else Path(str(record.about.get("heads", file.stem))).name
        made.append(Series(name, record, judge, family, table))
    return made


def report_charts(
    made: Sequence[Series], trees: Sequence[str], nodes: int | None, measured: Sequence[tuple[str, dict[str, Any]]]
) -> list[Chart]:
    """Everything that the report shows, in order. Raises TreeError for trees that are none."""
    from ..tree import Tree, by_category, parse_tree, walk

    named: list[tuple[str, Series, Tree]] = []
    for series in made:
        size = nodes or _paying(series)
        size = min(series.family.members, key=lambda n: abs(n - size))
        named.append((f"{series.label}, {size} nodes", series, series.family.tree(size)))
        for spec in trees:
            shape = parse_tree(spec, series.record.origin.depth)
            if not isinstance(shape, Tree):
                raise BadParameter(
                    f"--tree {spec} grows anew at each step: measure it with treedraft bench, give --run"
                )
            named.append((f"{series.label}, {Path(spec).name}", series, shape))
    walks = [walk(series.judge, tree) for _, series, tree in named]
    charts: list[Chart] = [
        Diagram(f"tree-{i}", f"{name}: rounds that accept each candidate", tree.parents, tree.ranks,
                node_shares(series.judge, tree).tolist())
        for i, (name, series, tree) in enumerate(named, 1)
    ]  # fmt: skip
    charts.append(Lines("tau", "Mean accepted length by number of nodes", "N", "τ", [_tau(s) for s in made]))
    if any(series.costs for series in made):
        charts.append(_speed(made))
        charts.append(_forward(made))
    deepest = max(len(walked.accept_by_depth) for walked in walks)
    shares = [[*w.accept_by_depth[1:], *[0.0] * (deepest - len(w.accept_by_depth))] for w in walks]
    names = [name for name, _, _ in named]
    depths = [f"depth {d}" for d in range(1, deepest)]
    charts.append(Bars("depth", "Rounds that accept at least so many", "share", depths, names, shares, percent=True))
    categories = sorted({c for series in made for c in series.judge.categories})
    found = [by_category(series.judge, walked) for (_, series, _), walked in zip(named, walks, strict=True)]
    taus = [[row.get(c, float("nan")) for c in categories] for row in found]
    charts.append(Bars("category", "Mean accepted length by category", "τ", categories, names, taus))
    if measured:
        charts += _measured(measured)
    return charts


def _paying(series: Series) -> int:
    from ..tree import best_choice

    choices = [choice for choice in series.choices() if choice.nodes > 1]
    return best_choice(choices).nodes if choices else 8


def _tau(series: Series) -> Line:
    members = [series.family.members[n] for n in sorted(series.family.members)]
    choices = series.choices()
    chosen = None
    if choices:
        from ..tree import best_choice

        best = best_choice(choices).nodes
        chosen = next((i for i, m in enumerate(members) if m.tree.size == best), None)
    low, high = ([m.interval[end] for m in members] for end in (0, 1))
    return Line(series.label, [m.tree.size for m in members], [m.tau for m in members], low, high, chosen)


def _speed(made: Sequence[Series]) -> Lines:
    from ..tree import best_choice

    lines, plain = [], 0.0
    for series in made:
        choices = series.choices()
        if choices:
            plain = plain or choices[0].speed
            xs, ys = [c.nodes for c in choices], [c.speed for c in choices]
            low, high = ([c.speed * c.interval[end] / c.tau for c in choices] for end in (0, 1))
            lines.append(Line(series.label, xs, ys, low, high, choices.index(best_choice(choices)), " tokens/s"))
    return Lines(
        "speed", "Predicted speed by number of nodes", "N", "tokens/s", lines, (plain, "plain decoding, N = 1")
    )


def _forward(made: Sequence[Series]) -> Lines:
    table = next(series.costs for series in made if series.costs)
    lines = [
        Line(f"{f.batch} rows, {f.context} cached", f.nodes, [1e3 * s for s in f.seconds], unit=" ms")
        for f in table.forwards
    ]
    return Lines("forward", "T(n): a forward over n new tokens of each row", "n", "ms", lines, from_zero=True)


def _run(text: str) -> tuple[str, dict[str, Any]]:
    """Raises BadParameter unless it is NAME=FILE with a result of bench."""
    name, equals, file = text.partition("=")
    if not (name and equals):
        raise BadParameter(f"--run: expected NAME=FILE, got {text!r}")
    content = json_format.loads(Path(file).read_text())
    if "tree" not in content.get("modes", {}):
        raise BadParameter(f"--run: {file} is no result of treedraft bench with a tree")
    return name, content


def _measured(measured: Sequence[tuple[str, dict[str, Any]]]) -> list[Chart]:
    """Speed and tau of bench runs beside plain decoding of the same runs."""
    names = [name for name, _ in measured]
    modes = [content["modes"] for _, content in measured]
    speeds = [[mode["tree"]["tokens_per_second_decode"] for mode in modes]]
    series = ["tree"]
    if all("plain" in mode for mode in modes):
        speeds.append([mode["plain"]["tokens_per_second_decode"] for mode in modes])
        series.append("no heads, same run")
    return [
        Bars("measured-speed", "Measured: tokens a second without the prefill", "tokens/s", names, series, speeds),
        Bars(
            "measured-tau", "Measured: mean accepted length", "τ", names, ["tree"], [[m["tree"]["tau"] for m in modes]]
        ),
    ]
