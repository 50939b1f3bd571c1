"""A small model as the drafter: it says what it would say alone, and the text stays the target's."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import lru_cache

import pytest
import torch
from scipy import stats
from torch import Tensor

from kit import VOCAB, compare, markov_rand, target, tokenizer
from treedraft.heads import Accepted, DraftScores, HeadError, HeadWarning, Memory
from treedraft.infer import (
    DraftModel,
    KVCache,
    Sampling,
    Target,
    check_same_tokenizer,
    complete,
    draft_model,
    fit_draft_model,
)
from treedraft.infer.cache import LayerSizes
from treedraft.tree import Draft, DynamicTree, Shape, Tree

PROMPTS = [[1, 5, 30, 40], [20] * 17, [i % 83 + 13 for i in range(40)], [50, 51], [60, 61, 62]]  # unequal on purpose
CHAIN = Tree.chain(3)
TREES: dict[str, Shape] = {
    "chain": CHAIN,
    "static": Tree.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0, 0]]),
    "dynamic": DynamicTree(9, 4, 3),
}
LAWS = {
    "greedy": Sampling(),
    "temperature 1.0": Sampling(temperature=1.0),
    "temperature 0.8, penalty 1.2": Sampling(temperature=0.8, repetition_penalty=1.2, top_p=0.9),
}
PAIRS = [("llama_gqa", "llama_3layers"), ("qwen2_bias", "mistral_sw16")]
TOKENS, SAMPLES = 10, 1000


@lru_cache(maxsize=8)
def loaded(name: str) -> Target:
    return Target(target(name), tokenizer(), name=name)


@lru_cache(maxsize=16)
def plain(name: str, law: str) -> list[list[int]]:
    done = complete(loaded(name), PROMPTS, sampling=LAWS[law], seed=3, max_new_tokens=TOKENS)
    return [c.ids for c in done]


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("name", "draft"), PAIRS)
def test_the_text_is_the_targets_own_for_every_tree_and_batch(name: str, draft: str, law: str):
    model = loaded(name)
    for tree, batch_size in (("chain", 5), ("static", 1), ("static", 5), ("dynamic", 2)):
        done = complete(
            model,
            PROMPTS,
            head=fit_draft_model(loaded(draft), model),
            tree=TREES[tree],
            sampling=LAWS[law],
            seed=3,
            max_new_tokens=TOKENS,
            batch_size=batch_size,
        )
        for prompt, expected, found in zip(PROMPTS, plain(name, law), done, strict=True):
            result = compare(model, prompt, expected, found.ids, LAWS[law], found.seed)
            assert result.equal or result.near_tie is not None


@pytest.mark.parametrize("rule", ["coupled", "block", "chain-rejection", "recursive-rejection"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sw16"])
def test_a_target_that_drafts_for_itself_accepts_every_chain_to_its_end(name: str, temperature: float, rule: str):
    done = complete(
        loaded(name),
        PROMPTS,
        head=DraftModel(loaded(name)),
        tree=CHAIN,
        sampling=Sampling(temperature=temperature),
        seed=3,
        max_new_tokens=25,  # the prefill's own, and six rounds of three accepted tokens and a bonus
        batch_size=5,
        end_ids=(),
        rule=rule,
    )
    assert [c.stats.accept_by_depth for c in done] == [[1.0, 1.0, 1.0, 1.0]] * 5
    assert [c.stats.rounds for c in done] == [6] * 5


@dataclass(frozen=True)
class Followed:
    """A drafter's memory and the texts that belong to it."""

    inner: Memory | None
    texts: list[list[int]]

    def select(self, rows: Tensor) -> Followed:
        assert self.inner is not None
        return Followed(self.inner.select(rows), [self.texts[row] for row in rows.tolist()])

    def join(self, other: Followed) -> Followed:
        assert self.inner is not None
        return Followed(self.inner.join(other.inner), self.texts + other.texts)


class Checked:
    """A draft model whose every draft is held against plain forwards of the model over the text and the path."""

    def __init__(self, head: DraftModel) -> None:
        self.head, self.steps, self.batches = head, 0, set()
        self.taps, self.depth, self.candidates = head.taps, head.depth, head.candidates

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        if memory is None:
            assert accepted.first is not None
            memory = Followed(None, [[token] for token in accepted.first.tolist()])
        assert isinstance(memory, Followed)
        read = zip(memory.texts, accepted.tokens.tolist(), accepted.count.tolist(), strict=True)
        texts = [text + tokens[:count] for text, tokens, count in read]
        draft, inner = self.head.propose(accepted, memory.inner, tree, scores)
        self.steps += 1
        self.batches.add(len(texts))
        for row, text in enumerate(texts):
            self.check(text, draft, row)
        return draft, Followed(inner, texts)

    def check(self, text: list[int], draft: Draft, row: int) -> None:
        """The children of a node are among the likeliest tokens after it, as a plain forward sees them."""
        tokens, parents = draft.tokens[row].tolist(), draft.parents[row].tolist()
        for node in range(draft.size):
            children = [i for i, parent in enumerate(parents) if parent == node]
            if not children:
                continue
            path = [tokens[i] for i in draft.ancestors[row, node].nonzero()[1:, 0].tolist()]
            logits = self.head.model.model(torch.tensor([text + path])).logits[0, -1]
            best = logits.topk(len(children)).values
            torch.testing.assert_close(logits[[tokens[i] for i in children]].sort(descending=True).values, best)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize(("name", "draft"), [("llama_gqa", "llama_gqa"), ("qwen2_bias", "mistral_sw16")])
