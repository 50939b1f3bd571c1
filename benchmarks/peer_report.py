"""The table and the chart of a run of ``peers.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    "peer",
    "weights",
    "tokens/s",
    "95 %",
    "without the prefill",
    "95 %",
    "times generate",
    "95 %",
    "first token",
    "τ",
    "same text",
    "peak memory",
    "share of the limit",
)
ENGINES = (  # prefix of the title, colour (Okabe and Ito's, told apart by the colour-blind and in grey)
    ("treedraft", "#0072B2"),
    ("Hugging Face", "#999999"),
    ("vLLM", "#E69F00"),
    ("OpenVINO", "#009E73"),
    ("llama.cpp", "#CC79A7"),
)
DRAFTS = ("lookup", "n-gram", "heads", "Medusa", "Hydra", "EAGLE", "suffix")
"""Words in the title of a peer that drafts."""


def markdown(result: Mapping[str, Any]) -> str:
    """The table with what it was measured on and how it is to be read."""
    settings, machine, peers = result["settings"], result["machine"], result["peers"]
    head = (
        f"{machine['processor']}, {machine['cores']} cores, {settings['threads']} threads each, "
        f"{machine['memory_gib']} GiB, {settings['target']}, arithmetic in {settings['dtype']}, batch 1, greedy, "
        f"{settings['prompts_decoded']} prompts ({settings['prompts']}) x {settings['max_new_tokens']} new tokens, "
        f"in turns, {_answers(peers)} answers of each.\n"
    )
    rows = [_row(name, result) for name, figures in peers.items() if "tokens_per_second" in figures]
    lines = [head, _line(COLUMNS), _line(["---"] * 2 + ["---:"] * (len(COLUMNS) - 2)), *map(_line, rows), ""]
    gb = result["gb_per_second"]
    lines += [
        "Intervals: 95 % bootstrap over prompts, paired for ratios. Same text: answers equal, token by token, to "
        "those of `generate`. Peak memory: above the resident size after imports, loading included. τ: tokens of a "
        "round behind the prefill; - where the engine does not tell. Share of the limit: decoding without the "
        f"prefill over {gb:.1f} GB/s (measured) / {result['weights_mb']:.0f} MB = "
        f"{1e3 * gb / result['weights_mb']:.0f} tokens/s, the speed of a decoder that drafts nothing and only reads "
        "the checkpoint's 16-bit weights once for every token; drafting and smaller weights may go beyond 100 %.",
        "",
    ]
    failed = {name: figures["error"] for name, figures in peers.items() if "error" in figures}
    lines += [f"Failed: {result['titles'][name]}: {error}" for name, error in failed.items()] + [""] * bool(failed)
    own = {**result["versions"]}
    for figures in peers.values():
        own |= {k: v for k, v in figures.get("versions", {}).items() if k not in own}
    lines.append("Versions: " + ", ".join(f"{package} {release}" for package, release in own.items()) + ".")
    return "\n".join(lines) + "\n"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """A bar for every peer, fastest first: tokens/s with the prefill, and the interval. Hatched: it drafts."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    peers = {name: figures for name, figures in result["peers"].items() if "tokens_per_second" in figures}
    order = sorted(peers, key=lambda name: peers[name]["tokens_per_second"])
    titles = [f"{result['titles'][name]}{_own_weights(name, result)}" for name in order]
    speeds = [peers[name]["tokens_per_second"] for name in order]
    ends = [peers[name]["tokens_per_second_interval"] for name in order]
    figure, axes = pyplot.subplots(figsize=(8, 0.3 * len(order) + 1.2))
    bars = axes.barh(
        titles,
        speeds,
        xerr=[
            [max(0.0, s - low) for s, (low, _) in zip(speeds, ends, strict=True)],
            [max(0.0, high - s) for s, (_, high) in zip(speeds, ends, strict=True)],
        ],
        color=[_colour(title) for title in titles],
        edgecolor="black",
        linewidth=0.5,
        error_kw={"elinewidth": 0.8, "capsize": 2},
    )
    for bar, title, speed, (_, high) in zip(bars, titles, speeds, ends, strict=True):
        bar.set_hatch("///" if _drafts(title) else "")
        axes.text(max(speed, high) + 0.8, bar.get_y() + bar.get_height() / 2, f"{speed:.1f}", va="center", fontsize=8)
    axes.legend(handles=[Patch(facecolor="white", edgecolor="black", hatch="///", label="drafts")], loc="lower right")
    axes.set_xlabel(f"tokens/s, prefill included (arithmetic in {result['settings']['dtype']})")
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.1, y=0.01)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _row(name: str, result: Mapping[str, Any]) -> list[str]:
    figures = result["peers"][name]
    return [
        result["titles"][name],
        result["weights"][name] or result["settings"]["dtype"],
        f"{figures['tokens_per_second']:.1f}",
        _between(figures["tokens_per_second_interval"], 1),
        f"{figures['tokens_per_second_decode']:.1f}",
        _between(figures["tokens_per_second_decode_interval"], 1),
        _or_dash(figures["times_generate"], ".2f"),
        _between(figures["times_generate_interval"], 2),
        f"{1e3 * figures['first_token_seconds']:.0f} ms",
        _or_dash(figures["tau"], ".2f"),
        _or_dash(figures["equal_texts"], ".0%"),
        f"{figures['peak_over_imports_mb']:.0f} MB",
        f"{figures['share_of_roofline']:.0%}",
    ]


def _answers(peers: Mapping[str, Mapping[str, Any]]) -> str:
    counts = {figures["answers"] for figures in peers.values() if "answers" in figures}
    return "-".join(str(count) for count in sorted({min(counts, default=0), max(counts, default=0)}))


def _own_weights(name: str, result: Mapping[str, Any]) -> str:
    weights = result["weights"][name]
    return "" if not weights or "weights" in result["titles"][name] else f" ({weights})"


def _colour(title: str) -> str:
    return next(colour for engine, colour in ENGINES if title.startswith(engine))


def _drafts(title: str) -> bool:
    return any(word in title.replace("no heads", "") for word in DRAFTS)


def _between(ends: Sequence[float] | None, digits: int) -> str:
    return "-" if ends is None else f"{ends[0]:.{digits}f}-{ends[1]:.{digits}f}"


def _or_dash(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
