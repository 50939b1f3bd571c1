"""Rows from files, folders and the hub. JSON Lines is read line by line, so types may differ between rows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .records import DataError

Row = dict[str, Any]

FORMS = "a .jsonl, .json or .parquet file, a folder written by datasets' save_to_disk, or a hub id such as owner/name"
_MAX_FAULTS = 10


def read_rows(source: str | Path, split: str | None = None) -> Iterator[Row]:
    """The rows of ``source``, one by one: FORMS lists what it may be. ``split`` is for folders and hub ids.

    A missing file or split is refused at once; a faulty line when the reading ends, with all faulty lines (the first
    ten) by file and number. A file without rows is a fault. Raises DataError.
    """
    path = Path(source)
    if path.is_dir():
        return _not_empty(_dataset_folder(path, split), str(source))
    if path.is_file():
        return _not_empty(_file_rows(path), str(source))
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", str(source)) and path.suffix not in (".jsonl", ".json", ".parquet"):
        return _not_empty(_hub_dataset(str(source), split), str(source))
    raise DataError(f"no data at {source}: expected {FORMS}")


def numbered_rows(path: Path) -> Iterator[tuple[int, Row]]:
    """(line number, row) of a JSON Lines file; blank lines are passed over. Raises DataError as read_rows does."""
    faults: list[str] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                faults.append(f"{path}:{number}: not JSON ({error})")
                continue
            if not isinstance(row, dict):
                faults.append(f"{path}:{number}: expected an object, got {type(row).__name__}")
            elif not faults:
                yield number, row
    if faults:
        more = f"; and {len(faults) - _MAX_FAULTS} more" if len(faults) > _MAX_FAULTS else ""
        raise DataError("; ".join(faults[:_MAX_FAULTS]) + more)


def _file_rows(path: Path) -> Iterator[Row]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix == ".json":
        return _json_rows(path)
    if path.suffix == ".jsonl":
        return (row for _, row in numbered_rows(path))
    raise DataError(f"{path}: unknown kind of file {path.suffix!r}: expected {FORMS}")


def _json_rows(path: Path) -> Iterator[Row]:
    """A list of objects, an object that holds one list, or JSON Lines under the wrong name."""
    try:
        content = json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            return (row for _, row in numbered_rows(path))
        raise DataError(f"{path} is not JSON: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8: {error}") from error
    if isinstance(content, dict):
        lists = {key: value for key, value in content.items() if isinstance(value, list)}
        if len(lists) != 1:
            found = ", ".join(lists) or "none"
            raise DataError(f"{path}: expected a list, or an object that holds one list; lists found: {found}")
        content = next(iter(lists.values()))
    if not isinstance(content, list):
        raise DataError(f"{path}: expected a list of objects, got {type(content).__name__}")
    faults = [f"{path}: record {i} is not an object" for i, row in enumerate(content, 1) if not isinstance(row, dict)]
    if faults:
        raise DataError("; ".join(faults[:_MAX_FAULTS]))
    return iter(content)


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise DataError(f"{path} is not a Parquet file: {error}") from error
    return (row for batch in file.iter_batches(batch_size=1024) for row in batch.to_pylist())


def _dataset_folder(path: Path, split: str | None) -> Iterator[Row]:
    import datasets

    try:
        content = datasets.load_from_disk(str(path))
    except (FileNotFoundError, ValueError) as error:
        raise DataError(f"{path} was not written by datasets' save_to_disk ({error}); expected {FORMS}") from error
    if isinstance(content, datasets.DatasetDict):
        content = content[_chosen_split(str(path), split, [str(s) for s in content])]
    return _dicts(content)


def _hub_dataset(name: str, split: str | None) -> Iterator[Row]:
    import datasets

    try:
        splits = [str(s) for s in datasets.get_dataset_split_names(name)]
        content = datasets.load_dataset(name, split=_chosen_split(name, split, splits))
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{name} is neither here nor on the hub ({error}); expected {FORMS}") from error
    return _dicts(content)


def _chosen_split(source: str, split: str | None, present: list[str]) -> str:
    wanted = split or (present[0] if len(present) == 1 else "train")
    if wanted not in present:
        raise DataError(f"{source} has no split {wanted!r}: choose one of {', '.join(present)}")
    return wanted


def _dicts(content: Any) -> Iterator[Row]:
    return (dict(row) for row in content)


def _not_empty(rows: Iterator[Row], source: str) -> Iterator[Row]:
    count = 0
    for count, row in enumerate(rows, 1):  # noqa: B007
        yield row
    if not count:
        raise DataError(f"{source} has no rows")
