"""The one decoder layer of EAGLE heads, in parts: keys and values, queries, and what follows the attention.

B batch rows   n rows of the layer   S slots   h query heads   g key/value heads   d head size   H hidden size
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import native
from .linear import GATE_UP, QKV, can_pack, pack_linears, pack_sides, side_by_side, stack_layers


@dataclass(frozen=True)
class LayerShape:
    """The sizes of a Llama decoder layer, by the names that Hugging Face configurations give them."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 2048
    """The target's: no table is made from it, but engines that serve the head read it."""

    def faults(self, hidden_size: int) -> list[str]:
        """What is wrong for a target of ``hidden_size``, in words."""
        names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        found = [
            f"layer.{name} must be at least 1, got {getattr(self, name)}" for name in names if getattr(self, name) < 1
        ]
        if not found and self.num_attention_heads % self.num_key_value_heads:
            found.append(
                f"layer.num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"layer.num_key_value_heads ({self.num_key_value_heads})"
            )
        if not found and self.head_dim % 2:
            found.append(f"layer.head_dim must be even for rotary positions, got {self.head_dim}")
        if self.hidden_size != hidden_size:
            found.append(f"layer.hidden_size is {self.hidden_size}, the target's is {hidden_size}")
        return found


def as_shape(layer: LayerShape | dict[str, Any]) -> LayerShape:
    """A shape read from JSON; TypeError for unknown keys."""
    return LayerShape(**layer) if isinstance(layer, dict) else layer


