"""The noise is a fixed function of integers, uniform, and independent across seeds, positions and tokens."""

import pytest
import torch

from treedraft.infer import gumbel, noise_bits, row_seed

# From a plain-Python SplitMix64: bits of seeds 0 and 12345, positions 0 and 77, tokens 0, 1 and 49151.
WORD = (1 << 64) - 1


def mix(z: int) -> int:
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def slow_bits(seed: int, position: int, token: int) -> int:
    gamma = 0x9E3779B97F4A7C15
    key = mix((mix((seed + gamma) & WORD) + position * 0xD1B54A32D192ED03) & WORD)
    return mix((key + (token + 1) * gamma) & WORD) >> 32


@pytest.mark.parametrize("seed", [0, 12345, 2**63 - 1])
def test_bits_equal_the_generator_in_plain_integers(seed: int) -> None:
    positions, tokens = [0, 1, 77, 131071], [0, 1, 2, 49151]
    bits = noise_bits(torch.tensor([seed] * 4), torch.tensor(positions), torch.tensor(tokens))
    assert bits.tolist() == [[slow_bits(seed, p, t) for t in tokens] for p in positions]


def test_bits_of_a_token_do_not_depend_on_which_others_are_read() -> None:
    seeds, positions = torch.tensor([3, 4]), torch.tensor([10, 11])
    everything = noise_bits(seeds, positions, torch.arange(5000))
    some = torch.tensor([4999, 17, 18])
    assert torch.equal(noise_bits(seeds, positions, some), everything[:, some])


def _uniforms(axis: str, count: int = 200_000) -> torch.Tensor:
    """Noise along one axis, the two others fixed."""
    run = torch.arange(count)
    if axis == "tokens":
        bits = noise_bits(torch.tensor([7]), torch.tensor([5]), run)[0]
    elif axis == "positions":
        bits = noise_bits(torch.full((count,), 7), run, torch.tensor([11]))[:, 0]
    else:
        bits = noise_bits(run, torch.full((count,), 5), torch.tensor([11]))[:, 0]
    return (bits.double() + 0.5) / 2**32


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_noise_is_uniform_along_each_axis(axis: str) -> None:
    u = _uniforms(axis)
    counts = torch.histc(u, 100, 0, 1)
    chi2 = ((counts - 2000) ** 2 / 2000).sum().item()
    assert 60 < chi2 < 149  # 99 degrees of freedom: p between 0.999 and 0.001
    low = noise_low_bits(u)
    assert abs(low.mean().item() - 0.5) < 5 * 0.5 / len(u) ** 0.5


def noise_low_bits(u: torch.Tensor) -> torch.Tensor:
    """The last of the 32 bits, the one a weak mixer leaves regular."""
    return ((u * 2**32 - 0.5).round().long() & 1).double()


@pytest.mark.parametrize("axis", ["tokens", "positions", "seeds"])
def test_neighbours_along_each_axis_are_uncorrelated(axis: str) -> None:
    u = _uniforms(axis) - 0.5
    for lag in (1, 2, 3, 83):
        correlation = (u[lag:] * u[:-lag]).mean().item() / (1 / 12)
        assert abs(correlation) < 5 / len(u) ** 0.5
    pairs = torch.histogramdd(torch.stack([u[:-1], u[1:]], 1).float(), bins=[10, 10], range=[-0.5, 0.5, -0.5, 0.5]).hist
    chi2 = ((pairs - 2000) ** 2 / 2000).sum().item()
    assert 60 < chi2 < 149


@pytest.mark.parametrize("other", ["seed", "position"])
def test_streams_of_neighbouring_seeds_and_positions_are_independent(other: str) -> None:
    tokens = torch.arange(100_000)
    first = noise_bits(torch.tensor([7]), torch.tensor([5]), tokens)[0]
    moved = (8, 5) if other == "seed" else (7, 6)
    second = noise_bits(torch.tensor([moved[0]]), torch.tensor([moved[1]]), tokens)[0]
    a, b = first.double() / 2**32 - 0.5, second.double() / 2**32 - 0.5
    assert abs((a * b).mean().item() * 12) < 5 / len(tokens) ** 0.5
    assert abs((a[1:] * b[:-1]).mean().item() * 12) < 5 / len(tokens) ** 0.5
    assert (first == second).sum() < 3


def test_noise_is_finite_for_the_extreme_bits_in_fp64() -> None:
    u = (torch.tensor([0, 2**32 - 1], dtype=torch.float64) + 0.5) / 2**32
    extremes = -torch.log(-torch.log(u))
    assert torch.isfinite(extremes).all()
    noise = gumbel(torch.tensor([1]), torch.tensor([2]), torch.arange(100_000))
    assert noise.dtype == torch.float64
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.02)
    assert noise.var().item() == pytest.approx(1.6449, abs=0.05)


def test_row_seeds_differ_and_the_first_is_the_calls_own() -> None:
    assert row_seed(42, 0) == 42
    seeds = {row_seed(s, i) for s in range(20) for i in range(1, 50)}
    assert len(seeds) == 20 * 49
    assert all(0 <= s < 2**63 for s in seeds)
