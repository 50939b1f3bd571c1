"""Heads on disk: a folder with ``config.json`` and ``heads.safetensors``, written atomically and read strictly.

config.json holds the kind, its configuration and the facts of the target. The draft vocabulary, where there is one, is
the tensor ``draft_ids``: ascending absolute target ids. Pickles are refused: loading one runs its code.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ..tree import write_atomically
from .base import Head, HeadError, TargetFacts, TargetLayers
from .eagle import Eagle, EagleConfig
from .eagle3 import Eagle3, Eagle3Config
from .hub import find_heads
from .hydra import Hydra, HydraConfig
from .medusa import Medusa, MedusaConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "heads.safetensors"
DRAFT_IDS, IDS_HASH = "draft_ids", "draft_ids_hash"
FORMAT = 1

HEADS: dict[str, tuple[type, type]] = {
    "medusa": (MedusaConfig, Medusa),
    "hydra": (HydraConfig, Hydra),
    "eagle": (EagleConfig, Eagle),
    "eagle3": (Eagle3Config, Eagle3),
}


class HeadWarning(UserWarning):
    """Heads that fit in size but were trained for other weights: drafts may be poor, the text is still the target's."""


def build_head(config: Any, target: TargetLayers, draft_ids: Tensor | None = None) -> Head:
    """Fresh heads of the configuration's kind for a target. Raises HeadError if the draft vocabulary cannot be."""
    vocab, hidden = target.output.weight.shape
    faults = []
    if (vocab, hidden) != (config.vocab_size, config.hidden_size):
        faults.append(
            f"the target's output layer is {vocab} x {hidden} (vocabulary x hidden size), "
            f"the configuration says {config.vocab_size} x {config.hidden_size}"
        )
    faults += _draft_id_faults(draft_ids, config.draft_vocab_size, config.vocab_size)
    if faults:
        raise HeadError("the heads cannot be built: " + "; ".join(faults))
    return HEADS[config.kind][1](config, target, draft_ids)


def save_head(head: Head, folder: str | Path, facts: TargetFacts, dtype: torch.dtype = torch.float32) -> None:
    """Writes the heads into ``folder`` (made if need be), each file atomically, weights rounded to ``dtype``."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    tensors = {name: value.detach().cpu().to(dtype).contiguous() for name, value in head.state_dict().items()}
    bad = sorted(name for name, value in tensors.items() if not torch.isfinite(value).all())
    if bad:
        raise HeadError(f"the heads are not saved: non-finite values in {', '.join(bad)}")
    if head.draft_ids is not None:
        tensors[DRAFT_IDS] = head.draft_ids.cpu()
    content = {"format": FORMAT, "kind": head.config.kind, "head": asdict(head.config), "target": asdict(facts)}
    if head.draft_ids is not None:
        content[IDS_HASH] = _ids_hash(head.draft_ids)
    weights = path / f".{WEIGHTS_FILE}.{os.getpid()}"
    save_file(tensors, weights)
    weights.replace(path / WEIGHTS_FILE)
    write_atomically(json.dumps(content, indent=2) + "\n", path / CONFIG_FILE)


def load_head(folder: str | Path, facts: TargetFacts, target: TargetLayers) -> Head:
    """Reads heads for the target that ``facts`` and ``target`` describe, in fp32. ``folder`` may be a hub id (hub.py).

    Raises HeadError, listing everything wrong: files missing or broken, another target's sizes, tensors missing,
    unexpected or of another shape. Warns (HeadWarning) if the sizes fit and the recorded weights are not the target's.
    """
    path = find_heads(folder)
    content = read_config(path)
    config = _parse(HEADS[content["kind"]][0], content["head"], path)
    trained_for = _parse(TargetFacts, content["target"], path)
    _compare_targets(trained_for, facts, path)
    tensors = _read_tensors(path)
    draft_ids = tensors.pop(DRAFT_IDS, None)
    device = target.output.weight.device
    if draft_ids is not None:
        draft_ids = draft_ids.to(device)
    faults = _draft_id_faults(draft_ids, config.draft_vocab_size, config.vocab_size)
    if not faults and draft_ids is not None and content.get(IDS_HASH, _ids_hash(draft_ids)) != _ids_hash(draft_ids):
        faults.append(f"{DRAFT_IDS} are not the ones that the heads were trained with ({CONFIG_FILE} has their hash)")
    if faults:
        raise HeadError(f"{path / WEIGHTS_FILE}: " + "; ".join(faults))
    head = build_head(config, target, draft_ids).to(device)
    _load_strictly(head, tensors, path / WEIGHTS_FILE)
    return head


def heads_hash(folder: str | Path) -> str:
    """What tells these heads from all others: a hash of their files. Raises HeadError if they are not there."""
    path = find_heads(folder)
    read_config(path)
    digest = hashlib.sha256()
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        digest.update((path / name).read_bytes())
    return digest.hexdigest()[:16]


def target_hash(facts: TargetFacts) -> str:
    """What tells a target from all others, whatever it is called."""
    known = {name: value for name, value in asdict(facts).items() if name != "name"}
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:16]


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a heads folder. Raises HeadError if it is none, or one that this version does not read."""
    if not path.is_dir():
        raise HeadError(f"no heads at {path}: expected a folder with {CONFIG_FILE} and {WEIGHTS_FILE}")
    pickles = sorted(p.name for p in path.iterdir() if p.suffix in (".pt", ".pth", ".bin", ".pkl"))
    missing = [name for name in (CONFIG_FILE, WEIGHTS_FILE) if not (path / name).is_file()]
    if missing:
        advice = f"; {', '.join(pickles)} is a pickle and is not read, since that runs its code" if pickles else ""
        raise HeadError(f"{path} is not a heads folder: {' and '.join(missing)} missing{advice}")
    try:
        content = json.loads((path / CONFIG_FILE).read_text())
    except json.JSONDecodeError as error:
        raise HeadError(f"{path / CONFIG_FILE} is not JSON: {error}") from error
    expected = {"format", "kind", "head", "target"}
    if not isinstance(content, dict) or set(content) - {IDS_HASH} != expected:
        found = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise HeadError(f"{path / CONFIG_FILE}: expected the keys {sorted(expected)}, got {found}")
    if content["format"] != FORMAT or content["kind"] not in HEADS:
        raise HeadError(
            f"{path / CONFIG_FILE}: format {content['format']!r} and kind {content['kind']!r}; "
            f"this version reads format {FORMAT} and kinds {sorted(HEADS)}"
        )
    return content


