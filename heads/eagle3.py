"""EAGLE-3: one decoder layer on features of several of the target's layers (Li et al. 2025, arXiv 2503.01840).

B batch rows   T text positions   M marked positions   K unrolled steps   n rows   C tapped layers   F = C * H
H hidden size   W draft vocabulary

``fc`` brings the tapped features to width H. The layer's attention reads the normed embedding of the next token beside
the normed state; its residual is the raw state. A norm and an output layer of the head's own, over the draft
vocabulary, follow; the raw output is the state of the next step. Training unrolls K steps ("training-time test").
``fc_norm`` (a norm for each tapped feature) and ``norm_output`` (the normed output is carried on) are EAGLE-3.1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tree import Draft, Shape
from . import unroll
from .base import Accepted, DraftScores, HeadError, Memory, Output, TargetLayers, draft_vocab_faults
from .eagle import DEEPEST
from .fill import fill
from .layer import DraftLayer, LayerShape, RMSNorm, as_shape, pack_head


def default_taps(num_layers: int) -> tuple[int, ...]:
    """Layers 2, L/2 and L - 3, as the paper has it; the last three of a target too small for that.

    >>> default_taps(30), default_taps(7), default_taps(4), default_taps(2)
    ((2, 15, 27), (2, 3, 4), (1, 2, 3), (0, 1))
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(range(max(0, num_layers - 3), num_layers))


@dataclass(frozen=True)
class Eagle3Config:
    """What config.json of EAGLE-3 heads holds."""

    hidden_size: int
    vocab_size: int
    num_target_layers: int
    tapped_layers: tuple[int, ...]
    """Ids of the hidden states *entering* these layers, ascending; always written down."""
    layer: LayerShape
    steps: int = 7
    """K, steps that training unrolls."""
    draft_vocab_size: int | None = None
    """W; None means all of the target's vocabulary."""
    fc_norm: bool = False
    norm_output: bool = False
    trained_length: int = 0
    """The longest text of training in tokens; 0 is not known."""
    kind: Literal["eagle3"] = "eagle3"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", as_shape(self.layer))
        object.__setattr__(self, "tapped_layers", tuple(self.tapped_layers))
        faults = self.layer.faults(self.hidden_size)
        taps = self.tapped_layers
        if not taps or list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < self.num_target_layers:
            faults.append(
                f"tapped_layers must be distinct, ascending and in 0..{self.num_target_layers - 1}, got {list(taps)}"
            )
        if self.steps < 1:
            faults.append(f"steps must be at least 1, got {self.steps}")
        faults += draft_vocab_faults(self.draft_vocab_size, self.vocab_size)
        if faults:
            raise HeadError("EAGLE-3 heads cannot be built: " + "; ".join(faults))


class Eagle3(nn.Module):
    """An EAGLE-3 head. The embedding is the target's; the output layer starts from the target's rows.

    draft_ids: [W] ascending target ids, or None.
    """

    def __init__(self, config: Eagle3Config, target: TargetLayers, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.layer.rms_norm_eps
        self.fc_norm = nn.ModuleList(RMSNorm(size, eps) for _ in config.tapped_layers if config.fc_norm)
        self.fc = nn.Linear(len(config.tapped_layers) * size, size, bias=False)
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps)
        self.layer = DraftLayer(config.layer, 2 * size)
        self.norm = RMSNorm(size, eps)
        rows = target.output.on(draft_ids).weight
        self.lm_head = nn.Linear(size, len(rows), bias=False)
        with torch.no_grad():
            self.lm_head.weight.copy_(rows)
        self._target = (target,)  # a tuple hides the target's weights from parameters() and state_dict()
        self._ids = draft_ids

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.tapped_layers

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def depth(self) -> int:
        return DEEPEST

    @property
    def candidates(self) -> int:
        return self.config.draft_vocab_size or self.config.vocab_size

    @property
    def draft_ids(self) -> Tensor | None:
        return self._ids

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """Fills ``tree`` level by level, one head call each."""
        return fill(self, accepted, memory, tree, scores)

    def begin(self, accepted: Accepted, memory: Memory | None) -> tuple[Tensor, unroll.Beam, Memory]:
        return unroll.begin(self, accepted, memory)

    def extend(self, beam: unroll.Beam, parents: Tensor, tokens: Tensor) -> tuple[Tensor, unroll.Beam]:
        return unroll.extend(self, beam, parents, tokens)

    def predict(self, features: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        """Normed hidden rows [K, M, H]."""
        return unroll.predict(self, features, tokens, rows, self.config.steps)

    def output(self) -> Output:
        return Output(self.lm_head.weight, None, self._ids)

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._target[0].embedding)

    def fuse(self, features: Tensor) -> Tensor:
        if self.fc_norm:
            parts = features.split(self.config.hidden_size, -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(features)

    def enter(self, state: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        normed = self.input_layernorm(embedding.to(state.dtype)), self.hidden_norm(state)
        return torch.cat(normed, -1), state

    def carry(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden) if self.config.norm_output else hidden

    def read(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)

    def for_decoding(self, dtype: torch.dtype) -> Eagle3:
        """A copy for drafting in ``dtype``, its layers packed where the CPU gains by it. Not to be trained or saved."""
        copy = Eagle3(self.config, self._target[0], self._ids)
        copy.load_state_dict(self.state_dict())
        device = self.lm_head.weight.device
        copy = copy.to(device, dtype)
        pack_head(copy, dtype, device)
        return copy.eval().requires_grad_(False)
