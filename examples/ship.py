"""Makes a folder of heads fit to be shipped: weights in bf16, and a card with what was measured.

    python examples/ship.py runs/eagle3/best/heads examples/smollm2-135m/eagle3 \
        --evaluation eagle3.json --notes "how it was trained, in a sentence or two"

The first time without --evaluation, since what is evaluated should be what is shipped; then again with the results.
OUT holds the configurations that trained them, train-1.yaml and further ones that went on from there. EVALUATION is
what ``treedraft evaluate --json`` wrote for these heads; more than one may be given (greedy, sampled).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from treedraft.data import Encoded, draft_vocabulary, prepare, read_rows
from treedraft.heads import Head, build_head, load_head, save_head
from treedraft.infer import Target, load_target
from treedraft.train.fresh import always_drafted
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
{commands}
```

with `answers.jsonl` made by `treedraft distill`; other answers give other figures.
"""


def main(
    heads: Path,
    out: Path,
    notes: Annotated[str, typer.Option(help="Data, steps, time.")],
    evaluation: Annotated[list[Path] | None, typer.Option(help="Results of treedraft evaluate --json.")] = None,
    target: Annotated[str, typer.Option(help="The target they were trained for.")] = "smollm2-135m",
    tree: Annotated[str | None, typer.Option(help="The tree that decodes with them unless told otherwise.")] = None,
    keep: Annotated[
        int | None, typer.Option(help="Ship only so many draftable tokens, the most frequent ones.")
    ] = None,
    answers: Annotated[Path | None, typer.Option(help="With --keep: the answers they are counted in.")] = None,
) -> None:
    """Writes config.json, heads.safetensors, README.md and, if a tree is named, tree.json into OUT."""
    if (keep is None) != (answers is None):
        raise typer.BadParameter("--keep counts tokens in --answers: name both or neither")
    model = load_target(target, pack=False)
    head = load_head(heads, model.facts, model.layers())
    if keep is not None and answers is not None:
        rows, _ = prepare(read_rows(answers), model.tokenizer, 1024, "all")
        head = with_fewer_tokens(head, keep, rows, model)
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
        tables="\n\n".join(_table(json.loads(path.read_text())) for path in evaluation or ()),
        commands="\n".join(f"treedraft train {run}" for run in sorted(out.glob("train-*.yaml"))),
    )
    (out / "README.md").write_text(card)


def with_fewer_tokens(head: Any, size: int, rows: Sequence[Encoded], target: Target) -> Head:
    """The heads on the ``size`` ids of their draft vocabulary that are most frequent; end and special tokens stay."""
    all_ids: Tensor = head.draft_ids
    ids = draft_vocabulary(rows, target.vocab_size, size, always_drafted(target), among=all_ids).ids
    assert ids is not None
    kept = torch.searchsorted(all_ids, ids)
    fewer = build_head(replace(head.config, draft_vocab_size=size), target.layers(), ids)
    tensors = {n: weight[kept] if len(weight) == len(all_ids) else weight for n, weight in head.state_dict().items()}
    fewer.load_state_dict(tensors)
    return fewer


def _table(found: dict[str, Any]) -> str:
    """One evaluation as a Markdown table."""
    settings = found["settings"]
    law = settings["sampling"]["temperature"]
    title = (
        f"{found['prompts']} prompts x {settings['max_new_tokens']} tokens, {settings['dtype']}, "
        f"{'greedy' if law == 0 else f'temperature {law:g}'}, {_tree(settings['tree'])}"
    )
    rows = [("all", found["tau"], found["tau_without_loops"])]
    for kind, name in (("category", "{}"), ("prompt_length", "prompts of {} tokens")):
        without = found.get(f"tau_without_loops_by_{kind}", {})  # earlier results have none
        rows += [(name.format(part), tau, without.get(part)) for part, tau in found[f"tau_by_{kind}"].items()]
    lines = [f"| {name} | {' | '.join('-' if tau is None else f'{tau:.2f}' for tau in taus)} |" for name, *taus in rows]
    return "\n".join([f"{title}:", "", "| | tau | without loops |", "|---|---|---|", *lines])


def _tree(tree: dict[str, Any]) -> str:
    if tree.get("dynamic"):
        return f"dynamic trees of {tree['nodes']} nodes, {tree['depth']} deep, {tree['width']} wide"
    return f"a fixed tree of {tree['nodes']} nodes, {tree['depth']} deep"


if __name__ == "__main__":
    typer.run(main)
