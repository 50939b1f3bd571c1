"""What every draft head is: one Protocol, the facts it must know of its target, and a dict of kinds.

B batch rows   A accepted path length, root included   N tree nodes   T text positions   F feature width   H hidden size
V target vocabulary   W draft vocabulary   K heads or unrolled steps
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..tree import Draft, Shape


class HeadError(ValueError):
    """Heads that cannot be used as asked: the message names every fault, expected against got, and what to do."""


def draft_vocab_faults(size: int | None, vocab_size: int) -> list[str]:
    """What is wrong with a draft vocabulary of ``size`` (None is all of it), in words."""
    fits = size is None or 1 <= size <= vocab_size
    return [] if fits else [f"draft_vocab_size must lie in 1..{vocab_size}, got {size}"]


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
    adapter_hash: str = ""
    """Hash of the LoRA adapter that is part of the target; empty without one."""


@dataclass(frozen=True)
class Accepted:
    """What the target has just read of every row: its features and the tokens that follow them.

    features: [B, A, F], ``features[b, i]`` belongs to position ``start[b] + i``, for i < ``count[b]``
    tokens: [B, A], ``tokens[b, i]`` is the token at ``start[b] + i + 1``; the last one counted is the root
    count: [B], how many of the A are real; the rest is padding
    start: [B], the position of the first feature
    reach: at least the largest root position, known without asking the device: what memories must have room for
    first: [B], the token at position 0, which no ``tokens`` hold; on the first call of a request alone, None later
    The first call of a request carries the whole prompt.
    """

    features: Tensor
    tokens: Tensor
    count: Tensor
    start: Tensor
    reach: int
    first: Tensor | None = None

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

    def followed_by(self, features: Tensor, tokens: Tensor) -> Accepted:
        """What a head has still to read after a further round that it was not asked in: one token [B, 1] of each row
        was read, features [B, 1, F], and ``tokens`` followed it."""
        rows = torch.arange(len(self.count), device=self.count.device)
        held, known = pad(self.features, (0, 0, 0, 1)), pad(self.tokens, (0, 1))
        held[rows, self.count], known[rows, self.count] = features[:, 0], tokens[:, 0]
        return Accepted(held, known, self.count + 1, self.start, self.reach + 1, self.first)

    def select(self, rows: Tensor) -> Accepted:
        first = None if self.first is None else self.first[rows]
        return Accepted(self.features[rows], self.tokens[rows], self.count[rows], self.start[rows], self.reach, first)

    def join(self, other: Accepted) -> Accepted:
        """These rows and behind them those of ``other``: either all of them read their prompts, or none."""
        first = None
        if self.first is not None and other.first is not None:
            first = torch.cat([self.first, other.first])
        assert (first is None) == (self.first is None) == (other.first is None)
        return Accepted(
            cat_padded(self.features, other.features),
            cat_padded(self.tokens, other.tokens),
            torch.cat([self.count, other.count]),
            torch.cat([self.start, other.start]),
            max(self.reach, other.reach),
            first,
        )


def cat_padded(one: Tensor, other: Tensor, dim: int = 1) -> Tensor:
    """The rows of both, which may differ in length along ``dim``: the shorter ones end in zeros.

    >>> cat_padded(torch.tensor([[1]]), torch.tensor([[2, 3]])).tolist()
    [[1, 0], [2, 3]]
    """
    size = max(one.shape[dim], other.shape[dim])
    behind = (0, 0) * (one.dim() - 1 - dim)
    return torch.cat([pad(part, (*behind, 0, size - part.shape[dim])) for part in (one, other)])


class Memory(Protocol):
    """A head's own state of a batch between steps; Medusa has none."""

    def select(self, rows: Tensor) -> Memory:
        """The memory of some rows, row i being the old row ``rows[i]`` >= i; the old memory is used up."""
        ...

    def join(self, other: Any) -> Memory:
        """The memory of these rows and behind them those of ``other``, of the same head; both are used up."""
        ...


class DraftScores(Protocol):
    """How a request ranks candidates, given a head's logits [B, n, W]."""

    @property
    def keeps_laws(self) -> bool:
        """Whether candidates are drawn from the head's law, for rules that weigh p against q: drafts carry it."""
        ...

    def __call__(self, logits: Tensor, positions: Tensor, ids: Tensor | None) -> Tensor:
        """Scores [B, n, W] that candidates are ranked by; positions [B, n] are those of the drafted tokens.

        ids: [W] target ids of the draft vocabulary, or None for all of V. At temperature 0, or with plain top-k
        drafts, scores order as the logits do; coupled, they are log q + G at the request's temperature and penalties.
        """
        ...

    def confidence(self, scores: Tensor) -> Tensor:
        """From scores to the log of the share of belief in each candidate, [B, n, W]: what dynamic trees grow by."""
        ...

    def law(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        """log q [B, n, W] at the request's temperature and penalties."""
        ...


@dataclass(frozen=True)
class TargetLayers:
    """What heads borrow of the target, without gradient.

    output: its effective output layer over the whole vocabulary
    embedding: [V, H], its input embedding
    """

    output: Output
    embedding: Tensor


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

    def on(self, ids: Tensor | None) -> Output:
        """The layer's rows of the draft vocabulary ``ids`` [W]; itself for None."""
        if ids is None:
            return self
        return Output(self.weight[ids], None if self.bias is None else self.bias[ids], ids)

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
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        """A tree of candidates for every row, and the memory to pass next time."""
        ...


class Head(Drafter, Protocol):
    """A drafter that is trained on a target: a torch module, of whose methods some are named here."""

    @property
    def config(self) -> Any:
        """A frozen dataclass that describes the head, saved in config.json; it has ``kind``."""
        ...

    @property
    def draft_ids(self) -> Tensor | None:
        """[W] ascending target ids of its draft vocabulary, or None when W = V."""
        ...

    @property
    def steps(self) -> int:
        """K, the heads or unrolled steps that training gives a loss each."""
        ...

    def predict(self, features: Tensor, tokens: Tensor, rows: Tensor) -> Tensor:
        """Training: what the K heads or steps say at the M positions that ``rows`` [B, T] bool marks: [K, M, H].

        features: [B, T, F] of positions 0..T-1; tokens: [B, T], one further, at t the token of t + 1. A marked row t
        of head k stands for the token at position t + 2 + k. Unmarked rows are context. Marked ones come in the order
        of ``rows.nonzero()``. The output layer is applied by the loss, in chunks.
        """
        ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]: ...

    def state_dict(self) -> dict[str, Tensor]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> Any: ...

    def to(self, *args: Any, **kwargs: Any) -> Any: ...

    def output(self) -> Output:
        """The layer that turns hidden rows into logits."""
        ...

    def for_decoding(self, dtype: torch.dtype) -> Drafter:
        """A copy to draft with, in ``dtype``."""
        ...
