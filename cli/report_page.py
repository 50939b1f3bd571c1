"""The report's page: one HTML file with its style, its charts and a few lines of script; nothing is fetched."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from .charts import Chart
from .svg import svg

if TYPE_CHECKING:
    from .tree_report import Series

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #111; background: #fff; margin: 0 auto; max-width: 1220px;
  padding: 24px; }
h1 { font-size: 24px; margin: 0 0 4px; } h2 { font-size: 18px; margin: 28px 0 8px; }
p.what { color: #444; margin: 0 0 16px; }
.verdict { border-left: 5px solid #0072B2; background: #f2f7fb; padding: 8px 14px; margin: 8px 0; }
.verdict.no { border-color: #D55E00; background: #fdf4ee; }
.tables { display: flex; flex-wrap: wrap; gap: 0 48px; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(480px, 1fr)); gap: 18px; }
figure { background: #fff; margin: 0; border: 1px solid #ddd; border-radius: 6px; padding: 8px; break-inside: avoid; }
svg { width: 100%; height: auto; display: block; font-family: inherit; font-size: 13px; }
svg .title { font-weight: 600; font-size: 14px; }
svg .small { font-size: 11.5px; fill: #333; } svg .tiny { font-size: 8.5px; }
svg .grid { stroke: #e3e3e3; } svg .level { stroke: #555; stroke-dasharray: 5 4; }
svg .halo { paint-order: stroke; stroke: #fff; stroke-width: 3.5px; }
svg .node { fill: #fff; stroke: #222; stroke-width: 1.3; }
svg .point:hover, svg .point:focus { stroke: #000; stroke-width: 2.5; outline: none; }
svg line.point:hover, svg line.point:focus { stroke: #D55E00; stroke-width: 9; }
table { border-collapse: collapse; margin: 8px 0; font-variant-numeric: tabular-nums; }
th, td { padding: 3px 12px; border-bottom: 1px solid #ddd; text-align: right; }
th:first-child, td:first-child { text-align: left; }
#tip { position: fixed; display: none; background: #111; color: #fff; padding: 4px 9px; border-radius: 4px;
  font-size: 13px; pointer-events: none; max-width: 340px; z-index: 9; }
footer { margin-top: 28px; color: #555; font-size: 13px; overflow-wrap: anywhere; }
@media print { body { max-width: none; padding: 0; font-size: 11px; } #tip { display: none !important; }
  .charts { grid-template-columns: 1fr 1fr; gap: 8px; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; } }
"""
SCRIPT = """
const tip = document.getElementById('tip');
function show(target, x, y) {
  tip.textContent = target.dataset.tip; tip.style.display = 'block';
  tip.style.left = Math.min(x + 14, innerWidth - tip.offsetWidth - 8) + 'px';
  tip.style.top = Math.max(y - tip.offsetHeight - 10, 4) + 'px';
}
for (const point of document.querySelectorAll('[data-tip]')) {
  const own = point.querySelector('title'); if (own) own.remove();
  point.setAttribute('aria-label', point.dataset.tip);
  point.addEventListener('mousemove', event => show(point, event.clientX, event.clientY));
  point.addEventListener('focus', () => { const box = point.getBoundingClientRect(); show(point, box.x, box.y); });
  for (const event of ['mouseleave', 'blur']) point.addEventListener(event, () => { tip.style.display = 'none'; });
}
"""


def page(charts: Sequence[Chart], made: Sequence[Series], measured: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """The whole file."""
    figures = "\n".join(f'<figure id="{chart.name}">{svg(chart)}</figure>' for chart in charts)
    verdicts = "".join(_verdict(series) for series in made)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>Trees of candidates</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body>\n<h1>Trees of candidates</h1>\n"
        '<p class="what">N counts the root; N = 1 is plain decoding. τ is the mean accepted length: tokens kept from '
        "decode rounds over rounds. Trees are found on every other prompt of a record and judged on the rest, by the "
        "walk that decoding takes; bands are 95 % bootstrap intervals over prompts.</p>\n"
        f"{verdicts}<div class='charts'>\n{figures}\n</div>\n{_sizes(made)}{_runs(measured)}{_footer(made)}"
        f'<div id="tip" role="tooltip"></div><script>{SCRIPT}</script></body></html>\n'
    )


