"""How engines load Medusa heads: names, sizes from the configuration, and its traps."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from .files import Checkpoint
from .medusa import block_of
from .replay import Replay, needed


def rules(read: Checkpoint, engine: str) -> list[str]:
    """Settings that the engine needs, or reads in another way than they look."""
    config, names = read.config, set(read.tensors)
    faults = needed(config, ("model_type",) if engine == "vllm" else ())
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
        faults += needed(config, ("base_model_name_or_path",))
    wanted = "model.safetensors" if engine == "vllm" else "medusa_lm_head.safetensors"
    if engine in ("vllm", "tgi") and read.weights_file not in {"vllm": (*_ANY, wanted), "tgi": (wanted,)}[engine]:
        faults.append(f"{engine} reads {wanted}, the weights are in {read.weights_file}")
    return faults


_ANY = ("medusa_lm_head.safetensors", "model.safetensors.index.json")


def medusa_part(name: str) -> str:
    match = block_of(name)
    return "" if match is None else match[3]


def replay(read: Checkpoint, engine: str) -> Replay | None:
    """What the engine builds; None where the sizes are no whole numbers."""
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
