"""Which candidates become nodes: the best ones, closed under parents."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treedraft.tree import DynamicTree, TreeError, choose_nodes, parse_tree


@st.composite
def pools(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    """Parents (0 the root, else 1 + index) and scores that fall from parent to child."""
    size = draw(st.integers(1, 12))
    parents = [draw(st.integers(0, i)) for i in range(size)]
    scores: list[float] = []
    for parent in parents:
        scores.append((scores[parent - 1] if parent else 0.0) - draw(st.floats(0.01, 3.0)))
    return parents, scores


@given(pools(), st.integers(1, 10))
def test_the_best_candidates_are_kept_in_order_with_their_parents(pool: tuple[list[int], list[float]], size: int):
    parents, scores = pool
    tokens = list(range(100, 100 + len(parents)))
    draft = choose_nodes(
        torch.tensor([7]), torch.tensor([tokens]), torch.tensor([parents]), torch.tensor([scores]), size, 20
    )
    best = [t - 100 for t in draft.tokens[0, 1:].tolist()]
    assert best == sorted(best)
    assert len(best) == min(size - 1, len(scores))
    assert sum(scores[i] for i in best) == pytest.approx(sum(sorted(scores, reverse=True)[: size - 1]))
    place = {i + 1: at for at, i in enumerate(best, 1)} | {0: 0}
    assert draft.parents[0].tolist() == [-1, *(place[parents[i]] for i in best)]
    assert draft.valid.all()


def test_what_is_no_candidate_becomes_padding_at_the_end():
    tokens, none = torch.tensor([[1, 2, 3]]), float("-inf")
    draft = choose_nodes(
        torch.tensor([0]), tokens, torch.zeros(1, 3, dtype=torch.int64), torch.tensor([[none, -1.0, none]]), 4, 2
    )
    assert draft.tokens[0, :2].tolist() == [0, 2]
    assert draft.valid[0].tolist() == [True, True, False, False]
    assert draft.parents[0].tolist() == [-1, 0, -1, -1]
    assert draft.ancestors[0, 2].tolist() == [False, False, True, False]


def test_every_row_grows_a_tree_of_its_own():
    tokens, parents = torch.tensor([[1, 2, 3]] * 2), torch.tensor([[0, 0, 1]] * 2)
    draft = choose_nodes(
        torch.tensor([8, 9]), tokens, parents, torch.tensor([[-1.0, -2.0, -1.5], [-1.0, -2.0, -3.0]]), 3, 3
    )
    assert draft.tokens.tolist() == [[8, 1, 3], [9, 1, 2]]
    assert draft.parents.tolist() == [[-1, 0, 1], [-1, 0, 0]]


def test_a_dynamic_tree_is_named_with_nodes_depth_and_width():
    assert parse_tree("dynamic:16:5:4", 32) == DynamicTree(16, 5, 4)
    assert parse_tree("dynamic:16", 3) == DynamicTree(16, 3, 8)
    assert parse_tree("dynamic:32", 9) == DynamicTree(32, 6, 16)
    assert parse_tree("dynamic:2", 32) == DynamicTree(2, 1, 1)
    assert parse_tree("dynamic:1", 32).size == 1


@pytest.mark.parametrize("name", ["dynamic", "dynamic:x", "dynamic:1:2:3:4", "dynamic:"])
def test_other_spellings_are_refused(name: str):
    with pytest.raises(TreeError, match="expected"):
        parse_tree(name, 4)


def test_sizes_below_one_are_all_named():
    with pytest.raises(TreeError, match=r"size must be at least 1, got 0; depth .* got 0; width .* got 0"):
        DynamicTree(0, 0, 0)


def test_a_dynamic_tree_deeper_than_the_heads_or_wider_than_the_vocabulary_is_refused():
    with pytest.raises(TreeError, match="5 deep, but there are 3 heads; it takes 9 candidates"):
        DynamicTree(16, 5, 9).check_fits(3, 8)
