from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Call

COMMANDS = ("demo", "prepare", "distill", "train", "evaluate", "generate", "bench")
FORMATS = ("export", "import", "verify-export")


def test_the_version_is_the_installed_one(call: Call):
    assert call("--version").out == "treedraft 0.1.0\n"


def test_help_names_every_command(call: Call):
    shown = call("--help")
    assert shown.code == 0
    assert all(f"│ {command} " in shown.out for command in (*COMMANDS, *FORMATS))


@pytest.mark.parametrize("command", [*COMMANDS, *FORMATS])
def test_the_help_of_a_command_ends_with_an_example_of_it(call: Call, command: str):
    shown = call(command, "--help")
    assert shown.code == 0
    assert f"Example: treedraft {command} " in shown.out


@pytest.mark.parametrize("command", COMMANDS)
def test_shared_options_mean_the_same_everywhere(call: Call, command: str):
    meanings = {
        "--target": "The frozen model",
        "--heads": "Folder of trained heads",
        "--tree": "Shape of the drafts",
        "--max-new-tokens": "Most tokens to write",
        "--temperature": "Sampling temperature",
        "--seed": "Same seed, same text",
        "--dtype": "Number format of the target",
        "--batch-size": "Prompts decoded together",
    }
    lines = [line for line in call(command, "--help").out.splitlines() if line.startswith("│")]
    for option, meaning in meanings.items():
        for line in lines:
            assert f" {option} " not in line or meaning in line


def test_help_answers_without_loading_torch():
    code = "import sys; from treedraft.cli import main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_wrong_option_is_named(call: Call):
    shown = call("generate", "--tempreature", "1")
    assert shown.code == 2
    assert "--tempreature" in shown.err


def test_ctrl_c_ends_with_130(call: Call, monkeypatch: pytest.MonkeyPatch, chats: Path):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("treedraft.data.read_rows", interrupted)
    assert call("prepare", "--data", chats).code == 130


def test_debug_shows_the_traceback_of_a_users_fault(tmp_path: Path):
    command = [sys.executable, "-m", "treedraft.cli.main", "--debug", "prepare", "--data", str(tmp_path / "none.jsonl")]
    shown = subprocess.run(command, capture_output=True, text=True)
    assert shown.returncode == 1
    assert "Traceback" in shown.stderr


def test_a_fault_of_our_own_is_not_dressed_up_as_the_users(monkeypatch: pytest.MonkeyPatch, chats: Path):
    from treedraft.cli.main import run

    def broken(*_: object) -> None:
        raise ValueError("a bug")

    monkeypatch.setattr("treedraft.data.read_rows", broken)
    with pytest.raises(ValueError, match="a bug"):
        run(["prepare", "--data", str(chats)])
