"""What a run trains and is measured on: training rows, held-out rows, prompts."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..data import DataError, Encoded, prepare, read_prompts, read_rows, render_prompt
from ..infer import Target, TargetError
from ..infer.capability import check_rope
from .config import TrainConfig


class TrainError(ValueError):
    """A run that cannot start or go on: the message says what, where, and what to do."""


@dataclass(frozen=True)
class Material:
    """rows: trained on; held_out: for the teacher-forced proxies; prompts with their categories: decoded for tau."""

    rows: list[Encoded]
    held_out: list[Encoded]
    prompts: list[list[int]]
    categories: list[str | None]

    def fingerprint(self) -> str:
        """A hash over names, tokens and masks of the training rows."""
        digest = hashlib.sha256()
        for row in self.rows:
            digest.update(repr((row.id, row.ids, row.mask)).encode())
        return digest.hexdigest()


def gather_material(config: TrainConfig, target: Target, say: Callable[[str], None]) -> Material:
    """Reads the configured data through the target's tokenizer and splits it; ``say`` is told what was left out.

    Held-out rows are drawn by the seed. Raises DataError or TrainError, naming rows, before anything long starts.
    """
    if target.tokenizer is None:
        raise TargetError(f"{target.facts.name or 'the target'} has no tokenizer: conversations cannot be read")
    data = config.data
    source = itertools.chain.from_iterable(read_rows(path, data.split) for path in data.paths)
    rows, summary = prepare(source, target.tokenizer, data.max_length, data.turns)
    skipped = "".join(f"; {len(names)} skipped ({_some(names)}): {why}" for why, names in summary.skipped.items())
    say(f"data: {summary.used} of {summary.read} rows, {summary.supervised} supervised tokens{skipped}")
    _check_lengths(rows, target)
    rows, held_out = split_rows(rows, data.holdout, config.seed)
    if data.holdout and not held_out:
        say(f"notice: the held-out split is empty ({data.holdout:g} of {len(rows)} rows)")
    _check_something_to_learn(rows)
    prompts, categories = _prompts(config, target, held_out)
    if not prompts:
        say(
            "notice: no held-out prompts: tau is not measured, there will be no best/. Set data.prompts or data.holdout"
        )
    return Material(rows, held_out, prompts, categories)


def split_rows(rows: Sequence[Encoded], holdout: float, seed: int) -> tuple[list[Encoded], list[Encoded]]:
    """(training rows, held-out rows), both in the order of ``rows``; which ones are held out is drawn by ``seed``.

    ``holdout`` is a share below 1 (rounded down) or a number of rows. Raises TrainError if nothing is left to train on.
    """
    count = int(holdout) if holdout >= 1 else int(holdout * len(rows))
    if count >= len(rows):
        raise TrainError(f"data.holdout keeps {count} rows from training, but there are only {len(rows)}")
    drawn = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:count]
    held = set(drawn.tolist())
    return [r for i, r in enumerate(rows) if i not in held], [r for i, r in enumerate(rows) if i in held]


def _check_lengths(rows: Sequence[Encoded], target: Target) -> None:
    long = [row for row in rows if len(row.ids) > target.context]
    if long:
        raise DataError(
            f"{len(long)} rows are longer than the target's context of {target.context} tokens "
            f"({_some([row.id for row in long])}): "
            f"set data.max_length to {target.context} or less"
        )
    check_rope(target.config, target.facts.name, max(len(row.ids) for row in rows))


def _check_something_to_learn(rows: Sequence[Encoded]) -> None:
    """A head's first label is the second supervised token in a row: without one there would be nothing to train."""
    if not any(a and b for row in rows for a, b in itertools.pairwise(row.mask)):
        raise DataError(
            f"none of the {len(rows)} training rows has two supervised tokens in a row: there is nothing to draft, "
            "since a draft starts after a token that the target has written. Give longer answers, or a larger "
            "data.max_length"
        )


def _prompts(
    config: TrainConfig, target: Target, held_out: Sequence[Encoded]
) -> tuple[list[list[int]], list[str | None]]:
    """Prompts to decode and their categories: those of the prompts file, else the first prompts of held-out rows."""
    if config.data.prompts is not None:
        read = read_prompts(config.data.prompts)[: config.eval.prompts]
        prompts = [render_prompt(target.tokenizer, prompt.messages) for prompt in read]
        long = [p.id for p, ids in zip(read, prompts, strict=True) if len(ids) >= target.context]
        if long:
            raise DataError(f"prompts longer than the target's context of {target.context} tokens: {', '.join(long)}")
        return prompts, [prompt.category for prompt in read]
    starts = [row.ids[: row.mask.index(1)] for row in held_out[: config.eval.prompts]]
    kept = [start for start in starts if start]
    return kept, [None] * len(kept)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
