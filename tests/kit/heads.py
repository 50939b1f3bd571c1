"""Draft heads for the tiny targets: random ones, which are always wrong somewhere, and ones that are exactly right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from treedraft.heads import (
    Eagle3Config,
    EagleConfig,
    Head,
    HydraConfig,
    MedusaConfig,
    build_head,
    default_taps,
)
from treedraft.infer import Target, complete
from treedraft.infer.shape import layer_shape
from treedraft.train.step import Objective, step_totals, train_step

from .targets import ring_law


def medusa_config(target: Target, num_heads: int = 3, **changes: object) -> MedusaConfig:
    """A configuration that fits ``target``."""
    facts = target.facts
    sizes = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size, "num_target_layers": facts.num_layers}
    return MedusaConfig(num_heads=num_heads, **sizes, **changes)  # type: ignore[arg-type]


class PlainScores:
    """Candidates ranked by the logits alone; draws carry their laws where ``keeps_laws``."""

    keeps_laws = False

    def __call__(self, logits: Tensor, positions: Tensor, ids: Tensor | None) -> Tensor:
        return logits

    def confidence(self, scores: Tensor) -> Tensor:
        return scores.log_softmax(-1)

    def law(self, logits: Tensor, ids: Tensor | None) -> Tensor:
        return logits.log_softmax(-1)


KINDS = ("medusa", "hydra", "hydra++", "eagle", "hass", "eagle3", "eagle3.1")
"""Every kind of trained head, with the options that change what it computes."""


def any_config(target: Target, kind: str, steps: int = 3, draft_ids: Tensor | None = None) -> Any:
    """A configuration of the kind that fits ``target``."""
    facts, width = target.facts, None if draft_ids is None else len(draft_ids)
    sizes = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size, "num_target_layers": facts.num_layers}
    sizes["draft_vocab_size"] = width  # type: ignore[assignment]
    if kind == "medusa":
        return MedusaConfig(steps, **sizes)  # type: ignore[arg-type]
    layer = layer_shape(target.config)
    if kind in ("hydra", "hydra++"):
        return HydraConfig(steps, num_layers=2, layer=layer if kind == "hydra++" else None, **sizes)  # type: ignore[arg-type]
    if kind in ("eagle", "hass"):
        return EagleConfig(layer=layer, steps=1 if kind == "eagle" else steps, **sizes)  # type: ignore[arg-type]
    taps, new = default_taps(facts.num_layers), kind == "eagle3.1"
    return Eagle3Config(tapped_layers=taps, layer=layer, steps=steps, fc_norm=new, norm_output=new, **sizes)  # type: ignore[arg-type]


def any_head(target: Target, kind: str, steps: int = 3, draft_ids: Tensor | None = None, seed: int = 0) -> Head:
    """A head of the kind with random weights."""
    head = build_head(any_config(target, kind, steps, draft_ids), target.layers(), draft_ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            draw = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.15 * draw if parameter.dim() > 1 else parameter + 0.15 * draw)
    return head


def random_heads(target: Target, num_heads: int = 3, seed: int = 0, draft_ids: Tensor | None = None) -> Head:
    """Heads with random weights."""
    size = None if draft_ids is None else len(draft_ids)
    head = build_head(medusa_config(target, num_heads, draft_vocab_size=size), target.layers(), draft_ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return head


def ring_heads(target: Target, num_heads: int = 3) -> Head:
    """Heads that are right at every depth on ``markov_ring``: head k's output layer is the law k + 2 tokens on."""
    head: Any = build_head(medusa_config(target, num_heads, output="own"), target.layers())
    next_token = ring_law().argmax(-1)
    weight = target.output_layer().weight  # [V, H], column i the logits after token i
    with torch.no_grad():
        for k, own in enumerate(head.own_output):
            source = torch.arange(len(next_token))
            for _ in range(k + 1):
                source = next_token[source]
            own.copy_(weight[:, source])
    return head


def trained_heads(target: Target, num_heads: int = 3, steps: int = 50, kind: str = "medusa") -> Head:
    """Heads after a few optimiser steps on the target's own greedy text."""
    prompts = [[13 + 7 * i % 83, 13 + 11 * i % 83] for i in range(8)]
    rows = [
        [*p, *c.ids] for p, c in zip(prompts, complete(target, prompts, max_new_tokens=30, end_ids=()), strict=True)
    ]
    tokens = torch.tensor(rows)
    mask = torch.ones_like(tokens)
    mask[:, :2] = 0
    head = build_head(any_config(target, kind, num_heads), target.layers())
    features = target.features(tokens, torch.full((8,), tokens.shape[1]), head.taps).clone()
    totals = step_totals(tokens, mask, head.steps, None, "count")
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2 if kind == "medusa" else 3e-3)
    for _ in range(steps):
        loss, _ = train_step(head, features, None, tokens, mask, totals, Objective())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head
