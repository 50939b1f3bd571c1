"""Alignment: which token at which position each head is trained on."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from treedraft.train.align import align, next_tokens, teacher_index


def plain_align(tokens: list[int], mask: list[int], num_heads: int) -> list[tuple[int, int, int]]:
    """(head, position, label) of everything that counts, in the words of the rule."""
    length = len(tokens)
    return [
        (k, t, tokens[t + 2 + k])
        for k in range(num_heads)
        for t in range(length)
        if t + 2 + k < length and all(mask[t + 1 : t + 3 + k])
    ]


def counted(tokens: torch.Tensor, mask: torch.Tensor, num_heads: int) -> list[tuple[int, int, int]]:
    labels, valid = align(tokens, mask, num_heads)
    return [(k, t, int(labels[k, 0, t])) for k, b, t in valid.nonzero().tolist() if b == 0]


@given(st.lists(st.tuples(st.integers(0, 95), st.integers(0, 1)), min_size=1, max_size=12), st.integers(1, 5))
def test_a_position_counts_when_the_root_and_all_tokens_up_to_its_own_are_supervised(row: list, num_heads: int):
    tokens, mask = [t for t, _ in row], [m for _, m in row]
    assert counted(torch.tensor([tokens]), torch.tensor([mask]), num_heads) == plain_align(tokens, mask, num_heads)


@given(st.lists(st.tuples(st.integers(0, 95), st.integers(0, 1)), min_size=1, max_size=12), st.integers(0, 9))
def test_padding_of_any_length_and_value_changes_nothing(row: list, padding: int):
    tokens, mask = torch.tensor([[t for t, _ in row]]), torch.tensor([[m for _, m in row]])
    bare = counted(tokens, mask, 3)
    for value in (0, 5):
        padded = torch.cat([tokens, torch.full((1, padding), value)], 1)
        assert counted(padded, torch.cat([mask, torch.zeros(1, padding, dtype=mask.dtype)], 1), 3) == bare


def test_turns_of_a_conversation_are_not_bridged():
    tokens, mask = torch.arange(8)[None], torch.tensor([[0, 1, 1, 0, 1, 1, 1, 0]])
    assert counted(tokens, mask, 2) == [(0, 0, 2), (0, 3, 5), (0, 4, 6), (1, 3, 6)]


def test_the_teachers_law_of_a_label_stands_one_position_before_it():
    tokens, mask = torch.arange(7)[None], torch.ones(1, 7)
    labels, valid = align(tokens, mask, 3)
    for k in range(3):
        _, position = teacher_index(valid, k)
        assert (labels[k][valid[k]] - 1 == position).all()


def test_the_next_tokens_are_shifted_by_one():
    assert next_tokens(torch.tensor([[1, 2, 3], [4, 5, 6]])).tolist() == [[2, 3, 0], [5, 6, 0]]


def test_a_row_shorter_than_the_first_label_counts_nowhere():
    labels, valid = align(torch.tensor([[1, 2]]), torch.ones(1, 2), 3)
    assert labels.shape == (3, 1, 2)
    assert not valid.any()
