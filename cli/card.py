"""``treedraft card``: a heads folder made ready for the hub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from .console import note

EXAMPLE = (
    "Example: treedraft card runs/mine/best/heads --name org/name --base-model HuggingFaceTB/SmolLM2-135M-Instruct "
    "--license apache-2.0 --evaluation tau.json"
)


def command(
    heads: Annotated[Path, Argument(help="Folder of trained heads; the card is written into it.")],
    name: Annotated[
        str | None, Option(help="What the heads will be called: a hub id. The folder, if not told.")
    ] = None,
    target: Annotated[
        str | None, Option(help="What commands on the card call the target; as in training, if not told.")
    ] = None,
    base_model: Annotated[str | None, Option(help="Hub id of the target.")] = None,
    license: Annotated[str | None, Option(help="Licence of the heads, by its name on the hub.")] = None,
    dataset: Annotated[list[str] | None, Option(help="Hub id of training data; may be repeated.")] = None,
    notes: Annotated[str, Option(help="How they were trained: data, steps, time.")] = "",
    evaluation: Annotated[
        list[Path] | None, Option(help="What treedraft evaluate --json wrote for them; may be repeated.")
    ] = None,
) -> None:
    """Write a model card into a heads folder: README.md with the hub's front matter, mean accepted length, data and
    licence, and custom_generate/, through which transformers decodes with the folder. Then hf upload ORG/NAME HEADS
    publishes it."""
    from ..heads import HeadError, model_card, write_card

    found = []
    for path in evaluation or ():
        try:
            found.append(json.loads(path.read_text()))
        except json.JSONDecodeError as error:
            raise HeadError(f"{path} is not JSON: {error}") from error
    try:
        card = model_card(
            heads,
            target=target,
            name=name,
            notes=notes,
            evaluations=found,
            base_model=base_model,
            license=license,
            datasets=dataset or (),
        )
    except (KeyError, TypeError) as error:
        files = ", ".join(map(str, evaluation or ()))
        raise HeadError(f"{files}: not what treedraft evaluate --json writes ({error} is missing or wrong)") from error
    write_card(heads, card)
    written = f"{heads / 'README.md'} and {heads / 'custom_generate'}"
    note(f"Wrote {written}; publish with: hf upload {name or 'ORG/NAME'} {heads}")
