"""The forward of Llama's family in the compiled part: all layers in one call, tree attention without a mask.

B batch rows   n new positions   H hidden size
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..heads import stack_layers
from .blocks import Block, Blocks
from .cache import KVCache
from .capability import Window

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
"""Hugging Face names of activations that the compiled part knows."""


@dataclass(frozen=True)
class Compiled:
    """A model of the family whose layers run in the compiled part; embedding, norm and output layer stay modules."""

    blocks: Blocks
    stack: Any

    def run_layers(
        self,
        tokens: Tensor,
        positions: Tensor,
        rotary: Tensor,
        ancestors: Tensor,
        cache: KVCache,
        taps: Collection[int],
    ) -> dict[int, Tensor]:
        """The states [B, n, H] by the ids ``taps``, the last of them the final norm's output.

        tokens, positions: [B, n]; rotary: [B, n] the positions that keys and queries are rotated for; ancestors:
        [B, n, n] bool. Keys and values go into ``cache``.
        """
        last, body = len(self.blocks.layers), self.blocks.body
        state = body.embed_tokens(tokens)
        cos, sin = body.rotary_emb(state, position_ids=rotary)
        wanted = sorted({*taps, last})
        keys, values = cache.layers_of()
        seen = (cache.lengths, cache.lengths, ancestors, positions)
        states = dict(zip(wanted, self.stack.run(state, None, cos, sin, keys, values, *seen, wanted), strict=True))
        return {**states, last: self.blocks.norm(states[last])}


def compiled_of(blocks: Blocks, window: Window | None) -> Compiled | None:
    """The blocks' layers, packed before, as the compiled part's; None where it cannot run them."""
    activation = ACTIVATIONS.get(getattr(blocks.body.config, "hidden_act", ""))
    if activation is None:
        return None
    stack = stack_layers(_parts(block, blocks, window, activation) for block in blocks.layers)
    return None if stack is None else Compiled(blocks, stack)


def _parts(block: Block, blocks: Blocks, window: Window | None, activation: str) -> tuple[Any, ...]:
    """What ``stack_layers`` asks of a layer, in its order."""
    attention, heads = block.attention, blocks.body.config.num_attention_heads
    norms = (block.attention_norm, block.mlp_norm, block.q_norm, block.k_norm)
    weights = [None if norm is None else norm.module.weight.detach() for norm in norms]
    sizes = (heads, heads // attention.num_key_value_groups)
    windowed = window if window is None or not window.mixed or block.mask == "sliding_attention" else None
    seen = 0 if windowed is None else windowed.size
    numbers = (block.mlp_norm.module.variance_epsilon, float(attention.scaling), seen)
    return attention, block.mlp, *weights, *sizes, *numbers, activation
