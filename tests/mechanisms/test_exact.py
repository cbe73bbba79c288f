"""The exact samplers: their frequencies against the formulas, and the formulas against ε."""

from __future__ import annotations

import math
import random
from collections import Counter
from fractions import Fraction

import pytest
import torch

from lipdp.errors import ConfigurationError
from lipdp.mechanisms import noise
from lipdp.mechanisms.noise import density, draw_noise, opendp_installed, release_noise, release_selection, staircase_step
from lipdp.mechanisms.utilities import probabilities
from lipdp.privacy import randomness

DRAWS = 20_000


def check(counts: Counter[int], pmf: dict[int, float], draws: int) -> None:
    """Pearson's statistic over the cells that hold enough, within 5 standard deviations of its mean."""
    cells = [(counts[value], draws * p) for value, p in pmf.items() if draws * p > 20]
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    assert len(cells) > 3
    assert statistic < len(cells) + 5 * math.sqrt(2 * len(cells))


def test_bernoulli_exp() -> None:
    below = random.Random(1).randrange
    for gamma in (Fraction(0), Fraction(1, 3), Fraction(1), Fraction(5, 2)):
        p = sum(randomness.bernoulli_exp(gamma, below) for _ in range(DRAWS)) / DRAWS
        want = math.exp(-gamma)
        assert abs(p - want) <= 5 * math.sqrt(want * (1 - want) / DRAWS) + 1e-12


@pytest.mark.parametrize("scale", [Fraction(3), Fraction(7, 3)])
def test_discrete_laplace(scale: Fraction) -> None:
    below = random.Random(2).randrange
    counts = Counter(randomness.discrete_laplace(scale, below) for _ in range(DRAWS))
    weights = {z: math.exp(-abs(z) / float(scale)) for z in range(-80, 81)}
    total = sum(weights.values())
    check(counts, {z: w / total for z, w in weights.items()}, DRAWS)


def level(z: int, sensitivity: int, step: int) -> int:
    return abs(z) // sensitivity + (abs(z) % sensitivity >= step)


def test_discrete_staircase() -> None:
    below, epsilon, sensitivity, step = random.Random(3).randrange, Fraction(3, 4), 5, 2
    counts = Counter(randomness.discrete_staircase(sensitivity, step, epsilon, below) for _ in range(DRAWS))
    weights = {z: math.exp(-float(epsilon) * level(z, sensitivity, step)) for z in range(-200, 201)}
    total = sum(weights.values())
    check(counts, {z: w / total for z, w in weights.items()}, DRAWS)


@pytest.mark.parametrize(("sensitivity", "step"), [(5, 1), (5, 2), (5, 5), (8, 3)])
def test_staircase_levels_move_by_at_most_one_under_every_shift(sensitivity: int, step: int) -> None:
    """P(z) ∝ exp(−ε·level(z)): this is ε-DP for sensitivity Δ, and the bound is reached."""
    gaps = {
        abs(level(z + shift, sensitivity, step) - level(z, sensitivity, step))
        for z in range(-60, 61)
        for shift in range(-sensitivity, sensitivity + 1)
    }
    assert gaps == {0, 1}


@pytest.mark.parametrize("method", ["exponential", "permute_and_flip"])
def test_selection_frequencies(method: str) -> None:
    below, utilities, epsilon = random.Random(4).randrange, [0, 3, 10, 9, 4, 10], Fraction(3, 2)
    draw = randomness.exponential_mechanism if method == "exponential" else randomness.permute_and_flip
    counts = Counter(draw(utilities, 4, epsilon, below) for _ in range(DRAWS))
    chances = probabilities(method, torch.tensor([utilities], dtype=torch.float64), 4, 1.5)[0]  # type: ignore[arg-type]
    check(counts, dict(enumerate(chances.tolist())), DRAWS)


@pytest.mark.skipif(not opendp_installed(), reason="opendp is an extra; the exact sampler is tested above")
def test_opendp_draws_the_same_distributions() -> None:
    utilities, epsilon = [0, 3, 10, 9, 4, 10], Fraction(3, 2)
    draws = 4000
    picks = Counter(release_selection("permute_and_flip", utilities, 4, epsilon, "opendp") for _ in range(draws))
    chances = probabilities("permute_and_flip", torch.tensor([utilities], dtype=torch.float64), 4, 1.5)[0]
    check(picks, dict(enumerate(chances.tolist())), draws)
    drawn = Counter(release_noise("laplace", [7] * 4000, 2, epsilon, "opendp"))
    weights = {z: math.exp(-abs(z) * 0.75) for z in range(-60, 61)}
    total = sum(weights.values())
    check(drawn, {z + 7: w / total for z, w in weights.items()}, draws)


@pytest.mark.parametrize("epsilon", [0.1, 0.5, 1.0, 2.0, 4.0])
def test_staircase_step_minimises_the_variance(epsilon: float) -> None:
    z = torch.linspace(-60 / epsilon, 60 / epsilon, 400_001, dtype=torch.float64)

    def variance(gamma: float) -> float:
        size = z.abs()
        weight = torch.exp(-epsilon * (size.floor() + (size - size.floor() >= gamma)))
        return float((weight * z**2).sum() / weight.sum())

    best = variance(staircase_step(epsilon))
    assert best <= min(variance(g) for g in (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 1.0)) * 1.001
    assert best < 2 / epsilon**2  # better than Laplace


@pytest.mark.parametrize("kind", ["laplace", "staircase"])
def test_simulated_noise_follows_its_density(kind: str) -> None:
    uniform = (torch.arange(200_000, dtype=torch.float64) + 0.5) / 200_000
    drawn = draw_noise(kind, uniform, 0.7, 1.3)  # type: ignore[arg-type]
    z = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
    weight = density(kind, z, 0.7, 1.3)  # type: ignore[arg-type]
    for power in (2, 4):
        assert float((drawn**power).mean()) == pytest.approx(float((weight * z**power).sum() / weight.sum()), rel=5e-3)


def test_samplers_are_obeyed_or_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without opendp, 'auto' draws exactly with our own sampler, and 'opendp' is an error, not a silent change."""
    with pytest.raises(ConfigurationError, match="choose one of"):
        release_noise("laplace", [0], 1, Fraction(1), "secure")  # type: ignore[arg-type]
    monkeypatch.setattr(noise, "opendp_installed", lambda: False)
    monkeypatch.setattr(noise, "_opendp", lambda: pytest.fail("opendp was used"))
    with pytest.raises(ConfigurationError, match="lipdp\\[mechanisms\\]"):
        release_noise("laplace", [0], 1, Fraction(1), "opendp")
    assert isinstance(release_noise("laplace", [0], 1, Fraction(1))[0], int)
    assert release_selection("permute_and_flip", [0, 10**6], 1, Fraction(1)) == 1
    monkeypatch.setattr(noise, "opendp_installed", lambda: True)
    with pytest.raises(ConfigurationError, match="does not offer staircase draws"):
        release_noise("staircase", [0], 1, Fraction(1), "opendp")
    with pytest.raises(ConfigurationError, match="does not offer exponential draws"):
        release_selection("exponential", [0], 1, Fraction(1), "opendp")
    with pytest.raises(ConfigurationError, match="one value"):
        release_noise("staircase", [0, 1], 1, Fraction(1))
