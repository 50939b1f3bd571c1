"""Heads by folder or by hub id: ``org/name``, or ``org/name@revision`` for a branch, tag or commit."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, RepositoryNotFoundError

from .base import HeadError

TREE_FILE = "tree.json"
"""A heads folder may bring the tree that was chosen for it."""

FILES = ("config.json", "heads.safetensors", TREE_FILE, "README.md")
"""What is fetched: neither pickles nor code."""

_HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(@(?P<revision>[\w./-]+))?")


def find_heads(name: str | Path) -> Path:
    """The folder that ``name`` says, fetched from the hub if it is an id there and no folder here.

    With HF_HUB_OFFLINE=1 only what was fetched before is found. Raises HeadError naming both places that were searched.
    """
    if Path(name).is_dir():
        return Path(name)
    found = _parse(name)
    if found is None:
        raise HeadError(f"no heads at {name}: expected a folder that treedraft train wrote, or a hub id org/name")
    here = f"no heads at {name}: there is no such folder, and"
    try:
        return Path(snapshot_download(found["repo"], revision=found["revision"], allow_patterns=list(FILES)))
    except RepositoryNotFoundError as error:  # a kind of HfHubHTTPError
        raise HeadError(f"{here} the hub shows no {found['repo']} (private? then log in: hf auth login)") from error
    except LocalEntryNotFoundError as error:
        reason = "cannot be reached (or HF_HUB_OFFLINE is set) and these heads were not fetched before"
        raise HeadError(f"{here} the hub {reason}") from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        raise HeadError(f"{here} the hub does not give {name}: {error}") from error


def is_hub_id(name: str | Path) -> bool:
    """Whether it could be one: ``org/name``, and no path that starts with a dot or a slash."""
    return _parse(name) is not None


def _parse(name: str | Path) -> re.Match[str] | None:
    return _HUB_ID.fullmatch(name) if isinstance(name, str) and not name.startswith(".") else None


def shipped_tree(folder: str | Path) -> Path | None:
    """The tree file that a heads folder brings, if it does."""
    own = Path(folder) / TREE_FILE
    return own if own.is_file() else None
