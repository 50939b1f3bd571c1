"""Checkpoints of other programs on disk: read without trust, written whole or not at all.

No code of a checkpoint runs. Weights are safetensors; a pickle is read on explicit request alone, and then by torch's
weights-only loader. Names in an index file must be plain names in the same folder, headers are bounded before they are
parsed, and numbers that are not finite are refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ...tree import write_atomically
from ..base import HeadError

CONFIG_FILE = "config.json"
WEIGHTS = ("model.safetensors", "medusa_lm_head.safetensors")
PICKLES = ("medusa_lm_head.pt", "pytorch_model.bin", "model.pt")
MOST_HEADER = 16 << 20
MOST_CONFIG = 4 << 20
"""Bytes: far beyond what heads need, far below what hurts."""


@dataclass(frozen=True)
class Checkpoint:
    """A folder's configuration and tensors by the names they have there.

    weights_file: where the tensors lie; pickled: whether a .pt file with the same tensors stands beside it
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    weights_file: str = "model.safetensors"
    pickled: bool = False


def read_checkpoint(folder: str | Path, allow_pickle: bool = False) -> Checkpoint:
    """Everything of a checkpoint folder. Raises HeadError, naming every fault of its files."""
    path = Path(folder)
    if not path.is_dir():
        raise HeadError(f"no checkpoint at {path}: expected a folder with {CONFIG_FILE} and {WEIGHTS[0]}")
    config = read_json(path / CONFIG_FILE)
    file, tensors = _read_weights(path, allow_pickle)
    bad = [name for name, value in sorted(tensors.items()) if value.is_floating_point() and not _finite(value)]
    if bad:
        raise HeadError(f"{path / file}: non-finite values in {', '.join(bad)}")
    return Checkpoint(config, tensors, file)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object. Raises HeadError."""
    if not file.is_file():
        raise HeadError(f"{file} is missing")
    if file.stat().st_size > MOST_CONFIG:
        raise HeadError(f"{file} has {file.stat().st_size:,} bytes, at most {MOST_CONFIG:,} are read")
    try:
        content = json.loads(file.read_bytes().decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise HeadError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise HeadError(f"{file}: expected an object, got {type(content).__name__}")
    return content


def write_checkpoint(made: Checkpoint, folder: Path) -> None:
    """Writes weights, then configuration, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in made.tensors.items()}
    draft = folder / f".{made.weights_file}.{os.getpid()}"
    save_file(tensors, draft, {"format": "pt"})
    draft.replace(folder / made.weights_file)
    if made.pickled:
        name = Path(made.weights_file).with_suffix(".pt").name
        draft = folder / f".{name}.{os.getpid()}"
        torch.save(tensors, draft)
        draft.replace(folder / name)
    write_atomically(json.dumps(made.config, indent=2) + "\n", folder / CONFIG_FILE)


def tensor_hash(value: Tensor) -> str:
    """16 hex digits of the SHA-256 of the bytes."""
    flat = value.detach().cpu().contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def describe_tensors(tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Shape, dtype and hash of every tensor."""
    return {
        name: {
            "shape": list(value.shape),
            "dtype": str(value.dtype).removeprefix("torch."),
            "sha256": tensor_hash(value),
        }
        for name, value in sorted(tensors.items())
    }


def _finite(value: Tensor) -> bool:
    return bool(torch.isfinite(value.float() if value.dtype.itemsize == 1 else value).all())


def _read_weights(path: Path, allow_pickle: bool) -> tuple[str, dict[str, Tensor]]:
    for name in WEIGHTS:
        if (path / name).is_file():
            return name, read_safetensors(path / name)
    index = path / f"{WEIGHTS[0]}.index.json"
    if index.is_file():
        return index.name, _read_index(index)
    pickles = [name for name in PICKLES if (path / name).is_file()]
    if not pickles:
        raise HeadError(f"{path} has no weights: expected {' or '.join(WEIGHTS)}, or {index.name}")
    if not allow_pickle:
        raise HeadError(
            f"{path / pickles[0]} is a pickle and is not read, since that can run its code: convert it to safetensors, "
            "or ask for --allow-pickle, which reads plain tensors alone"
        )
    return pickles[0], _read_pickle(path / pickles[0])


def read_safetensors(file: Path) -> dict[str, Tensor]:
    """The tensors of one file. Raises HeadError."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(8)
    if len(start) < 8:
        raise HeadError(f"{file} cannot be read: {size} bytes are no safetensors file")
    (header,) = struct.unpack("<Q", start)
    if header > min(size - 8, MOST_HEADER):
        raise HeadError(f"{file} cannot be read: its header claims {header:,} bytes, the file has {size:,}")
    try:
        return load_file(file)
    except (SafetensorError, OSError, ValueError, KeyError, RuntimeError, OverflowError) as error:
        raise HeadError(f"{file} cannot be read (half written?): {error}") from error


def _read_index(index: Path) -> dict[str, Tensor]:
    table = read_json(index).get("weight_map")
    if not isinstance(table, dict) or not table or not all(isinstance(name, str) for name in table.values()):
        raise HeadError(f"{index}: expected weight_map, from tensor names to file names")
    outside = sorted({name for name in table.values() if not _is_plain(name, index.parent)})
    if outside:
        raise HeadError(f"{index} names files outside its folder or of another kind: {', '.join(map(repr, outside))}")
    absent = sorted({name for name in table.values() if not (index.parent / name).is_file()})
    if absent:
        raise HeadError(f"{index} names files that are not there: {', '.join(absent)}")
    found: dict[str, Tensor] = {}
    wrong: list[str] = []
    for file in sorted(set(table.values())):
        part = read_safetensors(index.parent / file)
        wrong += [f"{name} is not in {file}" for name in table if table[name] == file and name not in part]
        wrong += [f"{name} of {file} is not listed for it" for name in part if table.get(name) != file]
        found |= part
    if wrong:
        raise HeadError(f"{index} does not describe its files: {'; '.join(wrong)}")
    return found


def _is_plain(name: str, folder: Path) -> bool:
    """Whether the name is that of a safetensors file that lies in the folder itself, links followed."""
    if not name.endswith(".safetensors") or Path(name).name != name or "\\" in name or "\0" in name:
        return False
    return (folder / name).resolve().parent == folder.resolve()


def _read_pickle(file: Path) -> dict[str, Tensor]:
    try:
        content = torch.load(file, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, KeyError, AttributeError) as error:
        raise HeadError(f"{file} holds more than plain tensors, or is broken, and was not read: {error}") from error
    if not isinstance(content, dict) or not all(
        isinstance(k, str) and isinstance(v, Tensor) for k, v in content.items()
    ):
        raise HeadError(f"{file}: expected tensors by name")
    return {name: value.contiguous() for name, value in content.items()}
