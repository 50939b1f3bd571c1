from __future__ import annotations

import json
from pathlib import Path

from kit import tokenizer
from treedraft.cli.painting import ACCEPTED, Painter
from treedraft.infer import Chunk

from .conftest import Call


def test_the_answer_to_one_prompt_is_all_of_stdout(call: Call, ring: Path):
    shown = call("generate", "--target", ring, "--prompt", "w1 w2", "--max-new-tokens", 6)
    assert (shown.code, shown.out) == (0, "w0 w1 w2 w3 w4 w5\n")
    assert "6 tokens in " in shown.err
    assert "τ 1.00 over 5 rounds" in shown.err


def test_heads_change_the_rounds_and_not_the_text(call: Call, ring: Path, heads: Path):
    asked = ("generate", "--target", ring, "--prompt", "w1 w2", "--max-new-tokens", 12)
    plain, drafted = call(*asked), call(*asked, "--heads", heads, "--tree", "chain:2")
    assert drafted.out == plain.out
    assert "over 11 rounds" in plain.err
    assert "over 4 rounds" in drafted.err  # 11 tokens after the prefill's own, three a round


def test_a_stop_string_ends_the_text_right_after_it(call: Call, ring: Path):
    assert call("generate", "--target", ring, "--prompt", "w1", "--stop", "w3").out == "w0 w1 w2 w3\n"


def test_sampled_text_is_repeated_by_its_seed(call: Call, llama: Path):
    asked = ("generate", "--target", llama, "--prompt", "w1", "--max-new-tokens", 12, "--temperature", 1)
    first, again, other = call(*asked, "--seed", 3), call(*asked, "--seed", 3), call(*asked, "--seed", 4)
    assert first.out == again.out != other.out


def test_rules_that_do_not_give_the_text_of_the_seed_say_so(call: Call, ring: Path, heads: Path):
    asked = (
        "generate",
        "--target",
        ring,
        "--heads",
        heads,
        "--tree",
        "chain:2",
        "--prompt",
        "w1",
        "--max-new-tokens",
        4,
    )
    warm = (*asked, "--temperature", 0.1)
    plain = call(*warm)
    assert "Rule" not in plain.err
    for rule, notice in (
        ("block", "Rule block: exact in law, not by seed"),
        ("lossy-typical", "Rule lossy-typical: lossy, the text is NOT the target's own law"),
    ):
        shown = call(*warm, "--rule", rule)
        assert notice in shown.err
        assert shown.out == plain.out  # the ring leaves nothing to chance
    assert "Rule block: at temperature 0 it is the greedy match" in call(*asked, "--rule", "block").err


def test_follow_ups_are_asked_with_the_coupled_rule_only(call: Call, ring: Path, heads: Path, prompts: Path):
    asked = ("generate", "--target", ring, "--heads", heads, "--prompts", prompts, "--turns", "all", "--temperature", 1)
    shown = call(*asked, "--rule", "block")
    assert shown.code == 2
    assert "--turns all needs --rule coupled" in shown.err


