"""Every kind of head gives the reference text: static and dynamic trees, ragged batches, rows that leave, all laws."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch

from kit import KINDS, any_head, compare, target, tokenizer, trained_heads
from treedraft.heads import HeadWarning, build_head
from treedraft.infer import Sampling, Target, autoregressive, complete
from treedraft.tree import DynamicTree, Shape, Tree

PROMPTS = [[1, 5, 30, 40], [20] * 17, [i % 83 + 13 for i in range(40)], [50, 51], [60, 61, 62]]  # unequal on purpose
SHAPES: dict[str, Shape] = {
    "chain": Tree.chain(3),
    "static": Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0]]),
    "dynamic": DynamicTree(9, 3, 4),
}
LAWS = {
    "greedy": Sampling(),
    "temperature 1.0": Sampling(temperature=1.0),
    "temperature 0.7, penalty 1.2": Sampling(temperature=0.7, repetition_penalty=1.2, top_p=0.95),
}
NAMES = ("llama_gqa", "qwen3_headdim")
SEED, TOKENS = 3, 14


@lru_cache(maxsize=4)
def loaded(name: str) -> Target:
    return Target(target(name), tokenizer(), pack=True)


@lru_cache(maxsize=32)
def reference(name: str, law: str) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in PROMPTS]
    plain = Target(target(name), tokenizer())
    for chunk in autoregressive(plain, PROMPTS, sampling=LAWS[law], seed=SEED, max_new_tokens=TOKENS):
        answers[chunk.row] += chunk.ids
    return answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_head_gives_the_reference_text(name: str, kind: str) -> None:
    head = any_head(loaded(name), kind).for_decoding(torch.float32)
    tied = 0
    for law, sampling in LAWS.items():
        for shape in SHAPES.values():
            for batch_size in (2, 5)[(shape is SHAPES["chain"]) :]:
                done = complete(
                    loaded(name),
                    PROMPTS,
                    head=head,
                    tree=shape,
                    sampling=sampling,
                    seed=SEED,
                    max_new_tokens=TOKENS,
                    batch_size=batch_size,
                )
                for prompt, expected, found in zip(PROMPTS, reference(name, law), done, strict=True):
                    result = compare(loaded(name), prompt, expected, found.ids, sampling, found.seed)
                    assert result.equal or result.near_tie is not None, (law, shape, expected, found.ids)
                    tied += not result.equal
    assert tied <= 5  # of 75


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "medusa"])
def test_trained_step_wise_heads_accept_deep_drafts_and_change_no_token(kind: str) -> None:
    ring = Target(target("markov_ring"), tokenizer())
    torch.manual_seed(0)
    head = trained_heads(ring, 5, 120, kind=kind).for_decoding(torch.float32)
    for shape in (Tree.chain(5), DynamicTree(12, 5, 3)):
        done = complete(ring, PROMPTS, head=head, tree=shape, max_new_tokens=TOKENS, end_ids=(), batch_size=5)
        plain = complete(ring, PROMPTS, max_new_tokens=TOKENS, end_ids=())
        assert [c.ids for c in done] == [c.ids for c in plain]
        tau = sum(c.stats.kept for c in done) / sum(c.stats.rounds for c in done)
        assert tau > (1.5 if kind == "eagle" else 2.5)  # one step of training does not teach a head its own outputs


@pytest.mark.parametrize("kind", ["eagle", "hydra++", "eagle3"])
def test_text_longer_than_the_heads_were_trained_on_is_warned_about_and_stays_the_targets(kind: str) -> None:
    model = loaded("llama_gqa")
    head: Any = any_head(model, kind)
    short: Any = build_head(replace(head.config, trained_length=32), model.layers())
    short.load_state_dict(head.state_dict())
    prompt = [i % 83 + 13 for i in range(60)]
    with pytest.warns(HeadWarning, match="at most 32 tokens, and this run may reach 100"):
        done = complete(model, [prompt], head=short.for_decoding(torch.float32), tree=Tree.chain(3), max_new_tokens=40)
    plain = complete(model, [prompt], max_new_tokens=40)[0]
    assert compare(model, prompt, plain.ids, done[0].ids, Sampling(), 0).equal
    ranges = done[0].stats.tau_by_position
    assert list(ranges) == ["0-63", "64-127"][: len(ranges)]
    assert sum(done[0].stats.rounds_at.values()) == done[0].stats.rounds


@pytest.mark.parametrize("kind", KINDS)
def test_ids_beyond_the_tokenizer_are_decoded_like_any_other(kind: str) -> None:
    model = loaded("llama_pad128")
    ids = torch.arange(0, 128, 2)
    head = any_head(model, kind, draft_ids=ids).for_decoding(torch.float32)
    done = complete(model, PROMPTS, head=head, tree=DynamicTree(9, 3, 4), max_new_tokens=40, end_ids=())
    plain = complete(model, PROMPTS, max_new_tokens=40, end_ids=())
    assert any(token >= 96 for answer in plain for token in answer.ids)
    for prompt, expected, found in zip(PROMPTS, plain, done, strict=True):
        result = compare(model, prompt, expected.ids, found.ids, Sampling(), found.seed)
        assert result.equal or result.near_tie is not None
