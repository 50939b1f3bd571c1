"""Decoding of prompts in batches, as an iterator that streams."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from transformers import LogitsProcessor

from ..heads import Drafter, HeadWarning, NoHead
from ..tree import DynamicTree, Schedule, Shape, Tree, TreeError, default_tree
from .batch import Decoder, serve
from .capability import check_rope
from .noise import row_seed
from .request import Chunk, Request
from .rules import NamedRule, find_rule, rule_faults
from .sampling import Drafts, GenerationError, Sampler, Sampling
from .stats import Clock, Stats
from .target import Target


@dataclass(frozen=True)
class Completion:
    """A finished request. ``seed`` repeats it alone: ``row_seeds=[seed]``."""

    ids: list[int]
    text: str
    reason: str
    seed: int
    stats: Stats


@dataclass
class Run:
    """What a call to ``generate`` has done so far, for callers that want more than the chunks."""

    stats: Stats = field(default_factory=Stats)
    completions: dict[int, Completion] = field(default_factory=dict)
    schedule: Schedule | None = None
    """Of a tree that has one: what it learnt."""


def complete(target: Target, prompts: Sequence[Sequence[int]], **options: Any) -> list[Completion]:
    """Decodes all prompts to their ends; the arguments are those of ``generate``. In the order of the prompts."""
    run = options.pop("run", None) or Run()
    for _ in generate(target, prompts, run=run, **options):
        pass
    return [run.completions[i] for i in range(len(prompts))]


@torch.inference_mode()
def generate(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    head: Drafter | None = None,
    tree: Shape | None = None,
    sampling: Sampling | None = None,
    logits_processor: Sequence[LogitsProcessor] = (),
    seed: int = 0,
    row_seeds: Sequence[int] | None = None,
    max_new_tokens: int = 128,
    end_ids: Sequence[int] | None = None,
    stop_strings: Sequence[str] = (),
    stop_after: Callable[[int, Sequence[int]], bool] | None = None,
    batch_size: int = 8,
    rule: str | NamedRule = "coupled",
    drafts: Drafts | None = None,
    run: Run | None = None,
    synchronize: bool = False,
) -> Iterator[Chunk]:
    """Streams the answers to ``prompts`` (token ids), ``batch_size`` of them at a time, a chunk per request and round.

    A request that ends gives its place to the next one.

    With the coupled rule the text of a request is a function of its prompt, the sampling and its seed alone: head,
    tree, batch and ``drafts`` change its speed. Without a head this is plain decoding. ``seed`` gives request i the
    seed ``row_seed(seed, i)`` unless ``row_seeds`` names them. ``max_new_tokens`` is cut to what the context has room
    for. ``logits_processor`` are further Hugging Face processors; each sees the text of the node that it judges.
    ``synchronize`` makes phase times true on an accelerator.

    stop_after: told the request's index and the ids of its answer so far, after each of them: True ends it there.
    rule: an acceptance rule by its name in ``RULES``, or one made by ``lossy_typical``. At temperature > 0 only the
    coupled rule gives the text of the seed; with the others it depends on head and tree too (docs/lossless.md).
    drafts: how candidates are taken at temperature > 0; None is what the rule asks for.

    Raises GenerationError or TreeError before any work, naming all faults; GenerationError also where the rule weighs
    p against q and the head turns out to give no q.
    """
    head = NoHead() if head is None else head
    tree = Tree.chain(0) if isinstance(head, NoHead) else tree or default_tree(head.depth)
    sampling = sampling or Sampling()
    run = run if run is not None else Run()
    ends = target.end_ids if end_ids is None else end_ids
    seeds = [row_seed(seed, i) for i in range(len(prompts))] if row_seeds is None else list(row_seeds)
    faults = rule_faults(rule, drafts, None if isinstance(head, NoHead) else tree)
    _check(target, head, tree, prompts, seeds, max_new_tokens, batch_size, stop_strings, faults)
    chosen = find_rule("coupled" if isinstance(head, NoHead) else rule)  # nothing drafted, nothing to accept
    requests = [
        Request(i, p, s, min(max_new_tokens, target.context - len(p)), frozenset(ends), stop_strings, target.tokenizer)
        for i, (p, s) in enumerate(zip(prompts, seeds, strict=True))
    ]
    if stop_after is not None:
        for request in requests:
            request.stop_after = partial(stop_after, request.index)

    def sampler_of(rows: Sequence[Request]) -> Sampler:
        device_seeds = torch.tensor([row.seed for row in rows], device=target.device)
        return Sampler(sampling, device_seeds, logits_processor, drafts or chosen.drafts)

    if isinstance(tree, DynamicTree) and tree.schedule is not None:
        run.schedule = tree.schedule.fresh()  # what it learns is this run's own
        tree = replace(tree, schedule=run.schedule)
        rows, context = min(batch_size, max(len(requests), 1)), max((len(p) for p in prompts), default=0)
        if not run.schedule.pays(rows, context, tree.size, tree.depth, tree.width):
            head, tree = NoHead(), Tree.chain(0)
    clock = Clock(run.stats.phase_seconds, target.device, synchronize)
    for chunks in serve(Decoder(target, head, tree, chosen, sampler_of, clock), requests, batch_size):
        for chunk in chunks:
            if chunk.reason is not None:
                done = requests[chunk.row]
                run.completions[done.index] = Completion(done.ids, done.text, chunk.reason, done.seed, done.stats)
                run.stats.add(done.stats)
            yield chunk
        clock.restart()


def _check(
    target: Target,
    head: Drafter,
    tree: Shape,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int],
    max_new_tokens: int,
    batch_size: int,
    stop_strings: Sequence[str],
    faults: Sequence[str],
) -> None:
    """Raises GenerationError with ``faults`` and all that are found here."""
    faults = list(faults)
    if max_new_tokens < 0:
        faults.append(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    if batch_size < 1:
        faults.append(f"batch_size must be at least 1, got {batch_size}")
    if len(seeds) != len(prompts):
        faults.append(f"{len(seeds)} row seeds for {len(prompts)} prompts")
    if any(not 0 <= s < 2**63 for s in seeds):
        faults.append("seeds must lie in 0..2^63-1")
    if "" in stop_strings:
        faults.append("a stop string must not be empty")
    if stop_strings and target.tokenizer is None:
        faults.append("stop strings need a target with a tokenizer")
    for i, prompt in enumerate(prompts):
        if not prompt:
            faults.append(f"prompt {i} is empty")
        elif len(prompt) >= target.context:
            faults.append(f"prompt {i} has {len(prompt)} tokens, the target's context holds {target.context}")
        elif not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            faults.append(f"prompt {i} has ids outside 0..{target.vocab_size - 1}")
    if not isinstance(head, NoHead):
        try:
            tree.check_fits(head.depth, head.candidates)
        except TreeError as error:
            faults.append(str(error))
        if isinstance(tree, DynamicTree) and tree.schedule is not None and not hasattr(head, "extend"):
            faults.append(
                f"{type(head).__name__} does not answer level by level: a schedule needs trained heads or a draft model"
            )
    if faults:
        raise GenerationError("; ".join(faults))
    longest = max((len(p) for p in prompts), default=0)
    _warn_beyond_training(head, min(target.context, longest + max_new_tokens))
    check_rope(target.config, target.facts.name, min(target.context, longest + max_new_tokens + tree.depth))


def _warn_beyond_training(head: Drafter, longest: int) -> None:
    """Heads that see positions need not hold up beyond those that they were trained on; the text stays the target's."""
    seen = getattr(getattr(head, "config", None), "trained_length", 0)
    if seen and longest > seen:
        warnings.warn(
            f"the draft heads were trained on texts of at most {seen} tokens, and this run may reach {longest}: "
            "beyond, fewer drafts may be accepted. The text stays the target's own",
            HeadWarning,
            stacklevel=4,
        )
