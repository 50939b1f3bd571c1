"""Colours in the terminal: accepted drafted tokens in answers, supervised tokens in training rows."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from typing import Any

from rich.text import Text

from ..infer import Chunk
from ..infer.detokenizer import Detokenizer

ACCEPTED = "bold green"
SUPERVISED = "bold green"
UNSUPERVISED = "dim"


def legend(*entries: tuple[str, str]) -> Text:
    """One line that names what each style means: (style, meaning) ..."""
    return Text("   ").join(Text(meaning, style=style) for style, meaning in entries)


@dataclass
class Painter:
    """Puts a style on the accepted drafted tokens of one answer as its text comes.

    A chunk's text may lag behind its ids (an incomplete character waits for its other bytes), so what was drafted is
    kept by character.
    """

    tokenizer: Any
    style: str = ACCEPTED
    _drafted: list[bool] = field(default_factory=list)
    _shown: int = 0

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer)

    def paint(self, chunk: Chunk) -> Text:
        """The chunk's text, characters of accepted drafted tokens styled."""
        for place, token in enumerate(chunk.ids):
            self._drafted += [place < chunk.drafted] * len(self._detokenizer.push([token]))
        flags = self._drafted[self._shown : self._shown + len(chunk.text)]
        self._shown += len(chunk.text)
        painted = Text()
        for drafted, run in groupby(zip_longest(chunk.text, flags, fillvalue=False), key=lambda pair: pair[1]):
            painted.append("".join(str(character) for character, _ in run), self.style if drafted else "")
        return painted
