"""Measuring what a round costs: forwards by n, context and batch, the draft by depth and width, and the rest.

B batch rows   n new positions of a row   e nodes of a level that are asked   N tree nodes, root included

Sizes take turns within each repeat, so that a machine that slows down for a while slows all of them; figures are
medians. The forwards are over a chain behind random text, nothing committed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..heads import Accepted, Drafter, NoHead
from ..tree import CostTable, DraftCost, ForwardCost, Place, Tree
from .generate import Run, complete
from .masks import causal_ancestors
from .sampling import Sampler, Sampling
from .target import Target

WIDTHS = (1, 2, 4, 8, 16)
LEVELS = 4
"""Of the drafts that are timed."""
ROUNDS = 24
"""That the overhead is taken from."""

Progress = Callable[[int], object]


@dataclass(frozen=True)
class Plan:
    """What is measured; ``rows``: forwards of more than so many positions in all, B * n, are left out."""

    nodes: tuple[int, ...]
    contexts: tuple[int, ...] = (256,)
    batches: tuple[int, ...] = (1,)
    repeats: int = 9
    rows: int = 256

    def sizes(self, batch: int) -> tuple[int, ...]:
        return tuple(n for n in self.nodes if n == 1 or n * batch <= self.rows)

    @property
    def steps(self) -> int:
        """Forwards, for a progress bar."""
        return sum(len(self.sizes(batch)) for batch in self.batches) * len(self.contexts) * self.repeats


def spread_nodes(most: int) -> tuple[int, ...]:
    """All n up to 16, then by 2 to 32 and by 8: steps of a kernel's tiles are found where small trees are.

    >>> spread_nodes(6), spread_nodes(40)[15:]
    ((1, 2, 3, 4, 5, 6), (16, 18, 20, 22, 24, 26, 28, 30, 32, 40))
    """
    spread = [*range(1, 17), *range(18, 33, 2), *range(40, most + 8, 8)]
    return tuple(n for n in spread if n <= most)


@torch.inference_mode()
def measure_costs(
    target: Target, head: Drafter | None, place: Place, plan: Plan, progress: Progress = lambda _: None
) -> CostTable:
    """The cost table of target and head in ``place``; contexts that the target has no room for are left out."""
    forwards = []
    for batch in plan.batches:
        for context in plan.contexts:
            if context + max(plan.nodes) <= target.context:
                forwards.append(_forwards(target, batch, context, plan, progress))
    drafting = head is not None and not isinstance(head, NoHead)
    drafts = [_draft(target, head, batch, plan) for batch in plan.batches] if drafting and head is not None else []
    overhead = {batch: _overhead(target, head, batch) for batch in plan.batches}
    return CostTable(place, tuple(forwards), tuple(drafts), overhead)


def _forwards(target: Target, batch: int, context: int, plan: Plan, progress: Progress) -> ForwardCost:
    sizes = plan.sizes(batch)
    seconds = _in_turns(forwards_over(target, batch, context, sizes), plan.repeats, target.device, progress)
    return ForwardCost(batch, context, sizes, tuple(seconds[n] for n in sizes))


def forwards_over(target: Target, batch: int, context: int, sizes: Sequence[int]) -> dict[int, Callable[[], object]]:
    """For each n a forward over a chain of n tokens behind ``context`` cached ones, nothing committed."""
    cache = target.new_cache(batch, context + max(sizes))
    text = _text(target, batch, context)
    counts = torch.full((batch,), context, device=target.device)
    positions = torch.arange(context, device=target.device).expand(batch, -1)
    target.forward(text, positions, causal_ancestors(counts, context), cache, keep=counts[:, None] - 1)
    cache.append([context] * batch)
    drafts = {n: Tree.chain(n - 1).draft(text[:, :1].repeat(1, n)) for n in sizes}
    return {n: _forward(target, draft, context, cache) for n, draft in drafts.items()}


def _forward(target: Target, draft: Any, context: int, cache: Any) -> Callable[[], object]:
    return lambda: target.forward(draft.tokens, context + draft.depth, draft.ancestors, cache)


def _draft(target: Target, head: Drafter, batch: int, plan: Plan) -> DraftCost:
    """A level more costs what a draft of D levels takes beyond one of 1, both with e nodes a level, over D - 1."""
    context = min(plan.contexts[0], target.context - 8)
    text = _text(target, batch, context + 3)
    lengths = torch.full((batch,), context + 2, device=target.device)
    features = target.features(text[:, :-1], lengths, head.taps)
    start = torch.zeros_like(lengths)
    first = Accepted(features[:, :context], text[:, 1 : context + 1], start + context, start, context, text[:, 0])
    later = Accepted(features[:, context:], text[:, context + 1 :], start + 2, start + context, context + 2)
    sampler = Sampler(Sampling(), torch.zeros(batch, dtype=torch.int64, device=target.device))
    scores = sampler.draft_scores((), target.vocab_size, later.root_position)
    _, memory = head.propose(first, None, Tree.chain(1), scores)
    levels = min(LEVELS, head.depth)
    widths = tuple(w for w in WIDTHS if w <= head.candidates)

    def propose(depth: int, width: int) -> Callable[[], object]:
        tree = Tree.from_paths([(r, *([0] * d)) for r in range(width) for d in range(depth)])
        return lambda: head.propose(later, memory, tree, scores)

    runs = {(depth, width): propose(depth, width) for width in widths for depth in {1, levels}}
    seconds = _in_turns(runs, plan.repeats, target.device)
    begin = statistics.median(seconds[1, width] for width in widths)
    steps = [max(seconds[levels, w] - seconds[1, w], 0.0) / max(levels - 1, 1) for w in widths]
    return DraftCost(batch, begin, widths, tuple(steps))


def _overhead(target: Target, head: Drafter | None, batch: int) -> float:
    """Of a real round: all that is neither draft nor forward."""
    prompts = _text(target, batch, 16).tolist()
    tree = Tree.from_paths([[0], [0, 0], [1]][: 3 if head is not None and head.depth > 1 else 1])
    options: dict[str, Any] = {"head": head, "tree": tree if head is not None else None, "batch_size": batch}
    options |= {"max_new_tokens": ROUNDS + 1, "end_ids": (), "synchronize": True}
    complete(target, prompts, **options)
    run = Run()
    complete(target, prompts, run=run, **options)
    spent = run.stats.phase_seconds
    steps = max(done.stats.rounds for done in run.completions.values())
    return sum(spent[phase] for phase in ("verify", "commit", "rest")) / steps


def _text(target: Target, batch: int, length: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, target.vocab_size, (batch, length), generator=generator).to(target.device)


def _in_turns(
    runs: dict[Any, Callable[[], object]], repeats: int, device: torch.device, progress: Progress = lambda _: None
) -> dict[Any, float]:
    """The median seconds of each; a first round of all is left out as warm-up."""
    seconds: dict[Any, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, run in runs.items():
            start = now(device)
            run()
            if repeat:
                seconds[name].append(now(device) - start)
                progress(1)
    return {name: statistics.median(spent) for name, spent in seconds.items()}


def now(device: torch.device) -> float:
    """Seconds, once all that was asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
