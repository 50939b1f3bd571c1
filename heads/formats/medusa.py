"""Medusa heads in the layouts of vLLM, TGI and the paper's repository (which TensorRT-LLM reads).

H hidden size   V target vocabulary   W draft vocabulary   K heads   L residual blocks in a head

The layouts differ in names and in where the output layer comes from: vLLM reads one for each head or one for all from
the folder, TGI one for each head or the target's own, the repository one for each head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import TargetLayers
from ..medusa import Medusa, MedusaConfig
from .files import Checkpoint

_PREFIX = "medusa_heads."
_BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
_VLLM_BLOCK = re.compile(r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)")
_OUTPUT = re.compile(r"(\d+)\.(\d+)\.weight")
_VLLM_OUTPUT = re.compile(r"lm_heads\.(\d+)\.weight")


def to_checkpoint(head: Medusa, engine: str, target: str, dtype: torch.dtype) -> Checkpoint:
    """The heads for one engine, weights rounded to ``dtype``. Draft vocabularies become the whole vocabulary."""
    config = head.config
    own = whole_outputs(head)
    shared_rows = head._target[0].output.weight
    vllm = engine == "vllm"
    tensors: dict[str, Tensor] = {}
    for name, value in head.blocks.state_dict().items():
        k, layer, _, part = name.split(".")
        tensors[f"blocks.{k}.layers.{layer}.{part}" if vllm else name] = value
    from_target = engine == "tgi" and not own and config.num_layers == 1
    if vllm and not own:
        tensors["lm_head.weight"] = shared_rows
    elif not from_target:
        for k in range(config.num_heads):
            rows = own[k] if own else shared_rows
            tensors[f"lm_heads.{k}.weight" if vllm else f"{k}.{config.num_layers}.weight"] = rows
    sizes = {"hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
    precision = str(dtype).removeprefix("torch.")
    if vllm:
        # Keys with "num" and "heads" or "layers" in them are all renamed by its reader: there may be one of each.
        content: dict[str, Any] = {"model_type": "medusa", "architectures": ["MedusaModel"], **sizes}
        content |= {"num_heads": config.num_heads, "num_hidden_layers": config.num_layers}
        content |= {"medusa_fc_bias": True, "original_lm_head": not own, "truncated_vocab_size": config.vocab_size}
        file = "model.safetensors"
    else:
        # No "architectures": with it TGI looks for another kind of head.
        content = {"model_type": "medusa", "base_model_name_or_path": target, **sizes}
        content |= {"medusa_num_heads": config.num_heads, "medusa_num_layers": config.num_layers}
        file = "medusa_lm_head.safetensors"
    content |= {"tie_word_embeddings": False, "torch_dtype": precision}
    rounded = {name: value.detach().to(dtype) for name, value in tensors.items()}
    return Checkpoint(content, rounded, file, pickled=engine in ("medusa", "tensorrt-llm"))


def whole_outputs(head: Medusa) -> list[Tensor]:
    """The heads' own output layers over the whole vocabulary [V, H] each; none where they share the target's.

    Rows outside a draft vocabulary are the target's, from which training started.
    """
    if head.own_output is None:
        return []
    if head.draft_ids is None:
        return [own.detach() for own in head.own_output]
    found = []
    for own in head.own_output:
        rows = head._target[0].output.weight.detach().float().clone()
        rows[head.draft_ids] = own.detach().float()
        found.append(rows)
    return found


def is_medusa(config: Mapping[str, Any], names: set[str]) -> bool:
    if config.get("model_type") == "medusa" or "medusa_num_heads" in config:
        return True
    return any(_BLOCK.fullmatch(name.removeprefix(_PREFIX)) or _VLLM_BLOCK.fullmatch(name) for name in names)


def read_config(
    config: Mapping[str, Any], tensors: Mapping[str, Tensor], target: TargetLayers, num_target_layers: int
) -> tuple[MedusaConfig, dict[str, str], list[str]]:
    """The configuration, our tensor names to the file's (for all that is read), and notes.

    Heads whose output layers are all the target's own rows share the target's.
    """
    names = set(tensors)
    blocks = [match for name in names if (match := block_of(name))]
    num_heads = 1 + max((int(match[1]) for match in blocks), default=0)
    num_layers = 1 + max((int(match[2]) for match in blocks), default=0)
    heads_said = config.get("medusa_num_heads", config.get("num_medusa_heads", config.get("num_heads")))
    layers_said = config.get("medusa_num_layers", config.get("num_medusa_layers", config.get("num_hidden_layers")))
    num_heads = max(num_heads, heads_said) if type(heads_said) is int and heads_said <= 64 else num_heads
    num_layers = max(num_layers, layers_said) if type(layers_said) is int and layers_said <= 64 else num_layers
    vllm = any(_VLLM_BLOCK.fullmatch(name) for name in names)
    prefix = _PREFIX if any(name.startswith(_PREFIX) for name in names) else ""
    table = {}
    for k in range(num_heads):
        for layer in range(num_layers):
            for part in ("weight", "bias"):
                theirs = f"blocks.{k}.layers.{layer}.{part}" if vllm else f"{prefix}{k}.{layer}.linear.{part}"
                if part == "weight" or theirs in names or not _biasless(config, names):
                    table[f"blocks.{k}.{layer}.linear.{part}"] = theirs
    outputs = _output_names(names, num_heads, num_layers, prefix)
    notes = [f"{theirs} is the target's own output layer" for theirs in sorted(set(outputs))]
    vocab, size = target.output.weight.shape
    own = bool(outputs) and not all(name in tensors and _same(tensors[name], target.output.weight) for name in outputs)
    if own:
        table |= {f"own_output.{k}": theirs for k, theirs in enumerate(outputs)}
        notes = []
    made = MedusaConfig(
        num_heads, size, vocab, num_target_layers, num_layers=num_layers, output="own" if own else "shared"
    )
    return made, table, notes


def shared_names(tensors: Mapping[str, Tensor]) -> set[str]:
    """Output layers in the file, by name."""
    found = {name for name in tensors if _VLLM_OUTPUT.fullmatch(name) or name == "lm_head.weight"}
    return found | {name for name in tensors if _OUTPUT.fullmatch(name.removeprefix(_PREFIX))}


def _biasless(config: Mapping[str, Any], names: set[str]) -> bool:
    """Whether the layout says that blocks have no biases, which are then zero: vLLM's without ``medusa_fc_bias``."""
    return config.get("medusa_fc_bias") is False and not any(m[3] == "bias" for n in names if (m := block_of(n)))


def _output_names(names: set[str], num_heads: int, num_layers: int, prefix: str) -> list[str]:
    """The file's output layer of each head; empty where heads share the target's, which is then not in the file."""
    for form in ("lm_heads.{k}.weight", prefix + "{k}." + str(num_layers) + ".weight"):
        wanted = [form.format(k=k) for k in range(num_heads)]
        if form.startswith("lm_heads") and names & set(wanted) == {wanted[0]} and num_heads > 1:
            return [wanted[0]] * num_heads
        if names & set(wanted):
            return wanted
    return ["lm_head.weight"] * num_heads if "lm_head.weight" in names else []


def block_of(name: str) -> re.Match[str] | None:
    """Head, block and part of a block's tensor, by either of the two namings."""
    return _BLOCK.fullmatch(name.removeprefix(_PREFIX)) or _VLLM_BLOCK.fullmatch(name)


def _same(one: Tensor, rows: Tensor) -> bool:
    return one.shape == rows.shape and torch.equal(one, rows.detach().cpu().to(one.dtype))
