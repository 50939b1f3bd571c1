"""Draft heads for the tiny targets: random ones, which are always wrong somewhere, and ones that are exactly right."""

from __future__ import annotations

import torch
from torch import Tensor

from treedraft.heads import Medusa, MedusaConfig, build_head
from treedraft.infer import Target, complete
from treedraft.train.step import Objective, step_totals, train_step

from .targets import ring_law


def medusa_config(target: Target, num_heads: int = 3, **changes: object) -> MedusaConfig:
    """A configuration that fits ``target``."""
    facts = target.facts
    sizes = {"hidden_size": facts.hidden_size, "vocab_size": facts.vocab_size, "num_target_layers": facts.num_layers}
    return MedusaConfig(num_heads=num_heads, **sizes, **changes)  # type: ignore[arg-type]


def random_heads(target: Target, num_heads: int = 3, seed: int = 0, draft_ids: Tensor | None = None) -> Medusa:
    """Heads with random weights."""
    size = None if draft_ids is None else len(draft_ids)
    head = build_head(medusa_config(target, num_heads, draft_vocab_size=size), target.output_layer(), draft_ids)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return head


def ring_heads(target: Target, num_heads: int = 3) -> Medusa:
    """Heads that are right at every depth on ``markov_ring``: head k's output layer is the law k + 2 tokens on."""
    head = build_head(medusa_config(target, num_heads, output="own"), target.output_layer())
    next_token = ring_law().argmax(-1)
    weight = target.output_layer().weight  # [V, H], column i the logits after token i
    assert head.own_output is not None
    with torch.no_grad():
        for k, own in enumerate(head.own_output):
            source = torch.arange(len(next_token))
            for _ in range(k + 1):
                source = next_token[source]
            own.copy_(weight[:, source])
    return head


def trained_heads(target: Target, num_heads: int = 3, steps: int = 50) -> Medusa:
    """Heads after a few optimiser steps on the target's own greedy text."""
    prompts = [[13 + 7 * i % 83, 13 + 11 * i % 83] for i in range(8)]
    rows = [
        [*p, *c.ids] for p, c in zip(prompts, complete(target, prompts, max_new_tokens=30, end_ids=()), strict=True)
    ]
    tokens = torch.tensor(rows)
    mask = torch.ones_like(tokens)
    mask[:, :2] = 0
    features = target.features(tokens, torch.full((8,), tokens.shape[1]), (target.num_layers,)).clone()
    head = build_head(medusa_config(target, num_heads), target.output_layer())
    totals = step_totals(tokens, mask, num_heads, None, "count")
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for _ in range(steps):
        loss, _ = train_step(head, features, None, tokens, mask, totals, Objective())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return head
