"""How engines load EAGLE heads: names, sizes from the configuration, and its traps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .eagle import LAYER_PARTS, TOP_IDS
from .files import Checkpoint
from .replay import Replay, flat, needed

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
    faults = needed(config, _LAYER_KEYS)
    if config.get("tie_word_embeddings") is not False:
        faults.append(
            "tie_word_embeddings must be written and false: SGLang reads the embedding as output layer or crashes"
        )
    if config.get("num_hidden_layers", 1) != 1:
        faults.append("num_hidden_layers must be 1: engines norm further layers differently")
    if config.get("attention_bias") or config.get("mlp_bias"):
        faults.append(f"attention_bias and mlp_bias must be false for {engine}")
    return faults


def eagle_rules(read: Checkpoint, engine: str) -> list[str]:
    """Settings that the engine needs, or reads in another way than they look."""
    config = read.config
    faults = _layer_rules(config, engine)
    wanted = {"vllm": "LlamaForCausalLM", "sglang": "LlamaForCausalLMEagle", "eagle": None}[engine]
    if wanted is not None and config.get("architectures") != [wanted]:
        faults.append(f"architectures must be [{wanted!r}] for {engine}, got {config.get('architectures')!r}")
    if engine == "eagle" and config.get("bias", True) and "fc.bias" not in read.tensors:
        faults.append("bias is not false: the repository builds fc.bias, which the file lacks")
    return faults


def eagle(read: Checkpoint, engine: str) -> Replay | None:
    """What the engine builds for EAGLE-1 or 2; None where the sizes are no whole numbers."""
    built = _layer(read.config)
    if built is None:
        return None
    size, vocab = read.config["hidden_size"], read.config["vocab_size"]
    built |= {"fc.weight": (size, 2 * size), "embed_tokens.weight": (vocab, size)}
    if engine == "sglang" or (engine == "eagle" and read.config.get("bias", True)):
        built["fc.bias"] = (size,)
    zero_bias = {"fc.bias"} if "fc.bias" in read.tensors and not read.tensors["fc.bias"].any() else set()
    needs_embedding = engine == "eagle"
    optional: frozenset[str] = frozenset() if needs_embedding else frozenset({"embed_tokens.weight"})
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


def eagle3_rules(read: Checkpoint, engine: str) -> list[str]:
    """The same for EAGLE-3: also its tapped layers in both countings, and its draft vocabulary."""
    config, whole = read.config, flat(read.config)
    faults = _layer_rules(whole, engine)
    faults += [f"{key} is missing" for key in ("draft_vocab_size", TOP_IDS) if key not in config]
    if config.get("norm_before_residual") is not False:
        faults.append("norm_before_residual must be written and false: engines default to either")
    if engine == "speculators":
        if "model_type" in config:
            faults.append("model_type is present: the folder is not taken for a speculators checkpoint")
        keys = ("speculators_config", "transformer_layer_config", "speculators_model_type")
        faults += [f"{key} is missing" for key in keys if key not in config]
    elif config.get("architectures") != ["LlamaForCausalLMEagle3"]:
        faults.append(f"architectures must be ['LlamaForCausalLMEagle3'], got {config.get('architectures')!r}")
    faults += _tap_rules(config, engine) + _vocabulary_rules(read, whole)
    if engine in ("sglang", "llamacpp", "eagle"):
        faults += [f"{name} is true, which {engine} ignores" for name in ("fc_norm", "norm_output") if whole.get(name)]
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


def eagle3(read: Checkpoint, engine: str) -> Replay | None:
    """What the engine builds for EAGLE-3; None where the sizes are no whole numbers."""
    config = flat(read.config)
    built = _layer(config, 2)
    taps, width = config.get("num_aux_hidden_states"), config.get("draft_vocab_size")
    if taps is None:
        inner = config.get("eagle_config")
        ids = (inner.get(TOP_IDS) if isinstance(inner, dict) else None) or config.get(TOP_IDS)
        taps = len(ids) if isinstance(ids, list) else 3
    if built is None or not all(type(size) is int and 0 < size < 1 << 24 for size in (taps, width)):
        return None
    size, vocab = config["hidden_size"], config["vocab_size"]
    taps, width = int(taps), int(width or 0)
    built |= {"fc.weight": (size, taps * size), "norm.weight": (size,), "lm_head.weight": (width, size)}
    built |= {f"layers.0.{part}.weight": (size,) for part in ("input_layernorm", "hidden_norm")}
    built |= {f"fc_norm.{i}.weight": (size,) for i in range(taps if config.get("fc_norm") else 0)}
    built |= {"embed_tokens.weight": (vocab, size)}
    if width < vocab:
        built |= {"d2t": (width,), "t2d": (vocab,)}
    needs_embedding = engine in ("speculators", "eagle")
    optional = frozenset({"t2d"} if needs_embedding else {"t2d", "embed_tokens.weight"})
    return Replay(built, lambda name: name.replace("midlayer.", "layers.0."), optional)
