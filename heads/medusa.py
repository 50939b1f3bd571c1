"""Medusa: K heads on the target's last hidden state, each guessing one position (Cai et al. 2024, arXiv 2401.10774).

B batch rows   T text positions   M marked positions   N tree nodes   D depth of the tree
H hidden size   V target vocabulary   W draft vocabulary   K heads   L residual blocks in a head

Head k is L residual blocks x + SiLU(Wx + b), W zero at the start, and an output layer. It sees neither the tokens
drafted before it nor the position: the K laws of a step are independent, and a tree takes its candidates from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tree import Draft, Shape
from .base import Accepted, DraftScores, HeadError, Memory, Output, TargetLayers, draft_vocab_faults
from .fill import fill
from .linear import can_pack, pack_linears
from .readout import ReadOut, prepare, read_out


@dataclass(frozen=True)
class MedusaConfig:
    """What config.json of Medusa heads holds."""

    num_heads: int
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    """The tapped layer: heads read the output of the final norm, which this id names."""
    num_layers: int = 1
    """L, residual blocks in each head."""
    draft_vocab_size: int | None = None
    """W; None means all of the target's vocabulary."""
    output: Literal["shared", "own"] = "shared"
    """One output layer, the target's own rows, for all heads; or one trained for each head, started from those rows."""
    kind: Literal["medusa"] = "medusa"

    def __post_init__(self) -> None:
        faults = [
            f"{name} must be at least 1, got {value}"
            for name, value in (("num_heads", self.num_heads), ("num_layers", self.num_layers))
            if value < 1
        ]
        if self.output not in ("shared", "own"):
            faults.append(f"output must be shared or own, got {self.output!r}")
        faults += draft_vocab_faults(self.draft_vocab_size, self.vocab_size)
        if faults:
            raise HeadError("Medusa heads cannot be built: " + "; ".join(faults))


class ResidualBlock(nn.Module):
    """x + SiLU(Wx + b) with W and b zero at the start, so that a fresh head is the identity."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


@dataclass(frozen=True)
class MedusaBeam:
    """The feature [B, H] before the root, and which head comes next: what was drafted makes no difference."""

    feature: Tensor
    level: int


class Medusa(nn.Module):
    """K Medusa heads.

    draft_ids: [W] ascending target ids, or None. The shared output layer is the target's and is never saved or trained.
    """

    def __init__(self, config: MedusaConfig, target: TargetLayers, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        output = target.output.on(draft_ids)
        rows, bias = output.weight, output.bias
        self._ids = draft_ids
        self._target = (target,)  # a tuple hides the target's weights from parameters() and state_dict()
        self._shared = (rows, bias)
        self.own_output = (
            nn.ParameterList(nn.Parameter(rows.detach().float().clone()) for _ in range(config.num_heads))
            if config.output == "own"
            else None
        )
        self._read_out: list[ReadOut] = []  # the output layers prepared by for_decoding

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.num_target_layers,)

    @property
    def depth(self) -> int:
        return self.config.num_heads

    @property
    def candidates(self) -> int:
        return self.config.draft_vocab_size or self.config.vocab_size

    @property
    def draft_ids(self) -> Tensor | None:
        return self._ids

    @property
    def steps(self) -> int:
        return self.config.num_heads

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """Fills ``tree``: a node of depth d takes a candidate of head d - 1. A dynamic one grows best first."""
        return fill(self, accepted, memory, tree, scores, tree.size - 1)

    def begin(self, accepted: Accepted, memory: Memory | None) -> tuple[Tensor, MedusaBeam, None]:
        feature = accepted.last_feature
        return self._draft_logits(feature, 0), MedusaBeam(feature, 1), None

    def extend(self, beam: MedusaBeam, parents: Tensor, tokens: Tensor) -> tuple[Tensor, MedusaBeam]:
        return self._draft_logits(beam.feature, beam.level), MedusaBeam(beam.feature, beam.level + 1)

    def predict(self, features: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        """Hidden rows [K, M, H]; the tokens are not looked at."""
        marked = features[rows]
        return torch.stack([block(marked) for block in self.blocks])

    def output(self) -> Output:
        return Output(*self._shared, self._ids, tuple(self.own_output or ()))

    def for_decoding(self, dtype: torch.dtype) -> Medusa:
        """A copy for drafting in ``dtype``, its layers packed where the CPU gains by it. Not to be trained or saved."""
        copy = Medusa(replace(self.config, output="shared"), self._target[0], self._ids)
        copy.config = self.config
        copy.blocks.load_state_dict(self.blocks.state_dict())
        device = self._shared[0].device
        copy = copy.to(device, dtype)
        if can_pack(dtype, device):
            pack_linears(copy.blocks)
        copy._read_out = prepare(self.output(), dtype)
        return copy.eval().requires_grad_(False)

    def _draft_logits(self, feature: Tensor, k: int) -> Tensor:
        """The last feature [B, H] to logits [B, 1, W] of head k."""
        hidden = self.blocks[k](feature.to(self._shared[0].dtype))[:, None]
        return read_out(self._read_out, self.output(), k, hidden)
