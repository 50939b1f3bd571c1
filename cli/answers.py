"""The answers of ``treedraft generate`` in a file: what it holds already, and whether it was made the same way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..data import Prompt
    from ..infer import Completion


@dataclass
class Answers:
    """The answers that ``path`` holds and those that are appended to it; without a path, those of this run alone.

    settings: what an answer depends on besides its prompt and seed, written beside each one.
    """

    path: Path | None
    settings: Mapping[str, Any]
    seed: int

    def __post_init__(self) -> None:
        from ..data import read_journal

        self.rows: dict[str, dict[str, Any]] = {} if self.path is None else read_journal(self.path, ("ids", "settings"))

    def seed_of(self, place: int) -> int:
        """The seed of the prompt at ``place``, whoever was answered before."""
        from ..infer import row_seed

        return row_seed(self.seed, place)

    def check(self, asked: Sequence[Prompt]) -> None:
        """Raises DataError, naming what differs, if answers in the file were made otherwise than they would be now."""
        from ..data import DataError

        faults: dict[str, list[str]] = {}
        for place, prompt in enumerate(asked):
            if (row := self.rows.get(prompt.id)) is None:
                continue
            was, now = {**row["settings"], "seed": row["seed"]}, {**self.settings, "seed": self.seed_of(place)}
            for key in sorted({*was, *now}):
                if was.get(key) != now.get(key):
                    faults.setdefault(f"{key}: {was.get(key)} there, {now.get(key)} now", []).append(prompt.id)
        if faults:
            told = [f"{fault} ({', '.join(ids[:3])}{', ...' * (len(ids) > 3)})" for fault, ids in faults.items()]
            raise DataError(
                f"{self.path} holds answers that were made otherwise: {'; '.join(told[:10])}. "
                "Give the same settings and prompts to go on with it, or choose another file"
            )

    def row(self, prompt: Prompt, done: Completion) -> dict[str, Any]:
        return {
            "id": prompt.id,
            "category": prompt.category,
            "text": done.text,
            "ids": done.ids,
            "reason": done.reason,
            "seed": done.seed,
            "tau": done.stats.to_dict()["tau"],
            "settings": self.settings,
        }
