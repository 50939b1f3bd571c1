"""EAGLE-1/2/3 heads of published checkpoints: configuration, tapped layers, draft vocabulary, tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..base import HeadError, TargetFacts, TargetLayers
from ..eagle import EagleConfig
from ..eagle3 import Eagle3Config, default_taps
from ..files import build_head
from . import eagle
from .filling import IGNORED, Imported, compare_rows, fill, size_faults

_OTHERS = ("d2t", "t2d", "embed_tokens.weight")


def import_eagle(
    config: Mapping[str, Any], tensors: dict[str, Tensor], target: TargetLayers, facts: TargetFacts
) -> Imported:
    """EAGLE heads of any published layout. Raises HeadError with all faults."""
    faults: list[str] = []
    notes: list[str] = []
    inner = config.get("transformer_layer_config")
    if inner is not None and not isinstance(inner, dict):
        raise HeadError("transformer_layer_config must be an object")
    flat = {**config, **(inner or {})}
    three = any(name.endswith("hidden_norm.weight") for name in tensors) or _says_eagle3(config)
    faults += size_faults(flat, facts) + _unsupported(flat, config, three)
    shape = eagle.layer_shape(flat, facts.hidden_size, faults)
    if not (three or "fc.weight" in tensors):
        faults.append(f"neither Medusa nor EAGLE heads: tensors are {', '.join(sorted(tensors)[:12]) or 'none'}")
    if shape is None or (not three and "fc.weight" not in tensors):
        raise HeadError("the checkpoint cannot be imported: " + "; ".join(faults))
    if flat.get("rope_theta") is None and not flat.get("rope_parameters"):
        notes.append("no rope_theta: 10000, as engines take it")
    bias = not three and "fc.bias" in tensors and bool(tensors["fc.bias"].any())
    sizes: dict[str, Any] = {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "num_target_layers": facts.num_layers,
    }
    ids: Tensor | None = None
    order: Tensor | None = None
    if three:
        taps = _taps(config, facts.num_layers, faults, notes)
        ids, order = _draft_ids(flat, tensors, facts.vocab_size, faults)
        made: Any = _made(
            lambda: Eagle3Config(
                tapped_layers=taps,
                layer=shape,
                draft_vocab_size=None if ids is None else len(ids),
                fc_norm=flat.get("fc_norm") is True,
                norm_output=flat.get("norm_output") is True,
                **sizes,
            ),
            faults,
        )
        layer = "midlayer" if any(name.startswith("midlayer.") for name in tensors) else "layers.0"
        table = eagle.names("eagle3", layer, len(taps), made.fc_norm)
        if "lm_head.weight" not in tensors and ids is None and flat.get("draft_vocab_size") in (None, facts.vocab_size):
            notes.append("no lm_head.weight: the target's own output layer")
            table.pop("lm_head.weight")
    else:
        made = _made(lambda: EagleConfig(layer=shape, fc_bias=bias, **sizes), faults)
        table = eagle.names("eagle", fc_bias=bias)
    if "embed_tokens.weight" in tensors:
        compare_rows("embed_tokens.weight", tensors["embed_tokens.weight"], target.embedding, faults)
    allowed = {*_OTHERS, *IGNORED} if three else {"embed_tokens.weight", *(() if bias else ("fc.bias",))}
    if not three and "lm_head.weight" in tensors:
        compare_rows("lm_head.weight", tensors["lm_head.weight"], target.output.weight, faults)
        allowed.add("lm_head.weight")
    if order is not None and "lm_head.weight" in tensors and len(tensors["lm_head.weight"]) == len(order):
        tensors = {**tensors, "lm_head.weight": tensors["lm_head.weight"][order]}
        notes.append("d2t was not ascending: rows of lm_head were put in order")
    head = build_head(made, target, None if ids is None else ids.to(target.output.weight.device))
    fill(head, table, tensors, faults, allowed, set(head.state_dict()) - set(table))
    return Imported(head, notes)


def _made(make: Any, faults: list[str]) -> Any:
    """The configuration; raises all faults together with its own."""
    try:
        return make()
    except HeadError as error:
        raise HeadError("the checkpoint cannot be imported: " + "; ".join([*faults, str(error)])) from error


def _says_eagle3(config: Mapping[str, Any]) -> bool:
    architectures = config.get("architectures")
    named = isinstance(architectures, list) and any("eagle3" in str(name).lower() for name in architectures)
    return named or config.get("speculators_model_type") == "eagle3"


def _unsupported(flat: Mapping[str, Any], config: Mapping[str, Any], three: bool) -> list[str]:
    """Settings that these heads cannot follow."""
    found = [
        f"{name} is {flat[name]!r}, which these heads do not have"
        for name in (
            "attention_bias",
            "mlp_bias",
            "qkv_bias",
            "norm_before_residual",
            "norm_before_fc",
            "quantization_config",
        )
        if flat.get(name)
    ]
    if flat.get("num_hidden_layers", 1) != 1:
        found.append(f"num_hidden_layers is {flat['num_hidden_layers']!r}, these heads have one layer")
    if flat.get("hidden_act", "silu") != "silu":
        found.append(f"hidden_act is {flat['hidden_act']!r}, expected silu")
    if flat.get("model_type") not in (None, "llama", "eagle", "eagle3"):
        found.append(f"model_type is {flat['model_type']!r}: only layers of Llama's form are read")
    kind = config.get("speculators_model_type")
    if kind not in (None, "eagle3"):
        found.append(f"speculators_model_type is {kind!r}, eagle3 alone is read")
    if three and flat.get("target_hidden_size") not in (None, flat.get("hidden_size")):
        found.append(
            f"target_hidden_size is {flat['target_hidden_size']!r}, the heads' own {flat.get('hidden_size')!r}"
        )
    return found


def _taps(config: Mapping[str, Any], num_layers: int, faults: list[str], notes: list[str]) -> tuple[int, ...]:
    """The layers whose entering hidden states are read, from either counting or both."""
    inner = config.get("eagle_config")
    nested = inner.get(eagle.TOP_IDS) if isinstance(inner, dict) else None
    top = config.get(eagle.TOP_IDS)
    lists = {"top": top, "nested": nested}
    for where, ids in lists.items():
        if ids is not None and not (isinstance(ids, list) and all(type(k) is int for k in ids)):
            faults.append(f"{eagle.TOP_IDS} ({where}) must be a list of whole numbers, got {ids!r}")
            return default_taps(num_layers)
    if top is not None and nested is not None and [k + 1 for k in nested] != top:
        faults.append(
            f"{eagle.TOP_IDS} is {top} and in eagle_config {nested}: the second counts outputs, one less each"
        )
    if top is not None:
        return tuple(top)
    if nested is not None:
        notes.append(f"tapped layers {nested} of eagle_config count outputs: entering layers {[k + 1 for k in nested]}")
        return tuple(k + 1 for k in nested)
    notes.append(f"no tapped layers named: the default {list(default_taps(num_layers))}")
    return default_taps(num_layers)


def _draft_ids(
    flat: Mapping[str, Any], tensors: Mapping[str, Tensor], vocab: int, faults: list[str]
) -> tuple[Tensor | None, Tensor | None]:
    """Ascending target ids of the draft vocabulary, None for all; and the order that rows must be put into, if any."""
    size, table = flat.get("draft_vocab_size"), tensors.get("d2t")
    if size is not None and (type(size) is not int or not 1 <= size <= vocab):
        faults.append(f"draft_vocab_size must lie in 1..{vocab}, got {size!r}")
        return None, None
    if table is None:
        if size not in (None, vocab):
            faults.append(f"draft_vocab_size is {size} and d2t is missing: which tokens these are cannot be known")
        return None, None
    if table.dtype not in (torch.int64, torch.int32) or table.dim() != 1 or len(table) != (size or len(table)):
        faults.append(f"d2t must be {size or 'some'} whole numbers, got {table.dtype} of shape {tuple(table.shape)}")
        return None, None
    ids = table.long() + torch.arange(len(table))
    if len(ids) == 0 or ids.min() < 0 or ids.max() >= vocab or len(ids.unique()) != len(ids):
        absolute = len(table) and bool((table.diff() > 0).all()) and 0 <= int(table[0]) <= int(table[-1]) < vocab
        hint = ": it looks like absolute ids" if absolute else ""
        faults.append(f"i + d2t[i] must be distinct ids in 0..{vocab - 1}{hint}")
        return None, None
    marks = tensors.get("t2d")
    ordered, order = ids.sort()
    if marks is not None:
        if marks.shape != (vocab,):
            faults.append(f"t2d has shape {tuple(marks.shape)}, expected {(vocab,)}")
        elif not torch.equal(marks.bool().nonzero()[:, 0], ordered):
            faults.append("t2d does not mark the tokens that d2t names")
    if len(ids) == vocab:
        return None, None if torch.equal(order, torch.arange(vocab)) else order
    return ordered, None if torch.equal(ids, ordered) else order
