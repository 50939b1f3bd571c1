"""The token ids of a batch's texts so far, prompt and answer, root included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..heads import cat_padded
from ..tree import Draft
from .path import Path


@dataclass(frozen=True)
class Text:
    """ids: [B, capacity] int64, written in place up to ``lengths`` [B]; between steps the last one is the root.

    The capacity leaves room for one step more than the longest text, since a step also writes its padding.
    """

    ids: Tensor
    lengths: Tensor

    @staticmethod
    def of(prompts: Sequence[Sequence[int]], capacity: int, device: torch.device) -> Text:
        ids = torch.zeros(len(prompts), capacity, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            ids[row, : len(prompt)] = torch.tensor(prompt)
        return Text(ids.to(device), torch.tensor([len(p) for p in prompts], device=device))

    def extend(self, path: Path) -> Text:
        """The texts after a step: the tokens that ``path`` emits are appended."""
        places = self.lengths[:, None] + torch.arange(path.tokens.shape[1], device=self.ids.device)
        self.ids.scatter_(1, places, path.tokens)
        return Text(self.ids, self.lengths + path.counts)

    def rows(self) -> list[Tensor]:
        """The B texts as tensors [T_b + 1]: what logits processors read."""
        return [ids[:length] for ids, length in zip(self.ids, self.lengths.tolist(), strict=True)]

    def with_path(self, draft: Draft, rows: Tensor, nodes: Tensor) -> list[Tensor]:
        """For each of ``rows`` [M] the text followed by the drafted tokens on the way to its node of ``nodes`` [M]."""
        texts = []
        for row, node in zip(rows.tolist(), nodes.tolist(), strict=True):
            on_path = draft.ancestors[row, node].clone()
            on_path[0] = False  # the root is the last token of the text already
            texts.append(torch.cat([self.ids[row, : int(self.lengths[row])], draft.tokens[row, on_path]]))
        return texts

    def select(self, rows: Tensor) -> Text:
        return Text(self.ids[rows], self.lengths[rows])

    def join(self, other: Text) -> Text:
        return Text(cat_padded(self.ids, other.ids), torch.cat([self.lengths, other.lengths]))
