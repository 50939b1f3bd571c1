"""Medusa-2: heads and an adapter of the target trained together (Cai et al. 2024, arXiv 2401.10774, section 2.2.2).

B batch rows   T text positions   H hidden size   V target vocabulary   K heads   M supervised tokens

    loss = head_weight * sum over k of decay^k CE_k  +  kl_weight * KL(unadapted || adapted)

The heads' losses pull the target towards what they can guess, the KL holds it to the law it has without the adapter
(self-distillation, section 2.3.2): each is a mean over the whole optimiser step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..data import Batch, Encoded
from ..heads import Head, Output
from ..infer import TargetError
from .adapter import Adapter
from .align import next_tokens
from .features import TargetFeatures
from .step import Counts, Objective, train_step


@dataclass(frozen=True)
class Drift:
    """How far the adapted target is from the unadapted one: mean KL in nats, share of tokens with the same top one."""

    kl: float
    same_top: float

    def __str__(self) -> str:
        return f"adapter: KL to the unadapted target {self.kl:.4f}, same top token {self.same_top:.2%}"

    def values(self, prefix: str) -> dict[str, float]:
        """For a tracker."""
        return {f"{prefix}/adapter/kl": self.kl, f"{prefix}/adapter/same_top": self.same_top}


@dataclass(frozen=True)
class AdaptedFeatures:
    """Final features of rows as the adapter makes them now, with gradient, and as they are without it."""

    inner: TargetFeatures
    adapter: Adapter

    @property
    def rows(self) -> Sequence[Encoded]:
        return self.inner.rows

    def batch(self, indices: Sequence[int]) -> Batch:
        return self.inner.batch(indices)

    def names(self, indices: Sequence[int]) -> str:
        return self.inner.names(indices)

    def of(self, indices: Sequence[int], batch: Batch) -> tuple[Tensor, Tensor]:
        """[B, T, H] adapted and unadapted. Raises TargetError naming rows if one is not finite."""
        target, final = self.adapter.target, (self.adapter.target.num_layers,)
        try:
            with self.adapter.off():
                unadapted = target.features(batch.tokens, batch.lengths, final)
            with self.adapter.dropping():
                return target.features_with_gradient(batch.tokens, batch.lengths, final), unadapted
        except TargetError as error:
            raise TargetError(f"rows {self.names(indices)}: {error}") from error


class JointInTraining(nn.Module):
    """The joint step as a module's forward, for Accelerate to wrap; it owns what is trained, heads and adapter."""

    def __init__(self, head: Head, objective: Objective, adapter: Adapter) -> None:
        super().__init__()
        self.head, self.objective, self.settings = cast(Any, head), objective, adapter.settings
        self.adapter = nn.ParameterList(p for _, p in adapter.named_parameters())
        self._output = adapter.target.output_layer()

    def forward(
        self, features: Tensor, unadapted: Tensor, tokens: Tensor, mask: Tensor, totals: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The loss and the packed counts [4, K + 1] of these rows: of each head, and last of the KL.

        features, unadapted: [B, T, H]; totals: [K + 1], what each of the means is divided by.
        """
        teacher = features.detach().to(self._output.weight.dtype) if self.objective.needs_final else None
        heads, counts = train_step(self.head, features, teacher, tokens, mask, totals[:-1], self.objective)
        spoken = follows(mask)
        kl, same = kl_to_unadapted(unadapted[spoken], features[spoken], self._output, self.objective.chunk)
        loss = self.settings.head_weight * heads + self.settings.kl_weight * kl / totals[-1].clamp(min=1)
        of_kl = torch.stack([kl.detach().double(), same.double(), *[spoken.sum().double()] * 2])
        return loss, torch.cat([counts.pack(), of_kl[:, None]], 1)


def follows(mask: Tensor) -> Tensor:
    """Where the target's law speaks of a supervised token: [B, T] to [B, T] bool."""
    return next_tokens(mask).bool()


def kl_to_unadapted(unadapted: Tensor, adapted: Tensor, output: Output, chunk: int) -> tuple[Tensor, Tensor]:
    """Sum over rows of KL(unadapted || adapted), and how many rows have the same token on top.

    Both are final features [M, H], turned into logits ``chunk`` rows at a time and once more for the gradient, which
    goes to ``adapted`` alone.
    """
    wide = torch.promote_types(adapted.dtype, output.weight.dtype)
    weight, bias = (None if part is None else part.to(wide) for part in output.of_head(0))
    unadapted, adapted = unadapted.to(wide), adapted.to(wide)
    total, same = adapted.new_zeros((), dtype=torch.float32), torch.zeros((), dtype=torch.int64, device=adapted.device)
    for begin in range(0, len(adapted), chunk):
        rows = slice(begin, begin + chunk)
        kl, hits = cast(
            tuple[Tensor, Tensor],
            checkpoint(
                _kl_of_rows, unadapted[rows], adapted[rows], weight, bias, use_reentrant=False, preserve_rng_state=False
            ),
        )
        total, same = total + kl, same + hits
    return total, same


def _kl_of_rows(unadapted: Tensor, adapted: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    with torch.autocast(adapted.device.type, enabled=False):
        p, q = (F.linear(rows, weight, bias).float().log_softmax(-1) for rows in (unadapted, adapted))
    return F.kl_div(q, p, reduction="sum", log_target=True), (p.argmax(-1) == q.argmax(-1)).sum()


def loss_weights(objective: Objective, steps: int, adapter: Adapter | None) -> list[float]:
    """The weight of each term of the loss: one for each of the K heads, and with an adapter one for the KL."""
    weights = [objective.decay**k for k in range(steps)]
    if adapter is None:
        return weights
    return [*(adapter.settings.head_weight * weight for weight in weights), adapter.settings.kl_weight]


def split_counts(packed: Tensor, steps: int) -> tuple[Counts, Drift | None]:
    """Packed counts [4, K] or [4, K + 1] to those of the heads and, if there is an adapter, its drift."""
    if packed.shape[1] == steps:
        return Counts.unpack(packed), None
    kl, same, _, positions = packed[:, -1].tolist()
    return Counts.unpack(packed[:, :steps]), Drift(kl / max(positions, 1), same / max(positions, 1))
