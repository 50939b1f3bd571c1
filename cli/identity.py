"""Whether decoders wrote the same text, and if not, whether the target itself was undecided where they part.

Half precision and other orders of summation may turn a near-tie; anything else is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from ..infer import Sampler, Sampling, row_seed

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Verdict = Literal["equal", "near_tie", "different"]

HALF_TOLERANCE = 2.0**-7
"""Of the top logit, in bf16 and fp16."""
FP32_TOLERANCE = 5e-4


@dataclass(frozen=True)
class Scores:
    """What the target chose from at one place: its argmax is the next token.

    values: [V]; tolerance: scores closer than this are a near-tie
    """

    values: Tensor
    tolerance: float


ScoresAt = Callable[[int, Sequence[int]], Scores]
"""(number of the prompt, text so far, prompt included) -> scores of the next token."""


def compare(
    answers: Mapping[str, Sequence[Sequence[int]]], prompts: Sequence[Sequence[int]], scores_at: ScoresAt
) -> dict[str, Any]:
    """Counts of rows by their worst verdict over all pairs of decoders; ``answers`` are ids by decoder and prompt.

    Returns ``{"rows", "equal", "near_ties", "different", "different_rows"}``; the three verdicts add up to rows.
    """
    order: tuple[Verdict, ...] = ("equal", "near_tie", "different")
    verdicts = []
    for row, prompt in enumerate(prompts):
        pairs = combinations([ids[row] for ids in answers.values()], 2)
        after = partial(_scores_after, scores_at, row, prompt)
        found = [verdict(a, b, after) for a, b in pairs]
        verdicts.append(max(found, key=order.index, default="equal"))
    return {
        "rows": len(verdicts),
        "equal": verdicts.count("equal"),
        "near_ties": verdicts.count("near_tie"),
        "different": verdicts.count("different"),
        "different_rows": [row for row, worst in enumerate(verdicts) if worst == "different"],
    }


def verdict(a: Sequence[int], b: Sequence[int], scores_after: Callable[[Sequence[int]], Scores]) -> Verdict:
    """Compares two answers; ``scores_after(prefix)`` is asked at the place where they part.

    >>> verdict([4, 1], [4, 2], lambda prefix: Scores(torch.tensor([0.0, 3.0, 2.9]), 0.2))
    'near_tie'
    >>> verdict([4, 1], [4, 0], lambda prefix: Scores(torch.tensor([0.0, 3.0, 2.9]), 0.2))
    'different'
    """
    if list(a) == list(b):
        return "equal"
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
    if place is None:  # one goes on where the other ended: no choice of the target explains that
        return "different"
    scores = scores_after(a[:place])
    behind = scores.values.max() - scores.values[[a[place], b[place]]].min()
    return "near_tie" if float(behind) <= scores.tolerance else "different"


def _scores_after(scores_at: ScoresAt, row: int, prompt: Sequence[int], prefix: Sequence[int]) -> Scores:
    return scores_at(row, [*prompt, *prefix])


def target_scores(load: Callable[[], PreTrainedModel], sampling: Sampling, seed: int) -> ScoresAt:
    """Scores by one plain forward of the Hugging Face model over the whole text, no cache; loaded if it is asked."""

    def scores_at(row: int, text: Sequence[int]) -> Scores:
        model = load()
        tokens = torch.tensor([list(text)], device=model.device)
        with torch.inference_mode():
            logits = model(tokens, use_cache=False).logits[:, -1]  # [1, V]
        exact = logits.dtype == torch.float32
        tolerance = FP32_TOLERANCE if exact else HALF_TOLERANCE * float(logits.float().max().abs())
        sampler = Sampler(sampling, torch.tensor([row_seed(seed, row)], device=model.device))
        position = torch.tensor([len(text)], device=model.device)
        here = torch.zeros(1, dtype=torch.int64, device=model.device)
        values = sampler.target_scores(logits, here, position, [tokens[0]])[0]
        return Scores(values, tolerance if sampling.greedy else tolerance / sampling.temperature)

    return scores_at
