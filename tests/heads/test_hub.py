"""Heads by folder or hub id: what is fetched, what is said when nothing is found. The hub is a stand-in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from kit import any_head, target
from treedraft.heads import HeadError, find_heads, load_head, save_head, shipped_tree
from treedraft.infer import Target


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers org/name with a folder of heads, and keeps what it was asked."""
    wrapped, asked = Target(target("llama_gqa")), {}
    save_head(any_head(wrapped, "medusa"), tmp_path / "snapshot", wrapped.facts)

    def snapshot_download(repo: str, **options: Any) -> str:
        asked.update(options, repo=repo)
        if repo != "org/name":
            raise LocalEntryNotFoundError("no such snapshot")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr("treedraft.heads.hub.snapshot_download", snapshot_download)
    return asked


def test_a_hub_id_is_fetched_without_pickles_and_code(hub: dict[str, Any]) -> None:
    wrapped = Target(target("llama_gqa"))
    assert load_head("org/name@v1.0", wrapped.facts, wrapped.layers()).config.kind == "medusa"
    assert (hub["repo"], hub["revision"]) == ("org/name", "v1.0")
    assert not [name for name in hub["allow_patterns"] if "*" in name or name.endswith((".py", ".bin", ".pt"))]


def test_a_folder_comes_before_the_hub(hub: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_heads("org/name") == Path("org/name")
    assert shipped_tree("org/name") is None
    assert not hub


@pytest.mark.parametrize("name", ["nowhere", "../name", "a/b/c", "/org/name", "org/na me"])
def test_what_is_no_hub_id_is_not_asked_for(hub: dict[str, Any], name: str) -> None:
    with pytest.raises(HeadError, match="a folder that treedraft train wrote, or a hub id"):
        find_heads(name)
    assert not hub


def test_heads_that_are_nowhere_are_said_to_be_in_neither_place(hub: dict[str, Any]) -> None:
    with pytest.raises(HeadError, match=r"no such folder, and the hub cannot be reached \(or HF_HUB_OFFLINE"):
        find_heads("org/other")
    assert hub["repo"] == "org/other"


def test_offline_a_cached_snapshot_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = tmp_path / "models--org--name"
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text("a" * 40)
    (repo / "snapshots" / ("a" * 40)).mkdir(parents=True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert find_heads("org/name") == repo / "snapshots" / ("a" * 40)
    with pytest.raises(HeadError, match="HF_HUB_OFFLINE is set"):
        find_heads("org/other")
