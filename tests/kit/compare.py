"""Holding two decodes of one prompt equal, up to the target's own near-ties."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from treedraft.infer import Sampler, Sampling, Target

TOLERANCE = 5e-4


@dataclass(frozen=True)
class Comparison:
    """``near_tie`` is the place where the comparison ended without verdict, if it did."""

    equal: bool
    near_tie: int | None = None


def compare(
    target: Target, prompt: Sequence[int], expected: Sequence[int], found: Sequence[int], sampling: Sampling, seed: int
) -> Comparison:
    """Two answers to ``prompt``; where they part, the target alone says whether it was a near-tie there.

    A near-tie: the two best of log p + G are closer than the tolerance (scaled by 1 / temperature), or some token lies
    that close to a top-k, top-p or min-p cut, which moves it in or out.
    """
    if list(expected) == list(found):
        return Comparison(True)
    parted = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b), min(len(expected), len(found))
    )
    text = torch.tensor([*prompt, *expected[:parted]])
    with torch.inference_mode():
        logits = target.model(text[None]).logits[:, -1]
    sampler = Sampler(sampling, torch.tensor([seed]))
    limit = TOLERANCE / (sampling.temperature or 1.0)
    nudges = (-TOLERANCE, 0.0, TOLERANCE)
    choices = set()
    for sign in nudges:
        wobble = sign * torch.where(torch.arange(logits.shape[-1]) % 2 == 0, 1.0, -1.0)
        scores = sampler.target_scores(logits + wobble, torch.tensor([0]), torch.tensor([len(text)]), [text])[0]
        best = scores.topk(2)
        choices.add(int(best.indices[0]))
        if best.values[0] - best.values[1] < 2 * limit:
            return Comparison(False, parted)
    return Comparison(False, parted if len(choices) > 1 else None)
