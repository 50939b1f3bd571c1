"""Measured acceptance: counts by category that add up."""

from __future__ import annotations

import json

import pytest

from kit.training import tiny
from treedraft.heads import Drafter, Medusa, MedusaConfig, build_head
from treedraft.infer import Sampling, Target, row_seed
from treedraft.train import Evaluation, evaluate
from treedraft.tree import Tree

PROMPTS = [[20 + i, 30, 40 + i] for i in range(5)]
CATEGORIES = ["chat", "code", None, "chat", None]
TREE = Tree.from_paths([[0], [1], [2], [3], [0, 0], [0, 1]])


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny("markov_rand")


@pytest.fixture(scope="module")
def head(target: Target) -> Drafter:
    facts = target.facts
    config = MedusaConfig(2, facts.hidden_size, facts.vocab_size, facts.num_layers)
    return build_head(config, target.layers()).for_decoding(target.dtype)


def measured(target: Target, head: Medusa | None, rows: range = range(5)) -> Evaluation:
    return evaluate(
        target,
        head,
        TREE if head else None,
        [PROMPTS[i] for i in rows],
        [CATEGORIES[i] for i in rows],
        Sampling(temperature=1.0),
        max_new_tokens=20,
        batch_size=2,
        seed=3,
        row_seeds=[row_seed(3, i) for i in rows],
    )


def test_plain_decoding_has_a_tau_of_one(target: Target):
    result = measured(target, None)
    assert result.tau == 1.0
    assert (result.total.rounds, result.total.tokens) == (5 * 19, 5 * 20)


def test_categories_share_the_counts_of_the_whole(target: Target, head: Medusa):
    result = measured(target, head)
    assert {name: stats.prompts for name, stats in result.by_category.items()} == {"chat": 2, "code": 1, "all": 2}
    kept, rounds = result.total.kept, result.total.rounds
    assert kept == 5 * 19
    assert result.tau == kept / rounds > 1.0
    assert sum(stats.rounds for stats in result.by_category.values()) == rounds


def test_parts_of_the_prompts_add_up_to_the_whole(target: Target, head: Medusa):
    whole = measured(target, head).to_dict()
    parts = (measured(target, head, range(0, 5, 2)) + measured(target, head, range(1, 5, 2))).to_dict()
    for key in ("tau", "tau_without_loops", "accept_by_depth", "tau_by_category", "prompts", "tokens", "rounds"):
        assert parts[key] == whole[key]


def test_the_report_is_strict_json_with_all_that_is_needed_to_repeat_it(target: Target, head: Medusa):
    report = json.loads(json.dumps(measured(target, head).to_dict(), allow_nan=False))
    assert {"tau", "tau_without_loops", "accept_by_depth", "tau_by_category", "prompts", "tokens"} <= set(report)
    assert report["settings"]["tree"]["paths"] == [[0], [0, 0], [0, 1], [1], [2], [3]]
    assert report["settings"]["sampling"]["temperature"] == 1.0
    assert (report["settings"]["seed"], report["settings"]["max_new_tokens"]) == (3, 20)
    assert report["machine"]["cores"] >= 1
    assert "torch" in report["versions"]
    assert sum(report["phase_seconds"].values()) > 0


def test_no_prompts_give_no_counts_and_no_ratio(target: Target, head: Medusa):
    report = measured(target, head, range(0)).to_dict()
    assert (report["prompts"], report["tau"], report["tau_by_category"]) == (0, None, {})