def _verdict(series: Series) -> str:
    from ..tree import best_choice, explained

    choices = series.choices()
    if not choices:
        return f'<p class="verdict">{escape(series.label)}: no cost table was given, so no size is chosen.</p>\n'
    pays = best_choice(choices).nodes > 1
    costs = series.costs
    assert costs is not None
    where = f"{costs.batches[0]} row(s), {costs.contexts[0]} tokens cached"
    kind = "verdict" if pays else "verdict no"
    return f'<p class="{kind}">{escape(series.label)} ({where}): {escape(explained(choices))}.</p>\n'


def _sizes(made: Sequence[Series]) -> str:
    parts = []
    for series in made:
        speeds = {choice.nodes: choice for choice in series.choices()}
        rows = []
        for size, member in sorted(series.family.members.items()):
            if size <= 8 or size % 4 == 0:
                low, high = member.interval
                found = speeds.get(size)
                speed = "" if found is None else f"<td>{1e3 * found.seconds:.1f}</td><td>{found.speed:.1f}</td>"
                rows.append(f"<tr><td>{size}</td><td>{member.tau:.3f}</td><td>{low:.2f} to {high:.2f}</td>{speed}</tr>")
        more = "<th>round, ms</th><th>tokens/s</th>" if speeds else ""
        parts.append(
            f"<section><h2>{escape(series.label)}: found trees</h2>"
            f"<table><tr><th>N</th><th>τ</th><th>95 % interval</th>{more}</tr>"
            f"{''.join(rows)}</table></section>\n"
        )
    return f'<div class="tables">{"".join(parts)}</div>'


def _runs(measured: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Measured runs in full: speed of both modes, tau, shares of draft and verify, spread; a loss is named."""
    if not measured:
        return ""
    rows = []
    for name, content in measured:
        tree, plain = content["modes"]["tree"], content["modes"].get("plain")
        spent = tree["phase_seconds"]
        total = sum(spent.values()) or 1.0
        settings = content["settings"]
        ratio = content["ratio"].get("tree_vs_plain")
        verdict = "" if ratio is None else f"{ratio:.2f} times" + (", drafting loses" if ratio < 1 else "")
        cells = [
            f"{tree['tokens_per_second']:.1f}",
            "" if plain is None else f"{plain['tokens_per_second']:.1f}",
            verdict,
            f"{tree['tau']:.2f}",
            f"{spent['draft'] / total:.0%}",
            f"{spent['forward'] / total:.0%}",
            f"{spent['verify'] / total:.1%}",
            f"{tree['spread']:.0%}",
            f"{settings['dtype']}, {settings['attention']}, batch {settings['batch_size']}",
            str(settings["prompts_decoded"]),
        ]
        rows.append(f"<tr><td>{escape(name)}</td>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>")
    titles = (
        "run",
        "tokens/s",
        "no heads",
        "against no heads",
        "τ",
        "draft",
        "forward",
        "verify",
        "spread",
        "settings",
    )
    head = "".join(f"<th>{title}</th>" for title in (*titles, "prompts"))
    return f"<h2>Measured runs</h2><table><tr>{head}</tr>{''.join(rows)}</table>\n"


def _footer(made: Sequence[Series]) -> str:
    lines = []
    for series in made:
        about, origin = series.record.about, series.record.origin
        lines.append(
            f"{series.label}: {about.get('kind')} heads {origin.heads} on {about.get('target')}, "
            f"{len(series.record.lengths)} answers, {sum(series.record.lengths):,} tokens, {origin.dtype}, "
            f"{about.get('forward')}, temperature {origin.sampling.get('temperature', 0)}, seed {origin.seed}; "
            f"recorded on {(about.get('machine') or {}).get('processor')}, versions "
            + ", ".join(f"{name} {version}" for name, version in (about.get("versions") or {}).items())
        )
        if series.costs is not None:
            lines.append(
                f"Costs: {series.costs.place.machine}, {series.costs.place.dtype}, {series.costs.place.forward}"
            )
    return "<footer>" + "<br>".join(escape(line) for line in lines) + "</footer>\n"
