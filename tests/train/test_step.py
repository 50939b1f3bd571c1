"""The train step: what counts, what padding does not change, and what the teacher says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kit import WORD_ID, markov_rand, tokenizer
from kit.training import tiny
from treedraft.data import Encoded, collate, encode_conversation, normalise
from treedraft.heads import MedusaConfig, Output, build_head
from treedraft.infer import Target
from treedraft.train import Objective, train_step
from treedraft.train.step import step_totals


def heads(target: Target, num_heads: int = 3, ids: Tensor | None = None, output: str = "shared") -> Any:
    facts = target.facts
    width = None if ids is None else len(ids)
    config = MedusaConfig(num_heads, facts.hidden_size, facts.vocab_size, facts.num_layers, 1, width, output)  # type: ignore[arg-type]
    made: Any = build_head(config, target.layers(), ids)
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for block in made.blocks.parameters():
            block.copy_(0.3 * torch.randn(block.shape, generator=draw))
    return made


def encoded(pad: str, *answers: str) -> list[Encoded]:
    words = tokenizer(pad=pad)
    rows = []
    for number, answer in enumerate(answers, 1):
        turns = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": answer}]
        record = normalise({"messages": turns}, number)
        row = encode_conversation(words, record, 64)  # type: ignore[arg-type]
        assert isinstance(row, Encoded)
        rows.append(row)
    return rows


def step(target: Target, head: Any, tokens: Tensor, mask: Tensor, lengths: Tensor, objective: Objective | None = None):
    objective = objective or Objective()
    features = target.features(tokens, lengths, head.taps)
    totals = step_totals(tokens, mask, head.steps, head.draft_ids, objective.outside)
    return train_step(head, features, features, tokens, mask, totals, objective)


@pytest.fixture(scope="module")
def ring() -> Target:
    return tiny("markov_ring")


@pytest.mark.parametrize("length", [32, 64])
@pytest.mark.parametrize("pad", [0, 3, 5])
def test_neither_the_amount_nor_the_value_of_padding_changes_the_loss(ring: Target, length: int, pad: int):
    head = heads(ring)
    row = encoded("<pad>", "w6 w7 w8 w9 w10")[0]
    bare = collate([row], 0)
    alone, counts = step(ring, head, bare.tokens, bare.mask, bare.lengths)
    tokens = torch.full((1, length), pad)
    tokens[0, : len(row.ids)] = torch.tensor(row.ids)
    mask = torch.zeros(1, length, dtype=torch.bool)
    mask[0, : len(row.ids)] = torch.tensor(row.mask, dtype=torch.bool)
    padded, padded_counts = step(ring, head, tokens, mask, bare.lengths)
    # The answer is w6 .. w10 <|end|>: six tokens, the first of which is the first root.
    assert counts.positions.tolist() == padded_counts.positions.tolist() == [5, 4, 3]
    torch.testing.assert_close(padded, alone, rtol=0, atol=1e-6)


def test_a_pad_token_that_is_the_end_token_changes_no_loss_and_the_end_stays_supervised(ring: Target):
    head, results = heads(ring), []
    for pad in ("<pad>", "<|end|>"):
        rows = encoded(pad, "w6 w7 w8", "w1 w2 w3 w4 w5 w6 w7 w8")
        end, pad_id = (WORD_ID[name] for name in ("<|end|>", pad))
        assert all(row.mask[row.ids.index(end, len(row.ids) - 1)] == 1 for row in rows)
        batch = collate(rows, pad_id)
        loss, counts = step(ring, head, batch.tokens, batch.mask, batch.lengths)
        results.append((loss.item(), counts.positions.tolist()))
    assert results[0][1] == results[1][1]
    assert results[0][0] == pytest.approx(results[1][0], abs=1e-6)


def test_the_loss_is_the_decayed_sum_of_each_heads_mean_over_its_own_positions(ring: Target):
    head = heads(ring, 2)
    batch = collate(encoded("<pad>", "w6 w7 w8", "w1 w2 w3 w4 w5 w6"), 0)
    loss, counts = step(ring, head, batch.tokens, batch.mask, batch.lengths, Objective(decay=0.5))
    features = ring.features(batch.tokens, batch.lengths, head.taps)
    expected, weight = 0.0, ring.output_layer().weight
    for k in range(2):
        logits = F.linear(head.blocks[k](features), weight)
        losses = [
            F.cross_entropy(logits[b, t], batch.tokens[b, t + 2 + k])
            for b in range(2)
            for t in range(batch.tokens.shape[1] - 2 - k)
            if batch.mask[b, t + 1 : t + 3 + k].all()
        ]
        assert counts.positions[k] == len(losses)
        expected += 0.5**k * torch.stack(losses).mean().item()
    assert loss.item() == pytest.approx(expected, rel=1e-5)


def test_parts_of_a_step_add_up_to_the_whole(ring: Target):
    head = heads(ring)
    rows = encoded("<pad>", "w6", "w1 w2", " ".join(["w9"] * 20), " ".join(["w11"] * 40))
    whole = collate(rows, 0)
    totals = step_totals(whole.tokens, whole.mask, 3, None, "count")
    together, _ = step(ring, head, whole.tokens, whole.mask, whole.lengths)
    parts = 0.0
    for row in rows:
        batch = collate([row], 0)
        features = ring.features(batch.tokens, batch.lengths, head.taps)
        parts += train_step(head, features, None, batch.tokens, batch.mask, totals, Objective())[0].item()
    assert together.item() == pytest.approx(parts, rel=1e-6)


def test_an_empty_row_counts_nothing_and_leaves_zero_gradients(ring: Target):
    head = heads(ring, 2, output="own")
    batch = collate([None], 0)
    loss, counts = step(ring, head, batch.tokens, batch.mask, batch.lengths)
    loss.backward()
    assert loss.item() == 0.0
    assert not counts.positions.any()
    assert all(p.grad is not None and not p.grad.any() for p in head.parameters())


@pytest.mark.parametrize("width", [None, 40])
def test_the_soft_teacher_is_the_targets_own_law_of_the_drafted_token(width: int | None):
    model, law = markov_rand()
    target = Target(model, tokenizer(), name="markov_rand")
    ids = None if width is None else torch.arange(56, 96)
    head = heads(target, 2, ids)
    tokens = torch.randint(13, 96, (2, 12), generator=torch.Generator().manual_seed(5))
    mask, lengths = torch.ones(2, 12, dtype=torch.bool), torch.tensor([12, 12])
    objective = Objective(teacher_weight=1.0, teacher_output=Output(*target.output_layer().of_head(0)), decay=1.0)
    loss, counts = step(target, head, tokens, mask, lengths, objective)
    features = target.features(tokens, lengths, head.taps)
    expected = 0.0
    for k in range(2):
        weight = target.output_layer().weight if ids is None else target.output_layer().weight[ids]
        logits = F.linear(head.blocks[k](features), weight)
        wanted = law if ids is None else law[:, ids] / law[:, ids].sum(-1, keepdim=True)
        losses = [
            F.cross_entropy(
                logits[b, t], wanted[tokens[b, t + 1 + k]]
            )  # the law after the token before the drafted one
            for b in range(2)
            for t in range(10 - k)
            if ids is None or tokens[b, t + 2 + k] in ids
        ]
        assert counts.covered[k] == len(losses)
        expected += torch.stack(losses).sum().item() / counts.positions[k].item()
    assert loss.item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("outside", "divisor"), [("count", 4.0), ("drop", 3.0)])
def test_tokens_outside_the_draft_vocabulary_have_no_loss_and_count_as_configured(
    ring: Target, outside, divisor: float
):
    ids = torch.tensor([13, 14, 15, 17])  # w0 w1 w2 w4
    head = heads(ring, 1, ids)
    tokens = torch.tensor([[12, 13, 14, 15, 16, 17]])  # drafted: w1 w2 w3 w4, of which w3 is outside
    mask = torch.tensor([[0, 1, 1, 1, 1, 1]], dtype=torch.bool)
    loss, counts = step(ring, head, tokens, mask, torch.tensor([6]), Objective(outside=outside))
    assert (counts.positions.tolist(), counts.covered.tolist()) == ([4.0], [3.0])
    logits = F.linear(
        head.blocks[0](ring.features(tokens, torch.tensor([6]), head.taps)), ring.output_layer().weight[ids]
    )
    losses = F.cross_entropy(logits[0, [0, 1, 3]], torch.tensor([1, 2, 3]), reduction="sum")
    assert loss.item() == pytest.approx(losses.item() / divisor, rel=1e-5)
