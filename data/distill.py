"""Self-distillation: the target answers prompts, and its answers become training data.

The output is JSON Lines, appended batch by batch, and can be taken up again after any interruption. Answers that loop
are written too, with their ``repeat_share``: a resumed run then does not ask for them again, and the limit can be moved
later without asking the target anew. ``prepare`` leaves them out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .records import DataError, Prompt
from .sources import numbered_rows

LOOP_LIMIT = 0.5
"""An answer loops if more than this share of its word 4-grams repeats an earlier one."""


@dataclass(frozen=True)
class Answer:
    """What the target said. ``finish_reason`` is "length" if it was cut; ``tokens`` counts the end token it wrote."""

    text: str
    finish_reason: str
    tokens: int
    seed: int


@dataclass(frozen=True)
class Distilled:
    """Prompts found answered in the file, answered now, and of these: cut, looping, and the tokens of all."""

    found: int
    answered: int
    cut: int
    looping: int
    tokens: int


def distill(
    prompts: Sequence[Prompt],
    generate: Callable[[list[Prompt]], list[Answer]],
    out: Path,
    *,
    batch_size: int,
    temperature: float,
) -> Distilled:
    """Asks the prompts that ``out`` has no answer to, ``batch_size`` at a time, and appends each batch to it.

    A batch is one write that is on disk before the next begins. A line torn by a crash is cut off and asked again.
    Raises DataError before anything is asked if ``out`` holds something else, or if ids repeat.
    """
    names = [prompt.id for prompt in prompts]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"prompts share an id, so that answers could not be told apart: {', '.join(twice[:10])}")
    done = _answered_ids(out)
    todo = [prompt for prompt in prompts if prompt.id not in done]
    answers: list[Answer] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as file, tqdm(total=len(todo), desc="answering", unit=" prompts", disable=None) as progress:
        for begin in range(0, len(todo), batch_size):
            batch = todo[begin : begin + batch_size]
            made = generate(batch)
            rows = [_row(prompt, answer, temperature) for prompt, answer in zip(batch, made, strict=True)]
            file.write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode())
            file.flush()
            os.fsync(file.fileno())
            answers += made
            progress.update(len(batch))
    return Distilled(
        found=len(names) - len(todo),
        answered=len(answers),
        cut=sum(a.finish_reason == "length" for a in answers),
        looping=sum(repeat_share(a.text) > LOOP_LIMIT for a in answers),
        tokens=sum(a.tokens for a in answers),
    )


def repeat_share(text: str) -> float:
    """The share of a text's word 4-grams that occurred before in it. A punctuation mark is a word of its own.

    >>> repeat_share("a b c d a b c d")
    0.2
    """
    words = re.findall(r"\w+|[^\w\s]", text)  # not split at spaces: "a-lady-a-lady" loops too
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return round(1 - len(set(grams)) / len(grams), 4) if grams else 0.0


def _row(prompt: Prompt, answer: Answer, temperature: float) -> dict[str, Any]:
    return {
        "id": prompt.id,
        **({"category": prompt.category} if prompt.category is not None else {}),
        "messages": [*prompt.messages, {"role": "assistant", "content": answer.text}],
        "finish_reason": answer.finish_reason,
        "completion_tokens": answer.tokens,
        "temperature": temperature,
        "seed": answer.seed,
        "repeat_share": repeat_share(answer.text),
    }


def _answered_ids(out: Path) -> set[str]:
    """Ids in ``out``, whose torn last line is cut off. Raises DataError if there is anything but answers in it."""
    if not out.exists():
        return set()
    _mend_last_line(out)
    faults, ids = [], set()
    for number, row in numbered_rows(out):
        if "id" not in row or "messages" not in row:
            faults.append(f"{out}:{number}: no id and messages")
        ids.add(str(row.get("id")))
    if faults:
        raise DataError("the output file holds something else: " + "; ".join(faults[:10]) + "; choose another file")
    return ids


def _mend_last_line(out: Path) -> None:
    """Ends the last line if it is whole, and cuts it off if it is not."""
    content = out.read_bytes()
    last = content.rpartition(b"\n")[2]
    if not last.strip():
        return
    try:
        json.loads(last)
    except ValueError:
        os.truncate(out, len(content) - len(last))
    else:
        with out.open("ab") as file:
            file.write(b"\n")
