"""How a model's forward is called: its signature is asked, not its version.

B batch rows   n positions   k rows of logits that are read   u their union over the rows   V vocabulary
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel

from .cache import LayerSizes
from .capability import TargetError


@dataclass(frozen=True)
class Arguments:
    """How this version of the model's forward spells the cache and the choice of logits: asked of its signature."""

    cache: str
    keeps_logits: bool

    @staticmethod
    def of(model: PreTrainedModel) -> Arguments:
        names = inspect.signature(model.forward).parameters
        cache = next((name for name in ("cache", "past_key_values") if name in names), None)
        missing = [name for name in ("attention_mask", "position_ids") if name not in names]
        if cache is None or missing:
            lacks = [*([] if cache else ["cache"]), *missing]
            raise TargetError(f"{type(model).__name__}.forward takes no {', '.join(lacks)}: it cannot verify a tree")
        return Arguments(cache, "logits_to_keep" in names)

    def logits(self, model: nn.Module, tokens: Tensor, keep: Tensor | None, arguments: dict[str, Any]) -> Tensor:
        """Logits [B, k, V]. In some versions all rows must read the same positions, so the union is asked for."""
        if keep is None:
            return model(tokens, **arguments).logits
        columns, places = keep.unique(return_inverse=True)  # [u], [B, k]
        if self.keeps_logits:
            logits = model(tokens, logits_to_keep=columns, **arguments).logits  # [B, u, V]
        else:
            logits = model(tokens, **arguments).logits[:, columns]
        return logits[torch.arange(len(tokens), device=tokens.device)[:, None], places]


class RecordingCache(Cache):
    """Notes what each layer stores, for one forward."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.sizes: dict[int, LayerSizes] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.sizes[layer_idx] = LayerSizes(key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return int(query_length), 0
