"""Drafting never changes a token: every head, tree, batch and law equals the plain reference with the same seed."""

from functools import lru_cache
from typing import Any

import pytest
import torch

from kit import TARGETS, compare, random_heads, ring_heads, target, tokenizer, trained_heads
from treedraft.heads import Medusa
from treedraft.infer import RULES, Drafts, GenerationError, Sampling, Target, autoregressive, complete
from treedraft.tree import Tree, default_tree

PROMPTS = [[1, 5, 30, 40], [20] * 17, [i % 83 + 13 for i in range(40)], [50, 51], [60, 61, 62]]  # unequal on purpose
TREES = {
    "chain": Tree.chain(3),
    "wide": Tree.from_paths([[i] for i in range(12)] + [[i, 0] for i in range(6)]),
    "deep": Tree.from_paths(
        [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    ),
}
LAWS = {
    "greedy": Sampling(),
    "temperature 0.7, top-p 0.9": Sampling(temperature=0.7, top_p=0.9),
    "temperature 1.0": Sampling(temperature=1.0),
    "temperature 1.0, penalty 1.2": Sampling(temperature=1.0, repetition_penalty=1.2, top_k=20, min_p=0.01),
    "greedy, penalty 1.3": Sampling(repetition_penalty=1.3),
}
SEED, TOKENS = 3, 24


@lru_cache(maxsize=2)
def loaded(name: str) -> Target:
    return Target(target(name), tokenizer(), pack=True)


@lru_cache(maxsize=16)
def reference(name: str, law: str) -> list[list[int]]:
    answers: list[list[int]] = [[] for _ in PROMPTS]
    plain = Target(target(name), tokenizer())
    for chunk in autoregressive(plain, PROMPTS, sampling=LAWS[law], seed=SEED, max_new_tokens=TOKENS):
        answers[chunk.row] += chunk.ids
    return answers


def heads_for(name: str, kind: str) -> Medusa:
    make = {"exact": ring_heads, "random": random_heads, "trained": trained_heads}[kind]
    return make(loaded(name), 4).for_decoding(torch.float32)


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("name", TARGETS)
def test_every_tree_and_batch_gives_the_reference_text(name: str, law: str) -> None:
    tied = 0
    for tree in TREES.values():
        for batch_size in (1, 5):
            done = complete(
                loaded(name),
                PROMPTS,
                head=heads_for(name, "random"),
                tree=tree,
                sampling=LAWS[law],
                seed=SEED,
                max_new_tokens=TOKENS,
                batch_size=batch_size,
            )
            for prompt, expected, found in zip(PROMPTS, reference(name, law), done, strict=True):
                result = compare(loaded(name), prompt, expected, found.ids, LAWS[law], found.seed)
                assert result.equal or result.near_tie is not None, (name, law, tree, batch_size, expected, found.ids)
                tied += not result.equal
    assert tied <= 3  # of 30 comparisons: near-ties are rare, so many of them would hide an error


@pytest.mark.parametrize("name", TARGETS)
def test_trained_heads_change_no_token(name: str) -> None:
    head = heads_for(name, "trained")
    for law in ("greedy", "temperature 1.0"):
        done = complete(
            loaded(name),
            PROMPTS,
            head=head,
            tree=TREES["deep"],
            sampling=LAWS[law],
            seed=SEED,
            max_new_tokens=TOKENS,
            batch_size=5,
        )
        for prompt, expected, found in zip(PROMPTS, reference(name, law), done, strict=True):
            result = compare(loaded(name), prompt, expected, found.ids, LAWS[law], found.seed)
            assert result.equal or result.near_tie is not None


@pytest.mark.parametrize("law", LAWS)
def test_heads_that_are_right_and_heads_that_are_wrong_give_the_same_text(law: str) -> None:
    for kind in ("exact", "random"):
        done = complete(
            loaded("markov_ring"),
            PROMPTS,
            head=heads_for("markov_ring", kind),
            tree=TREES["deep"],
            sampling=LAWS[law],
            seed=SEED,
            max_new_tokens=TOKENS,
            batch_size=5,
        )
        assert [c.ids for c in done] == reference("markov_ring", law)
        if kind == "exact" and law == "greedy":
            assert sum(c.stats.kept for c in done) / sum(c.stats.rounds for c in done) > 4


@pytest.mark.parametrize("name", TARGETS)
def test_greedy_text_is_that_of_hugging_face_generate(name: str) -> None:
    stock: Any = target(name)
    for prompt, found in zip(PROMPTS, reference(name, "greedy"), strict=True):
        with torch.inference_mode():
            theirs = stock.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0, len(prompt) :]
        result = compare(loaded(name), prompt, theirs.tolist(), found, Sampling(), SEED)
        assert result.equal or result.near_tie is not None


