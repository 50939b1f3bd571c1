"""Plain autoregressive decoding, written to be obvious: what every draft must reproduce token for token.

It shares nothing with the fast path but the law of the next token: one prompt and one token at a time, the model's own
cache and masks, no trees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import DynamicCache, LogitsProcessor

from .noise import row_seed
from .request import Chunk, Request
from .sampling import Sampler, Sampling
from .target import Target


@torch.inference_mode()
def autoregressive(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
    seed: int = 0,
    row_seeds: Sequence[int] | None = None,
    max_new_tokens: int = 128,
    end_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
) -> Iterator[Chunk]:
    """Streams the answers to ``prompts``, one token a chunk; the arguments are those of ``generate``."""
    ends = frozenset(target.end_ids if end_ids is None else end_ids)
    for index, prompt in enumerate(prompts):
        seed_of_row = row_seed(seed, index) if row_seeds is None else row_seeds[index]
        budget = min(max_new_tokens, target.context - len(prompt))
        request = Request(index, prompt, seed_of_row, budget, ends, stop_strings, target.tokenizer)
        sampler = Sampler(sampling or Sampling(), torch.tensor([request.seed]), logits_processor)
        cache = DynamicCache(config=target.model.config)
        unread = list(prompt)
        while request.reason is None:
            logits = _next_logits(target, unread, cache)
            text = torch.tensor([*prompt, *request.ids])
            scores = sampler.target_scores(logits, torch.tensor([0]), torch.tensor([len(text)]), [text])
            unread = [int(scores.argmax())]
            yield request.take_first(*unread) if not request.ids else request.take_round(unread)


def _next_logits(target: Target, tokens: Sequence[int], cache: Any) -> torch.Tensor:
    """Logits [1, V] after ``tokens``, which the cache then holds too."""
    arguments = {target.cache_argument: cache, "use_cache": True}
    return target.model(torch.tensor([tokens], device=target.device), **arguments).logits[:, -1].cpu()
