"""Text files that are whole or absent."""

from __future__ import annotations

import os
from pathlib import Path


def write_atomically(text: str, path: Path) -> None:
    """Writes under a hidden name beside ``path`` and renames; a kill in between leaves the old file as it was."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)
