"""One training step: what the heads are asked, on which tokens, and how the losses of a step become one number.

B batch rows   T text positions   K heads or unrolled steps   F feature width   H hidden size
M positions that are marked   m of them that count for a head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..heads import Head, Output
from .align import align, next_tokens, teacher_index
from .losses import Soft, Teacher, chunked_cross_entropy


@dataclass(frozen=True)
class Objective:
    """How losses are taken and weighed; see LossConfig."""

    decay: float = 0.8
    outside: Literal["count", "drop"] = "count"
    chunk: int = 512
    teacher_weight: float = 0.0
    soft: Soft = "ce"
    token_weight: float = 1.0
    regression: float = 0.0
    teacher_output: Output | None = None
    """The target's output layer [V, H], with teacher_weight > 0; its rows of the draft vocabulary alone where the law
    is renormalised on it (soft: ce)."""

    @property
    def needs_final(self) -> bool:
        """Whether the target's final features are needed besides what the heads read."""
        return self.teacher_weight > 0 or self.regression > 0


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
    labels, valid = align(tokens, mask, head.steps)  # [K, B, T] both
    marked = valid[0]  # what any head is asked for
    hidden = head.predict(features, next_tokens(tokens), marked)  # [K, M, H]
    output, loss, counts = head.output(), hidden.new_zeros((), dtype=torch.float32), []
    for k in range(head.steps):
        rows = hidden[k][valid[k][marked]]  # [m, H]
        index, covered = _draft_index(labels[k][valid[k]], output.ids)  # [m] both
        final = None if teacher is None else teacher[teacher_index(valid, k)]  # [m, H]
        law = _law(final, covered, output.ids, objective)
        total, hits = chunked_cross_entropy(rows[covered], *output.of_head(k), index[covered], objective.chunk, law)
        part = objective.token_weight * total
        if objective.regression and final is not None:
            part = part + objective.regression * F.smooth_l1_loss(rows, final, reduction="sum") / rows.shape[-1]
        loss = loss + objective.decay**k * part / totals[k].clamp(min=1)
        counts.append(torch.stack([part.detach().double(), hits, covered.sum(), valid[k].sum()]))
    return loss, Counts.unpack(torch.stack(counts, 1))


def step_totals(tokens: Tensor, mask: Tensor, num_heads: int, ids: Tensor | None, outside: str) -> Tensor:
    """[K] fp64: what the loss of each head is divided by, as far as these rows [B, T] go."""
    labels, valid = align(tokens, mask, num_heads)
    if outside == "drop" and ids is not None:
        valid = valid & _draft_index(labels, ids)[1]
    return valid.sum((1, 2)).double()


class HeadsInTraining(nn.Module):
    """The train step as a module's forward, for Accelerate to wrap: autocast, gradients over processes."""

    def __init__(self, head: Head, objective: Objective) -> None:
        super().__init__()
        self.head, self.objective = cast(Any, head), objective

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


def _law(final: Tensor | None, covered: Tensor, ids: Tensor | None, objective: Objective) -> Teacher | None:
    if final is None or objective.teacher_output is None or not objective.teacher_weight:
        return None
    weight, bias = objective.teacher_output.of_head(0)
    return Teacher(final[covered], weight, bias, ids, objective.teacher_weight, objective.soft)
