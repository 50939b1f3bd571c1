"""search, cost, size and show on tiny heads; auto and scheduled trees; what does not belong together is refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from treedraft.cli.costs import costs_file
from treedraft.tree import CostTable, load_costs, load_family, save_costs

from .conftest import Call


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Cost tables of tests are kept apart."""
    monkeypatch.setenv("TREEDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path) -> dict[str, Path]:
    """A heads folder of its own with its record, trees and costs."""
    folder, record, costs = tmp_path / "heads", tmp_path / "ranks.safetensors", tmp_path / "costs.json"
    shutil.copytree(heads, folder)
    asked = ("--target", ring, "--heads", folder, "--dtype", "fp32", "--compile", "off")
    shown = call("tree", "record", *asked, "--prompts", prompts, "--max-new-tokens", 13, "--out", record)
    assert shown.code == 0, shown.err
    shown = call("tree", "search", "--record", record, "--nodes", 6, "--out", folder / "trees.json")
    assert shown.code == 0, shown.err
    shown = call(
        "tree", "cost", *asked, "--nodes", 6, "--contexts", "16", "--batches", "1,2", "--repeats", 1, "--out", costs
    )
    assert shown.code == 0, shown.err
    return {"heads": folder, "record": record, "costs": costs, "trees": folder / "trees.json"}


def priced(file: Path, forward: float, node: float, draft: float) -> CostTable:
    """The table of a file with other costs: of a plain forward, each node more, and each level of the draft."""
    table = load_costs(file)
    forwards = tuple(replace(f, seconds=tuple(forward + node * (n - 1) for n in f.nodes)) for f in table.forwards)
    drafts = tuple(replace(d, begin=draft, steps=tuple(draft for _ in d.widths)) for d in table.drafts)
    return replace(table, forwards=forwards, drafts=drafts)


def test_from_a_record_to_a_size(call: Call, measured: dict[str, Path], tmp_path: Path):
    family, table = load_family(measured["trees"]), load_costs(measured["costs"])
    assert sorted(family.members) == [2, 3, 4, 5, 6][: len(family.members)]
    assert family.members[3].tau == 3.0  # a chain of two, always right
    assert table.batches == [1, 2]
    assert table.forwards[0].nodes == (1, 2, 3, 4, 5, 6)
    save_costs(priced(measured["costs"], 0.01, 0.0, 0.0001), measured["costs"])
    out, tree = tmp_path / "size.json", tmp_path / "tree.json"
    asked = ("tree", "size", "--trees", measured["trees"], "--costs", measured["costs"])
    shown = call(*asked, "--json", out, "--save", tree)
    assert shown.code == 0, shown.err
    assert json.loads(out.read_text())["sizes"][0]["nodes"] == 3
    assert json.loads(tree.read_text()) == {"paths": [[0], [0, 0]]}
    assert "3 nodes pay best" in shown.out.replace("\n", " ")
    save_costs(priced(measured["costs"], 0.01, 0.02, 0.05), measured["costs"])
    assert "rafting does not pay here, because" in call(*asked).out


def test_auto_takes_what_pays_here_and_says_so(
    call: Call, measured: dict[str, Path], ring: Path, prompts: Path, own_cache: Path
):
    asked = ("generate", "--target", ring, "--heads", measured["heads"], "--prompt", "w4", "--max-new-tokens", 9)
    asked = (*asked, "--dtype", "fp32", "--compile", "off")
    before = call(*asked)
    assert "chosen by measurement" not in before.err
    cheap = priced(measured["costs"], 0.01, 0.0, 0.0001)
    save_costs(cheap, costs_file(cheap.place))
    drafted = call(*asked)
    assert "3 nodes pay best" in drafted.err
    assert "τ 2.67" in drafted.err or "τ 3.00" in drafted.err
    dear = priced(measured["costs"], 0.01, 0.05, 0.1)
    save_costs(dear, costs_file(dear.place))
    plain = call(*asked)
    assert "drafting does not pay here, because" in plain.err
    assert "τ 1.00" in plain.err
    assert before.out == drafted.out == plain.out
    record = ("tree", "record", "--target", ring, "--heads", measured["heads"], "--dtype", "fp32", "--compile", "off")
    again = call(*record, "--prompts", prompts, "--max-new-tokens", 13, "--out", own_cache / "again.safetensors")
    assert again.code == 0, again.err  # what is recorded drafts, whether it pays or not


def test_a_scheduled_tree_needs_costs_and_writes_the_same_text(call: Call, measured: dict[str, Path], ring: Path):
    asked = ("generate", "--target", ring, "--heads", measured["heads"], "--prompt", "w4", "--max-new-tokens", 9)
    asked = (*asked, "--dtype", "fp32", "--compile", "off", "--tree")
    refused = call(*asked, "scheduled:4")
    assert refused.code == 2
    assert "run treedraft tree cost" in refused.err
    cheap = priced(measured["costs"], 0.01, 0.0001, 0.0001)
    save_costs(cheap, costs_file(cheap.place))
    scheduled = call(*asked, "scheduled:4")
    assert scheduled.code == 0, scheduled.err
    assert scheduled.out == call(*asked, "chain:1").out
    assert "no tree called 'scheduled:x'" in call(*asked, "scheduled:x").err
    assert "it is 7 deep, but there are 2 heads" in call(*asked, "scheduled:9:7").err


def test_costs_of_another_machine_are_refused_by_name(measured: dict[str, Path]):
    from treedraft.cli.costs import find_costs
    from treedraft.tree import CostError

    table = load_costs(measured["costs"])
    here = table.place
    assert find_costs(here, measured["costs"]) == table
    save_costs(replace(table, place=replace(here, machine="an abacus")), measured["costs"])
    with pytest.raises(CostError, match=r"another machine .an abacus, this is"):
        find_costs(here, measured["costs"])


def test_trees_of_other_heads_are_refused_by_name(call: Call, measured: dict[str, Path], ring: Path):
    content = json.loads(measured["trees"].read_text()) | {"heads": "0123"}
    measured["trees"].write_text(json.dumps(content))
    shown = call("generate", "--target", ring, "--heads", measured["heads"], "--prompt", "w4")
    assert shown.code == 2
    assert "was found for other heads" in shown.err
    shown = call("tree", "size", "--trees", measured["trees"], "--costs", measured["costs"])
    assert "other heads or another target" in shown.err


def test_a_tree_is_drawn_with_what_was_measured(call: Call, measured: dict[str, Path]):
    shown = call("tree", "show", f"{measured['trees']}:3", "--record", measured["record"])
    assert shown.code == 0, shown.err
    assert "candidate 0  100.0%" in shown.out
    assert "3 nodes with the root, 2 levels" in shown.out
    assert "τ of x" in shown.out
    assert "candidate 9" in call("tree", "show", "medusa-63").out
    assert "no one shape" in call("tree", "show", "dynamic:8").err


def test_a_tree_deeper_than_the_heads_is_refused_by_path(call: Call, ring: Path, heads: Path):
    shown = call("generate", "--target", ring, "--heads", heads, "--prompt", "w4", "--tree", "medusa-63")
    assert shown.code == 2
    assert "path [0, 0, 0] is 3 deep, but there are 2 heads" in shown.err


def test_on_paper_the_bounds_are_those_of_the_ledger(call: Call, tmp_path: Path):
    out = tmp_path / "paper.json"
    paper = ("--parameters", 6738415616, "--weights", "fp16", "--bandwidth", 3.35e12, "--flops", 990e12)
    shown = call("tree", "size", *paper, "--acceptance", 0.8, "--draft-share", 0.05, "--json", out)
    assert "4.02 ms" in shown.out
    assert json.loads(out.read_text())["best_drafted"] == 8
    assert call("tree", "size", "--parameters", 1e9).code == 2
    assert call("tree", "size").code == 2


def test_records_too_small_to_judge_by_are_refused(call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path):
    file = tmp_path / "one.safetensors"
    asked: tuple[Any, ...] = ("tree", "record", "--target", ring, "--heads", heads, "--prompts", prompts)
    call(*asked, "--max-new-tokens", 5, "--limit", 1, "--out", file)
    shown = call("tree", "search", "--record", file)
    assert shown.code == 2
    assert "holds 1 answers" in shown.err


def test_drafters_without_levels_have_no_costs_by_level(call: Call, ring: Path):
    shown = call("tree", "cost", "--target", ring, "--heads", "ngram", "--compile", "off", "--contexts", "16")
    assert shown.code == 2
    assert "NGram cannot be recorded or timed" in shown.err
