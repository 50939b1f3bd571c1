"""A whole data source to training rows, with an account of what was read, used and left out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from .chat import encode_conversation
from .conversations import normalise, opens_with_answer
from .records import DataError, Encoded, Skipped, TokenRow, Turns, fit
from .rendering import check_tokenizer

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

OPENS = "opens with the assistant's turn: that turn is context and is not supervised"
_NAMED = 20


@dataclass(frozen=True)
class Summary:
    """What became of a data source. ``skipped`` and ``notes`` map a reason to the names of its records."""

    max_length: int
    read: int
    used: int
    truncated: int
    tokens: int
    supervised: int
    skipped: Mapping[str, tuple[str, ...]]
    notes: Mapping[str, tuple[str, ...]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON and for tables: every reason with its count and its first twenty records."""
        return {
            "max_length": self.max_length,
            "read": self.read,
            "used": self.used,
            "truncated": self.truncated,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "skipped": _counted(self.skipped),
            "notes": _counted(self.notes),
        }


def prepare(
    rows: Iterable[Mapping[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    turns: Turns = "all",
    max_repeat_share: float = 0.5,
) -> tuple[list[Encoded], Summary]:
    """Training rows of at most ``max_length`` tokens, in the order of ``rows``, and the account of all of them.

    A row with a ``repeat_share`` (as self-distillation writes it) above ``max_repeat_share`` loops and is skipped.
    Raises DataError if the tokenizer cannot be used, or with all reasons counted if no row is left.
    """
    check_tokenizer(tokenizer)
    if max_length < 2:
        raise DataError(f"max length must be at least 2 tokens, got {max_length}")
    used: list[Encoded] = []
    skipped: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    read = 0
    for read, row in enumerate(tqdm(rows, desc="tokenising", unit=" rows", disable=None), 1):
        made, opens = _encode(row, read, tokenizer, max_length, turns, max_repeat_share)
        if isinstance(made, Skipped):
            skipped.setdefault(made.reason, []).append(made.id)
            continue
        used.append(made)
        if opens:
            notes.setdefault(OPENS, []).append(made.id)
    if not used:
        raise DataError(_nothing_left(read, max_length, skipped))
    return used, Summary(
        max_length,
        read,
        len(used),
        sum(row.truncated for row in used),
        sum(len(row.ids) for row in used),
        sum(sum(row.mask) for row in used),
        {reason: tuple(names) for reason, names in skipped.items()},
        {note: tuple(names) for note, names in notes.items()},
    )


def show(row: Encoded, tokenizer: PreTrainedTokenizerBase) -> Text:
    """The row's text with its supervised tokens in colour, for a terminal."""
    from rich.text import Text

    text = Text()
    for supervised, pairs in groupby(zip(row.ids, row.mask, strict=True), key=lambda pair: pair[1]):
        piece = tokenizer.decode([token for token, _ in pairs], clean_up_tokenization_spaces=False)
        text.append(str(piece), style="bold green" if supervised else "dim")
    return text


def _encode(
    row: Mapping[str, Any],
    position: int,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    turns: Turns,
    max_repeat_share: float,
) -> tuple[Encoded | Skipped, bool]:
    """The row's fate, and whether it opens with the assistant's turn."""
    record = normalise(row, position)
    if isinstance(record, Skipped):
        return record, False
    share = row.get("repeat_share")
    if isinstance(share, (int, float)) and share > max_repeat_share:
        return Skipped(record.id, f"the answer loops: its repeat_share is above {max_repeat_share:g}"), False
    if isinstance(record, TokenRow):
        return fit(record.id, record.ids, record.mask, max_length), False
    return encode_conversation(tokenizer, record, max_length, turns), opens_with_answer(record.messages)


def _nothing_left(read: int, max_length: int, skipped: Mapping[str, Sequence[str]]) -> str:
    if not read:
        return "there are no rows to train on"
    reasons = "; ".join(f"{len(names)} x {reason} ({_some(names)})" for reason, names in skipped.items())
    return f"0 of {read} rows keep a supervised token at max length {max_length}: {reasons}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _counted(reasons: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
    return {reason: {"count": len(names), "records": list(names[:_NAMED])} for reason, names in reasons.items()}
