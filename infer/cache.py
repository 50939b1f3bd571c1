"""The key/value cache of a batch: preallocated, ragged, and edited by ``commit`` alone.

B batch rows   T text positions   N tree nodes   A accepted path length, root included
S slots   h key/value heads   d head size

Between steps row b holds exactly the positions [0, T_b) in the slots [0, T_b). A forward over N nodes writes them to
the slots [T_b, T_b + N); ``commit`` keeps the accepted ones, moved to the front, and forgets the rest. Keys are stored
rotated for their own positions, and a node's depth is its final offset, so moving them needs no arithmetic.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from transformers import Cache

from .path import Path


def close_ranks(stays: Sequence[bool]) -> list[int]:
    """Which old row each new one is, when some leave: the gaps are filled from the end, the others stay in place.

    >>> close_ranks([True, False, True, False, True])
    [0, 4, 2]
    """
    order = list(range(sum(stays)))
    movers = [row for row in range(len(order), len(stays)) if stays[row]]
    return [row if stays[row] else movers.pop() for row in order]


@dataclass(frozen=True)
class LayerSizes:
    """What one attention layer stores of a position: key/value heads and the head sizes of keys and of values."""

    heads: int
    key_size: int
    value_size: int


class KVCache(Cache):
    """``update`` is called by the model's attention layers, everything else by the decode step.

    lengths: [B] int64 on the device, and ``host_lengths`` the same as a list
    ``places`` >= ``batch`` rows are made, so that others can join without another allocation.
    """

    def __init__(
        self,
        layers: dict[int, LayerSizes],
        batch: int,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
        places: int = 0,
    ) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        self.host_lengths = [0] * batch
        self._sizes = layers
        # Tensors of one shape lie in one block [n, B, h, S, d], so that a commit moves all layers at once. Zeroed:
        # slots never written are masked, and 0 * NaN would still be NaN.
        members: dict[tuple[int, int], list[tuple[str, int]]] = {}
        for index, size in layers.items():
            members.setdefault((size.heads, size.key_size), []).append(("key", index))
            members.setdefault((size.heads, size.value_size), []).append(("value", index))
        self._store = [
            torch.zeros(len(names), max(places, batch), heads, slots, width, dtype=dtype, device=device)
            for (heads, width), names in members.items()
        ]
        self._blocks = [block[:, :batch] for block in self._store]
        self._place = {name: (b, i) for b, names in enumerate(members.values()) for i, name in enumerate(names)}
        self._written = torch.empty(0, dtype=torch.int64, device=device)
        self._width = 0

    @property
    def batch(self) -> int:
        return len(self.host_lengths)

    def begin(self, width: int) -> int:
        """Announces a forward over ``width`` new positions per row; returns how many slots its keys will span.

        Raises RuntimeError with the numbers if a row has no room left.
        """
        needed = max(self.host_lengths) + width
        if needed > self.slots:
            raise RuntimeError(f"the cache is full: {width} new positions need {needed} slots, there are {self.slots}")
        self._width = width
        self._written = self.lengths[:, None] + torch.arange(width, device=self.lengths.device)
        return needed

    def make_room(self, slots: int) -> None:
        """At least ``slots`` slots, in place: for a cache whose text has no known end. They double at least."""
        if slots > self.slots:
            self._enlarge(self._store[0].shape[1], max(slots, 2 * self.slots))
            self._blocks = [block[:, : self.batch] for block in self._store]

    def slot_positions(self, positions: Tensor, slots: int) -> Tensor:
        """The text position of what lies in each slot [B, S], the new ones standing at ``positions`` [B, N]."""
        held = torch.arange(slots, device=positions.device).repeat(len(positions), 1)
        return held.scatter_(1, self._written, positions)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Writes keys and values [B, h, N, d] of a layer and returns everything up to the last slot written."""
        return self._write("key", layer_idx, key_states), self._write("value", layer_idx, value_states)

    def layers_of(self) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values [B, h, S, d] of all layers, in their order: for a forward that writes them itself."""
        blocks = [block.unbind(0) for block in self._blocks]

        def of(kind: str) -> list[Tensor]:
            places = [self._place[kind, layer] for layer in self._sizes]
            return [blocks[block][index] for block, index in places]

        return of("key"), of("value")

    def commit(self, path: Path) -> None:
        """Keeps the nodes of ``path`` in order and drops the other new positions: T + N becomes T + A."""
        nodes, counts = path.host_nodes, path.host_counts
        if any(nodes[b][i] != i for b in range(len(counts)) for i in range(counts[b])):
            # A path's padding repeats its last node; what that copies lands beyond the row's new length.
            source = self.lengths[:, None] + path.nodes
            target = self.lengths[:, None] + torch.arange(path.nodes.shape[1], device=source.device)
            rows = torch.arange(self.batch, device=source.device)[:, None]
            for block in self._blocks:
                by_slot = block.permute(1, 3, 0, 2, 4)  # [B, S, n, h, d], a view
                by_slot[rows, target] = by_slot[rows, source]
        self.lengths = self.lengths + path.counts
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]

    def append(self, counts: list[int]) -> None:
        """Keeps the first ``counts[b]`` of the new positions of every row: the prefill's commit."""
        self.lengths = self.lengths + torch.tensor(counts, device=self.lengths.device)
        self.host_lengths = [length + count for length, count in zip(self.host_lengths, counts, strict=True)]

    def select(self, rows: list[int]) -> KVCache:
        """The cache of some rows, row i being the old row ``rows[i]`` >= i; the old cache is used up.

        Rows only move to the front, in place, so one that leaves costs one row's copy at most (see ``close_ranks``).
        """
        assert all(row >= i for i, row in enumerate(rows))
        chosen = torch.tensor(rows, device=self.lengths.device)
        for block in self._blocks:
            for i, row in enumerate(rows):
                if row != i:
                    block[:, i] = block[:, row]
        kept = copy.copy(self)
        kept._blocks = [block[:, : len(rows)] for block in self._blocks]
        kept.lengths = self.lengths[chosen]
        kept.host_lengths = [self.host_lengths[r] for r in rows]
        return kept

    def join(self, other: KVCache) -> KVCache:
        """The rows of this cache and behind them those of ``other``, which are copied; both old caches are used up."""
        rows = self.batch + other.batch
        joined = copy.copy(self)
        joined._enlarge(max(rows, self._store[0].shape[1]), max(self.slots, other.slots))
        for block, more in zip(joined._store, other._blocks, strict=True):
            for i, length in enumerate(other.host_lengths):
                block[:, self.batch + i, :, :length] = more[:, i, :, :length]
        joined._blocks = [block[:, :rows] for block in joined._store]
        joined.lengths = torch.cat([self.lengths, other.lengths])
        joined.host_lengths = self.host_lengths + other.host_lengths
        return joined

    def _enlarge(self, places: int, slots: int) -> None:
        """Room for so many rows and slots, in place."""
        rows, more = places - self._store[0].shape[1], slots - self.slots
        if rows or more:
            self._store = [pad(block, (0, 0, 0, more, 0, 0, 0, rows)) for block in self._store]
            self.slots = slots

    def stored(self, row: int) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [h, T_b, d] of every layer of a row: what a test compares with a fresh prefill."""
        length = self.host_lengths[row]
        return [(self._block("key", i)[row, :, :length], self._block("value", i)[row, :, :length]) for i in self._sizes]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.host_lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return max(self.host_lengths) + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return self.slots

    def _block(self, kind: str, layer: int) -> Tensor:
        block, index = self._place[kind, layer]
        return self._blocks[block][index]

    def _write(self, kind: str, layer: int, states: Tensor) -> Tensor:
        block = self._block(kind, layer)  # [B, h, S, d]
        end = max(self.host_lengths) + self._width
        if len(self.host_lengths) == 1:
            block[:, :, end - self._width : end] = states
        else:
            slots = self._written[:, None, :, None].expand_as(states)
            block.scatter_(2, slots, states)
        return block[:, :, :end]
