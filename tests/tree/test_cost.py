"""Cost tables, what they choose, and their refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from treedraft.tree import (
    CostError,
    CostTable,
    DraftCost,
    Family,
    ForwardCost,
    Member,
    Place,
    Roofline,
    Tree,
    TreeError,
    best_chain,
    best_choice,
    check_place,
    explained,
    load_costs,
    load_family,
    parse_tree,
    save_costs,
    save_family,
    sized,
)

HERE = Place("a processor, 2 cores, 2 threads", "fp32", "compiled", "t", "h")


def table(step: float = 0.001, begin: float = 0.002) -> CostTable:
    """T(n) = 10 ms up to 6 nodes, then 10 more; 1 ms for each node beyond 256 tokens of context and a row more."""
    nodes = (1, 2, 6, 7, 12)
    seconds = (0.010, 0.010, 0.010, 0.020, 0.020)
    forwards = (
        ForwardCost(1, 256, nodes, seconds),
        ForwardCost(1, 1024, nodes, tuple(s + 0.004 for s in seconds)),
        ForwardCost(4, 256, nodes, tuple(2 * s for s in seconds)),
        ForwardCost(4, 1024, nodes, tuple(2 * s + 0.004 for s in seconds)),
    )
    drafts = (DraftCost(1, begin, (1, 4), (step, 2 * step)), DraftCost(4, 2 * begin, (1, 4), (2 * step, 4 * step)))
    return CostTable(HERE, forwards, drafts, {1: 0.0005, 4: 0.001})


def family(**taus: float) -> Family:
    """Chains of N nodes with these tau, as N5=2.0."""
    members = {int(n[1:]): Member(Tree.chain(int(n[1:]) - 1), tau, (tau - 0.1, tau + 0.1)) for n, tau in taus.items()}
    return Family(members, ((0.5, 0.1),), ((1.0, 0.0),), "h", "t")


def test_costs_between_the_measured_ones_lie_on_lines():
    costs = table()
    assert costs.forward_seconds([1, 4, 6, 7]).tolist() == pytest.approx([0.010, 0.010, 0.010, 0.020])
    assert costs.forward_seconds(1, 1, 640)[0] == pytest.approx(0.012)
    assert costs.forward_seconds(1, 2, 256)[0] == pytest.approx(0.010 + 0.010 / 3)
    assert costs.forward_seconds(22)[0] == pytest.approx(0.020)  # the last line is flat
    assert costs.step_seconds(2) == pytest.approx(0.001 + 0.001 / 3)


def test_a_draft_costs_its_levels_by_their_width():
    costs = table()
    assert costs.draft_seconds(Tree.chain(0)) == 0.0
    assert costs.draft_seconds(Tree.chain(1)) == pytest.approx(0.002)
    assert costs.draft_seconds(Tree.chain(3)) == pytest.approx(0.002 + 2 * 0.001)
    branching = Tree.from_paths([[0], [1], [0, 0], [1, 0]])  # one level more, two nodes asked
    assert costs.draft_seconds(branching) == pytest.approx(0.002 + costs.step_seconds(2))
    assert costs.round_seconds(branching) == pytest.approx(costs.draft_seconds(branching) + 0.010 + 0.0005)


def test_the_size_stops_at_the_edge_of_a_step():
    choices = sized(family(N4=1.8, N6=2.1, N7=2.2), table(step=0.0))
    assert [c.nodes for c in choices] == [1, 4, 6, 7]
    assert best_choice(choices).nodes == 6
    assert "6 nodes pay best: τ 2.10" in explained(choices)


def test_not_drafting_is_a_choice_and_said_plainly():
    choices = sized(family(N4=1.2, N6=1.3), table(begin=0.004))
    assert best_choice(choices).nodes == 1
    words = explained(choices)
    assert "drafting does not pay here, because" in words
    assert "τ 1.20" in words
    assert "there is no tree" in explained(sized(Family({}), table()))


def test_a_table_comes_back_whole(tmp_path: Path):
    file = tmp_path / "kept" / "costs.json"
    save_costs(table(), file)
    assert load_costs(file) == table()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"machine": "another processor, 8 cores, 8 threads"}, "another machine .a processor, 2 cores"),
        ({"dtype": "bf16"}, "dtype .fp32, this is bf16"),
        ({"heads": "x", "target": "y"}, "another target; other heads"),
        ({"forward": "transformers"}, "forward .compiled"),
    ],
)
def test_a_table_of_another_place_is_refused_by_name(changes: dict[str, str], named: str, tmp_path: Path):
    with pytest.raises(CostError, match=named):
        check_place(HERE, replace(HERE, **changes), tmp_path)
    check_place(HERE, HERE, tmp_path)


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 7}', '{"paths": [[0]]}'])
def test_other_files_are_no_cost_tables(content: str, tmp_path: Path):
    (tmp_path / "c.json").write_text(content)
    with pytest.raises(CostError, match=r"no cost table|format 7"):
        load_costs(tmp_path / "c.json")


def test_trees_by_size_come_back_and_are_taken_by_name(tmp_path: Path):
    file = tmp_path / "trees.json"
    save_family(family(N4=1.8, N6=2.1), file)
    assert load_family(file) == family(N4=1.8, N6=2.1)
    assert parse_tree(f"{file}:6", 3) == Tree.chain(5)
    with pytest.raises(TreeError, match="no tree of 5 nodes: there are 4, 6"):
        parse_tree(f"{file}:5", 3)
    with pytest.raises(TreeError, match="holds trees of 4, 6 nodes: name one of them"):
        parse_tree(str(file), 3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"paths": [[0], [0, 0], [2, 1]]}, r"path \[2, 1\] lacks its ancestor"),
        ({"paths": [[0], [0]]}, "appears 2 times"),
        ({"paths": [[0]]}, "the tree called 4 has 2 nodes"),
        ({"paths": [[-1]]}, "must be a list of ranks"),
    ],
)
def test_malformed_trees_are_refused_by_path(change: dict[str, object], named: str, tmp_path: Path):
    file = tmp_path / "trees.json"
    save_family(family(N4=1.8), file)
    content = json.loads(file.read_text())
    content["trees"]["4"] |= change
    file.write_text(json.dumps(content))
    with pytest.raises(TreeError, match=named):
        load_family(file)


def test_on_paper_a_machine_with_little_arithmetic_drafts_less():
    gpu = Roofline(7e9, 2.0, 3.35e12, 990e12)
    cpu = Roofline(1.35e8, 2.0, 30e9, 150e9)
    assert gpu.free_nodes > 100 > cpu.free_nodes >= 4
    assert best_chain(gpu, 0.8, 0.05)[0] > best_chain(cpu, 0.8, 0.05)[0] > 0
