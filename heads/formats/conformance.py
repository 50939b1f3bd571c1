"""What an engine's loader makes of a folder, replayed without the engine.

Engines build a module from the configuration, with defaults of their own, and then load tensors by name; what does not
fit is dropped, renamed, left random or filled with zeros, often without a word. Here each of these is a fault. The
replays follow vLLM 0.32, SGLang 0.5.23, TensorRT-LLM's PyTorch backend, TGI, llama.cpp's converter and speculators 0.9.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base import TargetFacts, TargetLayers
from . import medusa
from .eagle import LAYER_PARTS, TOP_IDS
from .engines import SERVED
from .files import Checkpoint, tensor_hash


@dataclass(frozen=True)
class Replay:
    """What the engine builds: parameters with shapes, how it renames, and what it may leave out or ignore knowingly."""

    built: dict[str, tuple[int, ...]]
    rename: Callable[[str], str] = lambda name: name
    optional: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()


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
    if replay is not None:
        faults += _load(read.tensors, replay, engine)
    if facts is not None:
        faults += [
            f"{name} is {read.config.get(name)!r}, the target's is {wanted}"
            for name, wanted in (("hidden_size", facts.hidden_size), ("vocab_size", facts.vocab_size))
            if _flat(read.config).get(name) != wanted
        ]
    if rope is not None and kind != "medusa":
        faults += _geometry(_flat(read.config), rope)
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


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    inner = config.get("transformer_layer_config")
    return {**config, **inner} if isinstance(inner, dict) else dict(config)


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


# Medusa


def _medusa_rules(read: Checkpoint, engine: str) -> list[str]:
    config, names = read.config, set(read.tensors)
    faults = _needed(config, ("model_type",) if engine == "vllm" else ())
    if engine == "vllm":
        for word, kept in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
            keys = [key for key in config if "num" in key and word in key]
            if len(keys) > 1:
                faults.append(f"vllm reads {', '.join(keys)} all as {kept}: the last one wins")
        if config.get("medusa_fc_bias") is not True and any(medusa_part(name) == "bias" for name in names):
            faults.append("medusa_fc_bias is not true: vllm drops the biases of all blocks")
        if config.get("truncated_vocab_size") not in (None, config.get("vocab_size")):
            faults.append("truncated_vocab_size is reset by vllm when the vocabulary differs, and token_map dropped")
    if engine == "tgi" and "architectures" in config:
        faults.append("architectures is present: tgi then loads no Medusa heads at all")
    if engine in ("tgi", "medusa"):
        faults += _needed(config, ("base_model_name_or_path",))
    wanted = "model.safetensors" if engine == "vllm" else "medusa_lm_head.safetensors"
    if engine in ("vllm", "tgi") and read.weights_file not in {"vllm": (*_ANY, wanted), "tgi": (wanted,)}[engine]:
        faults.append(f"{engine} reads {wanted}, the weights are in {read.weights_file}")
    return faults


_ANY = ("medusa_lm_head.safetensors", "model.safetensors.index.json")


def medusa_part(name: str) -> str:
    match = medusa._block(name)
    return "" if match is None else match[3]


def _medusa_replay(read: Checkpoint, engine: str) -> Replay | None:
    config = read.config
    heads = _last(config, "heads", 5)
    layers = _last(config, "layers", 1)
    size, vocab = config.get("hidden_size", 4096), config.get("vocab_size", 32001)
    if not all(type(number) is int and 0 < number < 1 << 24 for number in (heads, layers, size, vocab)):
        return None
    built: dict[str, tuple[int, ...]] = {}
    bias = config.get("medusa_fc_bias", False) is True or engine != "vllm"
    for k in range(min(heads, 64)):
        for layer in range(min(layers, 64)):
            built[f"blocks.{k}.layers.{layer}.weight"] = (size, size)
            if bias:
                built[f"blocks.{k}.layers.{layer}.bias"] = (size,)
        built[f"lm_heads.{k}.weight"] = (vocab, size)
    outputs = {name for name in built if name.startswith("lm_heads")}
    if engine == "vllm":
        if config.get("original_lm_head", False):
            built = {name: shape for name, shape in built.items() if name not in outputs}
            built["lm_head.weight"] = (vocab, size)
        return Replay(built, _vllm_medusa_name(bool(config.get("original_lm_head", False))))
    present = outputs & {_plain_medusa_name(name) for name in read.tensors}
    if engine == "tgi" and not present and layers == 1:  # its second version reads the target's output layer
        built = {name: shape for name, shape in built.items() if name not in outputs}
    return Replay(built, _plain_medusa_name)


def _last(config: Mapping[str, Any], word: str, default: int) -> Any:
    """vLLM's reading of a size: the last key with "num" and ``word`` in it."""
    found = [config[key] for key in config if "num" in key and word in key]
    return found[-1] if found else default


