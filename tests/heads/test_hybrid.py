from __future__ import annotations

import random
from dataclasses import asdict, replace
from functools import lru_cache

import pytest
import torch
from torch import Tensor

from kit import KINDS, PlainScores, any_head, compare, ring_heads, target, tokenizer
from treedraft.heads import (
    Accepted,
    Drafter,
    DraftScores,
    HeadError,
    Hybrid,
    Memory,
    NGram,
    Recycling,
    RecyclingConfig,
    Suffix,
)
from treedraft.heads.hybrid import best_of
from treedraft.heads.source import Trie, pack
from treedraft.infer import Sampling, Target, complete
from treedraft.tree import Draft, DynamicTree, Shape, Tree

PROMPTS = [[1, 5, 30, 40, 5, 30], [20] * 17, [*range(13, 40), 13], [50], [60, 61, 62, 60, 61]]
CPU = torch.device("cpu")


@lru_cache(maxsize=4)
def loaded(name: str) -> Target:
    return Target(target(name), tokenizer(), pack=True)


@pytest.mark.parametrize("kind", ["medusa", "eagle", "eagle3"])
def test_the_text_is_the_same_with_and_without_drafts(kind: str) -> None:
    model, tied = loaded("llama_gqa"), 0
    head = any_head(model, kind).for_decoding(torch.float32)
    recycling = Recycling(RecyclingConfig(model.num_layers), model.layers())
    for law in (Sampling(), Sampling(temperature=1.0)):
        plain = complete(model, PROMPTS, sampling=law, seed=3, max_new_tokens=12)
        for other in (Suffix(), recycling):
            drafter = Hybrid(head, other)
            done = complete(
                model,
                PROMPTS,
                head=drafter,
                tree=DynamicTree(9, 5, 4),
                sampling=law,
                seed=3,
                max_new_tokens=12,
                batch_size=3,
            )
            for prompt, expected, found in zip(PROMPTS, plain, done, strict=True):
                result = compare(model, prompt, expected.ids, found.ids, law, found.seed)
                assert result.equal or result.near_tie is not None
                tied += not result.equal
    assert tied <= 2  # of 20


def test_a_copy_is_accepted_deeper_than_the_head_reaches() -> None:
    ring = loaded("markov_ring")
    head = ring_heads(ring, 2).for_decoding(torch.float32)
    shape = DynamicTree(16, 15, 8)
    drafter = Hybrid(head, NGram())
    [copied] = complete(ring, [PROMPTS[2]], head=drafter, tree=shape, max_new_tokens=24, end_ids=())
    [guessed] = complete(ring, [[50]], head=drafter, tree=shape, max_new_tokens=24, end_ids=())
    assert max(copied.stats.accepted) > 5
    assert max(guessed.stats.accepted) == 2  # nothing to copy: the head alone


class Fixed:
    """A drafter whose trees are given, for every row the same."""

    def __init__(self, trie: Trie, taps: tuple[int, ...] = (), scored: bool = True) -> None:
        self.taps, self.depth, self.candidates = taps, 8, 96
        self._trie, self._scored = trie, scored
        self.seen: list[Accepted] = []
        self.asked: list[Shape] = []

    def propose(
        self, accepted: Accepted, memory: Memory | None, tree: Shape, scores: DraftScores
    ) -> tuple[Draft, Memory | None]:
        self.seen.append(accepted)
        self.asked.append(tree)
        draft = pack([self._trie] * len(accepted.count), tree.size, CPU)
        return draft if self._scored else replace(draft, scores=None), None


def trie_of(root: int, nodes: list[tuple[int, int, float]]) -> Trie:
    trie = Trie.of_root(root)
    for token, parent, score in nodes:
        trie.add(token, parent, score)
    return trie


def given(features: Tensor) -> Accepted:
    batch = len(features)
    return Accepted(features, torch.full((batch, 1), 4), torch.ones(batch).long(), torch.zeros(batch), 1)


def drafted(head: Drafter, other: Drafter, tree: Shape) -> Draft:
    return Hybrid(head, other).propose(given(torch.zeros(2, 1, 0)), None, tree, None)[0]  # type: ignore[arg-type]


def test_a_path_that_both_propose_is_one_node_with_the_larger_score() -> None:
    head = trie_of(4, [(5, 0, -1.0), (6, 1, -2.0), (7, 0, -3.0)])
    other = trie_of(4, [(5, 0, -1.5), (6, 1, -1.6), (8, 2, -1.7)])
    draft = drafted(Fixed(head), Fixed(other), DynamicTree(5, 8, 8))
    assert draft.tokens[0].tolist() == [4, 5, 6, 7, 8]
    assert draft.parents[0].tolist() == [-1, 0, 1, 0, 2]
    assert draft.scores is not None
    assert draft.scores[0].tolist() == pytest.approx([0.0, -1.0, -1.6, -3.0, -1.7])
    assert draft.levels == 4
    assert drafted(Fixed(head), Fixed(other), DynamicTree(4, 8, 8)).tokens[1].tolist() == [4, 5, 6, 8]


