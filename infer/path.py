"""What a verification yields: the accepted nodes of every row and the token that follows them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .sampling import GenerationError


@dataclass(frozen=True)
class Path:
    """The accepted path of every row.

    nodes: [B, A] int64 node ids from the root on, ascending, a row's last one repeated as padding
    counts: [B] int64, nodes on the path, the root included
    tokens: [B, A] int64, what the step emits: the accepted tokens after the root, then the bonus token, then padding
    finite: [B] bool, whether the logits that decided the path were finite
    """

    nodes: Tensor
    counts: Tensor
    tokens: Tensor
    finite: Tensor

    @cached_property
    def _host(self) -> list[list[int]]:
        """The one transfer to the host of a decode step. Raises GenerationError if the logits were not finite."""
        rows = torch.cat([self.nodes, self.tokens, self.finite[:, None], self.counts[:, None]], 1).tolist()
        if not all(row[-2] for row in rows):
            raise GenerationError(
                "the target's logits are not finite: nothing can be chosen from them. "
                "Weights or activations overflow this dtype; try --dtype fp32 or bf16"
            )
        return rows

    def read(self) -> None:
        """Brings the path to the host: the one wait of a decode step. Raises GenerationError (see ``_host``)."""
        _ = self._host

    @property
    def host_nodes(self) -> list[list[int]]:
        width = self.nodes.shape[1]
        return [row[:width] for row in self._host]

    @property
    def host_counts(self) -> list[int]:
        return [row[-1] for row in self._host]

    @property
    def host_tokens(self) -> list[list[int]]:
        """The emitted tokens of every row, without padding."""
        width = self.nodes.shape[1]
        return [row[width : width + row[-1]] for row in self._host]
