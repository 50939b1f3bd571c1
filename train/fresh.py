"""Heads to train: fresh ones of the configured kind, or earlier ones to go on from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ..data import Encoded, draft_vocabulary
from ..heads import (
    Eagle3Config,
    EagleConfig,
    Head,
    HydraConfig,
    MedusaConfig,
    build_head,
    default_taps,
    load_head,
)
from ..infer import Target
from ..infer.shape import layer_shape
from .config import HeadsConfig, TrainConfig
from .material import TrainError
from .settings import ConfigError

OPTIONS = {
    "medusa": {"num_heads", "num_layers", "output"},
    "hydra": {"num_heads", "num_layers", "output", "prefix_layer"},
    "eagle": {"unroll", "start"},
    "eagle3": {"unroll", "start", "tapped_layers", "fc_norm", "norm_output"},
}
"""Which settings speak of which kind; the others must be left at their defaults."""


def heads_faults(heads: HeadsConfig) -> list[str]:
    """Settings that the kind of head does not have."""
    known = set().union(*OPTIONS.values()) - OPTIONS[heads.kind]
    blank = HeadsConfig()
    return [
        f"heads.{name} does not apply to {heads.kind} heads, which have {', '.join(sorted(OPTIONS[heads.kind]))}"
        for name in sorted(known)
        if getattr(heads, name) != getattr(blank, name)
    ]


def steps_of(heads: HeadsConfig) -> int:
    """K: what the configuration trains."""
    if heads.kind in ("medusa", "hydra"):
        return heads.num_heads
    return heads.unroll or (1 if heads.kind == "eagle" else 7)


def fresh_heads(config: TrainConfig, target: Target, rows: Sequence[Encoded], say: Callable[[str], None]) -> Head:
    """Untrained heads for the target, with the draft vocabulary of the training rows if one is asked for.

    With heads.resume_from the weights are those of that folder, which must have the shape that is asked for. Raises
    ConfigError, HeadError or TrainError.
    """
    if config.heads.resume_from is not None:
        return _earlier_heads(config, target, rows, say)
    ids = _vocabulary(config.heads, target, rows, say)
    head = build_head(_shape(config.heads, target, ids, rows), target.layers(), ids)
    if config.heads.kind == "eagle3":
        say(f"tapped layers: {list(head.taps)} of {target.num_layers}")
    if config.heads.start == "target" and config.heads.kind == "eagle":
        scales = balance_fc(head, target, rows[0].ids)
        say("started with fc taking in embeddings of size {:.2g} and features of size {:.2g} alike".format(*scales))
    elif config.heads.start == "target":
        copied = start_from_target(head, target)
        say(f"started from the target's last layer: {', '.join(copied)}")
    return head.to(target.device)


def always_drafted(target: Target) -> set[int]:
    """Ids that belong to every draft vocabulary: end tokens and special ones, chat markers among them."""
    specials = getattr(target.tokenizer, "all_special_ids", None) or []
    return {*target.end_ids, *(i for i in specials if i < target.vocab_size)}


def _vocabulary(
    heads: HeadsConfig, target: Target, rows: Sequence[Encoded], say: Callable[[str], None]
) -> Tensor | None:
    if heads.draft_vocab_size is None:
        return None
    chosen = draft_vocabulary(rows, target.facts.vocab_size, heads.draft_vocab_size, always_drafted(target))
    say(f"draft vocabulary: {heads.draft_vocab_size} ids cover {chosen.coverage:.2%} of supervised tokens")
    return None if chosen.ids is None else chosen.ids.to(target.device)


def _shape(heads: HeadsConfig, target: Target, ids: Tensor | None, rows: Sequence[Encoded]) -> Any:
    facts = target.facts
    sizes = {
        "hidden_size": facts.hidden_size,
        "vocab_size": facts.vocab_size,
        "num_target_layers": facts.num_layers,
        "draft_vocab_size": None if ids is None else len(ids),
    }
    longest = max((len(row.ids) for row in rows), default=0)
    match heads.kind:
        case "medusa":
            return MedusaConfig(heads.num_heads, num_layers=heads.num_layers, output=heads.output, **sizes)
        case "hydra":
            return HydraConfig(
                heads.num_heads,
                num_layers=heads.num_layers,
                output=heads.output,
                layer=layer_shape(target.config) if heads.prefix_layer else None,
                trained_length=longest,
                **sizes,
            )
        case "eagle":
            layer = layer_shape(target.config)
            return EagleConfig(layer=layer, steps=steps_of(heads), trained_length=longest, **sizes)
        case "eagle3":
            return Eagle3Config(
                layer=layer_shape(target.config),
                tapped_layers=heads.tapped_layers or default_taps(facts.num_layers),
                steps=steps_of(heads),
                fc_norm=heads.fc_norm,
                norm_output=heads.norm_output,
                trained_length=longest,
                **sizes,
            )
        case _:
            raise ConfigError(f"heads.kind {heads.kind} cannot be trained")


def _earlier_heads(config: TrainConfig, target: Target, rows: Sequence[Encoded], say: Callable[[str], None]) -> Head:
    folder = config.heads.resume_from
    assert folder is not None
    head = load_head(folder, target.facts, target.layers())
    ids = head.draft_ids
    say(f"going on from {folder}")
    if _free_vocabulary(head) and config.heads.draft_vocab_size != (None if ids is None else len(ids)):
        ids = _vocabulary(config.heads, target, rows, say)
    else:
        say("its draft vocabulary is kept")
    wanted = _shape(config.heads, target, ids, rows)
    if _sizes_of(wanted, head) != _sizes_of(head.config, head):
        raise TrainError(f"{folder} holds other heads than heads asks for: {head.config}, expected {wanted}")
    again = build_head(wanted, target.layers(), ids)
    again.load_state_dict(head.state_dict())
    return again.to(target.device)


def _free_vocabulary(head: Head) -> bool:
    """Whether the draft vocabulary may change: the output layer is the target's, no weight belongs to a token."""
    return isinstance(head.config, EagleConfig) or getattr(head.config, "output", "own") == "shared"


