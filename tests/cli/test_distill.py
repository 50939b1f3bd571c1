from __future__ import annotations

import json
from pathlib import Path

from .conftest import Call


def test_answers_are_appended_and_not_asked_for_again(call: Call, ring: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "answers.jsonl"
    asked = ("distill", "--target", ring, "--prompts", prompts, "--out", out, "--max-new-tokens", 5)
    first = call(*asked, "--limit", 2)
    assert "2 prompts answered with 10 tokens; 2 answers reached the limit" in first.out
    kept = out.read_text()
    second = call(*asked)
    assert "1 prompts answered (2 were there already)" in second.out
    assert out.read_text().startswith(kept)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert rows[0]["messages"][-1] == {"role": "assistant", "content": "w0 w1 w2 w3 w4"}


def test_an_answer_does_not_depend_on_the_interruption_or_the_batch(
    call: Call, llama: Path, prompts: Path, tmp_path: Path
):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    asked = ("distill", "--target", llama, "--prompts", prompts, "--max-new-tokens", 6, "--temperature", 1, "--out")
    call(*asked, whole)
    call(*asked, parts, "--limit", 1)
    call(*asked, parts, "--batch-size", 1)
    assert parts.read_text() == whole.read_text()


def test_the_answers_can_be_trained_on(call: Call, ring: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "answers.jsonl"
    call("distill", "--target", ring, "--prompts", prompts, "--out", out, "--max-new-tokens", 5)
    assert call("prepare", "--data", out, "--target", ring).code == 0
