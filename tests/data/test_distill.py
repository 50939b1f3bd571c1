import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kit import tokenizer
from treedraft.data import Answer, DataError, Distilled, Prompt, distill, prepare, read_rows

PROMPTS = [Prompt(f"p{i}", "sums" if i else None, ({"role": "user", "content": f"w{i}"},)) for i in range(5)]
LOOP = " ".join(["w1 w2"] * 20)


class Target:
    """Answers with the next word, and notes whom it was asked for."""

    def __init__(self, fail_at: str | None = None) -> None:
        self.asked: list[str] = []
        self.fail_at = fail_at

    def __call__(self, prompts: list[Prompt]) -> Iterator[tuple[Prompt, Answer]]:
        self.asked += [p.id for p in prompts]
        for p in prompts:
            if p.id == self.fail_at:
                raise KeyboardInterrupt
            yield p, Answer(f"w{int(p.id[1:]) + 1}", "length" if p.id == "p3" else "end", 2, 10)


def run(out: Path, target: Target) -> Distilled:
    return distill(PROMPTS, target, out, temperature=0.7)


def test_answers_are_written_with_what_a_reader_needs(tmp_path: Path):
    out, target = tmp_path / "new" / "out.jsonl", Target()
    assert run(out, target) == Distilled(found=0, answered=5, cut=1, looping=0, tokens=10)
    rows = list(read_rows(out))
    assert rows[3] == {
        "id": "p3",
        "category": "sums",
        "messages": [{"role": "user", "content": "w3"}, {"role": "assistant", "content": "w4"}],
        "finish_reason": "length",
        "completion_tokens": 2,
        "temperature": 0.7,
        "seed": 10,
        "repeat_share": 0.0,
    }
    encoded, _ = prepare(rows, tokenizer(), 64)
    assert [sum(e.mask) for e in encoded] == [2, 2, 2, 1, 2]  # the cut answer's end token is not the target's


def test_an_interrupted_run_is_taken_up_after_the_last_answer(tmp_path: Path):
    out = tmp_path / "out.jsonl"
    with pytest.raises(KeyboardInterrupt):
        run(out, Target(fail_at="p2"))
    assert [row["id"] for row in read_rows(out)] == ["p0", "p1"]
    target = Target()
    assert run(out, target).found == 2
    assert target.asked == ["p2", "p3", "p4"]
    assert [row["id"] for row in read_rows(out)] == ["p0", "p1", "p2", "p3", "p4"]
    assert run(out, Target()) == Distilled(found=5, answered=0, cut=0, looping=0, tokens=0)


def test_a_torn_last_line_is_cut_off_and_asked_again(tmp_path: Path):
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run(whole, Target())
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:3]) + lines[3][:25])
    target = Target()
    run(out, target)
    assert target.asked == ["p3", "p4"]
    assert out.read_bytes() == whole.read_bytes()


def test_a_whole_last_line_without_its_newline_is_kept(tmp_path: Path):
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    run(whole, Target())
    out.write_bytes(whole.read_bytes().rstrip(b"\n"))
    assert run(out, Target()).found == 5
    assert out.read_bytes() == whole.read_bytes()


def test_loops_are_written_counted_and_left_out_by_prepare(tmp_path: Path):
    out = tmp_path / "out.jsonl"

    def loops_once(prompts: list[Prompt]) -> list[tuple[Prompt, Answer]]:
        return [(p, Answer(LOOP if p.id == "p1" else "w1", "end", 1, 0)) for p in prompts]

    assert distill(PROMPTS, loops_once, out, temperature=0.0).looping == 1
    rows = list(read_rows(out))
    assert rows[1]["repeat_share"] == pytest.approx(1 - 2 / 37, abs=1e-4)
    encoded, summary = prepare(rows, tokenizer(), 64)
    assert [e.id for e in encoded] == ["p0", "p2", "p3", "p4"]
    assert summary.skipped == {"the answer loops: its repeat_share is above 0.5": ("p1",)}


def test_a_file_that_holds_something_else_and_ids_that_repeat_are_refused_before_asking(tmp_path: Path):
    out, target = tmp_path / "out.jsonl", Target()
    out.write_text(json.dumps({"loss": 1.0}) + "\n")
    with pytest.raises(DataError, match=r"out\.jsonl:1: no id and messages"):
        run(out, target)
    with pytest.raises(DataError, match="told apart: p0"):
        distill([PROMPTS[0], PROMPTS[0]], target, tmp_path / "b.jsonl", temperature=0.0)
    assert target.asked == []
    assert out.read_text() == json.dumps({"loss": 1.0}) + "\n"