def _sizes_of(shape: Any, head: Head) -> dict[str, Any]:
    """What two configurations must share for the weights of one to fit the other."""
    free = {"steps", "trained_length"} | ({"draft_vocab_size"} if _free_vocabulary(head) else set())
    return {name: value for name, value in asdict(shape).items() if name not in free}


@torch.no_grad()
def start_from_target(head: Head, target: Target) -> list[str]:
    """Copies what fits of the target's last decoder layer and final norm; returns what was copied, by the head's names.

    For EAGLE-3, whose attention's input is twice as wide: the target's matrices go to the state's half, the embedding's
    half starts at zero. Raises ConfigError if the target's layers are not named as Llama's are.
    """
    module: Any = head
    source: Any = _last_layer(target)
    pairs = [(f"layer.mlp.{n}", module.layer.mlp, source.mlp, n) for n in ("gate_proj", "up_proj", "down_proj")]
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    pairs += [(f"layer.self_attn.{n}", module.layer.self_attn, source.self_attn, n) for n in names]
    copied = []
    for name, ours, theirs, part in pairs:
        mine, given = getattr(ours, part).weight, _weight(getattr(theirs, part))
        mine[:, mine.shape[1] - given.shape[1] :] = given
        mine[:, : mine.shape[1] - given.shape[1]] = 0
        copied.append(name)
    module.layer.post_attention_layernorm.weight.copy_(source.post_attention_layernorm.weight)
    module.fc.weight[:, : -module.fc.out_features] = 0  # the last feature passes: the highest tapped one
    module.fc.weight[:, -module.fc.out_features :] = torch.eye(module.fc.out_features)
    module.hidden_norm.weight.copy_(source.input_layernorm.weight)
    final: Any = target.model.base_model
    module.norm.weight.copy_(final.norm.weight)
    return copied


@torch.no_grad()
def balance_fc(head: Head, target: Target, text: Sequence[int]) -> tuple[float, float]:
    """Draws an EAGLE-1 head's ``fc`` such that embedding and feature enter it with one size, and gives their two sizes.

    Embeddings are an order of magnitude smaller than features: of columns drawn alike the drafted token is hardly
    heard. Sizes are root mean squares, of the features those of ``text``, cut to 256 tokens. Of the target's layers
    nothing is copied: they continue a residual stream, while this layer writes the normed feature.
    """
    module: Any = head
    tokens = torch.tensor([list(text[:256])])
    features = target.features(tokens, torch.tensor([tokens.shape[1]]), head.taps)
    scales = [target.layers().embedding.float().pow(2).mean().sqrt(), features.float().pow(2).mean().sqrt()]
    width = module.fc.out_features
    nn.init.normal_(module.fc.weight, std=(2 * width) ** -0.5)
    for half, scale in zip(module.fc.weight.split(width, 1), scales, strict=True):
        half.div_(scale.to(half.device))
    return scales[0].item(), scales[1].item()


def _last_layer(target: Target) -> nn.Module:
    layers: Any = getattr(target.model.base_model, "layers", None)
    if layers is None or not hasattr(layers[-1], "self_attn") or not hasattr(layers[-1], "mlp"):
        raise ConfigError("heads.start target needs a target whose layers are named as Llama's are; use fresh")
    return layers[-1]


def _weight(linear: Any) -> Tensor:
    """A linear layer's weight, unpacked if it was packed."""
    return linear.dense_weight() if hasattr(linear, "dense_weight") else linear.weight
