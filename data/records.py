"""What the data passes through: a conversation, the tokens and mask it becomes, or the reason why it is left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Message = Mapping[str, Any]
"""``role`` and ``content`` (text), and whatever else the chat template reads, such as ``tool_calls``."""

Turns = Literal["all", "last"]
"""Which assistant turns are supervised."""


class DataError(ValueError):
    """Data that cannot be used: the message names every fault, where it is, and what to do."""


class Unusable(DataError):
    """One conversation cannot become a training row or a prompt. The message is the reason that is counted."""


@dataclass(frozen=True)
class Conversation:
    """One record. ``finish_reason`` is "length" if its last answer was cut at a token limit; else it is not read."""

    id: str
    messages: tuple[Message, ...]
    finish_reason: str | None = None


@dataclass(frozen=True)
class TokenRow:
    """A record that brings its own tokens and mask (0 or 1 for every token)."""

    id: str
    ids: tuple[int, ...]
    mask: tuple[int, ...]


@dataclass(frozen=True)
class Skipped:
    """A record left out. Equal reasons are counted together."""

    id: str
    reason: str


@dataclass(frozen=True)
class Encoded:
    """A training row: token ids, 1 where the token is supervised, and whether it was cut at the maximum length."""

    id: str
    ids: list[int]
    mask: list[int]
    truncated: bool


@dataclass(frozen=True)
class Prompt:
    """What a target is asked: messages that end before its answer, and the user turns that follow once it answered."""

    id: str
    category: str | None
    messages: tuple[Message, ...]
    follow_ups: tuple[str, ...] = ()

    def answered(self, answer: str) -> Prompt | None:
        """The next turn of this prompt, given the answer to this one; None after the last."""
        if not self.follow_ups:
            return None
        history = (*self.messages, {"role": "assistant", "content": answer})
        question = {"role": "user", "content": self.follow_ups[0]}
        return replace(self, messages=(*history, question), follow_ups=self.follow_ups[1:])


def fit(name: str, ids: Sequence[int], mask: Sequence[int], max_length: int) -> Encoded | Skipped:
    """Cuts a row on the right to ``max_length`` tokens; skipped if it then teaches nothing or has no prompt."""
    if not any(mask):
        return Skipped(name, "no token is supervised")
    if all(mask):
        return Skipped(name, "every token is supervised: the mask leaves no prompt")
    if not any(mask[:max_length]):
        return Skipped(name, f"no supervised token is left at max length {max_length}")
    return Encoded(name, list(ids[:max_length]), list(mask[:max_length]), len(ids) > max_length)
