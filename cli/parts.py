"""Opens what a command is told to use: target, heads, tree and prompts, with all that can be wrong found first."""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .console import note, quiet_transformers
from .drafters import build_drafter, parse_drafters, tree_for
from .options import DEFAULT_TREE, CompileName, TurnsName

if TYPE_CHECKING:
    from ..data import Prompt
    from ..heads import Drafter
    from ..infer import Sampling, Target
    from ..tree import Shape


@dataclass(frozen=True)
class Parts:
    """What decodes. Without anything that drafts there is no tree."""

    target: Target
    head: Drafter | None
    tree: Shape | None
    adapter: Path | None = None
    """The LoRA adapter that the target carries."""


def open_parts(
    target: str,
    heads: str,
    tree: str,
    dtype: str,
    adapter: Path | None = None,
    compile: CompileName = "auto",
    work: int = 0,
    rows: int = 1,
) -> Parts:
    """Loads the target and what drafts for it, and fits the tree. ``heads`` and ``tree`` are named as in ``drafters``.

    compile, work: as in ``load_target``. rows: the batch that a tree is chosen for where it is chosen here.

    Raises TargetError, HeadError, TreeError or DataError.
    """
    from ..infer import load_target

    parse_drafters(heads)  # before the target, which may take long
    quiet_transformers()
    note(f"Loading {target} ...")
    loaded = load_target(target, dtype=dtype, adapter=adapter, compile=compile, work=work)
    parts = replace(fit_heads(loaded, heads, tree, rows), adapter=adapter)
    gc.collect()
    _give_memory_back()
    gc.freeze()  # models and modules stay: walking over them again and again took 3 % of decoding
    return parts


def _give_memory_back() -> None:
    """What weights took before they were packed, which glibc keeps: 220 MiB of a model of 260. Elsewhere nothing."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def fit_heads(target: Target, heads: str, tree: str, rows: int = 1) -> Parts:
    """The target with what drafts for it, and the named tree. Raises HeadError, TreeError, TargetError, CostError or
    DataError."""
    from .choose import chosen_tree, scheduled_tree

    names = parse_drafters(heads)
    drafter = build_drafter(names, target)
    if drafter is None:
        return Parts(target, None, None)
    if tree.startswith("scheduled"):
        return Parts(target, drafter, scheduled_tree(tree, target, heads, drafter))
    chosen = chosen_tree(target, heads, rows) if tree == DEFAULT_TREE else None
    if chosen is not None:
        return Parts(target, drafter, chosen) if chosen.size > 1 else Parts(target, None, None)
    return Parts(target, drafter, tree_for(names, tree, drafter))


def prompt_ids(target: Target, prompts: Sequence[Prompt]) -> list[list[int]]:
    """The prompts as the target reads them. Raises GenerationError naming those that are longer than its context."""
    from ..data import render_prompt
    from ..infer import GenerationError, TargetError

    if target.tokenizer is None:
        raise TargetError(f"{target.facts.name or 'the target'} has no tokenizer: prompts cannot be read")
    rendered = [render_prompt(target.tokenizer, prompt.messages) for prompt in prompts]
    pairs = zip(prompts, rendered, strict=True)
    long = [f"{prompt.id} has {len(ids)} tokens" for prompt, ids in pairs if len(ids) >= target.context]
    if long:
        more = f"; and {len(long) - 10} more" if len(long) > 10 else ""
        raise GenerationError(
            f"too long for the target's context of {target.context} tokens, which must also hold the answer: "
            f"{'; '.join(long[:10])}{more}. Shorten or leave out these prompts"
        )
    return rendered


def read_some_prompts(path: Path, turns: TurnsName, limit: int | None, every: int = 1) -> list[Prompt]:
    """Every ``every``-th prompt of a file, or the first ``limit`` of those. Raises DataError."""
    from ..data import read_prompts

    return read_prompts(path, turns=turns)[::every][:limit]


def in_turns(
    parts: Parts, prompts: Sequence[Prompt], law: Sampling, max_new_tokens: int, seed: int, batch_size: int
) -> list[Prompt]:
    """The prompts, and behind them their follow-ups, each in the history of the target's own answers.

    Answers are decoded with the seeds that ``generate`` gives to the list returned, so they are the ones it repeats.
    """
    from ..infer import complete, row_seed

    asked, latest, turn = list(prompts), list(enumerate(prompts)), 1
    while latest := [(place, prompt) for place, prompt in latest if prompt.follow_ups]:
        answers = complete(
            parts.target,
            prompt_ids(parts.target, [prompt for _, prompt in latest]),
            head=parts.head,
            tree=parts.tree,
            sampling=law,
            row_seeds=[row_seed(seed, place) for place, _ in latest],
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
        )
        turn += 1
        following = next_turn([prompt for _, prompt in latest], [answer.text for answer in answers], turn)
        latest = list(enumerate(following, len(asked)))
        asked += following
    return asked


def next_turn(prompts: Sequence[Prompt], answers: Sequence[str], turn: int) -> list[Prompt]:
    """The follow-ups of the prompts that have some, in the history of these answers, named by ``turn``."""
    answered = (prompt.answered(answer) for prompt, answer in zip(prompts, answers, strict=True))
    return [replace(prompt, id=f"{prompt.id}, turn {turn}") for prompt in answered if prompt is not None]
