"""Tiny targets on disk, heads trained on the ring for a second, and the command line called in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from kit import markov_ring, target, tokenizer
from treedraft.cli.main import run
from treedraft.train import parse_config, train

PROMPTS = [
    {"id": "a", "category": "x", "prompt": "w1 w2 w5"},
    {"id": "b", "category": "y", "turns": ["w30", "w40"]},
    {"id": "c", "messages": [{"role": "user", "content": "w7 w8"}]},
]
# The ring answers every question with w0 w1 w2 ..., since the token before the answer is not a word.
ANSWER = " ".join(f"w{i}" for i in range(20))


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    err: str


Call = Callable[..., Outcome]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    monkeypatch.setenv("COLUMNS", "200")

    def run_command(*arguments: object) -> Outcome:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            run([str(argument) for argument in arguments])
        shown = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), shown.out, shown.err)

    return run_command


@pytest.fixture(scope="session")
def ring(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each word is followed by the next."""
    folder = tmp_path_factory.mktemp("ring")
    markov_ring().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random target of 96 words, hidden size 64."""
    folder = tmp_path_factory.mktemp("llama")
    target("llama_gqa").save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    return file


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the ring answers, as conversations."""
    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [
        {
            "id": f"row{i}",
            "messages": [{"role": "user", "content": f"w{i}"}, {"role": "assistant", "content": ANSWER}],
        }
        for i in range(8)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory, ring: Path, chats: Path) -> Path:
    """Two heads for the ring, exact on its answers."""
    out = tmp_path_factory.mktemp("run") / "out"
    config = parse_config(
        {
            "target": {"spec": str(ring), "dtype": "fp32"},
            "data": {"paths": [str(chats)]},
            "checkpoint": {"out": str(out)},
            "heads": {"num_heads": 2},
            "optim": {"lr": 0.02, "epochs": 150},
        }
    )
    return train(config).heads