def _plain_medusa_name(name: str) -> str:
    name = name.replace("medusa_heads.", "")
    name = re.sub(r"^(\d+)\.(\d+)\.linear\.(weight|bias)$", r"blocks.\1.layers.\2.\3", name)
    return re.sub(r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight", name)


def _vllm_medusa_name(original: bool) -> Callable[[str], str]:
    def rename(name: str) -> str:
        plain = _plain_medusa_name(name)
        return "lm_head.weight" if original and plain == "lm_heads.0.weight" else plain

    return rename


# EAGLE


def _needed(config: Mapping[str, Any], keys: tuple[str, ...]) -> list[str]:
    return [f"{key} is missing" for key in keys if config.get(key) is None]


_LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
)
_LAYER_KEYS += ("num_hidden_layers", "rms_norm_eps", "rope_theta", "max_position_embeddings")


def _layer_rules(config: Mapping[str, Any], engine: str) -> list[str]:
    """Written down, whatever the default: engines' defaults differ."""
    faults = _needed(config, _LAYER_KEYS)
    if config.get("tie_word_embeddings") is not False:
        faults.append(
            "tie_word_embeddings must be written and false: SGLang reads the embedding as output layer or crashes"
        )
    if config.get("num_hidden_layers", 1) != 1:
        faults.append("num_hidden_layers must be 1: engines norm further layers differently")
    if config.get("attention_bias") or config.get("mlp_bias"):
        faults.append(f"attention_bias and mlp_bias must be false for {engine}")
    return faults


def _eagle_rules(read: Checkpoint, engine: str) -> list[str]:
    config = read.config
    faults = _layer_rules(config, engine)
    wanted = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "eagle": None}[engine]
    if wanted is not None and config.get("architectures") != [wanted]:
        faults.append(f"architectures must be [{wanted!r}] for {engine}, got {config.get('architectures')!r}")
    if engine == "eagle" and config.get("bias", True) and "fc.bias" not in read.tensors:
        faults.append("bias is not false: the repository builds fc.bias, which the file lacks")
    return faults


def _eagle_replay(read: Checkpoint, engine: str) -> Replay | None:
    built = _layer(read.config)
    if built is None:
        return None
    size, vocab = read.config["hidden_size"], read.config["vocab_size"]
    built |= {"fc.weight": (size, 2 * size), "embed_tokens.weight": (vocab, size)}
    if engine == "sglang" or (engine == "eagle" and read.config.get("bias", True)):
        built["fc.bias"] = (size,)
    zero_bias = {"fc.bias"} if "fc.bias" in read.tensors and not read.tensors["fc.bias"].any() else set()
    needs_embedding = engine == "eagle"
    optional = frozenset() if needs_embedding else frozenset({"embed_tokens.weight"})
    return Replay(built, optional=optional, ignored=frozenset() if "fc.bias" in built else frozenset(zero_bias))


def _layer(config: Mapping[str, Any], width: int = 1, name: str = "layers.0") -> dict[str, tuple[int, ...]] | None:
    """The decoder layer's parameters from the configuration, attention reading ``width`` times the hidden size."""
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
    sizes = [config.get(key) for key in keys]
    if not all(type(size) is int and 0 < size < 1 << 24 for size in sizes):
        return None
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv = config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or size // heads
    shapes = [(heads * head, width * size), (kv * head, width * size), (kv * head, width * size), (size, heads * head)]
    shapes += [(inner, size), (inner, size), (size, inner), (size,)]
    return {f"{name}.{part}": shape for part, shape in zip(LAYER_PARTS, shapes, strict=True)}


def _eagle3_rules(read: Checkpoint, engine: str) -> list[str]:
    config, flat = read.config, _flat(read.config)
    faults = _layer_rules(flat, engine)
    faults += [f"{key} is missing" for key in ("draft_vocab_size", TOP_IDS) if key not in config]
    if config.get("norm_before_residual") is not False:
        faults.append("norm_before_residual must be written and false: engines default to either")
    if engine == "speculators":
        if "model_type" in config:
            faults.append("model_type is present: the folder is not taken for a speculators checkpoint")
        needed = ("speculators_config", "transformer_layer_config", "speculators_model_type")
        faults += [f"{key} is missing" for key in needed if key not in config]
    elif config.get("architectures") != ["LlamaForCausalLMEagle3"]:
        faults.append(f"architectures must be ['LlamaForCausalLMEagle3'], got {config.get('architectures')!r}")
    faults += _tap_rules(config, engine) + _vocabulary_rules(read, flat)
    if engine in ("sglang", "llamacpp", "eagle"):
        faults += [f"{name} is true, which {engine} ignores" for name in ("fc_norm", "norm_output") if flat.get(name)]
    return faults


