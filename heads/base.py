"""What every draft head is: one Protocol, the facts it must know of its target, and a dict of kinds.

B batch rows   A accepted path length, root included   N tree nodes   T text positions   F feature width   H hidden size
V target vocabulary   W draft vocabulary   K heads or unrolled steps
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..tree import Draft, Tree


class HeadError(ValueError):
    """Heads that cannot be used as asked: the message names every fault, expected against got, and what to do."""


@dataclass(frozen=True)
class TargetFacts:
    """What heads record of the model they were trained for, and what is compared when they are loaded again."""

    hidden_size: int
    vocab_size: int
    num_layers: int
    name: str = ""
    output_hash: str = ""
    """Hash of the output embedding's bytes in fp32: same sizes and another hash is another model."""
    tokenizer_hash: str = ""
    chat_template_hash: str = ""


@dataclass(frozen=True)
class Accepted:
    """What the target has just read of every row: its features and the tokens that follow them.

    features: [B, A, F], ``features[b, i]`` belongs to position ``start[b] + i``, for i < ``count[b]``
    tokens: [B, A], ``tokens[b, i]`` is the token at ``start[b] + i + 1``; the last one counted is the root
    count: [B], how many of the A are real; the rest is padding
    start: [B], the position of the first feature
    The first call of a request carries the whole prompt.
    """

    features: Tensor
    tokens: Tensor
    count: Tensor
    start: Tensor

    @property
    def root(self) -> Tensor:
        """[B], the last token counted: emitted, not yet in the cache."""
        return self.tokens.gather(1, (self.count - 1)[:, None])[:, 0]

    @property
    def root_position(self) -> Tensor:
        """[B], the position of the root."""
        return self.start + self.count

    @property
    def last_feature(self) -> Tensor:
        """[B, F], the feature of the position before the root."""
        return self.features[torch.arange(len(self.count), device=self.count.device), self.count - 1]

    def select(self, rows: Tensor) -> Accepted:
        return Accepted(self.features[rows], self.tokens[rows], self.count[rows], self.start[rows])


class Memory(Protocol):
    """A head's own state of a batch between steps; Medusa has none."""

    def select(self, rows: Tensor) -> Memory: ...


DraftScores = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]
"""(logits [B, n, W], positions [B, n] of the drafted tokens, target ids [W] or None for all of V) -> scores [B, n, W].

Candidates are ranked by the scores. At temperature 0, or with plain top-k drafts, they order as the logits do; with
coupled drafts they are log q + G at the request's temperature and penalties.
"""


@dataclass(frozen=True)
class Output:
    """An output layer over the draft vocabulary.

    weight: [W, H], the one layer of all heads
    bias: [W] or None
    ids: [W] ascending target ids of the draft vocabulary, or None when W = V
    own: one [W, H] for each head instead, where heads have output layers of their own
    """

    weight: Tensor
    bias: Tensor | None = None
    ids: Tensor | None = None
    own: tuple[Tensor, ...] = ()

    def of_head(self, k: int) -> tuple[Tensor, Tensor | None]:
        """Weight [W, H] and bias [W] of head k."""
        return (self.own[k] if self.own else self.weight), self.bias


class Drafter(Protocol):
    """What a decode step needs: something that proposes trees. What it remembers of a request is passed in and back."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Layer ids whose features it reads, concatenated to F; the number of layers names the final norm's output."""
        ...

    @property
    def depth(self) -> int:
        """The deepest tree it can fill."""
        ...

    @property
    def candidates(self) -> int:
        """W, the size of its draft vocabulary."""
        ...

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Tree, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """A tree of candidates for every row, and the memory to pass next time."""
        ...


class Head(Drafter, Protocol):
    """A drafter that is trained on a target. Its weights are a torch module."""

    @property
    def config(self) -> Any:
        """A frozen dataclass that describes the head, saved in config.json; it has ``kind``."""
        ...

    @property
    def draft_ids(self) -> Tensor | None:
        """[W] ascending target ids of its draft vocabulary, or None when W = V."""
        ...

    def predict(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Training: features [B, T, F] of positions 0..T-1, and the tokens [B, T] one further, to hidden [K, B, T, H].

        Row t of head k stands for the token at position t + 2 + k. The output layer is applied by the loss, in chunks.
        """
        ...

    def output(self) -> Output:
        """The layer that turns hidden rows into logits."""
        ...

    def for_decoding(self, dtype: torch.dtype) -> Drafter:
        """A copy to draft with, in ``dtype``."""
        ...