def test_answers_to_a_file_are_shown_and_written_by_id(call: Call, ring: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "made" / "answers.jsonl"
    shown = call("generate", "--target", ring, "--prompts", prompts, "--out", out, "--max-new-tokens", 3)
    assert "[a] w0 w1 w2\n" in shown.out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c"]
    assert rows[1] == {
        "id": "b",
        "category": "y",
        "text": "w0 w1 w2",
        "ids": [13, 14, 15],
        "reason": "length",
        "seed": rows[1]["seed"],
        "tau": 1.0,
        "settings": rows[0]["settings"],
    }


def test_an_interrupted_file_of_answers_is_gone_on_with(call: Call, llama: Path, prompts: Path, tmp_path: Path):
    out, whole = tmp_path / "answers.jsonl", tmp_path / "whole.jsonl"
    asked = ("generate", "--target", llama, "--prompts", prompts, "--max-new-tokens", 6, "--temperature", 1)
    call(*asked, "--out", whole, "--batch-size", 1)
    lines = whole.read_bytes().splitlines(keepends=True)
    out.write_bytes(lines[1] + lines[0][:30])  # the second prompt's answer, and a line that was torn
    shown = call(*asked, "--out", out)
    assert shown.code == 0
    assert "1 answers were in the file already" in shown.err
    assert "[b]" not in shown.out
    texts = [{row["id"]: row for row in map(json.loads, file.read_text().splitlines())} for file in (out, whole)]
    assert texts[0] == texts[1]
    before = out.read_bytes()
    assert "3 answers were in the file already" in call(*asked, "--out", out).err
    assert out.read_bytes() == before


def test_answers_made_otherwise_are_not_mixed_in(call: Call, llama: Path, prompts: Path, tmp_path: Path):
    out = tmp_path / "answers.jsonl"
    asked = ("generate", "--target", llama, "--prompts", prompts, "--max-new-tokens", 2, "--temperature", 1)
    call(*asked, "--out", out)
    before = out.read_bytes()
    for change, fault in (
        (("--temperature", 0.5), "temperature: 1.0 there, 0.5 now (a, b, c)"),
        (("--seed", 3), "seed: 0 there, 3 now (a)"),
        (("--max-new-tokens", 3), "max_new_tokens: 2 there, 3 now"),
    ):
        shown = call(*asked, *change, "--out", out)
        assert shown.code == 2
        assert fault in " ".join(shown.err.split())
        assert "choose another file" in " ".join(shown.err.split())
    assert out.read_bytes() == before
    other = tmp_path / "other.jsonl"
    other.write_text('{"loss": 1}\n')
    shown = call(*asked, "--out", other)
    assert (shown.code, other.read_text()) == (2, '{"loss": 1}\n')
    assert "no id and ids and settings" in " ".join(shown.err.split())


def test_all_turns_ask_the_follow_ups_in_the_history_of_the_answers(
    call: Call, llama: Path, prompts: Path, tmp_path: Path
):
    out = tmp_path / "answers.jsonl"
    asked = ("generate", "--target", llama, "--prompts", prompts, "--max-new-tokens", 4, "--temperature", 1)
    call(*asked, "--turns", "all", "--out", out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["a", "b", "c", "b, turn 2"]

    history = tmp_path / "history.jsonl"
    turns = [("user", "w30"), ("assistant", rows[1]["text"]), ("user", "w40")]
    history.write_text(json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]}))
    alone = tmp_path / "alone.jsonl"
    call(*asked[:3], "--prompts", history, *asked[5:], "--out", alone, "--seed", rows[3]["seed"])
    assert json.loads(alone.read_text())["ids"] == rows[3]["ids"]


def test_prompt_and_prompts_exclude_each_other(call: Call, ring: Path, prompts: Path):
    for given in ((), ("--prompt", "w1", "--prompts", prompts)):
        shown = call("generate", "--target", ring, *given)
        assert shown.code == 2
        assert "give either --prompt TEXT or --prompts FILE" in shown.err


def test_colour_marks_what_was_drafted_and_nothing_else(call: Call, ring: Path, heads: Path):
    asked = ("generate", "--target", ring, "--heads", heads, "--tree", "chain:2", "--prompt", "w1")
    asked = (*asked, "--max-new-tokens", 4)
    assert call(*asked, "--color").out.startswith("w0\x1b[1;32m w1 w2\x1b[0m w3\n")
    assert "\x1b" not in call(*asked, "--no-color").out


def test_text_that_lags_behind_its_ids_keeps_its_colours():
    words = tokenizer()
    ids = words.encode("w1 w2 w3")
    painter = Painter(words)
    first = painter.paint(Chunk(0, ids[:2], "w1", 1, None))
    rest = painter.paint(Chunk(0, ids[2:], " w2 w3", 1, "length"))
    assert [(s.start, s.end) for s in first.spans if s.style == ACCEPTED] == [(0, 2)]
    assert [(s.start, s.end) for s in rest.spans if s.style == ACCEPTED] == [(3, 6)]
