"""Prompts files: JSON Lines whose rows have ``prompt``, ``messages`` or ``turns``, perhaps ``id`` and ``category``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from .conversations import read_messages
from .records import DataError, Message, Prompt, Unusable
from .sources import numbered_rows

_MAX_FAULTS = 10


def read_prompts(path: str | Path, turns: Literal["first", "all"] = "first") -> list[Prompt]:
    """The prompts of a file, in order.

    Of ``turns`` (a list of user texts) only the first is asked; with "all" the rest become the prompt's follow_ups,
    to be asked one by one after each answer (Prompt.answered). Of ``messages`` the answers at the end are left off.
    A row without an id is named by file and line. Raises DataError with every fault (the first ten) by file and line,
    also if the file is missing or empty.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"no prompts file at {path}")
    prompts: dict[str, Prompt] = {}
    faults = []
    for number, row in numbered_rows(file):
        try:
            prompt = _prompt(row, f"{file.name}:{number}", turns)
            if prompt.id in prompts:
                raise Unusable(f"the id {prompt.id!r} appears twice")
            prompts[prompt.id] = prompt
        except Unusable as fault:
            faults.append(f"{path}:{number}: {fault}")
    if faults:
        raise DataError("; ".join(faults[:_MAX_FAULTS]))
    if not prompts:
        raise DataError(f"{path} has no prompts")
    return list(prompts.values())


def _prompt(row: Mapping[str, Any], name: str, turns: str) -> Prompt:
    given = [key for key in ("prompt", "messages", "turns") if row.get(key) is not None]
    if len(given) != 1:
        raise Unusable(f"expected one of prompt, messages and turns, got {', '.join(given) or 'none'}")
    follow_ups: list[str] = []
    if given == ["messages"]:
        messages = _before_answer(read_messages(row["messages"]))
    else:
        texts = [row["prompt"]] if given == ["prompt"] else row["turns"]
        if not isinstance(texts, list) or not texts or not all(isinstance(t, str) and t.strip() for t in texts):
            raise Unusable("prompt must be a text, turns a list of texts, none of them empty")
        messages = ({"role": "user", "content": texts[0]},)
        follow_ups = texts[1:] if turns == "all" else []
    identity, category = row.get("id"), row.get("category")
    return Prompt(
        name if identity in (None, "") else str(identity),
        None if category is None else str(category),
        messages,
        tuple(follow_ups),
    )


def _before_answer(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    while messages and messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    if not any(m["role"] not in ("system", "developer") for m in messages):
        raise Unusable("messages ask nothing")
    return messages
