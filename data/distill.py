"""Self-distillation: the target answers prompts, and its answers become training data.

The output is JSON Lines, appended answer by answer, and can be taken up again after any interruption. Answers that loop
are written too, with their ``repeat_share``: a resumed run then does not ask for them again, and the limit can be moved
later without asking the target anew. ``prepare`` leaves them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from .journal import append_row, open_journal, read_journal
from .records import DataError, Prompt

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
    answers: Callable[[list[Prompt]], Iterable[tuple[Prompt, Answer]]],
    out: Path,
    *,
    temperature: float,
) -> Distilled:
    """Asks the prompts that ``out`` has no answer to and appends each answer as it comes, in any order.

    An answer is on disk before the next is waited for. A line torn by a crash is cut off and asked again.
    Raises DataError before anything is asked if ``out`` holds something else, or if ids repeat.
    """
    names = [prompt.id for prompt in prompts]
    if len(set(names)) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise DataError(f"prompts share an id, so that answers could not be told apart: {', '.join(twice[:10])}")
    done = read_journal(out, ("messages",))
    todo = [prompt for prompt in prompts if prompt.id not in done]
    made: list[Answer] = []
    with open_journal(out) as file, tqdm(total=len(todo), desc="answering", unit=" prompts", disable=None) as progress:
        for prompt, answer in answers(todo):
            append_row(file, _row(prompt, answer, temperature))
            made.append(answer)
            progress.update()
    return Distilled(
        found=len(names) - len(todo),
        answered=len(made),
        cut=sum(a.finish_reason == "length" for a in made),
        looping=sum(repeat_share(a.text) > LOOP_LIMIT for a in made),
        tokens=sum(a.tokens for a in made),
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
