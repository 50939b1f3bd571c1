"""Makes a folder of heads fit to be shipped: weights in bf16, and a card with what was measured.

    python examples/ship.py runs/eagle3/best/heads examples/smollm2-135m/eagle3 --run run.yaml \
        --evaluation eagle3.json --notes "how it was trained, in a sentence or two"

EVALUATION is what ``treedraft evaluate --json`` wrote for these heads; more than one may be given (greedy, sampled).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from treedraft.heads import load_head, save_head
from treedraft.infer import load_target
from treedraft.tree import parse_tree, save_tree

CARD = """# {kind} heads for {target}

{notes}

{parameters:,} parameters, {megabytes:.1f} MB in bf16. They change the speed of the target's text, never the text.

```
treedraft generate --target {target} --heads {folder} --prompt "Why is the sky blue?"
```

## Mean accepted length

Tokens for each forward of the target, by decoding (plain decoding is 1.00).

{tables}

## To reproduce

```
treedraft train {run}
```

```yaml
{settings}
```
"""


def main(
    heads: Path,
    out: Path,
    run: Annotated[Path, typer.Option(help="The YAML file that trained them.")],
    evaluation: Annotated[list[Path], typer.Option(help="Results of treedraft evaluate --json.")],
    notes: Annotated[str, typer.Option(help="Data, steps, time.")],
    target: Annotated[str, typer.Option(help="The target they were trained for.")] = "smollm2-135m",
    tree: Annotated[str | None, typer.Option(help="The tree that decodes with them unless told otherwise.")] = None,
) -> None:
    """Writes config.json, heads.safetensors, README.md and, if a tree is named, tree.json into OUT."""
    model = load_target(target, pack=False)
    head = load_head(heads, model.facts, model.layers())
    save_head(head, out, model.facts, torch.bfloat16)
    if tree is not None:
        save_tree(parse_tree(tree, head.depth), out / "tree.json")
    card = CARD.format(
        kind=head.config.kind,
        target=target,
        notes=notes,
        parameters=sum(weight.numel() for weight in head.state_dict().values()),
        megabytes=(out / "heads.safetensors").stat().st_size / 1e6,
        folder=out,
        tables="\n\n".join(_table(json.loads(path.read_text())) for path in evaluation),
        run=run.name,
        settings=run.read_text().strip(),
    )
    (out / "README.md").write_text(card)


def _table(found: dict[str, Any]) -> str:
    """One evaluation as a Markdown table."""
    settings = found["settings"]
    law = settings["sampling"]["temperature"]
    title = (
        f"{found['prompts']} prompts x {settings['max_new_tokens']} tokens, {settings['dtype']}, "
        f"{'greedy' if law == 0 else f'temperature {law:g}'}, tree {settings.get('tree_name', settings['tree'])}"
    )
    rows = [("all", found["tau"]), ("without loops", found["tau_without_loops"])]
    rows += list(found["tau_by_category"].items()) + list(found.get("tau_by_prompt_length", {}).items())
    lines = [f"| {name} | {'-' if tau is None else f'{tau:.2f}'} |" for name, tau in rows]
    return "\n".join([f"{title}:", "", "| | tau |", "|---|---|", *lines])


if __name__ == "__main__":
    typer.run(main)
