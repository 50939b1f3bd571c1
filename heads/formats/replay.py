"""What replays of engines have in common.

built: an engine's parameters by name, with the shapes that it builds from the configuration
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Replay:
    """What the engine builds: parameters with shapes, how it renames, and what it may leave out or ignore knowingly."""

    built: Mapping[str, tuple[int, ...]]
    rename: Callable[[str], str] = lambda name: name
    optional: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()


def flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration with the decoder layer's settings on top, where the speculators layout nests them."""
    inner = config.get("transformer_layer_config")
    return {**config, **inner} if isinstance(inner, dict) else dict(config)


def needed(config: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    """Which of the keys are missing, in words."""
    return [f"{key} is missing" for key in keys if config.get(key) is None]
