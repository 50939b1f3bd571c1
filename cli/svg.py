"""Charts as SVG: text and shapes alone, readable without a script; ``data-tip`` is what the page shows on hover."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from .charts import COLOURS, DASHES, Bars, Chart, Diagram, Lines, layout, ticks

WIDTH, HEIGHT = 560, 330
LEFT, RIGHT, TOP, BOTTOM = 56, 14, 66, 58


def svg(chart: Chart) -> str:
    """The chart as an ``<svg>`` element."""
    if isinstance(chart, Lines):
        return _lines(chart)
    return _bars(chart) if isinstance(chart, Bars) else _diagram(chart)


def _lines(chart: Lines) -> str:
    xs = [x for line in chart.lines for x in line.xs]
    ys = [y for line in chart.lines for values in (line.ys, line.low, line.high) for y in values]
    ys += [chart.level[0]] if chart.level else []
    low, high = (0.0 if chart.from_zero else min(ys)), max(ys)
    pad = (high - low) * 0.06 or 0.1
    frame = _Frame(min(xs), max(xs), low if chart.from_zero else low - pad, high + pad)
    parts = [frame.axes(chart.x, chart.y)]
    if chart.level:
        y = frame.y(chart.level[0])
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="small" x="{WIDTH - RIGHT - 4}" y="{y - 5:.1f}" text-anchor="end">')
        parts.append(f"{escape(chart.level[1])}</text>")
    for i, line in enumerate(chart.lines):
        colour = COLOURS[i % len(COLOURS)]
        if line.low:
            band = [(x, v) for x, v in zip(line.xs, line.high, strict=True)]
            band += [(x, v) for x, v in zip(line.xs, line.low, strict=True)][::-1]
            points = " ".join(f"{frame.x(x):.1f},{frame.y(v):.1f}" for x, v in band)
            parts.append(f'<polygon points="{points}" fill="{colour}" opacity="0.15"/>')
        points = " ".join(f"{frame.x(x):.1f},{frame.y(v):.1f}" for x, v in zip(line.xs, line.ys, strict=True))
        dash = DASHES[i % len(DASHES)]
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        for j, (x, y) in enumerate(zip(line.xs, line.ys, strict=True)):
            tip = f"{line.label}: {chart.x} {x:g}, {chart.y} {y:.4g}{line.unit}"
            if line.low:
                tip += f" ({line.low[j]:.4g} to {line.high[j]:.4g})"
            if j == line.marked:
                parts.append(
                    f'<circle cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="7" fill="none" stroke="#000" '
                    f'stroke-width="2"/><text class="small halo" x="{frame.x(x):.1f}" y="{frame.y(y) - 13:.1f}" '
                    f'text-anchor="middle">chosen: {x:g}</text>'
                )
            parts.append(
                f'<circle class="point" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="3" fill="{colour}" '
                f'data-tip="{escape(tip)}" tabindex="0"><title>{escape(tip)}</title></circle>'
            )
    parts.append(_legend([line.label for line in chart.lines], DASHES))
    return _whole(chart.title, parts)


def _bars(chart: Bars) -> str:
    top = max([value for row in chart.values for value in row if value == value], default=1.0) * 1.1
    frame = _Frame(-0.5, len(chart.groups) - 0.5, 0.0, top)
    parts = [frame.axes("", chart.y, names=chart.groups)]
    slot = (WIDTH - LEFT - RIGHT) / max(len(chart.groups), 1)
    thick = min(slot * 0.8 / max(len(chart.series), 1), 60)
    for i, (label, row) in enumerate(zip(chart.series, chart.values, strict=True)):
        for j, (group, value) in enumerate(zip(chart.groups, row, strict=True)):
            if value != value:
                continue
            x = frame.x(j) + (i - len(chart.series) / 2) * thick
            written = f"{value:.1%}" if chart.percent else f"{value:.3g}"
            tip = f"{label}, {group}: {written}"
            parts.append(
                f'<rect class="point" x="{x:.1f}" y="{frame.y(value):.1f}" width="{thick - 1.5:.1f}" '
                f'height="{frame.y(0) - frame.y(value):.1f}" fill="{COLOURS[i % len(COLOURS)]}" '
                f'data-tip="{escape(tip)}" tabindex="0"><title>{escape(tip)}</title></rect>'
            )
            if thick > 22 and value > 0:
                written = f"{value:.0%}" if chart.percent else written
                parts.append(
                    f'<text class="small" x="{x + thick / 2:.1f}" y="{frame.y(value) - 4:.1f}" text-anchor="middle">'
                    f"{written}</text>"
                )
    parts.append(_legend(chart.series))
    return _whole(chart.title, parts)


def _diagram(chart: Diagram) -> str:
    places = layout(chart.parents)
    wide, deep = max(x for x, _ in places), max(d for _, d in places)
    slot = min((WIDTH - 60) / max(wide, 1), 90.0)
    left = (WIDTH - slot * wide) / 2
    down = (HEIGHT - 100) / max(deep, 1)
    spots = [(left + slot * x, 56 + down * d) for x, d in places]
    parts = []
    for node in range(1, len(spots)):
        (x1, y1), (x2, y2) = spots[chart.parents[node]], spots[node]
        share = chart.shares[node]
        tip = f"candidate {chart.ranks[node]} at depth {places[node][1]}: {share:.1%} of rounds accept it"
        above = chart.shares[chart.parents[node]]
        tip += f", {share / above:.1%} of those that accept its parent" if above else ""
        parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{COLOURS[0]}" '
            f'stroke-width="{1 + 12 * share:.1f}" stroke-linecap="round" class="point" data-tip="{escape(tip)}" '
            f'tabindex="0"><title>{escape(tip)}</title></line>'
        )
    crowded = slot < 34
    for node, (x, y) in enumerate(spots):
        label = "root" if node == 0 else str(chart.ranks[node])
        radius = min(9.0, slot * 0.47)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="node"/>')
        parts.append(f'<text x="{x:.1f}" y="{y + 3:.1f}" text-anchor="middle" class="tiny">{label[:4]}</text>')
        if node and not crowded:
            parts.append(
                f'<text class="small halo" x="{x:.1f}" y="{y + 22:.1f}" text-anchor="middle">'
                f"{chart.shares[node]:.0%}</text>"
            )
    return _whole(chart.title, parts)


class _Frame:
    """From values to places in the picture."""

    def __init__(self, left: float, right: float, low: float, high: float) -> None:
        self._left, self._right = left, right if right > left else left + 1
        self._low, self._high = low, high if high > low else low + 1

    def x(self, value: float) -> float:
        return LEFT + (value - self._left) / (self._right - self._left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self._low) / (self._high - self._low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x: str, y: str, names: Sequence[str] = ()) -> str:
        parts = []
        for value in ticks(self._low, self._high):
            at = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(f'<text class="small" x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value:g}</text>')
        below = HEIGHT - BOTTOM + 16
        if names:
            tilted = max(map(len, names)) * len(names) > 70
            for place, name in enumerate(names):
                at = self.x(place)
                turn = f' transform="rotate(-28 {at:.1f} {below})" text-anchor="end"' if tilted else ""
                anchor = "" if tilted else ' text-anchor="middle"'
                parts.append(f'<text class="small" x="{at:.1f}" y="{below}"{turn}{anchor}>{escape(name)}</text>')
        else:
            for value in ticks(self._left, self._right, 8):
                at = self.x(value)
                parts.append(f'<text class="small" x="{at:.1f}" y="{below}" text-anchor="middle">{value:g}</text>')
            middle = (LEFT + WIDTH - RIGHT) / 2
            parts.append(f'<text x="{middle}" y="{below + 17}" text-anchor="middle" class="small">{escape(x)}</text>')
        middle = (TOP + HEIGHT - BOTTOM) / 2
        turn = f'transform="rotate(-90 13 {middle:.0f})"' if len(y) > 2 else ""
        parts.append(f'<text class="small" x="13" y="{middle:.0f}" text-anchor="middle" {turn}>{escape(y)}</text>')
        return "".join(parts)


def _legend(labels: Sequence[str], dashes: Sequence[str] = ()) -> str:
    """Below the title, in as many lines as it takes; two have room."""
    parts, x, y = [], 8.0, 34
    for i, label in enumerate(labels):
        wide = 40 + 6.2 * len(label)
        if x + wide > WIDTH and x > 8:
            x, y = 8.0, y + 16
        dash, thick = (dashes[i % len(dashes)], 3) if dashes else ("", 9)
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 22:.0f}" y1="{y - 4}" y2="{y - 4}" stroke-width="{thick}" '
            f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-dasharray="{dash}"/>'
            f'<text class="small" x="{x + 27:.0f}" y="{y}">{escape(label)}</text>'
        )
        x += wide
    return "".join(parts)


def _whole(title: str, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text x="8" y="15" class="title">{escape(title)}</text>{"".join(parts)}</svg>'
    )
