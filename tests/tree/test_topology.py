import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treedraft.tree import Tree, TreeError, ancestor_mask, make_draft, path_nodes

PATHS = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
PARENTS = (-1, 0, 1, 2, 1, 0, 5)  # depth first: (), 0, 00, 000, 01, 1, 10
DEPTHS = (0, 1, 2, 3, 2, 1, 2)
ANCESTORS = [
    [1, 0, 0, 0, 0, 0, 0],
    [1, 1, 0, 0, 0, 0, 0],
    [1, 1, 1, 0, 0, 0, 0],
    [1, 1, 1, 1, 0, 0, 0],
    [1, 1, 0, 0, 1, 0, 0],
    [1, 0, 0, 0, 0, 1, 0],
    [1, 0, 0, 0, 0, 1, 1],
]


@st.composite
def parent_lists(draw: st.DrawFn) -> list[int]:
    size = draw(st.integers(1, 40))
    return [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]


def test_rank_paths_are_laid_out_depth_first_whatever_their_order() -> None:
    for paths in (PATHS, PATHS[::-1]):
        tree = Tree.from_paths(paths)
        assert tree.parents == PARENTS
        assert tree.depths == DEPTHS
        assert tree.ranks == (0, 0, 0, 0, 1, 1, 0)
        assert tree.paths == ((), (0,), (0, 0), (0, 0, 0), (0, 1), (1,), (1, 0))
        assert (tree.size, tree.depth, tree.width) == (7, 3, 2)


def test_a_chain_has_one_node_at_each_depth() -> None:
    chain = Tree.chain(3)
    assert chain.parents == (-1, 0, 1, 2)
    assert chain.depths == (0, 1, 2, 3)
    assert Tree.chain(0).size == 1


def test_parents_give_ranks_by_order_among_siblings() -> None:
    assert Tree.from_parents([-1, 0, 0, 1, 0]).ranks == (0, 0, 1, 0, 2)


def test_every_fault_of_a_path_list_is_named() -> None:
    with pytest.raises(TreeError) as error:
        Tree.from_paths([[0], [0], [1, 0], [2, 1, 0]])
    message = str(error.value)
    assert "path [0] appears 2 times" in message
    assert "path [1, 0] lacks its ancestor [1]" in message
    assert "path [2, 1, 0] lacks its ancestor [2, 1]" in message


@pytest.mark.parametrize("path", [[], [-1], [0.5], ["0"], [True]])
def test_a_path_that_is_no_list_of_ranks_is_refused(path: list[object]) -> None:
    with pytest.raises(TreeError, match="must be a list of ranks"):
        Tree.from_paths([path])  # type: ignore[list-item]


def test_parents_out_of_order_are_all_named() -> None:
    with pytest.raises(TreeError, match=r"node 1 has parent 2, expected one of 0\.\.0.*node 3 has parent -1"):
        Tree.from_parents([-1, 2, 0, -1])
    with pytest.raises(TreeError, match="node 0 is the root"):
        Tree.from_parents([0, 0])


def test_siblings_with_one_rank_are_refused() -> None:
    with pytest.raises(TreeError, match="nodes 1 and 2 are both candidate 0 of node 0"):
        Tree((-1, 0, 0), (0, 0, 0))


def test_a_path_deeper_than_the_heads_is_refused_by_name() -> None:
    tree = Tree.from_paths([[0], [0, 0], [0, 0, 0], [0, 0, 0, 1]])
    tree.check_fits(heads=4, candidates=2)
    with pytest.raises(TreeError, match=r"path \[0, 0, 0, 1\] is 4 deep, but there are 3 heads"):
        tree.check_fits(heads=3, candidates=2)


def test_a_rank_beyond_the_draft_vocabulary_is_refused() -> None:
    with pytest.raises(TreeError, match="rank 4 needs 5 candidates, the draft vocabulary has 3"):
        Tree.from_paths([[4]]).check_fits(heads=1, candidates=3)


def test_the_ancestor_mask_is_the_golden_grid() -> None:
    assert ancestor_mask(torch.tensor([PARENTS]))[0].int().tolist() == ANCESTORS


def slow_ancestors(parents: list[int]) -> list[list[bool]]:
    grid = []
    for i in range(len(parents)):
        seen, node = set(), i
        while node >= 0:
            seen.add(node)
            node = parents[node]
        grid.append([j in seen for j in range(len(parents))])
    return grid


@given(parent_lists())
def test_the_ancestor_mask_equals_walking_up_from_every_node(parents: list[int]) -> None:
    assert ancestor_mask(torch.tensor([parents]))[0].tolist() == slow_ancestors(parents)


@given(parent_lists())
def test_a_path_lists_a_nodes_ancestors_in_order_and_repeats_the_last(parents: list[int]) -> None:
    grid = slow_ancestors(parents)
    size = len(parents)
    nodes = path_nodes(ancestor_mask(torch.tensor([parents] * size)), torch.arange(size), size)
    for node, path in enumerate(nodes.tolist()):
        real = [j for j in range(size) if grid[node][j]]
        assert path == real + [node] * (size - len(real))


def test_rows_may_have_trees_of_their_own_and_padding_sees_only_itself() -> None:
    parents = torch.tensor([[-1, 0, 1], [-1, 0, -1]])
    valid = torch.tensor([[True, True, True], [True, True, False]])
    draft = make_draft(torch.tensor([[5, 6, 7], [5, 6, 0]]), parents, valid, levels=3)
    assert draft.depth.tolist() == [[0, 1, 2], [0, 1, 0]]
    assert draft.ancestors[1].int().tolist() == [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