class RMSNorm(nn.Module):
    """Root-mean-square norm, taken in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype == torch.float32 and not self.weight.requires_grad and native.runs_on(x):
            return torch.ops.treedraft.rms_norm(x, self.weight, self.eps)  # torch's takes ten operations
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        queries, keys = shape.num_attention_heads * shape.head_dim, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=False)
        self.k_proj = nn.Linear(input_size, keys, bias=False)
        self.v_proj = nn.Linear(input_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)


class GatedMLP(nn.Module):
    def __init__(self, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = side_by_side(self, GATE_UP, x)
        return self.down_proj(F.silu(gate) * up)


@dataclass(frozen=True)
class Sight:
    """What n new rows of each text see, and where their keys and values are written.

    held, start: [B]; ancestors: [B, n, m]. Slots [0, held) are seen, and of the m slots from ``start`` on those that
    ``ancestors`` names; the new rows' own are the last n of these.
    """

    held: Tensor
    start: Tensor
    ancestors: Tensor

    def seen(self, slots: int) -> Tensor:
        """[B, n, slots], slots beyond the last one written being unseen."""
        slot = torch.arange(slots, device=self.held.device)
        among = slot - self.start[:, None]  # [B, slots]
        drafted = self.ancestors.shape[-1]
        index = among.clamp(0, drafted - 1)[:, None].expand(-1, self.ancestors.shape[1], -1)
        named = self.ancestors.gather(2, index) & ((among >= 0) & (among < drafted))[:, None]
        return named | (slot < self.held[:, None])[:, None]


class DraftLayer(nn.Module):
    """A Llama decoder layer whose attention reads ``input_size`` numbers a row and whose residual is passed apart."""

    def __init__(self, shape: LayerShape, input_size: int) -> None:
        super().__init__()
        self.shape = shape
        self.self_attn = Attention(shape, input_size)
        self.mlp = GatedMLP(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self._rope = rotary_frequencies(shape)  # a tuple stays in fp32 whatever the module is cast to
        self._stack: Any = None

    def use_compiled_part(self) -> None:
        """Runs ``over`` in the compiled part from now on, where the packed layers allow it."""
        shape, norm = self.shape, self.post_attention_layernorm
        sizes = (shape.num_attention_heads, shape.num_key_value_heads, norm.eps, shape.head_dim**-0.5, 0, "silu")
        self._stack = stack_layers([(self.self_attn, self.mlp, None, norm.weight.detach(), None, None, *sizes)])

    @property
    def compiled(self) -> bool:
        return self._stack is not None

    def over(
        self, x: Tensor, residual: Tensor, positions: Tensor, keys: Tensor, values: Tensor, sight: Sight
    ) -> Tensor:
        """The layer's output [B, n, H] of new rows x [B, n, X] with residual [B, n, H] at ``positions`` [B, n].

        keys, values: [B, g, S, d], of which the new rows' slots are written.
        """
        if self._stack is not None:
            cos, sin = self._rotation(positions, x.dtype)
            caches = ([keys], [values], sight.held, sight.start, sight.ancestors, positions)
            return self._stack.run(x, residual, torch.cat([cos, cos], -1), torch.cat([sin, sin], -1), *caches, [1])[0]
        queries, new_keys, new_values = self.read(x, positions)
        first_own = sight.start + sight.ancestors.shape[-1] - x.shape[1]
        slots = first_own[:, None] + torch.arange(x.shape[1], device=x.device)
        write(keys, values, new_keys, new_values, slots)
        return self.finish(self.attend(queries, keys, values, sight.seen(keys.shape[2])), residual)

    def read(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, h, n, d], keys and values [B, g, n, d] of rows [B, n, input_size] at ``positions`` [B, n].

        Queries and keys are rotated.
        """
        queries, keys, values = (self._heads(part) for part in side_by_side(self.self_attn, QKV, x))
        both = self._rotate(torch.cat([queries, keys], 1), positions)
        return both[:, : queries.shape[1]], both[:, queries.shape[1] :], values

    def keys_values(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """``read`` where queries are not wanted."""
        keys = self._heads(self.self_attn.k_proj(x))
        return self._rotate(keys, positions), self._heads(self.self_attn.v_proj(x))

    def queries(self, x: Tensor, positions: Tensor) -> Tensor:
        """``read`` where queries alone are wanted."""
        return self._rotate(self._heads(self.self_attn.q_proj(x)), positions)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor) -> Tensor:
        """[B, h, n, d]: attention of queries to slots [B, g, S, d] where ``seen`` [B, n, S] bool allows."""
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=seen[:, None], enable_gqa=True)

    def finish(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The layer's output [B, n, H] from what attention found [B, h, n, d] and the residual [B, n, H]."""
        hidden = residual + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.post_attention_layernorm(hidden))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2)

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """Rotary positions in half-rotation form (Su et al. 2021, arXiv 2104.09864), angles in fp32."""
        cos, sin = (part[:, None] for part in self._rotation(positions, x.dtype))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _rotation(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine [B, n, d/2] of the rotations at ``positions`` [B, n]."""
        frequencies, scale = self._rope
        angles = positions[..., None].float() * frequencies.to(positions.device)
        return (torch.cos(angles) * scale).to(dtype), (torch.sin(angles) * scale).to(dtype)


def write(keys: Tensor, values: Tensor, new_keys: Tensor, new_values: Tensor, slots: Tensor) -> None:
    """Puts new keys and values [B, g, n, d] into the slots [B, n] of those held [B, g, S, d], in place."""
    places = slots[:, None, :, None].expand_as(new_keys)
    keys.scatter_(2, places, new_keys)
    values.scatter_(2, places, new_values)


def pack_head(head: nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    """Packs a head's linear layers in place where the CPU gains by it, those of its decoder layer side by side."""
    if can_pack(dtype, device):
        layers = [module for module in head.modules() if isinstance(module, DraftLayer)]
        pack_sides(layers)
        pack_linears(head)
        for layer in layers:
            layer.use_compiled_part()


def rotary_frequencies(shape: LayerShape) -> tuple[Tensor, float]:
    """Frequencies [d/2] in fp32 and the scale of cosine and sine, as the target's own rotary settings give them.

    Types whose frequencies depend on the length of the batch (dynamic, longrope) are read as the plain base.
    """
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = dict(shape.rope_parameters)
    if parameters.get("rope_type") in ("dynamic", "longrope"):
        parameters = {"rope_type": "default", "rope_theta": parameters.get("rope_theta", 10000.0)}
    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rope_parameters=parameters,  # pyright: ignore[reportArgumentType]
    )
    made = LlamaRotaryEmbedding(config)
    return made.inv_freq.float().clone(), float(made.attention_scaling)
