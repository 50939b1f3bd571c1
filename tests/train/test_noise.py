"""Noise on features: drawn by seed, step and row, whatever the batch."""

from __future__ import annotations

import torch

from treedraft.train.noise import with_noise


def test_a_rows_noise_does_not_depend_on_its_neighbours_or_padding():
    plain = torch.zeros(3, 7, 16)
    together = with_noise(plain, 0.2, seed=1, step=5, indices=[4, 8, 2])
    alone = with_noise(plain[:1, :5], 0.2, seed=1, step=5, indices=[8])
    assert torch.equal(alone[0], together[1, :5])
    assert not torch.equal(together[0], together[1])


def test_seed_and_step_change_it_and_its_size_is_bounded():
    plain = torch.zeros(1, 200, 16)
    first = with_noise(plain, 0.2, 1, 5, [0])
    assert not torch.equal(first, with_noise(plain, 0.2, 2, 5, [0]))
    assert not torch.equal(first, with_noise(plain, 0.2, 1, 6, [0]))
    assert first.abs().max() <= 0.2
    assert first.abs().mean() > 0.09
    assert first.mean().abs() < 0.01


def test_without_noise_the_features_are_untouched():
    features = torch.randn(2, 3, 4)
    assert with_noise(features, 0.0, 1, 1, [0, 1]) is features
