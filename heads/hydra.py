"""Hydra: Medusa's heads, each of which also reads the tokens drafted before it (Ankner et al. 2024, arXiv 2402.05109).

B batch rows   T text positions   M marked positions   n nodes of a level   e of them that are asked for candidates
H hidden size   W draft vocabulary   K heads   L blocks in a head

Head k guesses the token at t + 2 + k from the feature h of position t and the embeddings of the k + 1 tokens between,
the root and k drafted ones: [h ; e(t+1) ; .. ; e(t+1+k)], (k + 2) H wide. The first of its L blocks brings that to H.

Hydra++ (same paper) puts a decoder layer over the features of all positions up to t first and reads its
output in place of h. Its memory of a request is EAGLE's: the layer's keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tree import Draft, Shape
from . import unroll
from .base import Accepted, DraftScores, HeadError, Memory, Output, TargetLayers, draft_vocab_faults
from .fill import fill
from .layer import DraftLayer, LayerShape, RMSNorm, as_shape, pack_head
from .medusa import ResidualBlock
from .readout import ReadOut, prepare, read_out

NORM_EPS = 1e-6


@dataclass(frozen=True)
class HydraConfig:
    """What config.json of Hydra heads holds."""

    num_heads: int
    hidden_size: int
    vocab_size: int
    num_target_layers: int
    """The tapped layer: heads read the output of the final norm, which this id names."""
    num_layers: int = 1
    """L, blocks in each head, the first one included."""
    draft_vocab_size: int | None = None
    """W; None means all of the target's vocabulary."""
    output: Literal["shared", "own"] = "shared"
    """One output layer, the target's own rows, for all heads; or one trained for each head, started from those rows."""
    layer: LayerShape | None = None
    """The decoder layer over the features that makes them Hydra++; None is Hydra."""
    trained_length: int = 0
    """The longest text of training in tokens; 0 is not known."""
    kind: Literal["hydra"] = "hydra"

    def __post_init__(self) -> None:
        layer = self.layer if self.layer is None else as_shape(self.layer)
        object.__setattr__(self, "layer", layer)
        faults = [
            f"{name} must be at least 1, got {value}"
            for name, value in (("num_heads", self.num_heads), ("num_layers", self.num_layers))
            if value < 1
        ]
        if self.output not in ("shared", "own"):
            faults.append(f"output must be shared or own, got {self.output!r}")
        faults += draft_vocab_faults(self.draft_vocab_size, self.vocab_size)
        if layer is not None:
            faults += layer.faults(self.hidden_size)
        if faults:
            raise HeadError("Hydra heads cannot be built: " + "; ".join(faults))


START = 0.25
"""How much of the target's feature a fresh head passes."""


class FirstBlock(nn.Module):
    """Px + SiLU(Wx + b) from ``parts`` * H to H; at the start W, b are zero and P passes START of the first H numbers.

    A fresh head gives START * h, that is, softly what the target expected in the root's place: h whole would be sure of
    a token that stands there already, and unlearning that takes hundreds of steps. P is trained as well: SiLU never
    falls below -0.28, so without a linear path of the embeddings a head of one block could add to h but hardly take
    anything away from it.
    """

    def __init__(self, size: int, parts: int) -> None:
        super().__init__()
        self.linear = nn.Linear(parts * size, size)
        self.residual = nn.Linear(parts * size, size, bias=False)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)
        nn.init.eye_(self.residual.weight)  # [I 0 .. 0]
        with torch.no_grad():
            self.residual.weight.mul_(START)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x) + F.silu(self.linear(x))


class PrefixLayer(nn.Module):
    """The decoder layer of Hydra++: reads the normed features, its residual is the features themselves.

    What it adds starts at zero, so that fresh Hydra++ heads read the target's feature as it is.
    """

    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.layer = DraftLayer(shape, shape.hidden_size)
        nn.init.zeros_(self.layer.self_attn.o_proj.weight)
        nn.init.zeros_(self.layer.mlp.down_proj.weight)


@dataclass(frozen=True)
class HydraBeam:
    """What the nodes of a level know, and which head comes next.

    state: [B, H], h or what the prefix layer made of it
    path: [B, n, level * H], normed embeddings of the tokens from the root to the node
    """

    state: Tensor
    path: Tensor
    level: int


