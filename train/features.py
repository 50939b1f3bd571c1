"""The target's features of training rows: computed when they are needed, or once and kept.

B batch rows   T text positions   F feature width   H hidden size

A feature's last bits depend on the rows it was computed beside. Online, that is the micro-batch, which a resumed run
repeats; in memory, a grouping that depends on the rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm

from ..data import Batch, Encoded, collate
from ..infer import Target, TargetError

GROUP_ROWS = 8


class TargetFeatures:
    """Features of ``rows`` by index. ``teacher`` asks for the final ones besides, for the soft loss."""

    def __init__(self, target: Target, rows: Sequence[Encoded], taps: Sequence[int], teacher: bool) -> None:
        self.rows = rows
        self._target, self._last = target, target.num_layers
        self._taps = tuple(taps) if not teacher or self._last in taps else (*taps, self._last)
        self._width = len(taps) * target.facts.hidden_size
        self._teacher = teacher
        self._kept: dict[int, Tensor] = {}

    @property
    def bytes_in_memory(self) -> int:
        """What :meth:`keep_all` would take."""
        tokens = sum(len(row.ids) for row in self.rows)
        return tokens * len(self._taps) * self._target.facts.hidden_size * self._target.dtype.itemsize

    def keep_all(self, show_progress: bool) -> None:
        """Computes all features now, into main memory, in groups of like length. Raises TargetError naming rows."""
        order = sorted(range(len(self.rows)), key=lambda i: len(self.rows[i].ids))
        starts = range(0, len(order), GROUP_ROWS)
        for start in tqdm(starts, desc="target features", unit=" groups", disable=None if show_progress else True):
            group = order[start : start + GROUP_ROWS]
            batch = collate([self.rows[i] for i in group], 0)
            for i, feature in zip(group, self._compute(group, batch), strict=True):
                self._kept[i] = feature[: len(self.rows[i].ids)].clone().cpu()

    def batch(self, indices: Sequence[int]) -> Batch:
        """These rows padded, on the target's device; -1 is a row of one pad token with mask 0."""
        made = collate([self.rows[i] if i >= 0 else None for i in indices], 0)
        device = self._target.device
        return Batch(made.tokens.to(device), made.mask.to(device), made.lengths.to(device))

    def of(self, indices: Sequence[int], batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Features [B, T, F] in the target's dtype and, with ``teacher``, the final ones [B, T, H]."""
        if self._kept:
            blank = next(iter(self._kept.values()))[:1]
            features = pad_sequence([self._kept[i] if i >= 0 else torch.zeros_like(blank) for i in indices], True)
            features = features.to(self._target.device)
        else:
            features = self._compute(indices, batch)
        if not self._teacher:
            return features, None
        hidden = self._target.facts.hidden_size
        at = self._taps.index(self._last) * hidden
        return features[..., : self._width], features[..., at : at + hidden]

    def names(self, indices: Sequence[int]) -> str:
        """The rows by name, for messages."""
        named = [self.rows[i].id for i in indices if i >= 0]
        return ", ".join(named[:8]) + (", ..." if len(named) > 8 else "")

    def _compute(self, indices: Sequence[int], batch: Batch) -> Tensor:
        try:
            return self._target.features(batch.tokens, batch.lengths, self._taps)
        except TargetError as error:
            raise TargetError(f"rows {self.names(indices)}: {error}") from error


def choose_features(
    wanted: Literal["auto", "online", "memory"], size: int, limit_gib: float
) -> Literal["online", "memory"]:
    """Where features of ``size`` bytes go: as wanted, and with auto into memory if they take at most ``limit_gib``."""
    if wanted != "auto":
        return wanted
    return "memory" if size <= limit_gib * 2**30 else "online"
