"""The sizes of a target's decoder layer, for heads that are made of one."""

from __future__ import annotations

from typing import Any

from ..heads import LayerShape


def layer_shape(config: Any) -> LayerShape:
    """A Llama layer of the target's geometry from its text configuration.

    Head size, key/value heads and rotary settings are read, not computed, where the configuration names them; a target
    without a gated MLP or without rotary positions gives the sizes that it has, and the usual ones besides.
    """
    hidden, heads = config.hidden_size, config.num_attention_heads
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=_width(config),
        num_attention_heads=heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or hidden // heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-5,
        rope_parameters=_rope(config),
        max_position_embeddings=getattr(config, "max_position_embeddings", None) or 2048,
    )


def _width(config: Any) -> int:
    """The MLP's inner size; GPT-2 calls it n_inner, and a missing one means four times the hidden size."""
    for name in ("intermediate_size", "n_inner", "ffn_hidden_size"):
        if getattr(config, name, None):
            return int(getattr(config, name))
    return 4 * config.hidden_size


def _rope(config: Any) -> dict[str, Any]:
    """The rotary settings of full-attention layers. Parts of a head's width that are not rotated are, in the draft."""
    found = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in found:
        found = dict(found["full_attention"])
    found.setdefault("rope_type", "default")
    found.setdefault("rope_theta", getattr(config, "rope_theta", None) or 10000.0)
    found.pop("partial_rotary_factor", None)
    return found
