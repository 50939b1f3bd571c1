"""The card of a heads folder: what the hub reads in front, what was measured, and what a wrong file is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard

from .conftest import Call


@pytest.fixture
def folder(heads: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(heads, tmp_path / "heads"))


def test_a_card_has_front_matter_tables_and_licence(
    call: Call, ring: Path, prompts: Path, folder: Path, tmp_path: Path
) -> None:
    tau = tmp_path / "tau.json"
    asked = ("--target", ring, "--heads", folder, "--prompts", prompts, "--max-new-tokens", 12, "--tree", "chain:2")
    assert call("evaluate", *asked, "--json", tau).code == 0
    told = ("--name", "org/name", "--base-model", "org/base", "--license", "mit", "--dataset", "org/data")
    shown = call("card", folder, *told, "--evaluation", tau, "--notes", "Eight rows.")
    assert shown.code == 0
    assert "hf upload org/name" in shown.err + shown.out
    card = ModelCard.load(folder / "README.md")
    data: Any = card.data
    assert (data.base_model, data.license, data.library_name) == ("org/base", "mit", "treedraft")
    assert data.datasets == ["org/data"]
    assert {"speculative-decoding", "medusa"} <= set(data.tags)
    assert f"| all | {json.loads(tau.read_text())['tau']:.2f} |" in card.text
    assert "Eight rows." in card.text
    assert 'drafted("org/name")' in card.text
    assert "FolderDrafting" in (folder / "custom_generate" / "generate.py").read_text()


def test_a_card_without_figures_says_so(call: Call, folder: Path) -> None:
    assert call("card", folder).code == 0
    text = (folder / "README.md").read_text()
    assert "Not measured yet" in text
    assert "No licence is given" in text


def test_a_file_that_is_no_evaluation_is_refused_and_nothing_written(call: Call, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"tau": 2.0}')
    shown = call("card", folder, "--evaluation", tmp_path / "other.json")
    assert (shown.code, "not what treedraft evaluate --json writes" in shown.err) == (2, True)
    assert not (folder / "README.md").exists()


def test_a_folder_without_heads_has_no_card(call: Call, tmp_path: Path) -> None:
    shown = call("card", tmp_path)
    assert (shown.code, "is not a heads folder" in shown.err) == (2, True)
