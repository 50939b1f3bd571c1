"""Medusa: K heads on the target's last hidden state, each guessing one position (Cai et al. 2024, arXiv 2401.10774).

B batch rows   T text positions   N tree nodes   D depth of the tree   R candidates ranked at a depth
H hidden size   V target vocabulary   W draft vocabulary   K heads   L residual blocks in a head

Head k is L residual blocks x + SiLU(Wx + b), W zero at the start, and an output layer. It sees neither the tokens
drafted before it nor the position: the K laws of a step are independent, and a tree takes its candidates from them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tree import Draft, Tree
from .base import Accepted, DraftScores, HeadError, Memory, Output
from .linear import PackedLinear, can_pack, pack_linears


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
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            faults.append(f"draft_vocab_size must lie in 1..{self.vocab_size}, got {self.draft_vocab_size}")
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


class Medusa(nn.Module):
    """K Medusa heads. ``target_output`` is the target's effective output layer over its whole vocabulary.

    draft_ids: [W] ascending target ids, or None. The shared output layer is the target's and is never saved or trained.
    """

    def __init__(self, config: MedusaConfig, target_output: Output, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(
            nn.Sequential(*(ResidualBlock(config.hidden_size) for _ in range(config.num_layers)))
            for _ in range(config.num_heads)
        )
        rows = target_output.weight if draft_ids is None else target_output.weight[draft_ids]
        bias = target_output.bias if target_output.bias is None or draft_ids is None else target_output.bias[draft_ids]
        self._ids = draft_ids
        self._shared = (rows, bias)  # a tuple hides the target's weight from parameters() and state_dict()
        self.own_output = (
            nn.ParameterList(nn.Parameter(rows.detach().float().clone()) for _ in range(config.num_heads))
            if config.output == "own"
            else None
        )
        self._layers: list[Callable[[Tensor], Tensor]] = []  # the output layers prepared by for_decoding

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

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Tree, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """Fills ``tree``: a node of depth d and rank r takes the r-th best token of head d - 1."""
        root = accepted.root  # [B]
        if tree.size == 1:
            return tree.draft(root[:, None]), None
        logits = self._draft_logits(accepted.last_feature, tree.depth)  # [B, D, W]
        steps = torch.arange(1, tree.depth + 1, device=root.device)
        ranking = scores(logits, accepted.root_position[:, None] + steps, self._ids)
        ranked = ranking.topk(tree.width).indices  # [B, D, R]
        if self._ids is not None:
            ranked = self._ids[ranked]
        depth, rank = tree.index(root.device)
        drafted = ranked[:, depth[1:] - 1, rank[1:]]  # [B, N-1]
        return tree.draft(torch.cat([root[:, None], drafted], 1)), None

    def predict(self, features: Tensor, tokens: Tensor) -> Tensor:
        """features [B, T, H] to hidden rows [K, B, T, H]; the tokens are not looked at."""
        return torch.stack([block(features) for block in self.blocks])

    def output(self) -> Output:
        rows, bias = self._shared
        if self.own_output is None:
            return Output(rows, bias, self._ids)
        return Output(rows, bias, self._ids, tuple(self.own_output))

    def for_decoding(self, dtype: torch.dtype) -> Medusa:
        """A copy for drafting in ``dtype``, its layers packed where the CPU gains by it. Not to be trained or saved."""
        rows, bias = self._shared
        copy = Medusa(replace(self.config, output="shared"), Output(rows, bias), None)
        copy.config, copy._ids = self.config, self._ids
        copy.blocks.load_state_dict(self.blocks.state_dict())
        own = None if self.own_output is None else [w.detach().to(dtype) for w in self.own_output]
        if can_pack(dtype, rows.device):
            copy._layers = [PackedLinear(w.to(dtype), bias) for w in own or [rows]]
            pack_linears(copy.blocks)
        elif own is not None:
            copy._layers = [partial(F.linear, weight=w, bias=bias) for w in own]
        return copy.to(rows.device, dtype).eval().requires_grad_(False)

    def _draft_logits(self, feature: Tensor, depth: int) -> Tensor:
        """The last feature [B, H] to logits [B, depth, W] of the first ``depth`` heads."""
        feature = feature.to(self._shared[0].dtype)
        hidden = torch.stack([block(feature) for block in list(self.blocks)[:depth]], 1)  # [B, depth, H]
        layers = self._layers or self._plain_layers()
        if len(layers) == 1:
            return layers[0](hidden)
        return torch.stack([layer(hidden[:, k]) for k, layer in enumerate(layers[:depth])], 1)

    def _plain_layers(self) -> list[Callable[[Tensor], Tensor]]:
        rows, bias = self._shared
        weights = [rows] if self.own_output is None else [w.to(rows.dtype) for w in self.own_output]
        return [partial(F.linear, weight=w, bias=bias) for w in weights]
