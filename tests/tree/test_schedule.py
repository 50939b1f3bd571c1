"""The confidence schedule on chances and costs that are known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from treedraft.tree import CostTable, DraftCost, ForwardCost, Logistic, Place, Reliability, Schedule, fit_logistic
from treedraft.tree.calibration import logit

PLACE = Place("m", "fp32", "f", "t", "h")


def schedule(per_node: float, step: float = 0.001, expected: float = 0.6) -> Schedule:
    """A plain forward of 10 ms, and ``per_node`` seconds for every further position of any row."""
    nodes = tuple(range(1, 33))
    forwards = tuple(
        ForwardCost(b, 256, nodes, tuple(0.010 + per_node * (b * n - b) for n in nodes)) for b in (1, 2, 4)
    )
    drafts = tuple(DraftCost(b, step, (1, 8), (step, step)) for b in (1, 2, 4))
    return Schedule(CostTable(PLACE, forwards, drafts, {1: 0.0}), [[expected, expected / 6]] * 4)


def offer(plan: Schedule, chances: list[list[float]]) -> None:
    plan.begin(len(chances))
    plan.offer(
        1, [[0]] * len(chances), [[[math.log(c) for c in row]] for row in chances],
        [[list(range(len(row)))] for row in chances],
    )  # fmt: skip


def admitted(plan: Schedule, chances: list[list[float]], size: int = 16) -> list[list[int]]:
    offer(plan, chances)
    return plan.admit(plan.prices(len(chances), 256, size, 8), 0.001, size)


def test_a_node_is_admitted_while_its_chance_pays_for_its_position():
    # a plain round has a token in 10 ms: 1 ms of a node is worth 0.1 tokens
    assert admitted(schedule(0.001), [[0.5, 0.1]]) == [[0]]
    assert admitted(schedule(0.0001), [[0.5, 0.1]]) == [[0, 1]]
    assert admitted(schedule(0.01), [[0.5, 0.1]]) == [[]]


def test_no_more_nodes_than_the_size_allows():
    assert admitted(schedule(0.0), [[0.4, 0.3, 0.2, 0.1]], size=3) == [[0, 1]]


def test_rows_compete_for_one_width():
    sure, unsure = [0.9, 0.05], [0.02, 0.01]
    alone = admitted(schedule(0.002), [unsure])
    together = admitted(schedule(0.002), [sure, unsure])
    assert alone == [[]]
    assert [len(row) for row in together] == [1, 1]  # padding would cost the same


def test_the_next_level_is_asked_for_only_if_what_it_may_bring_pays():
    cheap, dear = schedule(0.0001, step=0.0005), schedule(0.0001, step=0.02)
    for plan, wanted in ((cheap, [[0]]), (dear, [])):
        offer(plan, [[0.8, 0.01]])
        assert plan.next_level(1, plan.prices(1, 256, 16, 8), 0.001, 16, 8) == wanted
    hopeless = schedule(0.0001, step=0.0005, expected=0.01)
    offer(hopeless, [[0.8, 0.05]])
    assert hopeless.next_level(1, hopeless.prices(1, 256, 16, 8), 0.001, 16, 8) == []


def test_drafting_is_not_begun_where_no_tree_pays():
    assert schedule(0.0001).pays(1, 256, 8, 3, 4)
    assert not schedule(0.01).pays(1, 256, 8, 3, 4)
    assert not schedule(0.0001, step=0.02).pays(1, 256, 8, 3, 4)


def test_drafting_that_loses_is_left_alone_for_a_while_and_tried_again():
    plan = schedule(0.0001)
    rested = drafted = 0
    for _ in range(400):
        if not plan.drafts(first=False):
            rested += 1
            continue
        drafted += 1
        admitted(plan, [[0.8]])
        plan.learn([[0]])  # never right
    assert rested > 5 * drafted
    assert drafted > 20
    assert plan.drafts(first=True)  # prompts are always read


def test_drafting_that_gains_never_rests():
    plan = schedule(0.0001)
    for _ in range(100):
        assert plan.drafts(first=False)
        admitted(plan, [[0.8]])
        plan.learn([[0, 1]])
    assert plan.plain_rounds == 0


def test_what_was_accepted_corrects_the_confidences():
    plan, rng = schedule(0.0), np.random.default_rng(0)
    for _ in range(600):  # confident beyond reason: of 0.9 only 0.6 is right
        admitted(plan, [[0.9]])
        plan.learn([[0, 1] if rng.random() < 0.6 else [0]])
    assert plan.before.ece == pytest.approx(0.3, abs=0.05)
    assert plan.after.ece < 0.08


def test_a_run_learns_for_itself_alone():
    plan = schedule(0.0)
    own = plan.fresh()
    for _ in range(50):
        admitted(own, [[0.9]])
        own.learn([[0]])
    assert plan.before.counts == [0] * 10
    assert admitted(plan, [[0.9]]) == [[0]]
    assert plan.rows()[0].chances[0] == pytest.approx(0.9)


def test_the_fit_finds_the_law_it_was_drawn_from():
    rng = np.random.default_rng(1)
    confidence = rng.uniform(0.01, 0.99, 20_000)
    chance = 1 / (1 + np.exp(-(0.7 * np.log(confidence / (1 - confidence)) - 0.5)))
    right = rng.random(20_000) < chance
    a, b = fit_logistic(confidence, right)
    assert (a, b) == (pytest.approx(0.7, abs=0.05), pytest.approx(-0.5, abs=0.05))
    online = Logistic()
    for c, r in zip(confidence[:5000], right[:5000], strict=True):
        online.learn(logit(math.log(c)), bool(r))
    assert (online.a, online.b) == (pytest.approx(0.7, abs=0.1), pytest.approx(-0.5, abs=0.1))


def test_calibration_error_is_none_where_claims_come_true():
    seen = Reliability()
    for i in range(100):
        seen.add(0.25, i % 4 == 0)
    assert seen.ece == pytest.approx(0.0)
    assert math.isnan(Reliability().ece)
