"""Noise on features in training, so that a head learns to live with states that are not quite the target's (EAGLE).

B batch rows   T text positions   F feature width
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor


def with_noise(features: Tensor, size: float, seed: int, step: int, indices: Sequence[int]) -> Tensor:
    """Features [B, T, F] of the rows ``indices`` plus uniform noise in [-size, size].

    A row's noise depends on the seed, the step and the row alone, so that a step is the same however it is cut into
    parts and processes, and in a resumed run.
    """
    if not size:
        return features
    noise = torch.stack([_uniform(features.shape[1:], seed, step, index) for index in indices])
    return features + size * noise.to(features.device, features.dtype)


def _uniform(shape: Sequence[int], seed: int, step: int, index: int) -> Tensor:
    """[T, F] in [-1, 1]; position t's numbers do not depend on the padding after it."""
    key = hashlib.sha256(repr((seed, step, index)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "little") >> 1)
    return torch.rand(*shape, generator=generator) * 2 - 1
