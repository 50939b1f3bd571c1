import json
from pathlib import Path
from typing import Any

import pytest

from treedraft.data import DataError, Prompt, read_prompts


def write(tmp_path: Path, *rows: Any) -> Path:
    path = tmp_path / "asked.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_prompt_messages_and_turns_are_read_in_order(tmp_path: Path):
    system = {"role": "system", "content": "w0"}
    path = write(
        tmp_path,
        {"prompt": "w1", "category": "sums"},
        {"id": 7, "messages": [system, user("w2"), {"role": "assistant", "content": "w3"}]},
        {"id": "c", "turns": ["w4", "w5"]},
    )
    assert read_prompts(path) == [
        Prompt("asked.jsonl:1", "sums", (user("w1"),)),
        Prompt("7", None, (system, user("w2"))),
        Prompt("c", None, (user("w4"),)),
    ]


def test_later_turns_are_asked_after_each_answer(tmp_path: Path):
    prompt = read_prompts(write(tmp_path, {"id": "c", "turns": ["w4", "w5"]}), turns="all")[0]
    second = prompt.answered("w6")
    assert second is not None
    assert second == Prompt("c", None, (user("w4"), {"role": "assistant", "content": "w6"}, user("w5")))
    assert second.answered("w7") is None


def test_all_faults_are_named_by_file_and_line(tmp_path: Path):
    same = {"id": "a", "prompt": "w1"}
    path = write(tmp_path, {"prompt": "w1", "turns": ["w1"]}, {"turns": []}, same, same)
    with pytest.raises(DataError) as error:
        read_prompts(path)
    assert str(error.value) == (
        f"{path}:1: expected one of prompt, messages and turns, got prompt, turns; "
        f"{path}:2: prompt must be a text, turns a list of texts, none of them empty; "
        f"{path}:4: the id 'a' appears twice"
    )


def test_an_empty_and_a_missing_prompts_file_are_refused(tmp_path: Path):
    with pytest.raises(DataError, match="has no prompts"):
        read_prompts(write(tmp_path))
    with pytest.raises(DataError, match="no prompts file at"):
        read_prompts(tmp_path / "none.jsonl")
