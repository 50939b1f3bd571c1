"""The recording pass: ranks of the true tokens under a head, from every position that could be a root.

B answers side by side   L tokens of the longest answer   K depths   R candidates whose confidence is kept
S answer tokens, of all answers one behind the other   F feature width   W draft vocabulary

The head is asked exactly as in decoding: it reads the prompt, then one further token at a time, and from each root it
is led down the true path, the only node of each level. What a head reads of the text does not depend on where rounds
start (Medusa: the last feature; step-wise heads: true features of all positions before the root), so these are the
ranks that any round started there would see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..heads import Accepted, Drafter, HeadError, Memory
from ..tree import NOT_THERE
from .prefill import prefill
from .sampling import Sampler, Sampling
from .stats import LoopFinder
from .target import Target

KEPT_BELIEFS = 8
"""R."""


@dataclass(frozen=True)
class Answered:
    """A prompt, the target's own answer to it, and the seed it was drawn with."""

    prompt: Sequence[int]
    answer: Sequence[int]
    seed: int


@dataclass(frozen=True)
class Ranks:
    """ranks [S, K] int32, beliefs [S, K, R] fp32 and loops [S] bool of some answers, see ``tree.Record``."""

    ranks: Tensor
    beliefs: Tensor
    loops: Tensor


def check_levels(head: Drafter, depth: int) -> None:
    """Raises HeadError unless the drafter answers level by level, ``depth`` of them."""
    if not (hasattr(head, "begin") and hasattr(head, "extend")):
        raise HeadError(
            f"{type(head).__name__} cannot be recorded or timed: it does not rank its vocabulary level by level; "
            "trained heads and draft models do"
        )
    if not 1 <= depth <= head.depth:
        raise HeadError(f"a record of {depth} depths was asked for, the head has {head.depth}")


@torch.inference_mode()
def record_ranks(target: Target, head: Drafter, answers: Sequence[Answered], law: Sampling, depth: int) -> Ranks:
    """Leads ``head`` along the answers, ``depth`` = K levels from each of their tokens; in the order of ``answers``."""
    check_levels(head, depth)
    longest = max((len(a.answer) for a in answers), default=0)
    order = sorted(range(len(answers)), key=lambda i: -len(answers[i].answer))  # rows that end leave from the back
    rows = [_Row.read(target, head, answers[i]) for i in order]
    wide = min(KEPT_BELIEFS, head.candidates)
    ranks = torch.full((len(rows), longest, depth), NOT_THERE, dtype=torch.int32)
    beliefs = torch.full((len(rows), longest, depth, wide), float("-inf"))
    memory: Memory | None = None
    for row, place in zip(rows, range(len(rows)), strict=True):
        if row.roots:
            ranks[place, 0], beliefs[place, 0], own = _lead(target, head, [row], 0, None, law, depth)
            memory = own if memory is None or own is None else memory.join(own)
    live = [row for row in rows if row.roots]
    for step in range(1, longest - 1):
        staying = [row for row in live if step < row.roots]
        if memory is not None and len(staying) < len(live):
            memory = memory.select(torch.arange(len(staying), device=target.device))
        live = staying
        found = _lead(target, head, live, step, memory, law, depth)
        ranks[: len(live), step], beliefs[: len(live), step], memory = found
    place = {answer: row for row, answer in enumerate(order)}
    spans = [(place[i], len(a.answer)) for i, a in enumerate(answers)]
    return Ranks(
        torch.cat([ranks[row, :length] for row, length in spans]),
        torch.cat([beliefs[row, :length] for row, length in spans]),
        torch.tensor([loop for a in answers for loop in _loops(a.answer)], dtype=torch.bool),
    )


