from __future__ import annotations

import json
from pathlib import Path

from .conftest import Call


def test_the_fast_demo_runs_all_steps_and_goes_on_where_it_stopped(call: Call, llama: Path, tmp_path: Path):
    asked = ("demo", "--fast", "--target", llama, "--work", tmp_path / "work", "--json", tmp_path / "demo.json")
    first = call(*asked, "--dtype", "fp32")
    assert first.code == 0, first.err
    result = json.loads((tmp_path / "demo.json").read_text())
    assert list(result["modes"]) == ["hf_generate", "plain", "tree"]
    assert result["identical"]["different"] == 0
    assert list(result["step_seconds"]) == ["target", "answers", "training", "answer", "bench"]
    assert "16 prompts answered with" in first.out

    again = call(*asked, "--dtype", "fp32")
    assert again.code == 0
    assert "0 prompts answered (16 were there already)" in again.out
    assert "nothing left to do" in again.err


def test_a_folder_of_another_demo_or_of_something_else_is_left_alone(call: Call, llama: Path, tmp_path: Path):
    (tmp_path / "settings.json").write_text(json.dumps({"target": "another"}))
    shown = call("demo", "--fast", "--target", llama, "--work", tmp_path)
    assert shown.code == 2
    assert "other settings (target another, now" in shown.err
    (tmp_path / "settings.json").rename(tmp_path / "diary.txt")
    shown = call("demo", "--fast", "--target", llama, "--work", tmp_path)
    assert shown.code == 2
    assert "holds something else" in shown.err
    assert [path.name for path in tmp_path.iterdir()] == ["diary.txt"]