def _tap_rules(config: Mapping[str, Any], engine: str) -> list[str]:
    top, inner = config.get(TOP_IDS), config.get("eagle_config")
    nested = inner.get(TOP_IDS) if isinstance(inner, dict) else None
    if not isinstance(top, list) or not all(type(k) is int for k in top):
        return [f"{TOP_IDS} must be a list of layers, got {top!r}"]
    faults = []
    if top != sorted(set(top)):
        faults.append(f"{TOP_IDS} must be distinct and ascending, got {top}: vllm sorts them and drops repeats")
    if engine != "speculators":
        if nested is None:
            faults.append(f"eagle_config.{TOP_IDS} is missing: SGLang falls back to its default layers")
        elif nested != [k - 1 for k in top]:
            faults.append(f"{TOP_IDS} {top} (entering) and in eagle_config {nested} (outputs) are not one apart")
        if config.get("num_aux_hidden_states") not in (None, len(top)):
            faults.append(f"num_aux_hidden_states is {config['num_aux_hidden_states']}, {len(top)} layers are named")
    return faults


def _vocabulary_rules(read: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    vocab, width = config.get("vocab_size"), config.get("draft_vocab_size")
    table, marks = read.tensors.get("d2t"), read.tensors.get("t2d")
    if not (type(vocab) is int and type(width) is int and 0 < width <= vocab < 1 << 24):
        return [f"draft_vocab_size {width!r} must be a whole number up to vocab_size {vocab!r}"]
    if width == vocab:
        return ["d2t with the whole vocabulary: vllm has no parameter for it and stops"] if table is not None else []
    if table is None:
        return ["d2t is missing: engines fill it with zeros, and every draft is another token"]
    if table.dtype != torch.int64 or table.shape != (width,):
        return [f"d2t must be int64 [{width}], got {table.dtype} {list(table.shape)}"]
    ids = torch.arange(width) + table
    faults = []
    if ids.min() < 0 or ids.max() >= vocab or (ids.diff() <= 0).any():
        faults.append(f"i + d2t[i] must ascend within 0..{vocab - 1}: it holds offsets, not ids")
    elif marks is None:
        faults.append("t2d is missing")
    if marks is not None and (marks.shape != (vocab,) or not torch.equal(marks.bool().nonzero()[:, 0], ids)):
        faults.append("t2d does not mark the tokens that d2t names")
    return faults


def _eagle3_replay(read: Checkpoint, engine: str) -> Replay | None:
    config = _flat(read.config)
    built = _layer(config, 2)
    taps, width = config.get("num_aux_hidden_states"), config.get("draft_vocab_size")
    if taps is None:
        inner = config.get("eagle_config")
        ids = (inner.get(TOP_IDS) if isinstance(inner, dict) else None) or config.get(TOP_IDS)
        taps = len(ids) if isinstance(ids, list) else 3
    if built is None or not all(type(size) is int and 0 < size < 1 << 24 for size in (taps, width)):
        return None
    size, vocab = config["hidden_size"], config["vocab_size"]
    built |= {"fc.weight": (size, taps * size), "norm.weight": (size,), "lm_head.weight": (width, size)}
    built |= {f"layers.0.{part}.weight": (size,) for part in ("input_layernorm", "hidden_norm")}
    built |= {f"fc_norm.{i}.weight": (size,) for i in range(taps if config.get("fc_norm") else 0)}
    built |= {"embed_tokens.weight": (vocab, size)}
    if width < vocab:
        built |= {"d2t": (width,), "t2d": (vocab,)}
    needs_embedding = engine in ("speculators", "eagle")
    optional = frozenset({"t2d"} if needs_embedding else {"t2d", "embed_tokens.weight"})
    return Replay(built, lambda name: name.replace("midlayer.", "layers.0."), optional)


_RULES = {"medusa": _medusa_rules, "eagle": _eagle_rules, "eagle3": _eagle3_rules}
_REPLAYS = {"medusa": _medusa_replay, "eagle": _eagle_replay, "eagle3": _eagle3_replay}
