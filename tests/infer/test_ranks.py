"""A record of ranks says what decoding with any static tree does, to the count."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import pytest
import torch

from kit import any_head, ring_heads, target, tokenizer, trained_heads
from treedraft.heads import Drafter, HeadError, NGram
from treedraft.infer import Answered, Run, Sampling, Target, complete, record_ranks, row_seed
from treedraft.tree import NOT_THERE, Origin, Record, Tree, walk

PROMPTS = [[1, 5, 30, 40], [20] * 17, [i % 83 + 13 for i in range(40)], [50, 51], [60, 61, 62]]  # unequal on purpose
TREES = {
    "chain": Tree.chain(3),
    "branching": Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
    "wide": Tree.from_paths([[0], [2], [5], [0, 3], [5, 0]]),
    "root alone": Tree.chain(0),
}
LAWS = {
    "greedy": Sampling(),
    "sampled and penalised": Sampling(temperature=0.7, repetition_penalty=1.2),
}
SEED, TOKENS = 3, 20


@lru_cache(maxsize=2)
def loaded(name: str) -> Target:
    return Target(target(name), tokenizer(), pack=True)


def recorded(model: Target, head: Drafter, law: Sampling, end_ids: tuple[int, ...] = (), depth: int = 3) -> Record:
    """The record of the answers to PROMPTS."""
    seeds = [row_seed(SEED, i) for i in range(len(PROMPTS))]
    done = complete(model, PROMPTS, sampling=law, seed=SEED, max_new_tokens=TOKENS, end_ids=end_ids)
    answers = [Answered(p, c.ids, s) for p, c, s in zip(PROMPTS, done, seeds, strict=True)]
    found = record_ranks(model, head, answers, law, depth)
    lengths, starts = tuple(len(a.answer) for a in answers), tuple(len(a.prompt) for a in answers)
    names = tuple(str(i) for i in range(len(answers)))
    origin = Origin("h", "t", "fp32", "p", {}, SEED, TOKENS, depth)
    return Record(
        origin, lengths, starts, found.ranks, found.beliefs, found.loops, names, names, len(names)
    )  # fmt: skip


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("kind", ["medusa", "hydra", "hydra++", "eagle", "eagle3"])
def test_predicted_counts_are_the_decoded_counts(kind: str, law: str):
    model = loaded("llama_gqa")
    head = any_head(model, kind).for_decoding(torch.float32)
    answers = complete(model, PROMPTS, sampling=LAWS[law], seed=SEED, max_new_tokens=TOKENS, end_ids=())
    ends = (answers[0].ids[11],)  # an end token that some answers meet in the middle of a round
    record = recorded(model, head, LAWS[law], ends)
    for tree in TREES.values():
        run = Run()
        complete(
            model, PROMPTS, head=head, tree=tree, sampling=LAWS[law], seed=SEED, max_new_tokens=TOKENS, end_ids=ends,
            run=run, batch_size=3,
        )  # fmt: skip
        predicted = walk(record, tree)
        assert predicted.rounds.tolist() == [run.completions[i].stats.rounds for i in range(len(PROMPTS))]
        assert predicted.kept.tolist() == [run.completions[i].stats.kept for i in range(len(PROMPTS))]
        assert predicted.accepted_counts() == run.stats.accepted
        assert (predicted.loop_rounds.sum(), predicted.loop_kept.sum()) == (run.stats.loop_rounds, run.stats.loop_kept)


@pytest.mark.parametrize("kind", ["medusa", "hydra++", "eagle3"])
def test_predicted_counts_are_the_decoded_counts_of_heads_that_are_often_right(kind: str):
    ring = Target(target("markov_ring"), tokenizer())
    torch.manual_seed(0)
    trained = ring_heads(ring) if kind == "medusa" else trained_heads(ring, 3, 60, kind=kind)
    head = trained.for_decoding(torch.float32)
    record = recorded(ring, head, Sampling())
    assert walk(record, Tree.chain(3)).tau > 2
    for tree in TREES.values():
        run = Run()
        complete(ring, PROMPTS, head=head, tree=tree, seed=SEED, max_new_tokens=TOKENS, end_ids=(), run=run)
        assert walk(record, tree).accepted_counts() == run.stats.accepted


def test_a_draft_vocabulary_ranks_only_its_own_tokens():
    model = loaded("llama_gqa")
    ids = torch.arange(0, 96, 2)
    head = any_head(model, "eagle", draft_ids=ids).for_decoding(torch.float32)
    record = recorded(model, head, Sampling())
    answers = complete(model, PROMPTS, max_new_tokens=TOKENS, end_ids=())
    following = [token for done in answers for token in [*done.ids[1:], 1]]  # behind the last one there is none
    outside = [token % 2 == 1 for token in following]
    assert (record.ranks[:, 0] == NOT_THERE).tolist() == outside
    assert int(record.ranks.max()) < len(ids)
    run = Run()
    complete(model, PROMPTS, head=head, tree=TREES["wide"], max_new_tokens=TOKENS, end_ids=(), run=run)
    assert walk(record, TREES["wide"]).accepted_counts() == run.stats.accepted


def test_answers_of_one_token_have_no_rounds():
    model = loaded("llama_gqa")
    head = any_head(model, "eagle").for_decoding(torch.float32)
    found = record_ranks(model, head, [Answered([5, 6], [7], 0), Answered([5, 6, 7], [8, 9, 10], 0)], Sampling(), 2)
    assert found.ranks.shape == (4, 2)
    assert found.ranks[0].tolist() == found.ranks[3].tolist() == [NOT_THERE, NOT_THERE]
    assert found.ranks[2, 1] == NOT_THERE


def test_what_has_no_levels_and_what_is_too_shallow_is_refused():
    model = loaded("llama_gqa")
    with pytest.raises(HeadError, match="NGram cannot be recorded"):
        record_ranks(model, NGram(), [], Sampling(), 2)
    with pytest.raises(HeadError, match="4 depths was asked for, the head has 3"):
        record_ranks(model, any_head(model, "medusa").for_decoding(torch.float32), [], Sampling(), 4)


def test_confidences_are_of_the_best_candidates_in_order():
    model = loaded("llama_gqa")
    record = recorded(model, any_head(model, "medusa").for_decoding(torch.float32), Sampling())
    shares = record.beliefs[record.ranks[:, 0] != NOT_THERE].exp()
    assert (shares.diff(dim=-1) <= 0).all()
    assert (shares.sum(-1) <= 1 + 1e-5).all()
    assert replace(record, count=9).whole is False