class Hydra(nn.Module):
    """K Hydra heads. Embedding and shared output layer are the target's, never saved or trained.

    Embeddings pass a norm with learned scales, one for all heads: a target's rows may be far smaller or larger than h,
    which comes out of its final norm, and some targets scale them in their own forward.

    draft_ids: [W] ascending target ids, or None.
    """

    def __init__(self, config: HydraConfig, target: TargetLayers, draft_ids: Tensor | None) -> None:
        super().__init__()
        self.config = config
        size = config.hidden_size
        self.prefix = None if config.layer is None else PrefixLayer(config.layer)
        self.embedding_norm = RMSNorm(size, NORM_EPS)
        self.blocks = nn.ModuleList(
            nn.Sequential(FirstBlock(size, k + 2), *(ResidualBlock(size) for _ in range(config.num_layers - 1)))
            for k in range(config.num_heads)
        )
        output = target.output.on(draft_ids)
        rows, bias = output.weight, output.bias
        self.own_output = (
            nn.ParameterList(nn.Parameter(rows.detach().float().clone()) for _ in range(config.num_heads))
            if config.output == "own"
            else None
        )
        self._ids = draft_ids
        self._target = (target,)  # a tuple hides the target's weights from parameters() and state_dict()
        self._shared = (rows, bias)
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
        """Fills ``tree`` level by level: the nodes of depth d are candidates of head d - 1."""
        return fill(self, accepted, memory, tree, scores)

    def begin(self, accepted: Accepted, memory: Memory | None) -> tuple[Tensor, HydraBeam, Memory | None]:
        """Logits [B, 1, W] of head 0, which has read the root."""
        dtype = self.embedding_norm.weight.dtype
        if self.prefix is None:
            state = accepted.last_feature.to(dtype)
        else:
            features = accepted.features.to(dtype)
            normed = self.prefix.norm(features)
            found, memory = unroll.read_accepted(self.prefix.layer, normed, features, accepted, memory)
            state = found[:, 0]
        path = self._embed(accepted.root[:, None], dtype)
        return self._logits(0, state, path), HydraBeam(state, path, 1), memory

    def extend(self, beam: HydraBeam, parents: Tensor, tokens: Tensor) -> tuple[Tensor, HydraBeam]:
        """Logits [B, e, W] of the next head, which reads each node's own path; at most K - 1 times after ``begin``."""
        batch = torch.arange(len(tokens), device=tokens.device)[:, None]
        path = torch.cat([beam.path[batch, parents], self._embed(tokens, beam.path.dtype)], -1)
        return self._logits(beam.level, beam.state, path), HydraBeam(beam.state, path, beam.level + 1)

    def predict(self, features: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        """Hidden rows [K, M, H], every head reading the true tokens t + 1 .. t + 1 + k.

        Of unmarked rows the prefix layer computes keys and values, and nothing else is computed.
        """
        if self.prefix is None:
            state = features[rows]
        else:
            state = unroll.read_marked(self.prefix.layer, self.prefix.norm(features), features, rows)
        row, at = rows.nonzero(as_tuple=True)
        last = tokens.shape[1] - 1  # a head that would read past the text has no label there
        parts, hidden = [state], []
        for k, block in enumerate(self.blocks):
            parts.append(self._embed(tokens[row, (at + k).clamp(max=last)], state.dtype))
            hidden.append(block(torch.cat(parts, -1)))
        return torch.stack(hidden)

    def output(self) -> Output:
        return Output(*self._shared, self._ids, tuple(self.own_output or ()))

    def for_decoding(self, dtype: torch.dtype) -> Hydra:
        """A copy for drafting in ``dtype``, its layers packed where the CPU gains by it. Not to be trained or saved."""
        copy = Hydra(replace(self.config, output="shared"), self._target[0], self._ids)
        copy.config = self.config
        kept = copy.state_dict().keys()  # all but the heads' own output layers, which are prepared below
        copy.load_state_dict({name: value for name, value in self.state_dict().items() if name in kept})
        device = self._shared[0].device
        copy = copy.to(device, dtype)
        pack_head(copy, dtype, device)
        copy._read_out = prepare(self.output(), dtype)
        return copy.eval().requires_grad_(False)

    def _embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        return self.embedding_norm(F.embedding(tokens, self._target[0].embedding).to(dtype))

    def _logits(self, k: int, state: Tensor, path: Tensor) -> Tensor:
        """States [B, H] and paths [B, n, (k + 1) * H] to logits [B, n, W] of head k."""
        hidden = self.blocks[k](torch.cat([state[:, None].expand(-1, path.shape[1], -1), path], -1))
        return read_out(self._read_out, self.output(), k, hidden)
