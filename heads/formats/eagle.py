"""EAGLE heads in the layouts of engines: names, the flat configuration, and that of the speculators library.

H hidden size   V target vocabulary   W draft vocabulary   C tapped layers

Two countings of tapped layers are in use. This project, vLLM, llama.cpp and speculators name the hidden state that
*enters* layer k; SGLang, SpecForge and TensorRT-LLM name the layer whose *output* it is, one less. Both are written.
``d2t`` holds offsets: draft token i is the target's token i + d2t[i]; ``t2d`` marks the target's tokens in the draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ..eagle import Eagle
from ..eagle3 import Eagle3
from ..layer import LayerShape
from .engines import steps_served
from .files import Checkpoint

TOP_IDS = "eagle_aux_hidden_state_layer_ids"
LAYER_PARTS = (
    *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
    *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)
ARCHITECTURES = {
    ("eagle", "vllm"): "LlamaForCausalLM",  # vLLM puts "Eagle" in front
    ("eagle", "sglang"): "LlamaForCausalLMEagle",
    ("eagle", "eagle"): "LlamaForCausalLM",
    ("eagle3", "speculators"): "Eagle3Speculator",
}


def names(
    kind: str, layer: str = "layers.0", taps: int = 0, fc_norm: bool = False, fc_bias: bool = False
) -> dict[str, str]:
    """Our tensor names to those of published checkpoints, whose decoder layer is called ``layer``."""
    table = {"fc.weight": "fc.weight"} | {f"layer.{part}": f"{layer}.{part}" for part in LAYER_PARTS}
    if fc_bias:
        table["fc.bias"] = "fc.bias"
    if kind == "eagle3":
        table |= {f"{part}.weight": f"{layer}.{part}.weight" for part in ("input_layernorm", "hidden_norm")}
        table |= {"norm.weight": "norm.weight", "lm_head.weight": "lm_head.weight"}
        table |= {f"fc_norm.{i}.weight": f"fc_norm.{i}.weight" for i in range(taps if fc_norm else 0)}
    return table


def to_checkpoint(
    head: Eagle | Eagle3, engine: str, target: str, special: Mapping[str, Any], dtype: torch.dtype
) -> Checkpoint:
    """The head for one engine, weights rounded to ``dtype``.

    special: the target's begin and end token ids and its architectures, by their names in its configuration
    """
    config, state = head.config, head.state_dict()
    three = isinstance(head, Eagle3)
    if three:
        layer = "midlayer" if engine == "eagle" else "layers.0"
        table = names("eagle3", layer, len(head.config.tapped_layers), head.config.fc_norm)
    else:
        table = names("eagle", fc_bias=head.config.fc_bias)
    tensors = {theirs: state[ours].detach().to(dtype) for ours, theirs in table.items()}
    embedding = head._target[0].embedding
    if engine in ("speculators", "eagle"):  # the others read the target's own
        tensors["embed_tokens.weight"] = embedding.detach().to(dtype)
    if not three and engine == "sglang" and "fc.bias" not in tensors:
        tensors["fc.bias"] = torch.zeros(config.hidden_size, dtype=dtype)  # absent, it would be random there
    if three and head.draft_ids is not None and len(head.draft_ids) < config.vocab_size:
        tensors |= offsets(head.draft_ids.cpu(), config.vocab_size)
    content = flat_config(head, special, dtype)
    content["architectures"] = [ARCHITECTURES.get((config.kind, engine), "LlamaForCausalLMEagle3")]
    if engine == "speculators":
        content = _speculators_config(head, content, target, special)
    return Checkpoint(content, tensors)


def offsets(draft_ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """``d2t`` [W] int64 and ``t2d`` [V] bool of ascending target ids [W].

    >>> offsets(torch.tensor([1, 4]), 5)
    {'d2t': tensor([1, 3]), 't2d': tensor([False,  True, False, False,  True])}
    """
    marks = torch.zeros(vocab_size, dtype=torch.bool)
    marks[draft_ids] = True
    return {"d2t": draft_ids - torch.arange(len(draft_ids)), "t2d": marks}


def flat_config(head: Eagle | Eagle3, special: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The configuration that vLLM, SGLang, TensorRT-LLM, llama.cpp and SpecForge read, without ``architectures``."""
    config = head.config
    shape = asdict(config.layer)
    rope = shape.pop("rope_parameters")
    content = {"architectures": [], "model_type": "llama", **shape, "num_hidden_layers": 1, "hidden_act": "silu"}
    content |= rope_keys(rope) | {"vocab_size": config.vocab_size}
    content |= {"attention_bias": False, "mlp_bias": False, "bias": bool(getattr(config, "fc_bias", False))}
    content |= {"tie_word_embeddings": False, "torch_dtype": str(dtype).removeprefix("torch.")}
    content |= {name: special[name] for name in ("bos_token_id", "eos_token_id") if special.get(name) is not None}
    if isinstance(head, Eagle3):
        content |= _eagle3_keys(head)
    return content


