"""Colours in the terminal: accepted drafted tokens in answers, supervised tokens in training rows."""

from __future__ import annotations

from dataclasses import dataclass, field
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
        painted = Text()
        for character in chunk.text:
            drafted = self._shown < len(self._drafted) and self._drafted[self._shown]
            painted.append(character, self.style if drafted else "")
            self._shown += 1
        return painted
