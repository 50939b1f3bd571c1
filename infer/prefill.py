"""Reading prompts: a fresh cache, the first token of every row, and the state that decoding starts from.

B batch rows   T text positions   F feature width   V vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch

from ..heads import Accepted, Drafter
from ..tree import root_draft
from .masks import causal_ancestors
from .rules import lossless
from .sampling import Sampler
from .step import State
from .target import Target, TargetOutput
from .text import Text

CHUNK = 512
"""Positions of a prompt that are read at a time."""


def prefill(
    target: Target,
    head: Drafter,
    prompts: Sequence[Sequence[int]],
    budget: int,
    nodes: int,
    sampler: Sampler,
    places: int = 0,
) -> tuple[State, list[int]]:
    """Reads prompts into a fresh cache and chooses each row's first token, the first root.

    ``budget`` new tokens and a tree of ``nodes`` must fit behind the longest prompt; the cache has ``places`` rows, or
    as many as there are prompts. Returns the state and the roots.
    """
    if target.device.type != "cpu":
        return _read_together(target, head, prompts, sampler, max(map(len, prompts)) + budget + nodes, places)
    # One by one: a single prompt keeps a processor busy, and the padding of unequal ones is not computed.
    slots, places = max(len(prompt) for prompt in prompts) + budget + nodes, max(places, len(prompts))
    read = []
    for row, prompt in enumerate(prompts):
        own = sampler.select(torch.tensor([row]))
        room = (len(prompt) + budget + nodes, 1) if row else (slots, places)  # the others join the first
        read.append(_read_together(target, head, [prompt], own, *room))
    return reduce(State.join, (state for state, _ in read)), [root for _, roots in read for root in roots]


def _read_together(
    target: Target,
    head: Drafter,
    prompts: Sequence[Sequence[int]],
    sampler: Sampler,
    slots: int,
    places: int,
) -> tuple[State, list[int]]:
    """``prefill`` of unequal prompts in one batch, in chunks of positions."""
    lengths = [len(p) for p in prompts]
    text = Text.of(prompts, slots + 1, target.device)
    cache = target.new_cache(len(prompts), slots, places)
    features, logits = [], torch.empty(len(prompts), 1, target.vocab_size, dtype=target.dtype, device=target.device)
    for start in range(0, max(lengths), CHUNK):
        width = min(CHUNK, max(lengths) - start)
        counts = [min(max(length - start, 0), width) for length in lengths]
        out = _read_chunk(target, head, text, cache, counts, start, width)
        features.append(out.features)
        ending = [b for b, length in enumerate(lengths) if start < length <= start + width]
        logits[ending] = out.logits[ending]
    ends = torch.tensor(lengths, device=target.device)
    last = root_draft(text.ids.gather(1, ends[:, None] - 1)[:, 0])
    first = lossless(last, logits, text, sampler)
    tokens = torch.cat([text.ids[:, 1 : max(lengths)], torch.zeros_like(first.tokens)], 1)
    tokens.scatter_(1, ends[:, None] - 1, first.tokens)
    accepted = Accepted(torch.cat(features, 1), tokens, ends, torch.zeros_like(ends), max(lengths), text.ids[:, 0])
    state = State(cache, text.extend(first), accepted, None, sampler)
    return state, [row[0] for row in first.host_tokens]


def _read_chunk(
    target: Target, head: Drafter, text: Text, cache: Any, counts: list[int], start: int, width: int
) -> TargetOutput:
    """One forward over the prompts' positions [start, start + width); logits after each row's last one there."""
    taken = torch.tensor(counts, device=target.device)
    positions = start + torch.arange(width, device=target.device).expand(len(counts), -1)
    keep = (taken - 1).clamp_(min=0)[:, None]
    tokens = text.ids[:, start : start + width]
    out = target.forward(tokens, positions, causal_ancestors(taken, width), cache, head.taps, keep)
    cache.append(counts)
    return out
