"""Cross-entropy over the draft vocabulary without ever holding the logits.

M positions that count   H hidden size   V target vocabulary   W draft vocabulary

The output layer is applied to ``chunk`` positions at a time, and the gradient with respect to the hidden rows (and the
layer, if it is trained) is taken in the same pass. The largest tensor is [chunk, V]; no [B, T, V] exists. The plain
reference at the end is what it must equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Soft = Literal["ce", "lk", "lk-hybrid"]
"""The loss to the target's law p: cross-entropy; -log of the acceptance sum min(p, q); or KL and acceptance mixed, KL
weighing less the better the acceptance (LK losses, as trainers of EAGLE-3 heads have them)."""

HYBRID_DECAY = 3.0
"""v = exp(-3 a) weighs KL against 1 - a in lk-hybrid, a being the acceptance."""


@dataclass(frozen=True)
class Teacher:
    """The target's own law at the positions of a loss, as the rows that its output layer turns into logits.

    hidden: [M, H] final features of the target
    weight: [V, H] and bias: [V] or None, the target's output layer; or its W rows of the draft vocabulary alone, which
    renormalises the law on them
    ids: [W] target ids of the draft vocabulary, or None when W = V
    share: the weight w of the soft loss, in [0, 1]
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    ids: Tensor | None
    share: float
    soft: Soft = "ce"

    def law(self, rows: slice) -> Tensor:
        """Probabilities [rows, W] in fp32: renormalised on the draft vocabulary for ce, as they are for the others."""
        logits = F.linear(self.hidden[rows], self.weight, self.bias)
        if self.ids is None or len(self.weight) == len(self.ids):
            return _wide(logits).softmax(-1)
        if self.soft == "ce":
            return _wide(logits[:, self.ids]).softmax(-1)
        return _wide(logits).softmax(-1)[:, self.ids]


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, chunk: int, teacher: Teacher | None = None
) -> tuple[Tensor, Tensor]:
    """Sum of the losses over all rows, and how many rows have their label on top.

    hidden: [M, H]; M = 0 gives 0 and stays part of the graph
    weight, bias: [W, H] and [W] or None; cast to the dtype of ``hidden``, in which the product is taken
    labels: [M] indices into the draft vocabulary
    The loss of a row is (1-w) CE(label) + w soft(teacher's law), softmax in fp32 (fp64 for fp64 rows).
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
        hard = (1 - share) * logits.gather(1, label)  # [m, 1]: the logits of what is wanted
        law = None if teacher is None else teacher.law(rows)
        soft = "ce" if teacher is None else teacher.soft
        wanted = hard if law is None or soft != "ce" else hard + share * (law * logits).sum(-1, keepdim=True)
        slope = logits.sub_(top).exp_()  # in place from here on
        normaliser = slope.sum(-1, keepdim=True)
        logs = normaliser.log() + top  # [m, 1]
        slope.div_(normaliser)  # the softmax q; minus the wanted law it is d loss / d logits
        if law is None or soft == "ce":
            total += (logs - wanted).sum()  # differences first: the terms are far larger than the loss
            wide = slope
            if law is not None:
                wide.sub_(law, alpha=share)
        else:
            loss, wide = _acceptance_loss(slope, law, soft)
            total += ((1 - share) * logs - wanted + share * loss).sum()
            wide = (1 - share) * slope + share * wide
        if grads.hidden is None and grads.weight is None and grads.bias is None:
            continue
        wide.scatter_add_(1, label, torch.full_like(label, share - 1, dtype=wide.dtype))
        _gather_gradients(wide.to(hidden.dtype), hidden[rows], weight, rows, grads)
    return total, hits


def _acceptance_loss(q: Tensor, p: Tensor, soft: Soft) -> tuple[Tensor, Tensor]:
    """Losses [m, 1] that raise the acceptance a = sum min(p, q), and their gradients [m, W] by the logits of q.

    p: [m, W] on the draft vocabulary, its mass at most 1. d a / d logit = q (below - sum q below), below where q < p.
    """
    below = (q < p).to(q.dtype)
    a = torch.minimum(p, q).sum(-1, keepdim=True).clamp(min=1e-9)
    rise = q * (below - (q * below).sum(-1, keepdim=True))
    if soft == "lk":
        return -a.log(), -rise / a
    renormalised = p / p.sum(-1, keepdim=True).clamp(min=1e-9)
    kl = (torch.xlogy(renormalised, renormalised) - torch.xlogy(renormalised, q)).sum(-1, keepdim=True)
    v = (-HYBRID_DECAY * a).exp()
    return v * kl + (1 - v) * (1 - a), v * (q - renormalised) - (1 - v) * rise


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
    narrow = teacher.ids is None or len(teacher.weight) == len(teacher.ids)
    if teacher.soft == "ce":
        law = (target if narrow else target[:, teacher.ids]).softmax(-1)
        soft = F.cross_entropy(logits, law, reduction="sum")
    else:
        p, q = target.softmax(-1) if narrow else target.softmax(-1)[:, teacher.ids], logits.softmax(-1)
        a = torch.minimum(p, q).sum(-1)
        v = (-HYBRID_DECAY * a).exp().detach()
        renormalised = p / p.sum(-1, keepdim=True)
        kl = F.kl_div(q.log(), renormalised, reduction="none").sum(-1)
        soft = (-a.log() if teacher.soft == "lk" else v * kl + (1 - v) * (1 - a)).sum()
    return (1 - teacher.share) * hard + teacher.share * soft, hits