@dataclass(frozen=True)
class _Row:
    """One answer; features: [T, F] of all its positions but the last."""

    asked: Answered
    features: Tensor

    @staticmethod
    def read(target: Target, head: Drafter, asked: Answered) -> _Row:
        """The features are those of one pass over prompt and answer."""
        text = [*asked.prompt, *asked.answer[:-1]]
        unused = Sampler(Sampling(), torch.zeros(1, dtype=torch.int64, device=target.device))
        state, _ = prefill(target, head, [text], 1, 1, unused)
        return _Row(asked, state.accepted.features[0])

    @property
    def roots(self) -> int:
        """Answer tokens that can be roots: all but the last."""
        return max(len(self.asked.answer) - 1, 0)

    def token(self, step: int) -> int:
        """The answer's token, 0 behind its end."""
        return self.asked.answer[step] if step < len(self.asked.answer) else 0


def _lead(
    target: Target, head: Drafter, rows: Sequence[_Row], step: int, memory: Memory | None, law: Sampling, depth: int
) -> tuple[Tensor, Tensor, Memory | None]:
    """From answer token ``step`` of every row down the true path: ranks [B, K], beliefs [B, K, R], the new memory."""
    steps: Any = head
    ids, device = steps.draft_ids, target.device
    accepted = _accepted(rows, step, device)
    sampler = Sampler(law, torch.tensor([row.asked.seed for row in rows], device=device))
    texts = [_text(row, step, device) for row in rows] if sampler.reads_context else ()
    scores = sampler.draft_scores(texts, target.vocab_size, accepted.root_position)
    ranks, beliefs = [], []
    logits, beam, memory = steps.begin(accepted, memory)
    for level in range(depth):
        true = torch.tensor([[row.token(step + 1 + level)] for row in rows], device=device)
        ranking = scores(logits, (accepted.root_position + level + 1)[:, None], ids)[:, 0]  # [B, W]
        ends = torch.tensor([step + 1 + level >= len(row.asked.answer) for row in rows], device=device)
        ranks.append(_rank(ranking, true, ids).masked_fill(ends, NOT_THERE))
        kept = min(KEPT_BELIEFS, ranking.shape[-1])
        beliefs.append(scores.confidence(ranking[:, None])[:, 0].topk(kept).values)
        if level + 1 < depth:
            logits, beam = steps.extend(beam, torch.zeros_like(true), true)
    return torch.stack(ranks, 1).int().cpu(), torch.stack(beliefs, 1).float().cpu(), cast("Memory | None", memory)


def _rank(ranking: Tensor, true: Tensor, ids: Tensor | None) -> Tensor:
    """[B] how many candidates stand before the true tokens [B, 1] in scores [B, W], ties by id."""
    column = true if ids is None else torch.searchsorted(ids, true).clamp(max=len(ids) - 1)
    own = ranking.gather(1, column)
    before = torch.arange(ranking.shape[1], device=ranking.device) < column
    rank = ((ranking > own) | ((ranking == own) & before)).sum(1)
    return rank if ids is None else rank.masked_fill((ids[column] != true)[:, 0], NOT_THERE)


def _accepted(rows: Sequence[_Row], step: int, device: torch.device) -> Accepted:
    """What the target has just read when answer token ``step`` is the root: the prompt, then one position at a time."""
    ends = [len(row.asked.prompt) + step for row in rows]  # positions of the roots
    starts = [0 if step == 0 else end - 1 for end in ends]
    counts = [end - start for start, end in zip(starts, ends, strict=True)]
    features, tokens = [], []
    for row, start, end in zip(rows, starts, ends, strict=True):
        room = max(counts) - (end - start)
        features.append(pad(row.features[start:end], (0, 0, 0, room)))
        text = [*row.asked.prompt, *row.asked.answer][start + 1 : end + 1]
        tokens.append(text + [0] * room)
    first = torch.tensor([row.asked.prompt[0] for row in rows], device=device) if step == 0 else None
    where = torch.tensor([counts, starts], device=device)
    return Accepted(torch.stack(features), torch.tensor(tokens, device=device), where[0], where[1], max(ends), first)


def _text(row: _Row, step: int, device: torch.device) -> Tensor:
    return torch.tensor([*row.asked.prompt, *row.asked.answer[: step + 1]], device=device)


def _loops(answer: Sequence[int]) -> list[bool]:
    finder = LoopFinder()
    return [finder.repeats(token) for token in answer]
