"""Ids to text as they come, and stop strings met on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Detokenizer:
    """Turns a growing list of ids into a growing text.

    Ids are decoded together with the few before them, since a tokenizer may join or space a token by its neighbours,
    and text that ends in an incomplete character waits for its other bytes. Without a tokenizer the text stays empty.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # where decoding starts
        self._done = 0  # ids whose text is out

    def push(self, ids: Sequence[int]) -> str:
        """The text that ``ids`` add; may be empty while a character is incomplete."""
        self._ids += ids
        return self._advance(final=False)

    def finish(self) -> str:
        """What is left of an incomplete character at the end."""
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        if self._tokenizer is None:
            return ""
        before = self._decode(self._ids[self._context : self._done])
        after = self._decode(self._ids[self._context :])
        if len(after) <= len(before) or (after.endswith("\ufffd") and not final):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def find_stop(text: str, stops: Sequence[str], fresh: int) -> int | None:
    """Where ``text`` ends if a stop string ends in its last ``fresh`` characters: right after the first one to end.

    >>> find_stop("one two three", ["two", "three"], 9), find_stop("one two", ["four"], 7)
    (7, None)
    """
    ends = []
    for stop in stops:
        at = text.find(stop, max(0, len(text) - fresh - len(stop) + 1))
        if at >= 0:
            ends.append(at + len(stop))
    return min(ends, default=None)
