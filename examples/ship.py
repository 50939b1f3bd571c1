"""Makes a folder of heads fit to be shipped: weights in bf16, and a card with what was measured.

    python examples/ship.py runs/eagle3/best/heads examples/smollm2-135m/eagle3 \
        --evaluation eagle3.json --notes "how it was trained, in a sentence or two"

The first time without --evaluation, since what is evaluated should be what is shipped; then again with the results.
The card is that of ``treedraft card``. OUT holds the configurations that trained them, train-1.yaml and further ones
that went on from there. EVALUATION is what ``treedraft evaluate --json`` wrote for these heads; more than one may be
given (greedy, sampled).
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
from treedraft.heads import Head, build_head, load_head, model_card, save_head, write_card
from treedraft.infer import Target, load_target
from treedraft.train.fresh import always_drafted
from treedraft.tree import parse_tree, save_tree


def main(
    heads: Path,
    out: Path,
    notes: Annotated[str, typer.Option(help="Data, steps, time.")],
    evaluation: Annotated[list[Path] | None, typer.Option(help="Results of treedraft evaluate --json.")] = None,
    base_model: Annotated[str | None, typer.Option(help="Hub id of the target.")] = None,
    license: Annotated[str | None, typer.Option(help="Licence of the heads, by its name on the hub.")] = None,
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
    card = model_card(
        out,
        target=target,
        notes=notes,
        evaluations=[json.loads(path.read_text()) for path in evaluation or ()],
        base_model=base_model,
        license=license,
        commands=[f"treedraft train {run}" for run in sorted(out.glob("train-*.yaml"))],
    )
    write_card(out, card)


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


if __name__ == "__main__":
    typer.run(main)
