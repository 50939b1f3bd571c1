"""What a head predicts in training it drafts in decoding: step i of ``predict`` gives the logits of level i."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kit import KINDS, PlainScores, any_head, target, tokenizer
from treedraft.heads import Accepted, Head
from treedraft.infer import Target
from treedraft.tree import DynamicTree, Tree

IDS = torch.arange(1, 96, 2)
TEXT = 24


@pytest.fixture(scope="module", params=["llama_gqa", "qwen3_headdim", "qwen2_bias"])
def model(request: pytest.FixtureRequest) -> Target:
    return Target(target(request.param), tokenizer())


class Recorder(PlainScores):
    """Keeps the logits of every level."""

    def __init__(self) -> None:
        self.levels: list[Tensor] = []

    def __call__(self, logits: Tensor, positions: Tensor, ids: Tensor | None) -> Tensor:
        self.levels.append(logits)
        return logits


def texts(count: int) -> Tensor:
    return torch.randint(13, 96, (count, TEXT), generator=torch.Generator().manual_seed(5))


def accepted(features: Tensor, tokens: Tensor, start: list[int], end: list[int]) -> Accepted:
    """The positions [start, end) of every row, padded on the right with rubbish."""
    width = max(e - s for s, e in zip(start, end, strict=True))
    at = torch.tensor(start)[:, None] + torch.arange(width)
    rows = torch.arange(len(tokens))[:, None]
    count = torch.tensor(end) - torch.tensor(start)
    return Accepted(features[rows, at], tokens[rows, at + 1], count, torch.tensor(start), max(end))


def trained_logits(head: Head, features: Tensor, tokens: Tensor, row: int, position: int) -> list[Tensor]:
    """Logits [W] of every step at one position, teacher-forced along the text."""
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    marked[row, position] = True
    following = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
    hidden = head.predict(features, following, marked)  # [K, 1, H]
    return [F.linear(hidden[k, 0], *head.output().of_head(k)) for k in range(head.steps)]


def chain_logits(drafter: Any, given: Accepted, memory: Any, follow: Tensor) -> tuple[list[Tensor], Any]:
    """Logits [B, W] of every level when the tokens ``follow`` [B, levels] are drafted one after the other."""
    logits, beam, memory = drafter.begin(given, memory)
    found = [logits[:, 0]]
    for i in range(follow.shape[1]):
        logits, beam = drafter.extend(beam, torch.zeros(len(follow), 1, dtype=torch.int64), follow[:, i : i + 1])
        found.append(logits[:, 0])
    return found, memory


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_drafted_along_the_text_has_the_logits_of_training(model: Target, kind: str) -> None:
    head = any_head(model, kind, draft_ids=IDS)
    tokens = texts(3)
    features = model.features(tokens, torch.full((3,), TEXT), head.taps).clone()
    drafter: Any = head.for_decoding(torch.float32)
    memory, start, end = None, [0, 0, 0], [6, 9, 4]  # unequal prompts, then unequal rounds
    for grow in ([3, 1, 2], [1, 4, 2], [2, 1, 5]):
        follow = torch.stack([tokens[b, e + 1 : e + head.steps] for b, e in enumerate(end)])
        found, memory = chain_logits(drafter, accepted(features, tokens, start, end), memory, follow)
        for b in range(3):
            expected = trained_logits(head, features, tokens, b, end[b] - 1)
            for k in range(head.steps):
                torch.testing.assert_close(found[k][b], expected[k], atol=1e-3, rtol=1e-3)
        start, end = end, [e + g for e, g in zip(end, grow, strict=True)]


@pytest.mark.parametrize("kind", KINDS)
def test_marked_rows_do_not_depend_on_what_else_is_marked_or_on_padding(model: Target, kind: str) -> None:
    head = any_head(model, kind)
    tokens = texts(2)
    features = model.features(tokens, torch.full((2,), TEXT), head.taps).clone()
    marked = torch.zeros(2, TEXT, dtype=torch.bool)
    marked[0, [4, 5, 11]], marked[1, 7] = True, True
    together = head.predict(features, tokens.roll(-1, 1), marked)  # [K, 4, H]
    longer = [
        F.pad(features, (0, 0, 0, 5), value=3.0),
        F.pad(tokens.roll(-1, 1), (0, 5), value=2),
        F.pad(marked, (0, 5)),
    ]
    torch.testing.assert_close(head.predict(*longer), together, atol=1e-3, rtol=1e-3)
    for i, (row, at) in enumerate(marked.nonzero().tolist()):
        alone = torch.zeros_like(marked)
        alone[row, at] = True
        torch.testing.assert_close(
            head.predict(features, tokens.roll(-1, 1), alone)[:, 0], together[:, i], atol=1e-3, rtol=1e-3
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wide", [False, True])
def test_every_branch_of_a_tree_has_the_logits_of_its_own_chain(model: Target, kind: str, wide: bool) -> None:
    head = any_head(model, kind, draft_ids=IDS)
    tokens = texts(2)
    features = model.features(tokens, torch.full((2,), TEXT), head.taps).clone()
    drafter: Any = head.for_decoding(torch.float32)
    given = accepted(features, tokens, [0, 0], [9, 5])
    shape = DynamicTree(14, 3, 3) if wide else Tree.from_paths([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0], [1, 0, 0]])
    draft, _ = drafter.propose(given, None, shape, Recorder())
    for b in range(2):
        for node in range(1, draft.size):
            path = draft.tokens[b, draft.ancestors[b, node]].tolist()  # root to node
            follow = torch.tensor([path[1:-1]]).expand(2, -1)
            chain, _ = chain_logits(drafter, given, None, follow)
            rank = IDS[chain[-1][b].argsort(descending=True)].tolist().index(path[-1])
            siblings = [i for i in range(1, draft.size) if draft.parents[b, i] == draft.parents[b, node]]
            assert rank == siblings.index(node) if not wide else rank < 14


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_leave_the_batch_take_nothing_with_them(model: Target, kind: str) -> None:
    head = any_head(model, kind)
    tokens = texts(3)
    features = model.features(tokens, torch.full((3,), TEXT), head.taps).clone()
    drafter: Any = head.for_decoding(torch.float32)
    follow = tokens[:, 10:12]
    _, memory = chain_logits(drafter, accepted(features, tokens, [0] * 3, [6, 9, 4]), None, follow)
    rest = torch.tensor([0, 2])
    memory = None if memory is None else memory.select(rest)
    later = accepted(features[rest], tokens[rest], [6, 4], [8, 9])
    found, _ = chain_logits(drafter, later, memory, follow[rest])
    whole, _ = chain_logits(drafter, accepted(features[rest], tokens[rest], [0, 0], [8, 9]), None, follow[rest])
    torch.testing.assert_close(found, whole, atol=1e-3, rtol=1e-3)
