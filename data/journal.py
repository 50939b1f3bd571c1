"""Files of answers that grow row by row and are taken up again after a stop: JSON Lines with an ``id`` each."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from .records import DataError
from .sources import numbered_rows

_MAX_FAULTS = 10


def read_journal(path: Path, keys: Collection[str]) -> dict[str, dict[str, Any]]:
    """The rows of ``path`` by their ids; a last line that a crash tore is cut off. A missing file has none.

    Raises DataError, naming the lines, if a row lacks one of ``keys``: the file then holds something else.
    """
    if not path.exists():
        return {}
    _mend_last_line(path)
    faults, rows = [], {}
    for number, row in numbered_rows(path):
        missing = [key for key in ("id", *keys) if key not in row]
        if missing:
            faults.append(f"{path}:{number}: no {' and '.join(missing)}")
        rows[str(row.get("id"))] = row
    if faults:
        raise DataError(f"the output file holds something else: {'; '.join(faults[:_MAX_FAULTS])}; choose another file")
    return rows


def open_journal(path: Path) -> BinaryIO:
    """``path`` to append to; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("ab")


def append_row(file: BinaryIO, row: Mapping[str, Any]) -> None:
    """One line, which is on disk when this returns."""
    file.write((json.dumps(row, ensure_ascii=False) + "\n").encode())
    file.flush()
    os.fsync(file.fileno())


def _mend_last_line(path: Path) -> None:
    """Ends the last line if it is whole, and cuts it off if it is not."""
    content = path.read_bytes()
    last = content.rpartition(b"\n")[2]
    if not last.strip():
        return
    try:
        json.loads(last)
    except ValueError:
        os.truncate(path, len(content) - len(last))
    else:
        with path.open("ab") as file:
            file.write(b"\n")
