import itertools
import json
from pathlib import Path

import pytest

from treedraft.tree import DynamicTree, Tree, TreeError, best_tree, default_tree, load_tree, parse_tree, save_tree

ACCEPTANCE = [[0.6, 0.2, 0.1], [0.5, 0.25, 0.05]]


def expected_tokens(tree: Tree) -> float:
    total = 0.0
    for path in tree.paths[1:]:
        product = 1.0
        for depth, rank in enumerate(path):
            product *= ACCEPTANCE[depth][rank]
        total += product
    return total


@pytest.mark.parametrize("size", range(1, 8))
def test_the_best_tree_is_the_best_of_all_trees_of_its_size(size: int) -> None:
    nodes = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    closed = [
        Tree.from_paths(choice)
        for choice in itertools.combinations(nodes, size - 1)
        if all(len(p) == 1 or p[:1] in choice for p in choice)
    ]
    found = best_tree(ACCEPTANCE, size)
    assert found.size == size
    assert expected_tokens(found) == pytest.approx(max(map(expected_tokens, closed)))


@pytest.mark.parametrize("heads", [1, 2, 3, 5])
def test_default_trees_fit_the_number_of_heads(heads: int) -> None:
    tree = default_tree(heads, 8)
    assert tree.depth <= heads
    tree.check_fits(heads, candidates=8)
    assert parse_tree("best:8", heads) == tree


def test_a_chain_is_named_by_its_drafted_nodes() -> None:
    assert parse_tree("chain:4", heads=4) == Tree.chain(4)


def test_a_tree_file_holds_rank_paths_and_reads_back_equal(tmp_path: Path) -> None:
    tree = Tree.from_paths([[0], [1], [0, 2]])
    save_tree(tree, tmp_path / "tree.json")
    assert (tmp_path / "tree.json").read_text() == '{"paths": [[0], [0, 2], [1]]}\n'
    assert load_tree(tmp_path / "tree.json") == tree
    assert parse_tree(str(tmp_path / "tree.json"), heads=2) == tree
    assert [p.name for p in tmp_path.iterdir()] == ["tree.json"]


def test_a_tree_file_may_name_a_tree_that_grows(tmp_path: Path) -> None:
    tree = DynamicTree(8, 4, 3)
    save_tree(tree, tmp_path / "tree.json")
    assert json.loads((tmp_path / "tree.json").read_text()) == {"dynamic": {"nodes": 8, "depth": 4, "width": 3}}
    assert parse_tree(str(tmp_path / "tree.json"), heads=4) == tree


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ('{"dynamic": {"nodes": 8, "depth": 4}}', "is not a tree file"),
        ('{"dynamic": {"nodes": 8, "depth": 4, "width": "3"}}', "is not a tree file"),
        ('{"dynamic": {"nodes": 8, "depth": 4, "width": 3}, "paths": [[0]]}', "is not a tree file"),
        ('{"dynamic": {"nodes": 0, "depth": 4, "width": 3}}', "size must be at least 1"),
        ("[[0]]", "is not a tree file"),
        ('{"paths": [[0]], "extra": 1}', "is not a tree file"),
        ("{", "is not JSON"),
        ('{"paths": [0]}', "every path must be a list"),
        ('{"paths": [[0, 1]]}', r"lacks its ancestor \[0\]"),
    ],
)
def test_a_malformed_tree_file_is_refused_by_name(tmp_path: Path, content: str, fault: str) -> None:
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(TreeError, match=rf"bad\.json.*{fault}"):
        load_tree(tmp_path / "bad.json")


@pytest.mark.parametrize("name", ["best", "chain:x", "best:0", "nothing.json"])
def test_an_unknown_tree_name_is_refused_with_the_accepted_forms(name: str) -> None:
    with pytest.raises(TreeError, match="expected chain:LENGTH, best:NODES, dynamic:NODES"):
        parse_tree(name, heads=3)