def test_a_repetition_penalty_gives_the_text_of_hugging_face_generate() -> None:
    stock: Any = target("llama_gqa")
    for prompt in PROMPTS:
        with torch.inference_mode():
            theirs = stock.generate(torch.tensor([prompt]), max_new_tokens=30, do_sample=False, repetition_penalty=1.3)[
                0, len(prompt) :
            ].tolist()
        found = complete(
            loaded("llama_gqa"),
            [prompt],
            head=heads_for("llama_gqa", "random"),
            tree=default_tree(4),
            sampling=Sampling(repetition_penalty=1.3),
            max_new_tokens=30,
        )[0]
        assert compare(loaded("llama_gqa"), prompt, theirs, found.ids, Sampling(repetition_penalty=1.3), 0).equal
        plain = complete(loaded("llama_gqa"), [prompt], max_new_tokens=30)[0]
        assert plain.ids != found.ids  # the penalty matters here


@pytest.mark.parametrize("drafts", ["coupled", "top-k", "sampled"])
def test_all_drafts_give_the_same_text_with_the_coupled_rule(drafts: Drafts) -> None:
    done = complete(
        loaded("markov_rand"),
        PROMPTS,
        head=heads_for("markov_rand", "random"),
        tree=TREES["wide"],
        sampling=LAWS["temperature 1.0"],
        seed=SEED,
        max_new_tokens=TOKENS,
        drafts=drafts,
    )
    assert [c.ids for c in done] == reference("markov_rand", "temperature 1.0")


def test_coupling_accepts_more_than_plain_drafts_at_temperature_one() -> None:
    """A head whose law is the target's own next-but-one law: coupled drafts find the sampled token far more often."""
    model = loaded("markov_rand")
    head = random_heads(model, 1)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
    # The zero head repeats the law of the token before; on a text of one repeated law it is exact enough to compare.
    taus = {}
    kinds: tuple[Drafts, ...] = ("coupled", "top-k")
    for drafts in kinds:
        done = complete(
            model,
            PROMPTS,
            head=head.for_decoding(torch.float32),
            tree=Tree.from_paths([[0], [1], [2], [3]]),
            sampling=Sampling(temperature=3.0),
            seed=SEED,
            max_new_tokens=200,
            drafts=drafts,
        )
        taus[drafts] = sum(c.stats.kept for c in done) / sum(c.stats.rounds for c in done)
    assert taus["coupled"] > taus["top-k"]


def test_a_row_repeats_alone_with_the_seed_it_reports() -> None:
    law = LAWS["temperature 1.0"]
    done = complete(loaded("llama_gqa"), PROMPTS, sampling=law, seed=11, max_new_tokens=TOKENS, batch_size=5)
    for prompt, found in zip(PROMPTS, done, strict=True):
        alone = complete(loaded("llama_gqa"), [prompt], sampling=law, row_seeds=[found.seed], max_new_tokens=TOKENS)[0]
        assert alone.ids == found.ids
    assert len({c.seed for c in done}) == len(PROMPTS)


def test_a_reduced_draft_vocabulary_changes_speed_and_not_text() -> None:
    model = loaded("llama_pad128")
    head = random_heads(model, 3, draft_ids=torch.arange(0, 128, 3))
    done = complete(model, PROMPTS, head=head.for_decoding(torch.float32), max_new_tokens=TOKENS, batch_size=5)
    assert [c.ids for c in done] == reference("llama_pad128", "greedy")
    assert max(max(c.ids) for c in done) >= 96  # ids beyond the tokenizer's words occur and decode to text
    assert all(isinstance(c.text, str) for c in done)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_with_every_rule_a_temperature_near_zero_is_greedy(temperature: float, rule: str) -> None:
    tree = TREES["chain"] if RULES[rule].chains_only else TREES["deep"]
    done = complete(
        loaded("llama_gqa"),
        PROMPTS,
        head=heads_for("llama_gqa", "random"),
        tree=tree,
        sampling=Sampling(temperature=temperature),
        seed=SEED,
        max_new_tokens=TOKENS,
        rule=rule,
    )
    for prompt, expected, found in zip(PROMPTS, reference("llama_gqa", "greedy"), done, strict=True):
        result = compare(loaded("llama_gqa"), prompt, expected, found.ids, Sampling(), SEED)
        assert result.equal or result.near_tie is not None
        assert min(found.stats.accepted_by_depth) >= 0


def test_a_negative_temperature_is_refused() -> None:
    with pytest.raises(GenerationError, match="temperature must be 0"):
        Sampling(temperature=-1e-6)
