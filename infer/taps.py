"""Hidden states of the tapped layers, taken by hooks that live for one forward.

B batch rows   n positions   F feature width
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Tapped:
    """Hidden states of one forward by layer id."""

    states: dict[int, Tensor]

    def entering(self, tap: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.states[tap] = args[0] if args else kwargs["hidden_states"]

        return hook

    def after_norm(self, tap: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.states[tap] = output[0]

        return hook

    def features(self, taps: Sequence[int], tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """The states of ``taps`` side by side, [B, n, F]; F = 0 without taps."""
        if not taps:
            return torch.empty(*tokens.shape, 0, dtype=dtype, device=tokens.device)
        return self.states[taps[0]] if len(taps) == 1 else torch.cat([self.states[tap] for tap in taps], -1)


@contextmanager
def tapped(body: nn.Module, layers: nn.ModuleList, taps: Sequence[int]) -> Iterator[Tapped]:
    """Hooks on the layers with the ids ``taps`` for the length of one forward; ``len(layers)`` names the final norm."""
    states = Tapped({})
    handles = []
    for tap in taps:
        if tap == len(layers):
            handles.append(body.register_forward_hook(states.after_norm(tap)))
        else:
            handles.append(layers[tap].register_forward_pre_hook(states.entering(tap), with_kwargs=True))
    try:
        yield states
    finally:
        for handle in handles:
            handle.remove()
