"""Logits processors of Hugging Face ``generate``: which of them can judge a node of a tree, and how.

A node is judged with the text on its own path, in any order and more than once, so a processor must be a function of
(ids, scores) of one row. Those of transformers that are, are named here; others only if the caller vouches for them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import transformers as tf
from torch import Tensor
from transformers import LogitsProcessor

from .sampling import Sampling

LAW = (tf.TemperatureLogitsWarper, tf.TopKLogitsWarper, tf.TopPLogitsWarper, tf.MinPLogitsWarper)
"""What ``Sampling`` says, in its order."""

STATELESS = (
    *LAW,
    tf.EpsilonLogitsWarper,
    tf.EtaLogitsWarper,
    tf.ExponentialDecayLengthPenalty,
    tf.ForcedBOSTokenLogitsProcessor,
    tf.ForcedEOSTokenLogitsProcessor,
    tf.InfNanRemoveLogitsProcessor,
    tf.LogitNormalization,
    tf.MinLengthLogitsProcessor,
    tf.MinNewTokensLengthLogitsProcessor,
    tf.NoBadWordsLogitsProcessor,
    tf.NoRepeatNGramLogitsProcessor,
    tf.PrefixConstrainedLogitsProcessor,
    tf.RepetitionPenaltyLogitsProcessor,
    tf.SequenceBiasLogitsProcessor,
    tf.SuppressTokensAtBeginLogitsProcessor,
    tf.SuppressTokensLogitsProcessor,
    tf.TypicalLogitsWarper,
    *(found for name in ("TopHLogitsWarper",) if (found := getattr(tf, name, None))),
)


def unknown_processors(processors: Sequence[Any], stateless: Collection[type]) -> list[str]:
    """The processors that are not known to be functions of (ids, scores), in words."""
    return [
        f"{type(p).__name__}: drafts are judged out of order, each with the text on its own path, and it is not known "
        f"to read that alone. If its scores follow from (input_ids, scores) of one row, say "
        f"drafted(..., stateless=[{type(p).__name__}])"
        for p in processors
        if type(p) not in STATELESS and type(p) not in stateless
    ]


def split_law(processors: Sequence[LogitsProcessor], sample: bool) -> tuple[list[LogitsProcessor], Sampling]:
    """Processors that read the text, and the law that ends them; together what ``processors`` do in their order.

    The law holds the last processors where they are temperature, top-k, top-p and min-p in this order. Otherwise all
    are processors, and the law only draws.
    """
    kept = list(processors)
    while kept and type(kept[-1]) is tf.LogitNormalization:  # neither the argmax nor a law knows the difference
        kept.pop()
    if not sample:
        return kept, Sampling()
    first = next((i for i, p in enumerate(kept) if type(p) in LAW), len(kept))
    law: list[Any] = kept[first:]
    places = [LAW.index(type(p)) for p in law] if all(type(p) in LAW for p in law) else [1, 0]
    plain = all(
        getattr(p, "min_tokens_to_keep", 1) == 1 and getattr(p, "filter_value", -torch.inf) == -torch.inf for p in law
    )
    if places != sorted(set(places)) or not plain:
        return kept, Sampling(temperature=1.0)
    options: dict[str, Any] = {"temperature": 1.0}
    for place, warper in zip(places, law, strict=True):
        name = ("temperature", "top_k", "top_p", "min_p")[place]
        options[name] = getattr(warper, name)
    return kept[:first], Sampling(**options)


class OnRow(LogitsProcessor):
    """A processor of a batch as the processor of one of its rows, which it is shown with its padding in front."""

    def __init__(self, processor: LogitsProcessor, row: int, padding: Tensor) -> None:
        self._processor, self._padding = _alone(processor, row), padding

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        """ids [n, T] without padding, scores [n, V]; n texts, each judged as plain ``generate`` judges its row."""
        place = self._padding.device  # that of the prompts, where generate made its processors
        padding = self._padding.to(input_ids.dtype).expand(len(input_ids), -1)
        ids = torch.cat([padding, input_ids.to(place)], 1)
        return self._processor(ids, scores.to(place)).to(scores.device)  # type: ignore[arg-type]


def _alone(processor: Any, row: int) -> Any:
    """The processor for any number of texts of the row: some of transformers' count the rows of the batch."""
    if type(processor) is tf.RepetitionPenaltyLogitsProcessor:
        ignored = processor.prompt_ignore_length
        own = int(ignored[row]) if isinstance(ignored, Tensor) else ignored
        return tf.RepetitionPenaltyLogitsProcessor(processor.penalty, own)
    if type(processor) is tf.PrefixConstrainedLogitsProcessor:
        allowed, each = processor._prefix_allowed_tokens_fn, processor._num_beams
        return tf.PrefixConstrainedLogitsProcessor(lambda _, text: allowed(row // each, text), 1)
    return processor
