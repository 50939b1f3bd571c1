"""T(n): what one target forward over n new tokens costs here: by Hugging Face's modules, lean and packed, and compiled.

    python benchmarks/forward_cost.py --target smollm2-135m --dtype auto --context 256

They are timed in turns, n by n; the figure is the median. Decoding pays if the mean accepted length of a tree of n
nodes exceeds T(n) / T(1) with something to spare for drafting and verifying.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from treedraft.heads import native
from treedraft.infer import Target, load_model, machine, versions
from treedraft.infer.timing import forwards_over

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32)


def main(
    target: Annotated[str, typer.Option(help="Hub id, local folder or smollm2-135m.")] = "smollm2-135m",
    dtype: Annotated[str, typer.Option(help="auto, fp32, bf16 or fp16.")] = "auto",
    context: Annotated[int, typer.Option(help="Tokens in the cache.")] = 256,
    repeats: Annotated[int, typer.Option(help="Forwards of each kind.")] = 15,
    plot: Annotated[Path | None, typer.Option(help="PNG to draw.")] = None,
) -> None:
    native.load()
    models = {
        "Hugging Face": Target(load_model(target, dtype)[0], own_blocks=False),
        "packed": Target(load_model(target, dtype)[0], pack=True, compiled=False),
        "compiled": Target(load_model(target, dtype)[0], pack=True, compiled=True),
    }
    table = Table("n", *(f"{name}, ms" for name in models), "compiled T(n)/T(1)")
    medians: dict[str, list[float]] = {name: [] for name in models}
    forwards = {name: forwards_over(model, 1, context, SIZES) for name, model in models.items()}
    for nodes in SIZES:
        runs = {name: of_sizes[nodes] for name, of_sizes in forwards.items()}
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(repeats):
            for name, run in runs.items():
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
        middle = [1e3 * statistics.median(seconds[name]) for name in models]
        for of_model, ms in zip(medians.values(), middle, strict=True):
            of_model.append(ms)
        ratio = middle[-1] / medians["compiled"][0]
        table.add_row(str(nodes), *(f"{ms:.1f}" for ms in middle), f"{ratio:.2f}")
    console = Console()
    console.print(f"{target}, {models['compiled'].dtype}, {context} tokens cached, one row")
    console.print(machine(), versions())
    console.print(table)
    if plot is not None:
        draw(medians, f"{target}, {context} tokens cached", plot)


def draw(medians: Mapping[str, Sequence[float]], title: str, path: Path) -> None:
    """Milliseconds over n, a line for each kind, told apart by its marker too."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(5, 3.2))
    for (name, ms), colour, marker in zip(medians.items(), ("#999999", "#E69F00", "#0072B2"), "s^o", strict=True):
        axes.plot(SIZES, ms, color=colour, marker=marker, markersize=4, label=name)
    axes.set(xlabel="n, tokens in one forward", ylabel="T(n), ms", title=title, ylim=(0, None))
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
