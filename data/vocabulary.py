"""The draft vocabulary: the target ids that heads may propose, chosen by how often they are supervised."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import compress

import torch
from torch import Tensor

from .records import DataError, Encoded


@dataclass(frozen=True)
class DraftVocabulary:
    """The W target ids that heads may propose.

    ids: [W] int64, ascending; None stands for the whole vocabulary
    coverage: the share of supervised tokens that are among them
    supervised: the number of supervised tokens that were counted
    """

    ids: Tensor | None
    coverage: float
    supervised: int


def draft_vocabulary(
    rows: Iterable[Encoded],
    vocab_size: int,
    size: int,
    always: Iterable[int] = (),
    among: Tensor | None = None,
) -> DraftVocabulary:
    """The ``size`` most frequent supervised ids, those in ``always`` (end tokens, chat markers) first.

    Equal counts go by the lower id, so ids that never occur fill up from below. A size of ``vocab_size`` or more gives
    the whole vocabulary. With ``among`` only its ids are chosen from, ``always`` being part of them. Raises DataError
    with all faults.
    """
    kept = sorted(set(always))
    supervised = torch.tensor([token for row in rows for token in compress(row.ids, row.mask)], dtype=torch.int64)
    faults = []
    if size < max(1, len(kept)):
        faults.append(f"a draft vocabulary of {size} cannot hold the {len(kept)} ids that are always in it")
    if kept and (kept[0] < 0 or kept[-1] >= vocab_size):
        faults.append(f"ids that are always in it must lie in 0..{vocab_size - 1}, got {kept[0]}..{kept[-1]}")
    if among is not None and size > len(among):
        faults.append(f"a draft vocabulary of {size} cannot be chosen among {len(among)} ids")
    if not len(supervised):
        faults.append("the rows have no supervised token to count")
    elif int(supervised.max()) >= vocab_size:
        faults.append(f"the rows have the token id {int(supervised.max())}, the target's vocabulary is {vocab_size}")
    if faults:
        raise DataError("no draft vocabulary: " + "; ".join(faults))
    if size >= vocab_size:
        return DraftVocabulary(None, 1.0, len(supervised))
    counts = torch.bincount(supervised, minlength=vocab_size)
    rank = counts.clone()
    rank[kept] = len(supervised) + 1
    if among is not None:
        rank[~torch.isin(torch.arange(vocab_size), among)] = -1
    ids = rank.sort(descending=True, stable=True).indices[:size].sort().values
    return DraftVocabulary(ids, int(counts[ids].sum()) / len(supervised), len(supervised))
