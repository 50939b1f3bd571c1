"""EAGLE-1 and -2: one decoder layer that continues the target's last features (Li et al. 2024, arXiv 2401.15077).

B batch rows   T text positions   M marked positions   K unrolled steps   n rows   H hidden size   W draft vocabulary

The feature of position t and the embedding of the token of t + 1, joined and brought to width H, go through one layer
without an input norm; the output stands for the target's feature of t + 1, and the target's own output layer reads it.
EAGLE-2 (arXiv 2406.16858) is the same head under a dynamic tree. Trained over several steps on its own outputs it is
HASS (Zhang et al. 2024, arXiv 2408.15766). No biases are trained, since engines drop them; imported heads may have one.
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
from .fill import fill
from .layer import DraftLayer, LayerShape, as_shape, pack_head
from .readout import ReadOut, prepare, read_out

DEEPEST = 32
"""Drafted levels that a step-wise head is asked for at most: it has no limit of its own."""


@dataclass(frozen=True)
class EagleConfig:
    """What config.json of EAGLE-1/2 heads holds."""

    hidden_size: int
    vocab_size: int
    num_target_layers: int
    """The tapped layer: the output of the final norm, which this id names."""
    layer: LayerShape
    steps: int = 1
    """K, steps that training unrolls: 1 is EAGLE-1, more is HASS."""
    draft_vocab_size: int | None = None
    """W; None means all of the target's vocabulary."""
    trained_length: int = 0
    """The longest text of training in tokens; 0 is not known."""
    fc_bias: bool = False
    """Whether ``fc`` has a bias, as heads of the paper's own repository do."""
    kind: Literal["eagle"] = "eagle"

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer", as_shape(self.layer))
        faults = self.layer.faults(self.hidden_size)
        if self.steps < 1:
            faults.append(f"steps must be at least 1, got {self.steps}")
        faults += draft_vocab_faults(self.draft_vocab_size, self.vocab_size)
        if faults:
            raise HeadError("EAGLE heads cannot be built: " + "; ".join(faults))


class Eagle(nn.Module):
    """An EAGLE-1/2 head. Embedding and output layer are the target's, never saved or trained.

    draft_ids: [W] ascending target ids, or None.
    """

    def __init__(self, config: EagleConfig, target: TargetLayers, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config = config
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)  # embedding, feature
        self.layer = DraftLayer(config.layer, config.hidden_size)
        self._target = (target,)  # a tuple hides the target's weights from parameters() and state_dict()
        self._ids = draft_ids
        self._output = target.output.on(draft_ids)
        self._read_out: list[ReadOut] = []  # the output layer prepared by for_decoding

    @property
    def taps(self) -> tuple[int, ...]:
        return (self.config.num_target_layers,)

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
        """Hidden rows [K, M, H]: guesses of the target's own features at t + 1 + k."""
        return unroll.predict(self, features, tokens, rows, self.config.steps)

    def output(self) -> Output:
        return self._output

    def embed(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self._target[0].embedding)

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def enter(self, state: Tensor, embedding: Tensor) -> tuple[Tensor, Tensor]:
        joined = self.fc(torch.cat([embedding.to(state.dtype), state], -1))
        return joined, joined

    def carry(self, hidden: Tensor) -> Tensor:
        return hidden

    def read(self, hidden: Tensor) -> Tensor:
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return read_out(self._read_out, self._output, 0, hidden)

    def for_decoding(self, dtype: torch.dtype) -> Eagle:
        """A copy for drafting in ``dtype``, its layers packed where the CPU gains by it. Not to be trained or saved."""
        copy = Eagle(self.config, self._target[0], self._ids)
        copy.load_state_dict(self.state_dict())
        device = self._output.weight.device
        copy = copy.to(device, dtype)
        pack_head(copy, dtype, device)
        copy._read_out = prepare(self._output, dtype)
        return copy.eval().requires_grad_(False)
