from __future__ import annotations

from collections.abc import Sequence

import torch

from kit import markov_rand
from treedraft.cli.identity import Scores, compare, target_scores
from treedraft.infer import Sampling


def undecided(row: int, text: object) -> Scores:
    """Tokens 1 and 2 are within the tolerance, 3 is not."""
    return Scores(torch.tensor([0.0, 3.0, 2.9, 2.0]), 0.2)


def test_rows_are_counted_by_their_worst_verdict():
    answers = {
        "hf": [[1, 1], [1, 1], [1, 1], [1, 1]],
        "plain": [[1, 1], [1, 2], [1, 2], [1, 1]],
        "tree": [[1, 1], [1, 1], [1, 3], [1]],
    }
    counted = compare(answers, [[0]] * 4, undecided)
    assert counted == {"rows": 4, "equal": 1, "near_ties": 1, "different": 2, "different_rows": [2, 3]}


def test_the_target_is_asked_only_where_two_answers_part():
    asked = []

    def scores_at(row: int, text: Sequence[int]) -> Scores:
        asked.append((row, list(text)))
        return undecided(row, text)

    compare({"a": [[1], [4, 1, 5]], "b": [[1], [4, 2, 6]]}, [[7], [8, 9]], scores_at)
    assert asked == [(1, [8, 9, 4])]


def test_greedy_scores_are_the_logits_with_the_fp32_tolerance():
    model, law = markov_rand()
    scores = target_scores(lambda: model, Sampling(), seed=0)(0, [20, 40])
    torch.testing.assert_close(scores.values.softmax(-1), law[40], atol=1e-6, rtol=0)
    assert scores.tolerance == 5e-4


def test_in_bf16_the_tolerance_is_relative_to_the_top_logit():
    model = markov_rand()[0].bfloat16()
    scores = target_scores(lambda: model, Sampling(), seed=0)(0, [20, 40])
    top = float(model(torch.tensor([[20, 40]])).logits[0, -1].detach().float().max())
    assert scores.tolerance == abs(top) * 2**-7


def test_sampled_scores_are_those_that_the_decoder_draws_by():
    from treedraft.infer import Target, complete

    model, _ = markov_rand()
    (done,) = complete(Target(model), [[20]], sampling=Sampling(temperature=0.5), seed=9, max_new_tokens=3, end_ids=())
    scores_at = target_scores(lambda: model, Sampling(temperature=0.5), seed=9)
    chosen = [int(scores_at(0, [20, *done.ids[:place]]).values.argmax()) for place in range(3)]
    assert chosen == done.ids
    assert scores_at(0, [20]).tolerance == 1e-3
