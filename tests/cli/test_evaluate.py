from __future__ import annotations

import json
from pathlib import Path
from typing import get_args

import pytest

from treedraft.cli.options import DraftsName, RuleName
from treedraft.heads import MedusaConfig, build_head, save_head
from treedraft.infer import RULES, Drafts, load_target

from .conftest import Call


def test_the_result_holds_tau_and_what_it_was_measured_with(
    call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path
):
    out = tmp_path / "result.json"
    shown = call(
        "evaluate", "--target", ring, "--heads", heads, "--prompts", prompts, "--tree", "chain:2", "--json", out,
        "--max-new-tokens", 13,
    )  # fmt: skip
    assert shown.code == 0
    result = json.loads(out.read_text())
    assert {"tau", "tau_without_loops", "accept_by_depth", "tau_by_category", "prompts", "tokens"} <= set(result)
    assert {"settings", "machine", "versions"} <= set(result)
    assert (result["prompts"], result["tokens"], result["rounds"]) == (3, 39, 12)
    assert result["tau"] == pytest.approx(3.0)
    assert result["accept_by_depth"] == [1.0, 1.0, 1.0]
    assert result["tau_by_category"] == {"all": 3.0, "x": 3.0, "y": 3.0}
    assert result["tau_without_loops_by_category"].keys() == {"all", "x", "y"}
    assert result["tau_by_prompt_length"] == {"0-63": 3.0}
    assert result["tau_without_loops_by_prompt_length"] == {"0-63": result["tau_without_loops"]}
    assert result["tau_by_position"] == {"0-63": 3.0}
    assert result["settings"]["tree_name"] == "chain:2"
    assert "3 prompts, 39 tokens, 12 rounds" in shown.out


def test_without_heads_tau_is_one(call: Call, ring: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    call("evaluate", "--target", ring, "--heads", "none", "--prompts", prompts, "--json", out, "--max-new-tokens", 4)
    assert json.loads(out.read_text())["tau"] == 1.0


def test_all_turns_and_a_limit_count(call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    asked = ("evaluate", "--target", ring, "--heads", heads, "--prompts", prompts, "--json", out, "--max-new-tokens", 4)
    call(*asked, "--tree", "chain:1", "--turns", "all")
    assert json.loads(out.read_text())["prompts"] == 4
    call(*asked, "--tree", "chain:1", "--limit", 1)
    assert json.loads(out.read_text())["prompts"] == 1
    call(*asked, "--tree", "chain:1", "--every", 2)
    result = json.loads(out.read_text())
    assert (result["prompts"], result["settings"]["every"]) == (2, 2)
    assert sorted(result["tau_by_category"]) == ["all", "x"]


def test_one_token_has_no_round_and_no_tau(call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "result.json"
    asked = ("evaluate", "--target", ring, "--heads", heads, "--prompts", prompts, "--json", out, "--max-new-tokens", 1)
    shown = call(*asked, "--tree", "chain:1")
    assert json.loads(out.read_text())["tau"] is None
    assert "no rounds" in shown.out


def test_plain_top_k_drafts_accept_less_at_a_high_temperature(call: Call, llama: Path, tmp_path: Path, prompts: Path):
    target = load_target(str(llama), "fp32")
    head = build_head(MedusaConfig(2, 64, 96, 4), target.layers())
    save_head(head, tmp_path / "heads", target.facts)
    taus = {}
    for drafts in ("coupled", "top-k"):
        out = tmp_path / f"{drafts}.json"
        call(
            "evaluate", "--target", llama, "--heads", tmp_path / "heads", "--prompts", prompts, "--tree", "chain:1",
            "--temperature", 50, "--max-new-tokens", 40, "--drafts", drafts, "--json", out,
        )  # fmt: skip
        result = json.loads(out.read_text())
        assert result["settings"]["drafts"] == drafts
        taus[drafts] = result["tau"]
    # Almost uniform laws: the noise alone decides, and coupled drafts read it.
    assert taus["coupled"] > 1.5 > taus["top-k"]


def test_the_report_tells_the_rule_its_grade_and_the_drafts(
    call: Call, ring: Path, heads: Path, prompts: Path, tmp_path: Path
):
    out = tmp_path / "result.json"
    asked = ("evaluate", "--target", ring, "--heads", heads, "--prompts", prompts, "--json", out)
    asked = (*asked, "--tree", "chain:2", "--max-new-tokens", 4, "--temperature", 1)
    told = {
        "coupled": ("by seed", "coupled", ""),
        "block": ("in law", "sampled", "Rule block: exact in law, not by seed"),
        "lossy-typical": ("not lossless", "top-k", "Rule lossy-typical: lossy, the text is NOT the target's own law"),
    }
    for rule, (grade, drafts, notice) in told.items():
        shown = call(*asked, "--rule", rule)
        settings = json.loads(out.read_text())["settings"]
        assert (settings["rule"], settings["lossless"], settings["drafts"]) == (rule, grade, drafts)
        assert notice in shown.err
        assert "Rule" not in shown.err.replace(notice, "")
    call(*asked, "--drafts", "sampled")
    assert json.loads(out.read_text())["settings"]["drafts"] == "sampled"


def test_drafts_that_a_rule_cannot_use_are_refused(call: Call, ring: Path, heads: Path, prompts: Path):
    asked = ("evaluate", "--target", ring, "--heads", heads, "--prompts", prompts, "--tree", "chain:1")
    shown = call(*asked, "--rule", "traversal", "--drafts", "top-k", "--temperature", 1)
    assert shown.code == 2
    assert "rule traversal weighs p against q" in shown.err
    assert "it needs sampled drafts, got top-k" in shown.err


def test_the_names_of_rules_and_drafts_are_those_there_are():
    assert get_args(RuleName) == tuple(RULES)
    assert get_args(DraftsName) == get_args(Drafts)
