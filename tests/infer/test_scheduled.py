"""Trees under a confidence schedule change no token, whatever the schedule decides."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch

from kit import any_head, ring_heads, target, tokenizer
from treedraft.heads import Hybrid, NGram, Suffix
from treedraft.infer import GenerationError, Run, Sampling, Target, complete
from treedraft.tree import CostTable, DraftCost, DynamicTree, ForwardCost, Place, Schedule

PROMPTS = [[1, 5, 30, 40], [20] * 17, [i % 83 + 13 for i in range(40)], [50, 51], [60, 61, 62]]
TOKENS = 40


@lru_cache(maxsize=2)
def loaded(name: str) -> Target:
    return Target(target(name), tokenizer(), pack=True)


def scheduled(per_node: float, step: float = 1e-4) -> DynamicTree:
    """At most 9 nodes; a plain forward of 10 ms and ``per_node`` seconds for each further position of a row."""
    nodes = tuple(range(1, 10))
    forwards = (ForwardCost(1, 64, nodes, tuple(0.010 + per_node * (n - 1) for n in nodes)),)
    costs = CostTable(Place("m", "fp32", "f", "t", "h"), forwards, (DraftCost(1, step, (1,), (step,)),), {1: 0.0})
    return DynamicTree(9, 3, 3, Schedule(costs, [[0.5, 0.2, 0.1]] * 3))


@pytest.mark.parametrize(
    "law", [Sampling(), Sampling(temperature=0.8, repetition_penalty=1.1)], ids=["greedy", "drawn"]
)
@pytest.mark.parametrize("kind", ["medusa", "hydra++", "eagle3"])
def test_the_text_is_that_of_plain_decoding(kind: str, law: Sampling):
    model = loaded("llama_gqa")
    head = any_head(model, kind).for_decoding(torch.float32)
    options = {"sampling": law, "seed": 3, "max_new_tokens": TOKENS, "end_ids": ()}
    plain = complete(model, PROMPTS, **options)  # type: ignore[arg-type]
    for per_node in (1e-5, 1e-3):
        run = Run()
        done = complete(model, PROMPTS, head=head, tree=scheduled(per_node), batch_size=3, run=run, **options)  # type: ignore[arg-type]
        assert [c.ids for c in done] == [c.ids for c in plain]
        assert run.schedule is not None
        assert run.schedule.drafted_rounds
        if per_node == 1e-3:  # random heads gain nothing: it rests, and they read what they missed
            assert run.schedule.plain_rounds


def test_heads_that_are_right_are_used_to_their_depth():
    ring = loaded("markov_ring")
    head = ring_heads(ring).for_decoding(torch.float32)
    run = Run()
    complete(ring, PROMPTS, head=head, tree=scheduled(1e-4), max_new_tokens=TOKENS, end_ids=(), run=run)
    assert run.stats.tau > 3
    assert run.schedule is not None
    assert run.schedule.plain_rounds == 0


def test_where_no_tree_can_pay_nothing_is_drafted():
    model = loaded("llama_gqa")
    head = any_head(model, "eagle").for_decoding(torch.float32)
    run = Run()
    complete(model, PROMPTS, head=head, tree=scheduled(0.02), max_new_tokens=8, end_ids=(), run=run)
    assert run.stats.tau == 1.0
    assert run.schedule is not None
    assert run.schedule.drafted_rounds == 0


@pytest.mark.parametrize("rule", ["chain-rejection", "block", "recursive-rejection", "traversal"])
def test_rules_that_weigh_p_against_q_refuse_a_schedule(rule: str):
    model = loaded("llama_gqa")
    head = any_head(model, "medusa").for_decoding(torch.float32)
    with pytest.raises(GenerationError, match="cannot use a dynamic tree"):
        complete(model, PROMPTS, head=head, tree=scheduled(1e-4), rule=rule, sampling=Sampling(temperature=1.0))


def test_drafters_without_levels_refuse_a_schedule():
    model = loaded("llama_gqa")
    hybrid = Hybrid(any_head(model, "medusa").for_decoding(torch.float32), Suffix())
    for drafter in (NGram(), hybrid):
        with pytest.raises(GenerationError, match="does not answer level by level"):
            complete(model, PROMPTS, head=drafter, tree=scheduled(1e-4))
