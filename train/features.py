"""The target's features of training rows: computed when they are needed, or once and kept in memory or on disk.

B batch rows   T text positions   F feature width   H hidden size

A feature's last bits depend on the rows it was computed beside. Online, that is the micro-batch, which a resumed run
repeats; kept, a grouping that depends on the rows alone. The store rounds to its dtype, bf16 unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..data import Batch, Encoded, collate
from ..infer import Target, TargetError
from .store import FeatureStore

GROUP_ROWS, STORE_ROWS = 8, 1024

Where = Literal["online", "memory", "store"]
"""How target features are come by; it decides their last bits, so a resumed run keeps it."""


class TargetFeatures:
    """Features of ``rows`` by index. ``teacher`` asks for the final ones besides, for the soft loss."""

    def __init__(self, target: Target, rows: Sequence[Encoded], taps: Sequence[int], teacher: bool) -> None:
        self.rows = rows
        self._target, self._last = target, target.num_layers
        self._taps = tuple(taps) if not teacher or self._last in taps else (*taps, self._last)
        self._width = len(taps) * target.facts.hidden_size
        self._teacher = teacher
        self._kept: dict[int, Tensor] = {}
        self._store: FeatureStore | None = None

    @property
    def bytes_in_memory(self) -> int:
        """What :meth:`keep_all` would take."""
        tokens = sum(len(row.ids) for row in self.rows)
        return tokens * len(self._taps) * self._target.facts.hidden_size * self._target.dtype.itemsize

    def keep_all(self, show_progress: bool) -> None:
        """Computes all features now, into main memory, in groups of like length. Raises TargetError naming rows."""
        order = sorted(range(len(self.rows)), key=lambda i: len(self.rows[i].ids))
        for group, features in self._in_groups(order, self._taps, show_progress):
            for i, feature in zip(group, features, strict=True):
                self._kept[i] = feature.clone().cpu()

    def fill_store(self, folder: Path, further: Sequence[int], dtype: torch.dtype, show_progress: bool) -> None:
        """Reads features from the store in ``folder`` from now on, and first adds the rows that it lacks.

        A new store keeps the ``further`` layers besides. Raises StoreError or TargetError. Rows are computed in order
        of length, a bounded number at a time, so that a run that is killed goes on where it was.
        """
        store = FeatureStore(folder, self._target.fingerprint(), self._hidden, self._taps, further, dtype)
        lacking = [i for i, row in enumerate(self.rows) if row.ids not in store]
        for start in range(0, len(lacking), STORE_ROWS):
            order = sorted(lacking[start : start + STORE_ROWS], key=lambda i: len(self.rows[i].ids))
            for group, features in self._in_groups(order, store.stored_taps, show_progress):
                store.add([self.rows[i].ids for i in group], features)
        self._store = store

    def batch(self, indices: Sequence[int]) -> Batch:
        """These rows padded, on the target's device; -1 is a row of one pad token with mask 0."""
        made = collate([self.rows[i] if i >= 0 else None for i in indices], 0)
        device = self._target.device
        return Batch(made.tokens.to(device), made.mask.to(device), made.lengths.to(device))

    def of(self, indices: Sequence[int], batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Features [B, T, F] in the target's dtype and, with ``teacher``, the final ones [B, T, H]."""
        if self._kept or self._store is not None:
            features = pad_sequence([self._read(i) for i in indices], True).to(self._target.device)
        else:
            features = self._compute(indices, batch, self._taps)
        if not self._teacher:
            return features, None
        hidden = self._hidden
        at = self._taps.index(self._last) * hidden
        return features[..., : self._width], features[..., at : at + hidden]

    def names(self, indices: Sequence[int]) -> str:
        """The rows by name, for messages."""
        named = [self.rows[i].id for i in indices if i >= 0]
        return ", ".join(named[:8]) + (", ..." if len(named) > 8 else "")

    @property
    def _hidden(self) -> int:
        return self._target.facts.hidden_size

    def _in_groups(
        self, order: Sequence[int], taps: Sequence[int], show_progress: bool
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Rows and their features [T, F], a few rows of like length at a time."""
        starts = range(0, len(order), GROUP_ROWS)
        for start in tqdm(starts, desc="target features", unit=" groups", disable=None if show_progress else True):
            group = list(order[start : start + GROUP_ROWS])
            batch = collate([self.rows[i] for i in group], 0)
            computed = self._compute(group, batch, taps)
            yield group, [f[: len(self.rows[i].ids)] for i, f in zip(group, computed, strict=True)]

    def _read(self, index: int) -> Tensor:
        """Kept features [T, F] of a row; of none, a row of one position."""
        if index < 0:
            return torch.zeros(1, len(self._taps) * self._hidden, dtype=self._target.dtype)
        kept = self._kept[index] if self._store is None else self._store.of(self.rows[index].ids)
        return kept.to(self._target.dtype)

    def _compute(self, indices: Sequence[int], batch: Batch, taps: Sequence[int]) -> Tensor:
        try:
            return self._target.features(batch.tokens, batch.lengths, taps)
        except TargetError as error:
            raise TargetError(f"rows {self.names(indices)}: {error}") from error


def choose_features(
    wanted: Literal["auto", "online", "memory", "store"], size: int, limit_gib: float, folder: str | None
) -> Where:
    """Where features of ``size`` bytes go: as wanted; with auto to the store if it is named, else into memory if they
    take at most ``limit_gib``."""
    if wanted != "auto":
        return wanted
    if folder is not None:
        return "store"
    return "memory" if size <= limit_gib * 2**30 else "online"
