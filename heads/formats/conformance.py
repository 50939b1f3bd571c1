"""What an engine's loader makes of a folder, replayed without the engine.

Engines build a module from the configuration, with defaults of their own, and then load tensors by name; what does not
fit is dropped, renamed, left random or filled with zeros, often without a word. Here each of these is a fault. The
replays follow vLLM 0.32, SGLang 0.5.23, TensorRT-LLM's PyTorch backend, TGI, llama.cpp's converter and speculators 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import TargetFacts, TargetLayers
from . import eagle_replay, medusa, medusa_replay
from .eagle import TOP_IDS
from .engines import SERVED
from .files import Checkpoint, tensor_hash
from .replay import Replay, flat


def kind_of(read: Checkpoint) -> str:
    """medusa, eagle or eagle3, from names and configuration."""
    if medusa.is_medusa(read.config, set(read.tensors)):
        return "medusa"
    three = any(name.endswith("hidden_norm.weight") for name in read.tensors)
    return "eagle3" if three or TOP_IDS in read.config or "draft_vocab_size" in read.config else "eagle"


def check(
    read: Checkpoint,
    engine: str,
    facts: TargetFacts | None = None,
    target: TargetLayers | None = None,
    rope: Mapping[str, Any] | None = None,
    report: Mapping[str, Any] | None = None,
) -> list[str]:
    """Everything the engine would silently do to this folder, and what does not fit the target or the export's report.

    rope: the target's rotary settings and ``max_position_embeddings``, by the names of its configuration
    """
    kind = kind_of(read)
    if engine not in SERVED[kind]:
        return [f"{engine} does not serve {kind} heads"]
    faults = _RULES[kind](read, engine) + _numbers(read)
    replay = _REPLAYS[kind](read, engine)
    faults += (
        ["sizes of the configuration are no whole numbers"] if replay is None else _load(read.tensors, replay, engine)
    )
    if facts is not None:
        faults += [
            f"{name} is {read.config.get(name)!r}, the target's is {wanted}"
            for name, wanted in (("hidden_size", facts.hidden_size), ("vocab_size", facts.vocab_size))
            if flat(read.config).get(name) != wanted
        ]
    if rope is not None and kind != "medusa":
        faults += _geometry(flat(read.config), rope)
    if target is not None and "embed_tokens.weight" in read.tensors:
        found = read.tensors["embed_tokens.weight"]
        wanted = target.embedding.detach().cpu()
        if found.shape != wanted.shape or not torch.equal(found, wanted.to(found.dtype)):
            faults.append("embed_tokens.weight is not the target's: vLLM would use it, SGLang would not")
    if report is not None:
        faults += _against_report(read, report)
    return faults


def _load(tensors: Mapping[str, Tensor], replay: Replay, engine: str) -> list[str]:
    seen: dict[str, str] = {}
    faults = []
    for name, value in sorted(tensors.items()):
        renamed = replay.rename(name)
        if name in replay.ignored or renamed in replay.ignored:
            continue
        if renamed in seen:
            faults.append(f"{name} and {seen[renamed]} are both {renamed} to {engine}")
        seen[renamed] = name
        if renamed not in replay.built:
            faults.append(f"{name}: {engine} has no such parameter and drops it")
        elif tuple(value.shape) != replay.built[renamed]:
            faults.append(f"{name} has shape {tuple(value.shape)}, {engine} builds {replay.built[renamed]}")
    absent = sorted(set(replay.built) - set(seen) - replay.optional)
    return faults + [f"{name} missing: {engine} leaves it random or zero" for name in absent]


def _numbers(read: Checkpoint) -> list[str]:
    faults = []
    for name, value in sorted(read.tensors.items()):
        if value.is_floating_point() and not torch.isfinite(value).all():
            faults.append(f"{name} has non-finite values")
        if name == "fc.weight" and not value.any():
            faults.append("fc.weight is zero: nothing of the target would reach the head")
    return faults


def _geometry(config: Mapping[str, Any], rope: Mapping[str, Any]) -> list[str]:
    """Positions: the target's rotary settings and limit, or drafts are made for places that they do not stand at."""
    faults = []
    base = (rope.get("rope_parameters") or {}).get("rope_theta")  # None: the target has several, or none to compare
    if base is not None and config.get("rope_theta", 10000.0) != base:
        faults.append(f"rope_theta is {config.get('rope_theta', '10000 by default')}, the target's is {base}")
    found = config.get("rope_parameters")
    if isinstance(found, dict) and found.get("rope_theta") != config.get("rope_theta"):
        faults.append("rope_theta and rope_parameters say different bases")
    limit, own = rope.get("max_position_embeddings"), config.get("max_position_embeddings", 2048)
    if limit is not None and not (type(own) is int and own >= limit):
        faults.append(
            f"max_position_embeddings is {config.get('max_position_embeddings', '2048 by default')}, below the "
            f"target's {limit}: an engine indexes beyond its table or refuses"
        )
    return faults


def _against_report(read: Checkpoint, report: Mapping[str, Any]) -> list[str]:
    wanted = report.get("tensors") or {}
    faults = [f"{name} of the export is missing" for name in sorted(set(wanted) - set(read.tensors))]
    faults += [f"{name} is not part of the export" for name in sorted(set(read.tensors) - set(wanted))]
    faults += [
        f"{name} was changed after the export"
        for name in sorted(set(wanted) & set(read.tensors))
        if wanted[name].get("sha256") != tensor_hash(read.tensors[name])
    ]
    config = report.get("config") or {}
    return faults + [
        f"{name} is {read.config.get(name)!r}, the export wrote {config.get(name)!r}"
        for name in sorted(set(config) | set(read.config))
        if read.config.get(name) != config.get(name)
    ]


_RULES = {"medusa": medusa_replay.rules, "eagle": eagle_replay.eagle_rules, "eagle3": eagle_replay.eagle3_rules}
_REPLAYS = {"medusa": medusa_replay.replay, "eagle": eagle_replay.eagle, "eagle3": eagle_replay.eagle3}
