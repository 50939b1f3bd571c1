"""A small model of the same family as the drafter (Leviathan et al. 2022, arXiv 2211.17192; Chen et al. 2023, arXiv
2302.01318): it reads the text itself, and after a drafted path it says what its own next token would be.

B batch rows   A accepted path length, root included   V target vocabulary   W draft vocabulary
n new positions of a forward   u drafted nodes that were asked so far   e nodes of a level that are asked

Its cache holds the text up to and including the root. Drafted nodes are never committed to it: each level is one
forward over all u + e nodes, each seeing the text and its own ancestors, and the next step writes over them.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..heads import DEEPEST, Accepted, DraftScores, HeadError, HeadWarning, Memory, fill
from ..tree import Draft, Shape
from .cache import KVCache
from .masks import causal_ancestors
from .target import Target

READ_CHUNK = 512
"""Positions of a prompt that are read at a time."""

SPARE_SLOTS = 64
"""Room behind the prompt that a cache is made with."""


@dataclass(frozen=True)
class DraftModelConfig:
    """What reports say of a draft model."""

    name: str
    hidden_size: int
    num_layers: int
    vocab_size: int
    kind: Literal["model"] = "model"


@dataclass(frozen=True)
class ModelMemory:
    """The draft model's keys and values of every position up to the root; this batch's own, written in place."""

    cache: KVCache

    def select(self, rows: Tensor) -> ModelMemory:
        """Row i being the old row ``rows[i]`` >= i, as in ``KVCache.select``; the old memory is used up."""
        return ModelMemory(self.cache.select(rows.tolist()))

    def join(self, other: ModelMemory) -> ModelMemory:
        return ModelMemory(self.cache.join(other.cache))


@dataclass(frozen=True)
class ModelBeam:
    """The drafted nodes that were asked so far, level by level, and the last level of them.

    tokens: [B, u]; offsets: [u], how far behind the root each stands, less one
    seen: [B, u, u], which of them each sees
    level: [B, e, u], the rows of ``seen`` of the last level; the root's is one row that sees none
    depth: of the last level
    """

    cache: KVCache
    tokens: Tensor
    offsets: Tensor
    seen: Tensor
    level: Tensor
    depth: int


class DraftModel:
    """Drafts with ``model``. ``vocab_size`` is V of the target that verifies; None means that it is the model's own.

    Where one vocabulary is padded further than the other, ids that the target lacks are never drafted, and ids that the
    model lacks are read as its last one. Beyond the model's own context its drafts are poor. See ``fit_draft_model``.
    """

    taps: tuple[int, ...] = ()
    depth = DEEPEST

    def __init__(self, model: Target, vocab_size: int | None = None) -> None:
        self.model = model
        self.candidates = min(model.vocab_size, vocab_size or model.vocab_size)
        fewer = vocab_size is not None and self.candidates < vocab_size
        self.draft_ids = torch.arange(self.candidates, device=model.device) if fewer else None
        facts = model.facts
        self.config = DraftModelConfig(facts.name, facts.hidden_size, facts.num_layers, facts.vocab_size)

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """Fills ``tree`` with one forward over the accepted tokens and one for each further level."""
        return fill(self, accepted, memory, tree, scores)

    def begin(self, accepted: Accepted, memory: Memory | None) -> tuple[Tensor, ModelBeam, ModelMemory]:
        """Reads the accepted tokens, the root the last of them: logits [B, 1, W] of the token after it.

        The first call of a request needs ``accepted.first``.
        """
        assert memory is None or isinstance(memory, ModelMemory)
        counts, tokens = accepted.count.tolist(), accepted.tokens
        if memory is None:
            assert accepted.first is not None, "a draft model reads the whole text: Accepted.first is missing"
            tokens, counts = torch.cat([accepted.first[:, None], tokens], 1), [count + 1 for count in counts]
            memory = ModelMemory(self.model.new_cache(len(counts), accepted.reach + tokens.shape[1] + SPARE_SLOTS))
        logits = self._read(memory.cache, tokens, counts)
        none = tokens[:, :0]
        seen = none[:, :, None].expand(-1, -1, 0).bool()
        level = torch.zeros(len(tokens), 1, 0, dtype=torch.bool, device=tokens.device)
        return logits, ModelBeam(memory.cache, none, none[0], seen, level, 0), memory

    def extend(self, beam: ModelBeam, parents: Tensor, tokens: Tensor) -> tuple[Tensor, ModelBeam]:
        """One level on: logits [B, e, W] after ``tokens`` [B, e], whose parents [B, e] index the last level."""
        batch, count = tokens.shape
        used = beam.tokens.shape[1]
        rows = torch.arange(batch, device=tokens.device)[:, None]
        itself = torch.eye(count, dtype=torch.bool, device=tokens.device).expand(batch, -1, -1)
        level = torch.cat([beam.level[rows, parents], itself], -1)  # [B, e, u + e]
        seen = torch.cat([pad(beam.seen, (0, count)), level], 1)  # [B, u + e, u + e]
        offsets = torch.cat([beam.offsets, torch.full_like(tokens[0], beam.depth)])
        tokens = torch.cat([beam.tokens, tokens], 1)
        asked = torch.arange(used, used + count, device=tokens.device).expand(batch, -1)
        logits = self._forward(beam.cache, tokens, offsets, seen, asked if used else None)
        return logits, ModelBeam(beam.cache, tokens, offsets, seen, level, beam.depth + 1)

    def _read(self, cache: KVCache, tokens: Tensor, counts: list[int]) -> Tensor:
        """Commits the first ``counts[b]`` of ``tokens`` [B, n] of every row: logits [B, 1, W] after the last ones."""
        logits = torch.empty(len(counts), 1, self.candidates, dtype=self.model.dtype, device=tokens.device)
        for start in range(0, max(counts), READ_CHUNK):
            width = min(READ_CHUNK, max(counts) - start)
            taken = [min(max(count - start, 0), width) for count in counts]
            here = torch.tensor(taken, device=tokens.device)
            places = torch.arange(width, device=tokens.device)
            part, last = tokens[:, start : start + width], (here - 1).clamp_(min=0)[:, None]
            read = self._forward(cache, part, places, causal_ancestors(here, width), last)
            cache.append(taken)
            ending = [b for b, count in enumerate(counts) if start < count <= start + width]
            logits[ending] = read[ending]
        return logits

    def _forward(self, cache: KVCache, tokens: Tensor, offsets: Tensor, seen: Tensor, keep: Tensor | None) -> Tensor:
        """Logits [B, k, W] of ``keep`` after n tokens [B, n] that stand ``offsets`` [n] behind what the cache holds."""
        cache.make_room(max(cache.host_lengths) + tokens.shape[1])
        positions = cache.lengths[:, None] + offsets
        readable = tokens.clamp(max=self.model.vocab_size - 1)
        return self.model.forward(readable, positions, seen, cache, (), keep).logits[..., : self.candidates]


def fit_draft_model(model: Target, target: Target) -> DraftModel:
    """``model`` as the drafter of ``target``. Raises HeadError if it cannot be; warns if the vocabularies are padded
    differently (HeadWarning)."""
    if model.device != target.device:
        raise HeadError(
            f"the draft model {_name(model)} is on {model.device}, the target {_name(target)} on {target.device}: "
            "load both on one device"
        )
    check_same_tokenizer(model, target)
    return DraftModel(model, target.vocab_size)


def check_same_tokenizer(model: Target, target: Target) -> None:
    """Raises HeadError if the two tokenizers give a token different ids, naming both models and some tokens.

    Warns (HeadWarning) if only the output layers differ in size: one vocabulary is padded further. Without a tokenizer
    on both sides only the sizes can be compared.
    """
    if model.tokenizer is not None and target.tokenizer is not None:
        ours, theirs = model.tokenizer.get_vocab(), target.tokenizer.get_vocab()
        differing = sorted(token for token in {*ours, *theirs} if ours.get(token) != theirs.get(token))
        if differing:
            some = "; ".join(f"{token!r}: {ours.get(token)} and {theirs.get(token)}" for token in differing[:3])
            raise HeadError(
                f"{_name(model)} cannot draft for {_name(target)}: their tokenizers differ in {len(differing)} of "
                f"{len({*ours, *theirs})} tokens (ids of {some}). Draft with a model of the target's family"
            )
    if model.vocab_size != target.vocab_size:
        warnings.warn(
            f"the draft model {_name(model)} has {model.vocab_size} output rows, the target {_name(target)} "
            f"{target.vocab_size}: ids from {min(model.vocab_size, target.vocab_size)} on are never drafted",
            HeadWarning,
            stacklevel=3,
        )


def _name(target: Target) -> str:
    return target.facts.name or "unnamed"