def random_trie(numbers: random.Random, size: int) -> Trie:
    """Scores fall along a path, ties included; siblings differ."""
    trie = Trie.of_root(4)
    while len(trie.tokens) < size:
        parent = numbers.randrange(len(trie.tokens))
        taken = [t for t, p in zip(trie.tokens, trie.parents, strict=True) if p == parent]
        token = numbers.choice([t for t in range(5, 12) if t not in taken] or [12 + len(trie.tokens)])
        trie.add(token, parent, trie.scores[parent] - numbers.choice([0.0, 0.5, 1.0, 2.0]))
    return trie


def paths_of(trie: Trie) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for token, parent in zip(trie.tokens[1:], trie.parents[1:], strict=True):
        paths.append((*paths[parent], token))
    return paths


@pytest.mark.parametrize("seed", range(20))
def test_the_best_nodes_of_both_are_kept_and_closed_under_parents(seed: int) -> None:
    numbers = random.Random(seed)
    tries = [random_trie(numbers, numbers.randrange(1, 12)) for _ in range(2)]
    size = numbers.randrange(1, 12)
    merged = best_of([list(zip(t.tokens, t.parents, t.scores, strict=True)) for t in tries], size)
    best: dict[tuple[int, ...], float] = {}
    for trie in tries:
        for path, score in zip(paths_of(trie), trie.scores, strict=True):
            best[path] = max(score, best.get(path, score))
    found = paths_of(merged)
    assert len(found) == min(size, len(best))
    assert len(set(found)) == len(found)  # siblings carry distinct tokens
    assert all(path[:-1] in found for path in found[1:])
    assert merged.scores == [best[path] for path in found]
    assert sorted(merged.scores, reverse=True) == sorted(best.values(), reverse=True)[: len(found)]
    assert merged.depths == [len(path) for path in found]


def test_each_part_gets_the_features_of_the_layers_that_it_taps() -> None:
    head, other = Fixed(trie_of(4, []), taps=(1, 4)), Fixed(trie_of(4, []), taps=(4, 2))
    drafter = Hybrid(head, other)
    assert drafter.taps == (1, 4, 2)
    features = torch.arange(6.0).expand(2, 1, 6)  # two numbers of each layer
    drafter.propose(given(features), None, DynamicTree(4, 8, 8), None)  # type: ignore[arg-type]
    assert head.seen[0].features[0, 0].tolist() == [0, 1, 2, 3]
    assert other.seen[0].features[0, 0].tolist() == [2, 3, 4, 5]
    untapped = Fixed(trie_of(4, []))
    Hybrid(head, untapped).propose(given(features), None, DynamicTree(4, 8, 8), None)  # type: ignore[arg-type]
    assert untapped.seen[0].features.shape == (2, 1, 0)


def test_the_head_is_asked_for_few_levels_and_copies_may_be_as_deep_as_the_tree() -> None:
    head, other = Fixed(trie_of(4, [])), Fixed(trie_of(4, []))
    Hybrid(head, other, head_levels=3).propose(given(torch.zeros(1, 1, 0)), None, DynamicTree(16, 15, 8), None)  # type: ignore[arg-type]
    assert head.asked == [DynamicTree(16, 3, 8)]
    assert other.asked == [DynamicTree(16, 15, 8)]


def test_a_fixed_tree_is_refused_with_the_name_of_one_that_grows() -> None:
    with pytest.raises(HeadError, match="got a fixed one of 8 nodes: choose dynamic:8"):
        drafted(Fixed(trie_of(4, [])), Fixed(trie_of(4, [])), Tree.chain(7))


def test_drafts_without_scores_cannot_be_joined() -> None:
    with pytest.raises(HeadError, match="only be joined if their nodes have scores"):
        drafted(Fixed(trie_of(4, []), scored=False), Fixed(trie_of(4, [])), DynamicTree(8, 3, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_head_puts_scores_on_its_growing_trees(kind: str) -> None:
    model = loaded("llama_gqa")
    head = any_head(model, kind).for_decoding(torch.float32)
    features = model.features(torch.tensor([[20, 21, 22]]), torch.tensor([3]), head.taps)
    start = Accepted(
        features, torch.tensor([[21, 22, 23]]), torch.tensor([3]), torch.tensor([0]), 3, torch.tensor([20])
    )
    draft, _ = head.propose(start, None, DynamicTree(8, 3, 4), PlainScores())
    assert draft.scores is not None
    scores, parents = draft.scores[0], draft.parents[0]
    assert scores[0] == 0.0
    assert (scores[1:] < scores[parents[1:]]).all()


def test_settings_name_both_parts() -> None:
    model = loaded("llama_gqa")
    settings = asdict(Hybrid(any_head(model, "medusa"), Suffix()).config)
    assert (settings["kind"], settings["head"]["kind"], settings["drafter"]["kind"]) == ("hybrid", "medusa", "suffix")


def test_rows_that_leave_do_so_in_both_memories() -> None:
    model = loaded("llama_gqa")
    drafter = Hybrid(any_head(model, "eagle").for_decoding(torch.float32), Suffix())
    together = complete(model, PROMPTS, head=drafter, tree=DynamicTree(9, 5, 4), max_new_tokens=20, batch_size=5)
    for prompt, found in zip(PROMPTS, together, strict=True):
        [alone] = complete(model, [prompt], head=drafter, tree=DynamicTree(9, 5, 4), max_new_tokens=20)
        assert (alone.ids, alone.stats.accepted) == (found.ids, found.stats.accepted)
