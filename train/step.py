"""One training step: what the heads are asked, on which tokens, and how the losses of a step become one number.

B batch rows   T text positions   K heads   F feature width   H hidden size   M positions that count for a head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from ..heads import Head, Medusa, Output
from .align import align, next_tokens, teacher_positions
from .losses import Teacher, chunked_cross_entropy


@dataclass(frozen=True)
class Objective:
    """How losses are taken and weighed; see LossConfig."""

    decay: float = 0.8
    outside: Literal["count", "drop"] = "count"
    chunk: int = 512
    teacher_weight: float = 0.0
    teacher_output: Output | None = None
    """The target's output layer [V, H], with teacher_weight > 0."""


@dataclass(frozen=True)
class Counts:
    """What happened, as counts for each head; shares are taken at the edge. All [K], fp64.

    loss: sum of losses   hits: positions whose label was on top   covered: positions whose label can be drafted
    positions: all positions that count
    """

    loss: Tensor
    hits: Tensor
    covered: Tensor
    positions: Tensor

    def __add__(self, other: Counts) -> Counts:
        return Counts.unpack(self.pack() + other.pack())

    def pack(self) -> Tensor:
        """[4, K], for sums over processes."""
        return torch.stack([self.loss, self.hits, self.covered, self.positions])

    @staticmethod
    def unpack(packed: Tensor) -> Counts:
        return Counts(*packed.unbind())


def train_step(
    head: Head,
    features: Tensor,
    teacher: Tensor | None,
    tokens: Tensor,
    mask: Tensor,
    totals: Tensor,
    objective: Objective,
) -> tuple[Tensor, Counts]:
    """The loss of these rows as a part of their optimiser step, and their counts.

    features: [B, T, F]   teacher: the target's final features [B, T, H] or None   tokens, mask: [B, T]
    totals: [K], from :func:`step_totals` summed over all rows of the optimiser step, on all processes. Losses of the
    parts of a step add up to the loss of the step, however it is cut.
    """
    hidden = head.predict(features, next_tokens(tokens))  # [K, B, T, H]
    labels, valid = align(tokens, mask, head.depth)  # [K, B, T] both
    output, loss, counts = head.output(), hidden.new_zeros((), dtype=torch.float32), []
    for k in range(head.depth):
        index, covered = _draft_index(labels[k][valid[k]], output.ids)  # [M] both
        rows = hidden[k][valid[k]][covered]  # [covered, H]
        law = _teacher_rows(teacher, valid, covered, k, output.ids, objective)
        total, hits = chunked_cross_entropy(rows, *output.of_head(k), index[covered], objective.chunk, law)
        loss = loss + objective.decay**k * total / totals[k].clamp(min=1)
        counts.append(torch.stack([total.detach().double(), hits, covered.sum(), valid[k].sum()]))
    return loss, Counts.unpack(torch.stack(counts, 1))


def step_totals(tokens: Tensor, mask: Tensor, num_heads: int, ids: Tensor | None, outside: str) -> Tensor:
    """[K] fp64: what the loss of each head is divided by, as far as these rows [B, T] go."""
    labels, valid = align(tokens, mask, num_heads)
    if outside == "drop" and ids is not None:
        valid = valid & _draft_index(labels, ids)[1]
    return valid.sum((1, 2)).double()


class HeadsInTraining(nn.Module):
    """The train step as a module's forward, for Accelerate to wrap: autocast, gradients over processes."""

    def __init__(self, head: Medusa, objective: Objective) -> None:
        super().__init__()
        self.head, self.objective = head, objective

    def forward(
        self, features: Tensor, teacher: Tensor | None, tokens: Tensor, mask: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss and the packed counts [4, K] of :func:`train_step`."""
        loss, counts = train_step(self.head, features, teacher, tokens, mask, totals, self.objective)
        return loss, counts.pack()


def _draft_index(labels: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
    """Target ids to indices of the draft vocabulary, and which of them are in it."""
    if ids is None:
        return labels, torch.ones_like(labels, dtype=torch.bool)
    index = torch.searchsorted(ids, labels).clamp(max=len(ids) - 1)
    return index, ids[index] == labels


def _teacher_rows(
    teacher: Tensor | None, valid: Tensor, covered: Tensor, k: int, ids: Tensor | None, objective: Objective
) -> Teacher | None:
    if teacher is None or objective.teacher_output is None:
        return None
    row, position = teacher_positions(valid)
    rows = teacher[row[k][valid[k]], position[k][valid[k]]][covered]
    weight, bias = objective.teacher_output.of_head(0)
    return Teacher(rows, weight, bias, ids, objective.teacher_weight)
