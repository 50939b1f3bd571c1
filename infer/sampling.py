"""How the next token is chosen: the processed target law plus counter-based noise.

At every node the next token is argmax(log p + G), where p is the target's law after the standard logits processors on
that node's own path and G is the noise of its position; at temperature 0 there is no noise. Drafts may look at the same
noise, since nothing they do changes what is emitted.

B batch rows   M rows of logits   n drafted positions   V target vocabulary   W draft vocabulary
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ..heads import DraftScores
from .noise import DRAWS, gumbel, stream_seeds

Drafts = Literal["coupled", "top-k", "sampled"]
"""At temperature > 0: candidates that share the target's noise; the head's likeliest; or draws from the head's law with
noise of their own, for rules that weigh p against q."""

COUPLED_SCALE = 1.0
"""s in softmax((log q + G) / s), the belief in a coupled candidate."""


class GenerationError(ValueError):
    """A request that cannot be served: the message names every fault."""


@dataclass(frozen=True)
class Sampling:
    """The law that text is drawn from, in the terms of Hugging Face ``generate``. The defaults are greedy decoding."""

    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 keeps all tokens."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        faults = []
        if not 0.0 <= self.temperature < float("inf"):
            faults.append(f"temperature must be 0 (greedy) or positive, got {self.temperature}")
        if self.top_k < 0:
            faults.append(f"top_k must be 0 (off) or positive, got {self.top_k}")
        if not 0.0 < self.top_p <= 1.0:
            faults.append(f"top_p must lie in (0, 1], got {self.top_p}")
        if not 0.0 <= self.min_p < 1.0:
            faults.append(f"min_p must lie in [0, 1), got {self.min_p}")
        if not 0.0 < self.repetition_penalty < float("inf"):
            faults.append(f"repetition_penalty must be positive (1 is off), got {self.repetition_penalty}")
        if faults:
            raise GenerationError("; ".join(faults))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    def context_processors(self) -> list[LogitsProcessor]:
        """Processors that read the text before the token."""
        return [] if self.repetition_penalty == 1.0 else [RepetitionPenaltyLogitsProcessor(self.repetition_penalty)]

    def warpers(self) -> list[LogitsProcessor]:
        """Processors that read the scores alone, in the order of Hugging Face ``generate``; none when greedy."""
        if self.greedy:
            return []
        made: list[LogitsProcessor] = [TemperatureLogitsWarper(self.temperature)]
        if self.top_k:
            made.append(TopKLogitsWarper(self.top_k))
        if self.top_p < 1.0:
            made.append(TopPLogitsWarper(self.top_p))
        if self.min_p > 0.0:
            made.append(MinPLogitsWarper(self.min_p))
        return made


@dataclass(frozen=True)
class Sampler:
    """A batch's law and noise. ``processors`` are further logits processors that read the text, applied first.

    seeds: [B] int64
    """

    sampling: Sampling
    seeds: Tensor
    processors: Sequence[LogitsProcessor] = ()
    drafts: Drafts = "coupled"
    _context: list[LogitsProcessor] = field(init=False, repr=False)
    _warpers: list[LogitsProcessor] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_context", [*self.processors, *self.sampling.context_processors()])
        object.__setattr__(self, "_warpers", self.sampling.warpers())

    @property
    def reads_context(self) -> bool:
        return bool(self._context)

    @property
    def is_argmax(self) -> bool:
        """Whether the next token is the plain argmax of the logits."""
        return self.sampling.greedy and not self._context

    def select(self, rows: Tensor) -> Sampler:
        return Sampler(self.sampling, self.seeds[rows], self.processors, self.drafts)

    def join(self, other: Sampler) -> Sampler:
        """These rows and behind them those of ``other``, which has the same law."""
        return Sampler(self.sampling, torch.cat([self.seeds, other.seeds]), self.processors, self.drafts)

    def target_scores(self, logits: Tensor, rows: Tensor, positions: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """log p + G up to a constant for each row: its argmax is the next token.

        logits: [M, V] of batch rows ``rows`` [M]; positions: [M] of the token to choose; contexts: the M texts before
        it, needed only if ``reads_context``. Returns [M, V], fp32 when greedy and fp64 with noise.
        """
        scores = self._processed(logits, contexts)
        if self.sampling.greedy:
            return scores
        ids = torch.arange(scores.shape[-1], device=scores.device)
        return gumbel(self.seeds[rows], positions, ids).add_(scores)

    def target_law(self, logits: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """p [M, V] in fp64, at temperature > 0: what ``target_scores`` adds noise to, for rules that weigh p against q.

        logits: [M, V]; contexts: the M texts before the token to choose, needed only if ``reads_context``.
        """
        return self._processed(logits, contexts).double().softmax(-1)

    def draft_scores(self, texts: Sequence[Tensor], vocab_size: int, root_position: Tensor) -> DraftScores:
        """What draft heads rank candidates by; ``texts`` are the B texts so far, needed only if ``reads_context``.

        root_position: [B], which tells this step's draws from those of every other step.
        """
        seeds = self.seeds
        if self.drafts == "sampled":
            seeds = stream_seeds(self.seeds, DRAWS, root_position)
        return _DraftScores(self, texts, vocab_size, seeds, self.drafts == "sampled" and not self.sampling.greedy)

    def _processed(self, logits: Tensor, contexts: Sequence[Tensor]) -> Tensor:
        """[M, V] in fp32 after all logits processors."""
        scores = logits.float()
        if self._context:
            scores = torch.cat([self.in_context(scores[i : i + 1], text) for i, text in enumerate(contexts)])
        for warper in self._warpers:
            scores = warper(None, scores)  # type: ignore[arg-type]  # warpers do not read the text
        return scores

    def in_context(self, scores: Tensor, text: Tensor) -> Tensor:
        """Scores [n, V] after the processors that read the text, one text [T] for all n rows."""
        for processor in self._context:
            scores = processor(text.expand(len(scores), -1), scores)  # type: ignore[arg-type]
        return scores


@dataclass(frozen=True)
class _DraftScores:
    """A ``heads.DraftScores``: log q + G at the request's temperature and penalties, or the logits where that is moot.

    Penalties are taken on the text up to the root: a position-wise head does not know what lies between.
    """

    sampler: Sampler
    texts: Sequence[Tensor]
    vocab_size: int
    seeds: Tensor
    keeps_laws: bool

    def __call__(self, logits: Tensor, positions: Tensor, ids: Tensor | None) -> Tensor:
        if not self.sampler.sampling.temperature or self.sampler.drafts == "top-k":
            return self._penalised(logits, ids) if self.sampler.reads_context else logits
        batch, steps, width = logits.shape
        tokens = torch.arange(width, device=logits.device) if ids is None else ids
        seeds = self.seeds.repeat_interleave(steps)
        if self.sampler.drafts == "sampled":  # the nodes of a level draw independently of each other
            seeds = stream_seeds(seeds, DRAWS, torch.arange(steps, device=seeds.device).repeat(batch))
        noise = gumbel(seeds, positions.reshape(-1), tokens)
        return noise.view(batch, steps, width).add_(self.law(logits, ids))

    def confidence(self, scores: Tensor) -> Tensor:
        temperature = self.sampler.sampling.temperature
        if temperature:
            scores = scores / (temperature if self.sampler.drafts == "top-k" else COUPLED_SCALE)
        return scores.float().log_softmax(-1)

    def law(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        if self.sampler.reads_context:
            logits = self._penalised(logits, ids)
        return (logits.float() / (self.sampler.sampling.temperature or 1.0)).log_softmax(-1)

    def _penalised(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """Processors speak of target ids, so scores of the draft vocabulary are spread over V and read back."""
        spread = logits.float()
        if ids is not None:
            spread = torch.zeros(*logits.shape[:-1], self.vocab_size, device=logits.device)
            spread[..., ids] = logits.float()
        scores = torch.stack([self.sampler.in_context(row, text) for row, text in zip(spread, self.texts, strict=True)])
        return scores if ids is None else scores[..., ids]
