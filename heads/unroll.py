"""How a head of one decoder layer runs: unrolled over a text in training, level by level over a tree in decoding.

B batch rows   T text positions   M marked positions   R marked positions of a row, padded   K unrolled steps
F feature width   H hidden size   S slots   e nodes of a level that are asked for candidates   W draft vocabulary

A row t of the layer reads the feature of position t and the token of t + 1. Its first output speaks of the token at
t + 2; a next step reads that output in place of a feature, and the token drafted (in training: the true one). At step i
row t stands at rotary position t + i and sees the first-step keys of rows <= t and its own keys of steps 1..i: what a
chain drafted from t sees (Li et al. 2025, "EAGLE-3", arXiv 2503.01840, section 3.2; HASS, arXiv 2408.15766).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .base import Accepted, Memory, cat_padded
from .layer import DraftLayer, Sight, write

SPARE_SLOTS = 64
"""Room for drafted nodes that a memory is made with."""

FEW = 16
"""Accepted rows up to which the layer's output is taken of all of them and not of the last alone: they cost no more."""


class LayerHead(Protocol):
    """What a head of one layer is made of, besides the layer."""

    @property
    def layer(self) -> DraftLayer: ...

    def embed(self, tokens: Tensor) -> Tensor:
        """[B, n] to [B, n, H]."""
        ...

    def fuse(self, features: Tensor) -> Tensor:
        """The target's features [B, n, F] to the state [B, n, H] of a first step."""
        ...

    def enter(self, state: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        """State and embedding [B, n, H] to the attention's input [B, n, X] and the residual [B, n, H]."""
        ...

    def carry(self, hidden: Tensor) -> Tensor:
        """The layer's output [B, n, H] to the state of the next step."""
        ...

    def read(self, hidden: Tensor) -> Tensor:
        """The layer's output to what the output layer reads."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[B, n, W]."""
        ...


@dataclass(frozen=True)
class LayerMemory:
    """First-step keys and values of every accepted position, position p in slot p.

    keys, values: [B, g, S, d], this batch's own and written in place; slots from ``lengths`` [B] on hold drafts or none
    """

    keys: Tensor
    values: Tensor
    lengths: Tensor

    def select(self, rows: Tensor) -> LayerMemory:
        return LayerMemory(self.keys[rows], self.values[rows], self.lengths[rows])

    def join(self, other: LayerMemory) -> LayerMemory:
        keys, values = cat_padded(self.keys, other.keys, 2), cat_padded(self.values, other.values, 2)
        return LayerMemory(keys, values, torch.cat([self.lengths, other.lengths]))


@dataclass(frozen=True)
class Beam:
    """The drafted nodes of the last level, n of them, and what they see.

    hidden: [B, n, H], the layer's output; memory: accepted positions, and drafted nodes from slot ``reach`` on;
    ancestors: [B, n, u], which of the ``u`` drafted nodes with keys each one sees; position: [B] of the rows
    """

    hidden: Tensor
    memory: LayerMemory
    reach: int
    ancestors: Tensor
    position: Tensor


def predict(head: LayerHead, features: Tensor, tokens: Tensor, rows: Tensor, steps: int) -> Tensor:
    """Training: [B, T, F], [B, T] and marked rows [B, T] to hidden rows [K, M, H], see ``Head.predict``."""
    layer, device = head.layer, tokens.device
    at, real = _marked(rows)  # [B, R] both
    batch = torch.arange(len(tokens), device=device)[:, None]
    everywhere, _ = enter = head.enter(head.fuse(features), head.embed(tokens))  # [B, T, X]
    keys, values, seen = _text(layer, everywhere, at)
    x, residual = (part[batch, at] for part in enter)
    own: list[tuple[Tensor, Tensor]] = []
    outputs: list[Tensor] = []
    for step in range(steps):
        attended = chain_attention(layer.queries(x, at + step), keys, values, seen, own)
        hidden = layer.finish(attended, residual)
        outputs.append(head.read(hidden)[real])
        if step + 1 < steps:
            read = tokens[batch, (at + step + 1).clamp(max=tokens.shape[1] - 1)]
            x, residual = head.enter(head.carry(hidden), head.embed(read))
            own.append(layer.keys_values(x, at + step + 1))
    return torch.stack(outputs)


def read_marked(layer: DraftLayer, x: Tensor, residual: Tensor, rows: Tensor) -> Tensor:
    """Training: the layer's output [M, H] at marked rows [B, T], from x [B, T, X] and residual [B, T, H] of all rows.

    A row sees rows up to itself. Unmarked ones give keys and values alone.
    """
    at, real = _marked(rows)  # [B, R] both
    batch = torch.arange(len(rows), device=rows.device)[:, None]
    attended = chain_attention(layer.queries(x[batch, at], at), *_text(layer, x, at), [])
    return layer.finish(attended, residual[batch, at])[real]


def chain_attention(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Attention of rows [B, h, R, d] to shared keys [B, g, T, d] where seen [B, R, T], and each to its own rows.

    own: keys and values [B, g, R, d] of earlier steps, of which a query sees those of its own row. Softmax in fp32.
    """
    groups = keys.shape[1]
    q = queries.unflatten(1, (groups, -1)) * queries.shape[-1] ** -0.5  # [B, g, h/g, R, d]
    scores = (q @ keys[:, :, None].transpose(-1, -2)).float()
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    chain = [(q * k[:, :, None]).sum(-1, keepdim=True).float() for k, _ in own]
    shares = torch.cat([scores, *chain], -1).softmax(-1).to(queries.dtype)
    attended = shares[..., : keys.shape[2]] @ values[:, :, None]
    for i, (_, v) in enumerate(own):
        attended = attended + shares[..., keys.shape[2] + i, None] * v[:, :, None]
    return attended.flatten(1, 2)


def begin(head: LayerHead, accepted: Accepted, memory: Memory | None) -> tuple[Tensor, Beam, LayerMemory]:
    """Reads the accepted features into the memory; logits [B, 1, W] of the token after the root."""
    x, residual = head.enter(head.fuse(accepted.features), head.embed(accepted.tokens))  # [B, A, X], [B, A, H]
    hidden, memory = read_accepted(head.layer, x, residual, accepted, memory)
    none = torch.zeros(len(x), 1, 0, dtype=torch.bool, device=x.device)
    return head.logits(head.read(hidden)), Beam(hidden, memory, accepted.reach, none, accepted.root_position), memory


def read_accepted(
    layer: DraftLayer, x: Tensor, residual: Tensor, accepted: Accepted, memory: Memory | None
) -> tuple[Tensor, LayerMemory]:
    """Reads x [B, A, X] and residual [B, A, H] of the accepted positions: output [B, 1, H] at the last one, the memory.

    Of a prompt the output is computed at the last one alone.
    """
    assert memory is None or isinstance(memory, LayerMemory)
    count, last = x.shape[1], (accepted.count - 1)[:, None]
    batch = torch.arange(len(x), device=x.device)[:, None]
    positions = accepted.start[:, None] + torch.arange(count, device=x.device)
    memory = _with_room(memory, layer, x, int(accepted.reach) + count + SPARE_SLOTS)
    keys, values = memory.keys, memory.values
    memory = LayerMemory(keys, values, accepted.root_position)
    if count <= FEW:
        chain = torch.ones(count, count, dtype=torch.bool, device=x.device).tril().expand(len(x), -1, -1)
        sight, end = Sight(accepted.start, accepted.start, chain), slice(accepted.reach + count)
        hidden = layer.over(x, residual, positions, keys[:, :, end], values[:, :, end], sight)
        return hidden[batch, last], memory
    queries, new_keys, new_values = layer.read(x, positions)
    write(keys, values, new_keys, new_values, positions)
    queries = queries.gather(2, last[:, :, None, None].expand(-1, queries.shape[1], -1, queries.shape[3]))
    held = slice(accepted.reach)
    seen = (torch.arange(accepted.reach, device=x.device) < memory.lengths[:, None])[:, None]
    attended = layer.attend(queries, keys[:, :, held], values[:, :, held], seen)
    return layer.finish(attended, residual[batch, last]), memory


def extend(head: LayerHead, beam: Beam, parents: Tensor, tokens: Tensor) -> tuple[Tensor, Beam]:
    """One level on: logits [B, e, W] after ``tokens`` [B, e], whose parents index the beam."""
    batch = torch.arange(len(tokens), device=tokens.device)[:, None]
    count, used = tokens.shape[1], beam.ancestors.shape[-1]
    x, residual = head.enter(head.carry(beam.hidden[batch, parents]), head.embed(tokens))
    positions = beam.position[:, None].expand(-1, count)
    memory = _with_room(beam.memory, head.layer, x, beam.reach + used + count)
    itself = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(len(tokens), -1, -1)
    ancestors = torch.cat([beam.ancestors[batch, parents], itself], -1)  # [B, e, u + e]
    start = torch.full_like(beam.position, beam.reach)
    sight, end = Sight(memory.lengths, start, ancestors), slice(beam.reach + used + count)
    hidden = head.layer.over(x, residual, positions, memory.keys[:, :, end], memory.values[:, :, end], sight)
    return head.logits(head.read(hidden)), Beam(hidden, memory, beam.reach, ancestors, beam.position + 1)


def _marked(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Marked positions [B, R] of every row in order, R the most that a row has, and which of them are real."""
    counts = rows.sum(1)
    at = rows.int().sort(dim=1, descending=True, stable=True).indices[:, : int(counts.max())]
    return at, torch.arange(at.shape[1], device=rows.device) < counts[:, None]


def _text(layer: DraftLayer, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values [B, g, T, d] of all rows x [B, T, X], and which of them the rows ``at`` [B, R] see: [B, R, T]."""
    positions = torch.arange(x.shape[1], device=x.device)
    return *layer.keys_values(x, positions[None]), positions <= at[:, :, None]


def _with_room(memory: LayerMemory | None, layer: DraftLayer, x: Tensor, slots: int) -> LayerMemory:
    """The memory with at least ``slots`` slots; it doubles, so that growing costs little."""
    if memory is not None and memory.keys.shape[2] >= slots:
        return memory
    shape = layer.shape
    room = max(slots, 2 * memory.keys.shape[2]) if memory is not None else slots
    # zeroed: 0 * NaN would still be NaN
    blank = x.new_zeros(2, len(x), shape.num_key_value_heads, room, shape.head_dim)
    if memory is None:
        return LayerMemory(blank[0], blank[1], torch.zeros(len(x), dtype=torch.int64, device=x.device))
    blank[0, :, :, : memory.keys.shape[2]], blank[1, :, :, : memory.keys.shape[2]] = memory.keys, memory.values
    return LayerMemory(blank[0], blank[1], memory.lengths)
