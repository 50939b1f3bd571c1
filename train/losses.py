"""Cross-entropy over the draft vocabulary without ever holding the logits.

M positions that count   H hidden size   V target vocabulary   W draft vocabulary

The output layer is applied to ``chunk`` positions at a time, and the gradient with respect to the hidden rows (and the
layer, if it is trained) is taken in the same pass. The largest tensor is [chunk, V]; no [B, T, V] exists. The plain
reference at the end is what it must equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Teacher:
    """The target's own law at the positions of a loss, as the rows that its output layer turns into logits.

    hidden: [M, H] final features of the target
    weight: [V, H] and bias: [V] or None, the target's output layer
    ids: [W] target ids of the draft vocabulary, or None when W = V; the law is renormalised on them
    share: the weight w of the soft loss, in [0, 1]
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor | None
    share: float

    def law(self, rows: slice) -> Tensor:
        """Probabilities [rows, W] in fp32."""
        logits = F.linear(self.hidden[rows], self.weight, self.bias)
        if self.ids is not None:
            logits = logits[:, self.ids]
        return _wide(logits).softmax(-1)


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, teacher: Teacher | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the losses over all rows, and how many rows have their label on top.

    hidden: [M, H]; M = 0 gives 0 and stays part of the graph
    weight, bias: [W, H] and [W] or None; cast to the dtype of ``hidden``, in which the product is taken
    labels: [M] indices into the draft vocabulary
    The loss of a row is (1-w) CE(label) + w CE(teacher's law), softmax in fp32 (fp64 for fp64 rows).
    Returns (sum, an fp32 or fp64 scalar; hits, an int64 scalar).
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, bias, labels, chunk, teacher, torch.is_grad_enabled())


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk: int,
        teacher: Teacher | None,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:
        need_hidden, need_weight, need_bias = (learning and need for need in ctx.needs_input_grad[:3])
        grads = _Gradients(
            torch.empty_like(hidden) if need_hidden else None,
            torch.zeros_like(weight) if need_weight else None,
            torch.zeros_like(bias) if need_bias and bias is not None else None,
        )
        with torch.autocast(hidden.device.type, enabled=False):
            layer = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
            total, hits = _sum_chunks(hidden, layer, labels, chunk, teacher, grads)
        ctx.grads = grads
        ctx.mark_non_differentiable(hits)
        return total, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Any) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        scale = outputs[0]
        grads: _Gradients = ctx.grads
        scaled = (None if g is None else g * scale.to(g.dtype) for g in (grads.hidden, grads.weight, grads.bias))
        return (*scaled, None, None, None, None)


@dataclass(frozen=True)
class _Gradients:
    """Where the gradients of the sum are gathered, None where nobody asks."""

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def _sum_chunks(
    hidden: Tensor,
    layer: tuple[Tensor, Tensor | None],
    labels: Tensor,
    chunk: int,
    teacher: Teacher | None,
    grads: _Gradients,
) -> tuple[Tensor, Tensor]:
    weight, bias = layer
    total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    hits = torch.zeros((), dtype=torch.int64, device=hidden.device)
    share = 0.0 if teacher is None else teacher.share
    for begin in range(0, len(hidden), chunk):
        rows = slice(begin, min(begin + chunk, len(hidden)))
        logits = _wide(F.linear(hidden[rows], weight, bias))  # [m, W]
        label = labels[rows, None]
        top, best = logits.max(-1, keepdim=True)
        hits += (best == label).sum()
        wanted = (1 - share) * logits.gather(1, label)  # [m, 1]: the logits of what is wanted
        law = None if teacher is None else teacher.law(rows)
        if law is not None:
            wanted += share * (law * logits).sum(-1, keepdim=True)
        slope = logits.sub_(top).exp_()  # in place from here on
        normaliser = slope.sum(-1, keepdim=True)
        total += (normaliser.log() + top - wanted).sum()  # differences first: the terms are far larger than the loss
        if grads.hidden is None and grads.weight is None and grads.bias is None:
            continue
        slope.div_(normaliser)  # the softmax; minus the wanted law it is d loss / d logits
        slope.scatter_add_(1, label, torch.full_like(label, share - 1, dtype=slope.dtype))
        if law is not None:
            slope.sub_(law, alpha=share)
        _gather_gradients(slope.to(hidden.dtype), hidden[rows], weight, rows, grads)
    return total, hits


def _gather_gradients(slope: Tensor, hidden: Tensor, weight: Tensor, rows: slice, grads: _Gradients) -> None:
    if grads.hidden is not None:
        grads.hidden[rows] = slope @ weight
    if grads.weight is not None:
        grads.weight.add_(slope.T @ hidden)
    if grads.bias is not None:
        grads.bias.add_(slope.sum(0))


def _wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def plain_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, teacher: Teacher | None = None
) -> tuple[Tensor, Tensor]:
    """What :func:`chunked_cross_entropy` computes, in the plain way that keeps all logits. For tests."""
    logits = F.linear(hidden, weight, bias)
    hard = F.cross_entropy(logits, labels, reduction="sum")
    hits = (logits.argmax(-1) == labels).sum()
    if teacher is None:
        return hard, hits
    target = F.linear(teacher.hidden, teacher.weight, teacher.bias)
    law = (target if teacher.ids is None else target[:, teacher.ids]).softmax(-1)
    soft = F.cross_entropy(logits, law, reduction="sum")
    return (1 - teacher.share) * hard + teacher.share * soft, hits