def _parse(kind: type, content: Any, path: Path) -> Any:
    known = {f.name for f in fields(kind)}
    unknown = sorted(set(content) - known) if isinstance(content, dict) else [repr(content)]
    if unknown:
        raise HeadError(
            f"{path / CONFIG_FILE}: unknown keys {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
    try:
        return kind(**content)
    except TypeError as error:
        raise HeadError(f"{path / CONFIG_FILE}: {error}") from error


def _compare_targets(trained_for: TargetFacts, facts: TargetFacts, path: Path) -> None:
    faults = [
        f"{label} {getattr(trained_for, name)}, the target has {getattr(facts, name)}"
        for name, label in (("hidden_size", "hidden size"), ("vocab_size", "vocabulary"), ("num_layers", "layers"))
        if getattr(trained_for, name) != getattr(facts, name)
    ]
    if faults:
        raise HeadError(
            f"{path} was trained for another target ({trained_for.name or 'unnamed'}): {'; '.join(faults)}. "
            "Use the target it was trained for, or train heads for this one"
        )
    differing = [
        label
        for name, label in (
            ("output_hash", "output embedding"),
            ("tokenizer_hash", "tokenizer"),
            ("chat_template_hash", "chat template"),
        )
        if getattr(trained_for, name) and getattr(facts, name) and getattr(trained_for, name) != getattr(facts, name)
    ]
    if trained_for.adapter_hash != facts.adapter_hash:
        wanted, found = trained_for.adapter_hash or "none", facts.adapter_hash or "none"
        differing.append(f"adapter ({wanted} expected, {found} found)")
    if differing:
        warnings.warn(
            f"{path} was trained for {trained_for.name or 'another target'}; this target "
            f"({facts.name or 'unnamed'}) has the same sizes but another {' and '.join(differing)}. "
            "The text stays the target's own, fewer drafts will be accepted",
            HeadWarning,
            stacklevel=3,
        )


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path / WEIGHTS_FILE)
    except (SafetensorError, OSError) as error:
        raise HeadError(f"{path / WEIGHTS_FILE} cannot be read (half written?): {error}") from error


def _ids_hash(draft_ids: Tensor) -> str:
    return hashlib.sha256(draft_ids.cpu().numpy().tobytes()).hexdigest()[:16]


def _draft_id_faults(draft_ids: Tensor | None, draft_vocab_size: int | None, vocab_size: int) -> list[str]:
    if draft_ids is None:
        full = draft_vocab_size in (None, vocab_size)
        return [] if full else [f"draft vocabulary of {draft_vocab_size}, but no {DRAFT_IDS}"]
    if draft_vocab_size is None:
        return [f"{DRAFT_IDS} present, but the configuration names no draft vocabulary"]
    faults = []
    if draft_ids.dtype != torch.int64 or draft_ids.dim() != 1:
        faults.append(f"{DRAFT_IDS} must be a list of int64, got {draft_ids.dtype} of shape {tuple(draft_ids.shape)}")
        return faults
    if len(draft_ids) != draft_vocab_size:
        faults.append(f"{DRAFT_IDS} has {len(draft_ids)} ids, the configuration says {draft_vocab_size}")
    if len(draft_ids) and (draft_ids[0] < 0 or draft_ids[-1] >= vocab_size):
        faults.append(f"{DRAFT_IDS} must lie in 0..{vocab_size - 1}")
    if (draft_ids.diff() <= 0).any():
        faults.append(f"{DRAFT_IDS} must ascend without repeats")
    return faults


def _load_strictly(head: Head, tensors: dict[str, Tensor], file: Path) -> None:
    expected = {name: tuple(value.shape) for name, value in head.state_dict().items()}
    faults = [f"{name} missing" for name in sorted(set(expected) - set(tensors))]
    faults += [f"{name} unexpected" for name in sorted(set(tensors) - set(expected))]
    faults += [
        f"{name} has shape {tuple(tensors[name].shape)}, expected {shape}"
        for name, shape in sorted(expected.items())
        if name in tensors and tuple(tensors[name].shape) != shape
    ]
    faults += [
        f"{name} has non-finite values"
        for name, value in sorted(tensors.items())
        if value.is_floating_point() and not torch.isfinite(value).all()
    ]
    if faults:
        raise HeadError(f"{file} does not hold these heads: " + "; ".join(faults))
    head.load_state_dict({name: value.float() for name, value in tensors.items()})
