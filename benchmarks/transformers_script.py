"""A user's own transformers script, with and without the one added argument: tokens/s of both, and the same text.

    python benchmarks/transformers_script.py --heads examples/smollm2-135m/eagle3 --prompts prompts.jsonl

Both take turns on the same prompts, on one model in memory; each is run once before, unmeasured. PROMPTS are rows with
prompt, messages or turns. Where the texts part, one forward of the model says how close its two best tokens were.
"""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from treedraft.data import read_prompts, render_prompt
from treedraft.infer import drafted, load_model, machine, versions


def main(
    prompts: Path,
    heads: str = "examples/smollm2-135m/eagle3",
    target: str = "smollm2-135m",
    dtype: str = "fp32",
    max_new_tokens: int = 128,
    limit: int = 8,
    compile: Annotated[str, typer.Option(help="auto, on or off.")] = "on",
    sample: Annotated[bool, typer.Option(help="Temperature 0.7 instead of greedy; texts are not compared.")] = False,
) -> None:
    model, tokenizer = load_model(target, dtype)
    generate: Any = model.generate
    made: Any = {"plain": None, "no heads": drafted(None, compile=compile), "heads": drafted(heads, compile=compile)}  # type: ignore[arg-type]
    law = {"do_sample": True, "temperature": 0.7, "top_k": 0} if sample else {"do_sample": False}
    rows = [torch.tensor([render_prompt(tokenizer, p.messages)]) for p in read_prompts(prompts)[:limit]]
    seconds, tokens = dict.fromkeys(made, 0.0), dict.fromkeys(made, 0)
    equal, near, different = 0, 0, 0
    for number, ids in enumerate(tqdm([rows[0], *rows], disable=None)):
        texts = {}
        for name, way in made.items():
            torch.manual_seed(number)
            start = time.perf_counter()
            options = law if way is None else {**law, "custom_generate": way}
            mask = torch.ones_like(ids)
            out = generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, **options)
            if number:  # the first one warms up
                seconds[name] += time.perf_counter() - start
                tokens[name] += out.shape[1] - ids.shape[1]
            texts[name] = out[0].tolist()
        if number and not sample:
            verdicts = [_same(model, texts[a], texts[b]) for a, b in pairwise(made)]
            equal += all(v is None for v in verdicts)
            different += any(v is not None and v > 5e-4 for v in verdicts)
            near += any(v is not None and v <= 5e-4 for v in verdicts)
    print(machine(), versions(), f"{dtype}, {len(rows)} prompts x {max_new_tokens} tokens, one at a time", sep="\n")
    speed = {name: tokens[name] / seconds[name] for name in made}
    for name in made:
        print(f"{name:10} {speed[name]:6.1f} tokens/s with the prefill, {speed[name] / speed['plain']:.2f} times plain")
    if not sample:
        print(f"same text: {equal} of {len(rows)}; parted at a near-tie of the model: {near}; different: {different}")


def _same(model: Any, one: list[int], other: list[int]) -> float | None:
    """None for equal texts, else the gap between the model's two best logits where they part."""
    if one == other:
        return None
    parted = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    with torch.inference_mode():
        best = model(torch.tensor([one[:parted]])).logits[0, -1].topk(2).values
    return float(best[0] - best[1])


if __name__ == "__main__":
    typer.run(main)
