"""How results are written to files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_json(content: Mapping[str, Any], path: Path) -> None:
    """Writes atomically; folders are made."""
    _write(json.dumps(content, indent=2, allow_nan=False) + "\n", path)


def write_rows(rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Writes JSONL atomically; folders are made."""
    _write("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), path)


def _write(text: str, path: Path) -> None:
    from ..tree import write_atomically

    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(text, path)
