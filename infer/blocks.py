"""The forward of Llama's family written out: what its Hugging Face modules compute, in fewer operations.

B batch rows   n new positions   S cache slots   H hidden size   h query heads   g key/value heads   d head size
k rows of logits that are read   V vocabulary   F feature width

On a CPU a forward over a few tokens spends a fifth of its time between the matrix products: casts, small copies,
calls. Here a norm is one operation, both rotations are one, and nothing is asked of the configuration on the way. The
weights are the model's own modules, whatever stands in them (packed, with an adapter); no tensor is kept twice. Packed
layers that read the same rows are one product. The
model's own forward stays the reference: ``Target`` compares the two when it is made and falls back to the model's where
they differ.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from ..heads.linear import GATE_UP, QKV, side_by_side
from .cache import KVCache

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Families whose decoder layer is what ``Block`` says: root-mean-square norms before, rotary halves, a gated MLP."""

HEAD_NORMS = ("q_norm", "k_norm")
"""Norms over each head, which Qwen3 has."""


@dataclass(frozen=True)
class Norm:
    module: Any

    def __call__(self, x: Tensor) -> Tensor:
        weight: Tensor = self.module.weight
        return F.rms_norm(x, weight.shape, weight, self.module.variance_epsilon)


@dataclass(frozen=True)
class Block:
    """One decoder layer: the model's modules, asked anew each time, since an adapter may come to stand in them."""

    attention_norm: Norm
    attention: Any
    q_norm: Norm | None
    k_norm: Norm | None
    mlp_norm: Norm
    mlp: Any
    mask: str
    """Which mask it takes where layers of two kinds are mixed."""


@dataclass(frozen=True)
class Blocks:
    """A whole model of the family."""

    model: Any
    body: Any
    layers: tuple[Block, ...]
    norm: Norm


def blocks_of(model: PreTrainedModel) -> Blocks | None:
    """The model's parts, or None if it is not of a known family or does not use sdpa attention."""
    body: Any = model.base_model
    family = type(body).__name__.removesuffix("Model")
    config = body.config
    named = family in FAMILIES and type(model).__name__ == f"{family}ForCausalLM"
    if not named or config._attn_implementation != "sdpa":
        return None
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(body.layers)
    layers = tuple(_block(layer, kind) for layer, kind in zip(body.layers, kinds, strict=True))
    return Blocks(model, body, layers, Norm(body.norm))


def forward(
    blocks: Blocks,
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor | dict[str, Tensor],
    cache: KVCache,
    taps: Sequence[int],
    keep: Tensor | None,
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits [B, k, V] of the positions ``keep`` [B, k] (all if None), and the states [B, n, H] by the ids ``taps``.

    tokens, positions: [B, n]; mask: additive [B, 1, n, S], or one for each kind of layer. Keys and values go into
    ``cache``. A tap is the state that enters the layer of that id; the number of layers names the final norm's output.
    """
    last = len(blocks.layers)
    states = run_layers(blocks, tokens, positions, mask, cache, {*taps, last})
    return read_logits(blocks, states[last], keep), states


def read_logits(blocks: Blocks, state: Tensor, keep: Tensor | None) -> Tensor:
    """Logits [B, k, V] of the final norm's output [B, n, H] at the positions ``keep`` [B, k], all if None."""
    if keep is not None:
        state = state[torch.arange(len(state), device=state.device)[:, None], keep]
    return blocks.model.get_output_embeddings()(state)


def run_layers(
    blocks: Blocks,
    tokens: Tensor,
    positions: Tensor,
    mask: Tensor | dict[str, Tensor],
    cache: KVCache | None,
    taps: Collection[int],
) -> dict[int, Tensor]:
    """The states [B, n, H] by the ids ``taps``; nothing beyond the last of them is computed. Arguments as above."""
    state = blocks.body.embed_tokens(tokens)  # [B, n, H]
    cos, sin = blocks.body.rotary_emb(state, position_ids=positions)  # [B, n, d]
    half = cos.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    states: dict[int, Tensor] = {}
    for index, block in enumerate(blocks.layers):
        if index in taps:
            states[index] = state
            if index == max(taps):
                return states
        seen = mask if isinstance(mask, Tensor) else mask[block.mask]
        state = state + _attend(block, index, block.attention_norm(state), cos, sin, seen, cache)
        gate, up = side_by_side(block.mlp, GATE_UP, block.mlp_norm(state))
        state = state + block.mlp.down_proj(block.mlp.act_fn(gate) * up)
    states[len(blocks.layers)] = blocks.norm(state)
    return states


def _attend(
    block: Block, index: int, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KVCache | None
) -> Tensor:
    """Attention's output [B, n, H] from normed states [B, n, H]."""
    attention = block.attention
    heads = (*x.shape[:2], -1, attention.head_dim)
    queries, keys, values = (part.view(heads) for part in side_by_side(attention, QKV, x))
    if block.q_norm is not None and block.k_norm is not None:
        queries, keys = block.q_norm(queries), block.k_norm(keys)
    both = torch.cat([queries, keys], 2)  # [B, n, h + g, d]
    both = torch.addcmul(both * cos, both.roll(attention.head_dim // 2, -1), sin)
    queries, keys = both.split([queries.shape[2], keys.shape[2]], 2)
    held = keys.transpose(1, 2), values.transpose(1, 2)  # [B, g, n, d] both
    if cache is not None:
        held = cache.update(*held, index)  # [B, g, S, d]
    grouped = queries.shape[2] != keys.shape[2]
    found = F.scaled_dot_product_attention(
        queries.transpose(1, 2), *held, attn_mask=mask, scale=attention.scaling, enable_gqa=grouped
    )
    return attention.o_proj(found.transpose(1, 2).flatten(2))


def _block(layer: Any, kind: str) -> Block:
    attention = layer.self_attn
    q_norm, k_norm = (Norm(getattr(attention, name)) if hasattr(attention, name) else None for name in HEAD_NORMS)
    norms = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
    return Block(norms[0], attention, q_norm, k_norm, norms[1], layer.mlp, kind)
