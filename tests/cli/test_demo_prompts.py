from __future__ import annotations

from treedraft.cli.demo_prompts import KINDS, held_out_rows, training_rows


def test_there_are_400_prompts_to_train_on_and_80_held_out_of_twelve_kinds():
    assert (len(training_rows()), len(held_out_rows())) == (400, 80)
    assert len({row["category"] for row in training_rows()}) == 12
    assert {row["category"] for row in held_out_rows()} == {kind.category for kind in KINDS}


def test_no_prompt_and_no_id_appears_twice():
    rows = training_rows() + held_out_rows()
    assert len({row["id"] for row in rows}) == len({row["prompt"] for row in rows}) == 480


def test_no_held_out_topic_is_in_a_training_prompt_of_its_kind():
    def topics(rows: list[dict[str, str]]) -> set[str]:
        return {row["id"].rpartition("-")[0] for row in rows}

    assert not topics(training_rows()) & topics(held_out_rows())


def test_no_blank_is_left_unfilled():
    assert not any("{" in row["prompt"] for row in training_rows() + held_out_rows())


def test_any_first_part_is_of_many_kinds():
    assert len({row["category"] for row in training_rows()[:12]}) == 12
    assert len({row["category"] for row in held_out_rows()[:12]}) == 12
