"""What identifies a target: sizes and hashes that heads record and compare."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..heads import PackedLinear, PackedPart, TargetFacts


def facts_of(
    model: PreTrainedModel, tokenizer: Any, output_weight: Tensor, num_layers: int, name: str, adapter_hash: str = ""
) -> TargetFacts:
    """The facts of a model and its tokenizer. The vocabulary is the model's own, which may exceed the tokenizer's."""
    vocab_size, hidden_size = output_weight.shape
    return TargetFacts(
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        num_layers=num_layers,
        name=name or model.config.name_or_path or type(model).__name__,
        output_hash=_tensor_hash(output_weight),
        tokenizer_hash="" if tokenizer is None else _text_hash(json.dumps(sorted(tokenizer.get_vocab().items()))),
        chat_template_hash="" if tokenizer is None else _text_hash(tokenizer.chat_template or ""),
        adapter_hash=adapter_hash,
    )


def model_hash(model: torch.nn.Module) -> str:
    """A hash over the bytes of all parameters and buffers in the order of their names, packed weights unpacked."""
    digest = hashlib.sha256()
    tensors = dict(model.state_dict())
    wholes: dict[PackedLinear, Tensor] = {}  # unpacked once for all their parts
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            tensors[f"{name}.weight"] = module.dense_weight()
        elif isinstance(module, PackedPart):
            if module.whole not in wholes:
                wholes[module.whole] = module.whole.dense_weight()
            tensors[f"{name}.weight"] = module.dense_weight(wholes[module.whole])
        if isinstance(module, PackedLinear | PackedPart) and module.bias is not None:
            tensors[f"{name}.bias"] = module.bias
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(_bytes(tensors[name]))
    return digest.hexdigest()


def _tensor_hash(weight: Tensor) -> str:
    """Rounded to bf16 first, so that a model hashes alike whether it was loaded in fp32 or bf16."""
    return hashlib.sha256(_bytes(weight.detach().to(torch.bfloat16))).hexdigest()[:16]


def _text_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _bytes(tensor: Tensor) -> Any:
    """The tensor's bytes, without a copy where it lies in one piece on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
