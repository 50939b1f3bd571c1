"""Rules written for one row, applied to a batch: from tensors to a row's tree, laws and noise, and back to a path.

These rules are for study: they run row by row on the host. Their coins and residual draws are counter-based noise of
their own, keyed by the seed, the position of the step's root and a counter, so that a run can be repeated and no number
is used twice.

B batch rows   N tree nodes   A accepted path length, root included   V target vocabulary   W draft vocabulary
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ..tree import Draft
from .noise import COINS, RESIDUALS, noise_bits, stream_seeds
from .path import Path
from .rejection import Candidates, Law, Outcome
from .sampling import Sampler
from .tape import Choose
from .text import Text

RowRule = Callable[[Candidates, Law, Law, Choose], Outcome]
"""A row's tree, p, q and the source of randomness to the accepted path and the token that follows it."""


def verify_rows(rule: RowRule, draft: Draft, logits: Tensor, text: Text, sampler: Sampler) -> Path:
    """``rule`` for every row, at temperature > 0. logits: [B, N, V]; ``text`` ends with the root.

    Where the draft carries no laws, q is 0 everywhere: no child counts as drawn. Logits that are not finite are
    reported by the path when it is read.
    """
    device, root_position = logits.device, text.lengths - 1
    tokens, parents = draft.tokens.tolist(), draft.parents.tolist()
    streams = {
        stream: uniforms(stream_seeds(sampler.seeds, stream, root_position), draft.size).tolist()
        for stream in (COINS, RESIDUALS)
    }
    nodes, emitted, counts, finite = [], [], [], []
    for row in range(len(tokens)):
        p, q = _target_laws(draft, logits, text, sampler, row), _draft_laws(draft, row, logits.shape[-1])
        choose = choices({stream: iter(numbers[row]) for stream, numbers in streams.items()})
        asked: set[int] = set()
        target = _noting(asked, p.nan_to_num(1.0))  # any law will do there, since the path is going to be refused
        path, token = rule(Candidates.of(tokens[row], parents[row]), target, q.__getitem__, choose)
        padding = draft.levels - len(path)
        nodes.append(path + path[-1:] * padding)
        emitted.append([tokens[row][node] for node in path[1:]] + [token] * (padding + 1))
        counts.append(len(path))
        finite.append(bool(p[sorted(asked)].isfinite().all()))
    return Path(
        torch.tensor(nodes, device=device),
        torch.tensor(counts, device=device),
        torch.tensor(emitted, device=device),
        torch.tensor(finite, device=device),
    )


def _noting(asked: set[int], laws: Tensor) -> Law:
    """The rows of ``laws``; the nodes that are asked for are added to ``asked``."""

    def law(node: int) -> Tensor:
        asked.add(node)
        return laws[node]

    return law


def choices(numbers: Mapping[int, Iterator[float]]) -> Choose:
    """Choices from numbers in [0, 1), those of each stream in turn, by the inverse of the distribution.

    >>> choose = choices({RESIDUALS: iter([0.0, 0.49, 0.5, 0.99])})
    >>> [choose(torch.tensor([0.0, 2.0, 0.0, 2.0])) for _ in range(4)]
    [1, 1, 3, 3]
    """

    def choose(weights: Tensor, stream: int = RESIDUALS) -> int:
        reached = weights.double().cumsum(0)
        index = int(torch.searchsorted(reached, next(numbers[stream]) * reached[-1], right=True))
        return index if index < len(weights) else int(weights.nonzero()[-1])  # the product was rounded up to the whole

    return choose


def uniforms(seeds: Tensor, count: int) -> Tensor:
    """Numbers 0 to ``count`` - 1 of the streams with these seeds [B]: [B, count] fp64, 53 bits in [0, 1).

    >>> uniforms(torch.tensor([7, 8]), 3)
    tensor([[0.9502, 0.9011, 0.7281],
            [0.9959, 0.1947, 0.3505]], dtype=torch.float64)
    """
    bits = noise_bits(seeds, torch.zeros_like(seeds), torch.arange(2 * count, device=seeds.device))
    return ((bits[:, ::2] << 21) | (bits[:, 1::2] >> 11)).double() * 2.0**-53


def _target_laws(draft: Draft, logits: Tensor, text: Text, sampler: Sampler, row: int) -> Tensor:
    """p after every node of a row, [N, V]."""
    contexts = ()
    if sampler.reads_context:
        nodes = torch.arange(draft.size, device=logits.device)
        contexts = text.with_path(draft, torch.full_like(nodes, row), nodes)
    return sampler.target_law(logits[row], contexts).cpu()


def _draft_laws(draft: Draft, row: int, vocab_size: int) -> Tensor:
    """q at every node of a row, [N, V]: 0 outside the draft vocabulary, and everywhere if the head gave no law."""
    spread = torch.zeros(draft.size, vocab_size, dtype=torch.float64)
    if draft.laws is not None:
        shares = draft.laws[row].double().softmax(-1).nan_to_num(0.0).cpu()
        spread[:, slice(None) if draft.ids is None else draft.ids.cpu()] = shares
    return spread