def test_every_draft_is_what_the_small_model_would_say_itself(
    name: str, draft: str, tree: str, monkeypatch: pytest.MonkeyPatch
):
    """Prompts in parts, a cache that grows, rows that leave, windows that slide: all against plain forwards."""
    monkeypatch.setattr(draft_model, "READ_CHUNK", 7)
    monkeypatch.setattr(draft_model, "SPARE_SLOTS", 0)
    model, head = loaded(name), Checked(DraftModel(loaded(draft)))
    answers = complete(model, PROMPTS, max_new_tokens=12, end_ids=())
    ends = {answers[0].ids[3], answers[3].ids[6]}
    complete(model, PROMPTS, head=head, tree=TREES[tree], max_new_tokens=12, batch_size=5, end_ids=tuple(ends))
    assert head.steps >= 3
    assert len(head.batches) > 1  # rows left the batch


def test_a_cache_grows_without_moving_what_it_holds():
    cache = KVCache({0: LayerSizes(2, 3, 4)}, 2, 4, torch.float32, torch.device("cpu"))
    cache.begin(4)
    cache.update(torch.randn(2, 2, 4, 3), torch.randn(2, 2, 4, 4), 0)
    cache.append([4, 2])
    before = [[part.clone() for part in cache.stored(row)[0]] for row in range(2)]
    with pytest.raises(RuntimeError, match="5 slots, there are 4"):
        cache.begin(1)
    cache.make_room(5)
    assert cache.slots == 8  # it doubles
    cache.begin(4)
    for row in range(2):
        for held, kept in zip(cache.stored(row)[0], before[row], strict=True):
            assert torch.equal(held, kept)
    cache.make_room(3)
    assert cache.slots == 8


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(("name", "draft"), [("llama_pad128", "llama_gqa"), ("llama_gqa", "llama_pad128")])
def test_vocabularies_that_are_padded_differently_are_warned_about_and_change_no_text(name: str, draft: str, law: str):
    with pytest.warns(HeadWarning, match=rf"{draft} has \d+ output rows, the target {name} \d+: ids from 96 on"):
        head = fit_draft_model(loaded(draft), loaded(name))
    assert head.candidates == 96
    done = complete(
        loaded(name), PROMPTS, head=head, tree=TREES["static"], sampling=LAWS[law], seed=3, max_new_tokens=TOKENS
    )
    assert [c.ids for c in done] == plain(name, law)
    if name == "llama_pad128":
        assert max(max(ids) for ids in plain(name, law)) >= 96  # the draft model met ids that it cannot read


def test_another_tokenizer_is_refused_naming_both_models():
    words = tokenizer()
    words.add_tokens(["<new>"])
    other = Target(target("llama_3layers"), words, name="stranger")
    with pytest.raises(
        HeadError, match=r"stranger cannot draft for llama_gqa: .* 1 of 97 tokens .*'<new>': 96 and None"
    ):
        fit_draft_model(other, loaded("llama_gqa"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_same_tokenizer(loaded("llama_3layers"), loaded("llama_gqa"))
        check_same_tokenizer(Target(target("llama_3layers")), loaded("llama_gqa"))  # nothing to compare


def test_sampled_drafts_of_a_small_model_keep_the_targets_law():
    """A flatter law drafts for a known one; the third token's share of the texts is P^3 of the prompt."""
    model, law = markov_rand()
    flat, _ = markov_rand()
    with torch.no_grad():
        flat.get_parameter("lm_head.weight").mul_(0.5)
    head = DraftModel(Target(flat, tokenizer()))
    third = []
    for rule, tree in (("block", Tree.chain(2)), ("recursive-rejection", Tree.from_paths([[0], [1], [0, 0], [1, 0]]))):
        done = complete(
            Target(model, tokenizer()),
            [[14]] * SAMPLES,
            head=head,
            tree=tree,
            sampling=Sampling(temperature=1.0),
            seed=11,
            max_new_tokens=3,
            batch_size=250,
            end_ids=(),
            rule=rule,
        )
        third.append(torch.bincount(torch.tensor([c.ids[2] for c in done]), minlength=len(VOCAB)).double())
    expected = SAMPLES * torch.linalg.matrix_power(law.double(), 3)[14]
    big = expected >= 5
    for counts in third:
        cells = torch.cat([counts[big], counts[~big].sum()[None]])
        wanted = torch.cat([expected[big], expected[~big].sum()[None]])
        assert stats.chisquare(cells.numpy(), (wanted * SAMPLES / wanted.sum()).numpy()).pvalue > 0.001
