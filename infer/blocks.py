"""The forward of Llama's family written out: what its Hugging Face modules compute, in fewer operations.

B batch rows   n new positions   S cache slots   H hidden size   h query heads   g key/value heads   d head size
k rows of logits that are read   V vocabulary   F feature width

On a CPU a forward over a few tokens spends a fifth of its time between the matrix products: casts, small copies,
calls. Here a norm is one operation, both rotations are one, and nothing is asked of the configuration on the way. The
weights are the model's own modules, whatever stands in them (packed, with an adapter); no tensor is kept twice. The
model's own forward stays the reference: ``Target`` compares the two when it is made and falls back to the model's where
they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from .cache import KVCache

Layer = Callable[[Tensor], Tensor]

FAMILIES = ("Llama", "Mistral", "Qwen2", "Qwen3")
"""Families whose decoder layer is what ``Block`` says: root-mean-square norms before, rotary halves, a gated MLP."""

HEAD_NORMS = ("q_norm", "k_norm")
"""Norms over each head, which Qwen3 has."""


@dataclass(frozen=True)
class Norm:
    weight: Tensor
    eps: float

    @staticmethod
    def of(module: Any) -> Norm:
        return Norm(module.weight.detach(), module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True)
class Block:
    """One decoder layer, made of the model's modules."""

    attention_norm: Norm
    q_proj: Layer
    k_proj: Layer
    v_proj: Layer
    q_norm: Norm | None
    k_norm: Norm | None
    o_proj: Layer
    mlp_norm: Norm
    gate_proj: Layer
    up_proj: Layer
    down_proj: Layer
    activation: Layer
    head_size: int
    scale: float
    mask: str
    """Which mask it takes where layers of two kinds are mixed."""


@dataclass(frozen=True)
class Blocks:
    """A whole model of the family."""

    embed: nn.Module
    rotary: Callable[..., tuple[Tensor, Tensor]]
    layers: tuple[Block, ...]
    norm: Norm
    output: Layer


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
    output: Any = model.get_output_embeddings()
    return Blocks(body.embed_tokens, body.rotary_emb, layers, Norm.of(body.norm), output)


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
    state = blocks.embed(tokens)  # [B, n, H]
    cos, sin = blocks.rotary(state, position_ids=positions)  # [B, n, d]
    half = cos.shape[-1] // 2
    sin = torch.cat([-sin[..., :half], sin[..., half:]], -1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    states: dict[int, Tensor] = {}
    for index, block in enumerate(blocks.layers):
        if index in taps:
            states[index] = state
        seen = mask if isinstance(mask, Tensor) else mask[block.mask]
        state = state + _attend(block, index, block.attention_norm(state), cos, sin, seen, cache)
        x = block.mlp_norm(state)
        state = state + block.down_proj(block.activation(block.gate_proj(x)) * block.up_proj(x))
    state = blocks.norm(state)
    states[len(blocks.layers)] = state
    if keep is not None:
        state = state[torch.arange(len(state), device=state.device)[:, None], keep]
    return blocks.output(state), states


def _attend(block: Block, index: int, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, cache: KVCache) -> Tensor:
    """Attention's output [B, n, H] from normed states [B, n, H]."""
    heads = (*x.shape[:2], -1, block.head_size)
    queries, keys, values = block.q_proj(x).view(heads), block.k_proj(x).view(heads), block.v_proj(x).view(heads)
    if block.q_norm is not None and block.k_norm is not None:
        queries, keys = block.q_norm(queries), block.k_norm(keys)
    both = torch.cat([queries, keys], 2)  # [B, n, h + g, d]
    both = torch.addcmul(both * cos, both.roll(block.head_size // 2, -1), sin)
    queries, keys = both.split([queries.shape[2], keys.shape[2]], 2)
    held = cache.update(keys.transpose(1, 2), values.transpose(1, 2), index)  # [B, g, S, d] both
    grouped = queries.shape[2] != keys.shape[2]
    found = F.scaled_dot_product_attention(
        queries.transpose(1, 2), *held, attn_mask=mask, scale=block.scale, enable_gqa=grouped
    )
    return block.o_proj(found.transpose(1, 2).flatten(2))


def _block(layer: Any, kind: str) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    q_norm, k_norm = (Norm.of(getattr(attention, name)) if hasattr(attention, name) else None for name in HEAD_NORMS)
    return Block(
        Norm.of(layer.input_layernorm),
        attention.q_proj,
        attention.k_proj,
        attention.v_proj,
        q_norm,
        k_norm,
        attention.o_proj,
        Norm.of(layer.post_attention_layernorm),
        mlp.gate_proj,
        mlp.up_proj,
        mlp.down_proj,
        mlp.act_fn,
        attention.head_dim,
        attention.scaling,
        kind,
    )
