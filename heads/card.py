"""What makes a heads folder fit for the hub: a model card, and the function that lets transformers decode with it.

hf upload ORG/NAME FOLDER
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData
from safetensors import safe_open

from ..tree import write_atomically
from .files import DRAFT_IDS, WEIGHTS_FILE, read_config

CARD_FILE = "README.md"
TITLES = {"medusa": "Medusa", "hydra": "Hydra", "eagle": "EAGLE", "eagle3": "EAGLE-3"}

CARD = """---
{front}
---

# {kind} heads for {target}

{notes}

{parameters:,} parameters, {megabytes:.1f} MB in {dtype}. They change the speed of the target's text, never the text.

```
treedraft generate --target {target} --heads {name} --prompt "Why is the sky blue?"
```

In a script of your own, with `pip install treedraft`:

```python
from treedraft.infer import drafted

heads = drafted("{name}")
output = model.generate(**inputs, custom_generate=heads, max_new_tokens=128)
```

## Mean accepted length

{tables}

## Data and licence

{data}
"""

MEASURED = "Tokens for each forward of the target, by decoding (plain decoding is 1.00)."
NOT_MEASURED = "Not measured yet: `treedraft evaluate --json` measures it, `treedraft card --evaluation` adds it here."

FUNCTION = '''"""Decodes with these heads inside transformers:

    model.generate(**inputs, custom_generate="THIS FOLDER OR ITS HUB ID", trust_remote_code=True)
"""

from treedraft.infer import FolderDrafting

generate = FolderDrafting()
'''
FUNCTION_FILES = {"generate.py": FUNCTION, "requirements.txt": "treedraft\n"}


def model_card(
    folder: str | Path,
    *,
    target: str | None = None,
    name: str | None = None,
    notes: str = "",
    evaluations: Sequence[dict[str, Any]] = (),
    base_model: str | None = None,
    license: str | None = None,
    datasets: Sequence[str] = (),
    commands: Sequence[str] = (),
) -> str:
    """The card of a heads folder, with YAML front matter as the hub reads it.

    target: what commands call the target; None is the name in its config. name: what the heads are called (a hub id).
    evaluations: results of ``treedraft evaluate --json``. base_model: the target's hub id. license: as the hub names
    them. datasets: hub ids. commands: what repeats the training. Raises HeadError if it is no heads folder.
    """
    path = Path(folder)
    content = read_config(path)
    target = target or content["target"].get("name") or "the target"
    kind = TITLES.get(content["kind"], content["kind"])
    front = ModelCardData(
        base_model=base_model,
        license=license,
        datasets=list(datasets) or None,
        library_name="treedraft",
        pipeline_tag="text-generation",
        tags=["treedraft", "speculative-decoding", "draft-heads", content["kind"]],
    )
    parameters, dtype = _weights(path / WEIGHTS_FILE)
    told = [f"Trained on {', '.join(datasets)}." if datasets else "The training data is not named."]
    told.append(f"Licence: {license}." if license else "No licence is given: ask the authors before you use them.")
    if base_model:
        told.append(f"The target, {base_model}, has a licence of its own.")
    card = CARD.format(
        front=front.to_yaml().strip(),
        kind=kind,
        target=target,
        notes=notes or f"Draft heads that treedraft trained for {target}.",
        parameters=parameters,
        megabytes=(path / WEIGHTS_FILE).stat().st_size / 1e6,
        dtype=dtype,
        name=name or folder,
        tables="\n\n".join([MEASURED, *map(tau_table, evaluations)]) if evaluations else NOT_MEASURED,
        data=" ".join(told),
    )
    if commands:
        listed = "\n".join(commands)
        made = "with `answers.jsonl` made by `treedraft distill`; other answers give other figures."
        card += f"\n## To reproduce\n\n```\n{listed}\n```\n\n{made}\n"
    return card


def write_card(folder: str | Path, card: str) -> None:
    """Writes the card and ``custom_generate/`` into the folder, each file atomically."""
    path = Path(folder)
    write_atomically(card, path / CARD_FILE)
    (path / "custom_generate").mkdir(exist_ok=True)
    for name, text in FUNCTION_FILES.items():
        write_atomically(text, path / "custom_generate" / name)


def tau_table(found: dict[str, Any]) -> str:
    """One result of ``treedraft evaluate --json`` as a Markdown table, under what was measured."""
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


def _weights(file: Path) -> tuple[int, str]:
    """Parameters, the draft vocabulary's ids left out, and their dtype."""
    with safe_open(file, "pt") as tensors:
        slices = [tensors.get_slice(name) for name in tensors.keys() if name != DRAFT_IDS]  # noqa: SIM118
        dtypes = sorted({part.get_dtype().lower() for part in slices})
        return sum(prod(part.get_shape()) for part in slices), ", ".join(dtypes)
