"""A batch is kept full: rows that end give their places to waiting requests, which decode as they do alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch

from kit import KINDS, WORD_ID, any_head, markov_ring, ring_heads, target, tokenizer
from treedraft.heads import Accepted, Drafter, DraftScores, Hybrid, Memory, NGram, Recycling, RecyclingConfig, Suffix
from treedraft.infer import Completion, DraftModel, Sampling, Target, complete
from treedraft.tree import Draft, DynamicTree, Shape, Tree

PROMPTS = [[1, 5, 30, 40], [20] * 17, [i % 83 + 13 for i in range(60)], [50, 51], [60, 61, 62], [7, 8] * 9, [33] * 3]
ENDS = list(range(0, 96, 6))  # one token in six ends a row, so that rows leave at all times
TREE = DynamicTree(7, 3, 3)


@lru_cache(maxsize=1)
def model() -> Target:
    return Target(target("llama_gqa"), tokenizer(), pack=True)


def trained(kind: str) -> Callable[[], Drafter]:
    return lambda: any_head(model(), kind).for_decoding(torch.float32)


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    **{kind: trained(kind) for kind in KINDS},
    "ngram": NGram,
    "suffix": Suffix,
    "recycling": lambda: Recycling(RecyclingConfig(model().num_layers), model().layers()),
    "model": lambda: DraftModel(model()),
    "eagle3+suffix": lambda: Hybrid(trained("eagle3")(), Suffix()),
    "model+ngram": lambda: Hybrid(DraftModel(model()), NGram()),
}


def decode(head: Drafter | None, batch_size: int, law: Sampling, **options: Any) -> list[Completion]:
    asked = {"tree": TREE, "max_new_tokens": 30, "end_ids": ENDS, "seed": 4, "sampling": law, **options}
    return complete(model(), PROMPTS, head=head, batch_size=batch_size, **asked)


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize(
    "law", [Sampling(), Sampling(temperature=1.0, repetition_penalty=1.1)], ids=["greedy", "drawn"]
)
def test_a_row_that_joins_is_drafted_for_as_if_it_were_alone(drafter: str, law: Sampling) -> None:
    head = DRAFTERS[drafter]()
    alone, together = decode(head, 1, law), decode(head, 3, law)
    assert [c.ids for c in together] == [c.ids for c in alone]
    assert [c.reason for c in together] == [c.reason for c in alone]
    # the same drafts were accepted, so what the head remembers of each row came along with it
    assert [c.stats.accepted_by_depth for c in together] == [c.stats.accepted_by_depth for c in alone]
    lengths = {len(c.ids) for c in alone}
    assert len(lengths) > 2, "rows are to end at different times"


class Counted:
    """A drafter that notes how many rows each of its calls has."""

    def __init__(self, inner: Drafter) -> None:
        self.inner, self.rows = inner, list[int]()
        self.taps, self.depth, self.candidates = inner.taps, inner.depth, inner.candidates

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        self.rows.append(len(accepted.count))
        return self.inner.propose(accepted, memory, tree, scores)


def test_no_place_stays_empty_while_requests_wait() -> None:
    ring = Target(markov_ring(), tokenizer())
    head = Counted(ring_heads(ring, 3).for_decoding(torch.float32))
    starts = [5, 60, 30, 10, 40, 20]
    ends = [WORD_ID[f"w{n}"] for n in (9, 80, 35, 12, 60, 24)]  # after 4, 20, 5, 2, 20 and 4 tokens
    prompts = [[WORD_ID[f"w{n}"]] for n in starts]
    done = complete(ring, prompts, head=head, tree=Tree.chain(3), max_new_tokens=40, end_ids=ends, batch_size=2)
    assert [len(c.ids) for c in done] == [4, 20, 5, 2, 20, 4]
    # Each round gives four tokens behind the prefill's own. Calls with one row: those that enter, and the last row's.
    rounds = {index: c.stats.rounds for index, c in enumerate(done)}
    assert rounds == {0: 1, 1: 5, 2: 1, 3: 1, 4: 5, 5: 1}
    assert head.rows == [2, 1, 1, 1, 2, 2, 2, 2, 1]


def test_a_longer_prompt_that_joins_makes_the_cache_longer_and_moves_no_row() -> None:
    prompts = [[20, 30], [50] * 3, [i % 83 + 13 for i in range(150)], [60, 61, 62]]
    asked: dict[str, Any] = {"max_new_tokens": 20, "end_ids": [], "head": trained("eagle3")(), "tree": TREE}
    together = complete(model(), prompts, batch_size=2, **asked)
    assert [c.ids for c in together] == [complete(model(), [p], **asked)[0].ids for p in prompts]


def test_requests_without_a_budget_end_before_any_work_and_take_no_place() -> None:
    full = [i % 83 + 13 for i in range(255)]  # one token has room behind it
    done = complete(model(), [full, [20, 21], full], max_new_tokens=3, end_ids=[], batch_size=1)
    assert [len(c.ids) for c in done] == [1, 3, 1]
    none = complete(model(), [[20, 21], [22]], max_new_tokens=0)
    assert [(c.ids, c.reason) for c in none] == [([], "length"), ([], "length")]
