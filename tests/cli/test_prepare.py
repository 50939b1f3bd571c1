from __future__ import annotations

import json
from pathlib import Path

from .conftest import Call


def test_rows_are_counted_and_the_reasons_of_skipped_ones_named(call: Call, ring: Path, tmp_path: Path):
    data, out = tmp_path / "data.jsonl", tmp_path / "summary.json"
    rows = [
        {"id": "good", "messages": [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "w2 w3"}]},
        {"id": "unanswered", "messages": [{"role": "user", "content": "w1"}]},
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = call("prepare", "--data", data, "--target", ring, "--json", out)
    assert shown.code == 0
    summary = json.loads(out.read_text())
    assert (summary["read"], summary["used"], summary["supervised_tokens"]) == (2, 1, 3)
    assert "unanswered" in shown.out
    assert [entry["records"] for entry in summary["skipped"].values()] == [["unanswered"]]


def test_shown_rows_have_their_supervised_tokens_coloured_and_a_legend(
    call: Call, ring: Path, chats: Path, monkeypatch
):
    monkeypatch.setenv("FORCE_COLOR", "1")
    shown = call("prepare", "--data", chats, "--target", ring, "--show", 2)
    assert shown.out.count("\x1b[1;32mw0 w1") == 2
    assert "\x1b[1;32msupervised\x1b[0m" in shown.out


def test_the_weights_are_not_read(call: Call, ring: Path, chats: Path, tmp_path: Path):
    for file in ring.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    assert call("prepare", "--data", chats, "--target", tmp_path).code == 0


def test_several_sources_are_read_one_after_the_other(call: Call, ring: Path, chats: Path, tmp_path: Path):
    out = tmp_path / "summary.json"
    call("prepare", "--data", chats, "--data", chats, "--target", ring, "--json", out)
    assert json.loads(out.read_text())["read"] == 16
