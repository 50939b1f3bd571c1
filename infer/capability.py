"""What a model's configuration says it cannot do as a target: asked once, at load, and refused by name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class TargetError(ValueError):
    """A model that cannot be a target, or a run that it cannot make: the message names what and why."""


@dataclass(frozen=True)
class Window:
    """A sliding window of ``size`` positions, on all layers or mixed with full attention."""

    size: int
    mixed: bool


def check_config(config: Any, name: str) -> Window | None:
    """The sliding window, if there is one. Refuses by name what a tree cannot be verified with."""
    kinds = set(getattr(config, "layer_types", None) or [])
    faults = [f"layers of kind {kind}" for kind in sorted(kinds - {"full_attention", "sliding_attention"})]
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", "") == "alibi":
        faults.append("ALiBi positions, which follow slots and not positions")
    if faults:
        raise TargetError(f"{name} cannot verify a tree: it has {'; '.join(faults)}")
    size = getattr(config, "sliding_window", None)
    unused = kinds and "sliding_attention" not in kinds
    if size is None or unused or getattr(config, "use_sliding_window", True) is False:
        return None
    return Window(int(size), mixed="full_attention" in kinds)


def check_rope(config: Any, name: str, longest: int) -> None:
    """Raises TargetError if the run could cross the length at which this model's rotary frequencies change.

    ``dynamic`` and ``longrope`` scaling take them from the longest position in the batch, so a row's keys would depend
    on its neighbours.
    """
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [rope] if "rope_type" in rope or "type" in rope else [r for r in rope.values() if isinstance(r, dict)]
    for kind in kinds:
        scaling = kind.get("rope_type", kind.get("type", "default"))
        original = (
            kind.get("original_max_position_embeddings")
            or getattr(config, "original_max_position_embeddings", None)
            or config.max_position_embeddings
        )
        if scaling in ("dynamic", "longrope") and longest > original:
            raise TargetError(
                f"{name} scales its rotary positions by {scaling!r} beyond {original} positions, and this run could "
                f"reach {longest}: its keys would change with the batch. Keep prompt and budget within {original}"
            )
