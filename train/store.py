"""Features of training rows on disk: computed once for a target, read by every run that trains heads on it.

T text positions of all rows   H hidden size

A folder holds ``store.json`` (what it belongs to), one file ``tap-K.bin`` for each tapped layer ([T, H], raw numbers)
and ``rows.txt``, a line for each row: the hash of its tokens, where it starts, how long it is. A line is written after
its features are on disk, so that a killed run loses at most the rows it was computing, and the next one goes on.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from ..tree import write_atomically


class StoreError(ValueError):
    """A folder of features that is not this target's: the message says what differs and what to do."""


class FeatureStore:
    """The features at ``taps`` that ``folder`` holds, in ``dtype``; new ones are appended by one process at a time.

    ``target`` is the target's fingerprint. A new store keeps the ``further`` layers besides, an old one those that it
    was made with. Raises StoreError if the folder belongs to another target or holds fewer layers than asked for.
    """

    def __init__(
        self,
        folder: Path,
        target: str,
        hidden_size: int,
        taps: Sequence[int],
        further: Sequence[int] = (),
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.folder, self.taps, self.hidden_size, self.dtype = folder, tuple(taps), hidden_size, dtype
        self._rows: dict[str, tuple[int, int]] = {}
        self._mapped: dict[int, Tensor] = {}
        about = {"format": 1, "target": target, "hidden_size": hidden_size, "dtype": str(dtype).removeprefix("torch.")}
        described = folder / "store.json"
        if not described.exists():
            folder.mkdir(parents=True, exist_ok=True)
            write_atomically(json.dumps({**about, "taps": sorted({*taps, *further})}, indent=1) + "\n", described)
        found = json.loads(described.read_text(encoding="utf-8"))
        self.stored_taps: tuple[int, ...] = tuple(found.pop("taps"))
        faults = [
            f"{key}: {found.get(key)!r}, expected {value!r}" for key, value in about.items() if found.get(key) != value
        ]
        if not set(self.taps) <= set(self.stored_taps):
            faults.append(f"tapped layers {list(self.stored_taps)}, expected {list(self.taps)} among them")
        if faults:
            raise StoreError(f"{folder} holds other features: {'; '.join(faults)}. Name another folder")
        self._read_rows()

    def __contains__(self, ids: Sequence[int]) -> bool:
        return _key(ids) in self._rows

    def add(self, rows: Sequence[Sequence[int]], features: Sequence[Tensor]) -> None:
        """Appends the features [T, len(stored_taps) * H] of each row, in the order of ``stored_taps``."""
        start = self._end
        lines = []
        for ids in rows:
            lines.append(f"{_key(ids)} {start} {len(ids)}\n")
            start += len(ids)
        for i, tap in enumerate(self.stored_taps):
            part = slice(i * self.hidden_size, (i + 1) * self.hidden_size)
            with self._file(tap).open("r+b" if self._file(tap).exists() else "w+b") as file:
                file.seek(self._end * self._bytes_a_token)
                for row in features:
                    file.write(row[:, part].to("cpu", self.dtype).contiguous().view(torch.uint8).numpy().data)
                file.flush()
                os.fsync(file.fileno())
        with (self.folder / "rows.txt").open("a", encoding="ascii") as file:
            file.writelines(lines)
        self._mapped.clear()
        self._read_rows()

    def of(self, ids: Sequence[int]) -> Tensor:
        """The features [T, len(taps) * H] of a row that the store contains, without a copy of more than the row."""
        start, length = self._rows[_key(ids)]
        return torch.cat([self._map(tap)[start : start + length] for tap in self.taps], -1)

    @property
    def _bytes_a_token(self) -> int:
        return self.hidden_size * self.dtype.itemsize

    def _file(self, tap: int) -> Path:
        return self.folder / f"tap-{tap}.bin"

    def _map(self, tap: int) -> Tensor:
        if tap not in self._mapped:
            count = self._end * self.hidden_size
            mapped = torch.from_file(str(self._file(tap)), shared=False, size=count, dtype=self.dtype)
            self._mapped[tap] = mapped.view(-1, self.hidden_size)
        return self._mapped[tap]

    def _read_rows(self) -> None:
        """A last line without its end is a row that was being written: its features count as absent."""
        listed = self.folder / "rows.txt"
        text = listed.read_text(encoding="ascii") if listed.exists() else ""
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            write_atomically(whole, listed)
        self._rows = {key: (int(start), int(length)) for key, start, length in map(str.split, whole.splitlines())}
        self._end = max((start + length for start, length in self._rows.values()), default=0)


def _key(ids: Sequence[int]) -> str:
    return hashlib.sha256(torch.tensor(ids, dtype=torch.int64).numpy().tobytes()).hexdigest()[:32]