def rope_keys(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings in the old names (base, scaling) and in the new one, which say the same.

    >>> rope_keys({"rope_type": "default", "rope_theta": 1e5})["rope_theta"]
    100000.0
    """
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    plain = scaling.get("rope_type", "default") == "default"
    return {
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": None if plain else scaling,
        "rope_parameters": dict(rope),
    }


def _eagle3_keys(head: Eagle3) -> dict[str, Any]:
    config = head.config
    taps = list(config.tapped_layers)
    return {
        "draft_vocab_size": head.candidates,
        "target_hidden_size": config.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "num_aux_hidden_states": len(taps),
        TOP_IDS: taps,
        "eagle_config": {"use_aux_hidden_state": True, TOP_IDS: [k - 1 for k in taps]},
    }


def _speculators_config(
    head: Eagle | Eagle3, flat: dict[str, Any], target: str, special: Mapping[str, Any]
) -> dict[str, Any]:
    kept = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", TOP_IDS)
    apart = {*kept, "architectures", "eagle_config", "num_aux_hidden_states", "target_hidden_size", "bias"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": steps_served(head.config)}
    proposal |= {"accept_tolerance": 0.0, "verifier_accept_k": 1}
    verifier = {"name_or_path": target, "architectures": list(special.get("architectures") or ["LlamaForCausalLM"])}
    return {
        "architectures": flat["architectures"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.9.0",
        **{name: flat[name] for name in kept},
        "target_hidden_size": None,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": flat["torch_dtype"],
        "transformer_layer_config": {name: value for name, value in flat.items() if name not in apart},
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
    }


def layer_shape(config: Mapping[str, Any], hidden_size: int, faults: list[str]) -> LayerShape | None:
    """The decoder layer that a flat configuration describes; what is wrong with it goes to ``faults``."""
    wanted = ("hidden_size", "intermediate_size", "num_attention_heads")
    wrong = [
        f"{name} must be a whole number, got {config.get(name)!r}" for name in wanted if not _is_size(config.get(name))
    ]
    if wrong:
        faults += wrong
        return None
    heads = config["num_attention_heads"]
    sizes = {
        "num_key_value_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // heads,
        "max_position_embeddings": config.get("max_position_embeddings", 2048),
    }
    wrong = [f"{name} must be a whole number, got {value!r}" for name, value in sizes.items() if not _is_size(value)]
    eps = config.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or not 0 <= eps < 1:
        wrong.append(f"rms_norm_eps must be a small number, got {eps!r}")
    rope = _rope_parameters(config, wrong)
    if wrong:
        faults += wrong
        return None
    shape = LayerShape(
        **{name: config[name] for name in wanted}, **sizes, rms_norm_eps=float(eps), rope_parameters=rope
    )
    faults += shape.faults(hidden_size)
    return shape


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 24


def _rope_parameters(config: Mapping[str, Any], faults: list[str]) -> dict[str, Any]:
    new, theta, scaling = config.get("rope_parameters"), config.get("rope_theta"), config.get("rope_scaling")
    if not all(value is None or isinstance(value, dict) for value in (new, scaling)):
        faults.append("rope_parameters and rope_scaling must be objects")
        return {}
    if new and theta is not None and new.get("rope_theta", theta) != theta:
        faults.append(f"rope_theta is {theta} and in rope_parameters {new['rope_theta']}")
    rope = dict(new or scaling or {})
    rope["rope_type"] = rope.get("rope_type") or rope.pop("type", "default")
    rope.setdefault("rope_theta", 10000.0 if theta is None else theta)
    if not isinstance(rope["rope_theta"], int | float) or rope["rope_theta"] <= 0:
        faults.append(f"rope_theta must be a positive number, got {rope['rope_theta']!r}")
    return rope
