from __future__ import annotations

import json
from pathlib import Path

import pytest

from treedraft.cli import tree_record
from treedraft.heads import MedusaConfig, build_head, save_head
from treedraft.infer import load_target
from treedraft.tree import RecordError, Tree, check_heads, load_record, walk

from .conftest import Call


def test_what_is_predicted_is_what_evaluate_measures(
    call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path
):
    file, result = tmp_path / "ranks.safetensors", tmp_path / "result.json"
    asked = ("--target", ring, "--heads", heads, "--prompts", prompts, "--max-new-tokens", 13)
    shown = call("tree", "record", *asked, "--out", file)
    assert shown.code == 0, shown.err
    assert "3 answers, 39 tokens, 2 depths" in shown.out
    call("evaluate", *asked, "--tree", "chain:2", "--json", result)
    measured = json.loads(result.read_text())
    predicted = walk(load_record(file), Tree.chain(2))
    assert (predicted.rounds.sum(), predicted.kept.sum()) == (measured["rounds"], measured["kept"]) == (12, 36)
    assert predicted.tau_without_loops == measured["tau_without_loops"]
    assert load_record(file).categories == ("x", "y", "all")


def test_an_interrupted_record_goes_on_where_it_stopped(
    call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    asked = ("tree", "record", "--target", ring, "--heads", heads, "--prompts", prompts, "--max-new-tokens", 9)
    asked = (*asked, "--batch-size", 1, "--temperature", 1.0, "--out")
    call(*asked, tmp_path / "whole.safetensors")
    whole, calls = tree_record._record_batch, []

    def once(*arguments: object, **more: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return whole(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(tree_record, "_record_batch", once)
    assert call(*asked, tmp_path / "torn.safetensors").code == 130
    assert len(load_record(tmp_path / "torn.safetensors").lengths) == 1
    shown = call(*asked, tmp_path / "torn.safetensors")
    assert "has 1 of 3 answers" in shown.err
    assert len(calls) == 4
    torn, one_go = load_record(tmp_path / "torn.safetensors"), load_record(tmp_path / "whole.safetensors")
    assert torn.ranks.equal(one_go.ranks)
    assert torn.lengths == one_go.lengths
    assert torn.loops.equal(one_go.loops)


def test_a_record_of_other_heads_is_refused_by_name(call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path):
    file = tmp_path / "ranks.safetensors"
    target = load_target(str(ring), "fp32")
    save_head(build_head(MedusaConfig(2, 96, 96, target.num_layers), target.layers()), tmp_path / "other", target.facts)
    asked = ("tree", "record", "--target", ring, "--prompts", prompts, "--max-new-tokens", 5, "--out", file)
    call(*asked, "--heads", heads)
    shown = call(*asked, "--heads", tmp_path / "other")
    assert shown.code == 2
    assert "other heads" in shown.err
    shown = call(*asked, "--heads", heads, "--seed", 4, "--limit", 2)
    assert "other prompts" in shown.err
    assert "seed 0, expected 4" in shown.err
    with pytest.raises(RecordError, match="other heads and another target"):
        check_heads(load_record(file).origin, "a", "b", file)


@pytest.mark.parametrize("heads", ["ngram", "none", "suffix"])
def test_only_folders_of_heads_are_recorded(call: Call, ring: Path, prompts: Path, tmp_path: Path, heads: str):
    shown = call(
        "tree", "record", "--target", ring, "--heads", heads, "--prompts", prompts, "--out", tmp_path / "r.safetensors"
    )
    assert shown.code == 2
    assert f"a folder of trained heads, got {heads}" in shown.err


def test_other_files_are_no_records(tmp_path: Path):
    (tmp_path / "r.safetensors").write_text("{}")
    with pytest.raises(RecordError, match="is no rank record"):
        load_record(tmp_path / "r.safetensors")
    with pytest.raises(FileNotFoundError):
        load_record(tmp_path / "none.safetensors")
