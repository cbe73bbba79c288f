"""ε and σ at the edges, against references that know no grid, and the parts that the adaptive grid is made of."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld

from lipdp import privacy
from lipdp.privacy import PrivateRun, Release
from lipdp.privacy._composed_losses import compose_losses
from lipdp.privacy._step_losses import SampledGaussian, step_masses
from tests.privacy.exact_losses import exact_epsilon, log_delta

# ε of (σ, q, steps, δ) by tests/privacy/exact_losses.py: closed forms for one step and q = 1, its contour integral (right to 1e-6)
# otherwise, and for the last two its fine grid in extended precision (right to 1e-4). All: benchmarks/audit/accounting.py.
SETTINGS = [
    (25.4548, 0.1, 1, 1e-5),
    (0.0899478, 1e-6, 1, 1e-12),
    (13359.7, 1.0, 10_000_000, 1e-6),
    (35.9066, 1.0, 100_000, 1e-12),
    (9.75504, 1e-3, 100_000, 1e-5),
    (1.00751, 1e-6, 10_000_000, 1e-5),
    (1.16329, 0.004, 10_000, 1e-12),
    (207.4, 0.01, 10_000_000, 1e-12),
    (1.63595, 0.05, 100_000, 1e-5),
]


@pytest.mark.parametrize(("sigma", "q", "steps", "d"), SETTINGS)
def test_tight_and_never_below(sigma, q, steps, d):
    ours = privacy.epsilon(noise_multiplier=sigma, sampling_rate=q, steps=steps, delta=d)
    exact = exact_epsilon(sigma, q, steps, d, ours)
    assert exact * (1 - 1e-6) <= ours <= exact * 1.001


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "d", "reference"), [(0.9101, 1e-4, 10_000, 1e-9, 0.0999844), (0.47064008, 1e-6, 10**6, 1e-12, 2.99935)]
)
def test_rare_large_losses(sigma, q, steps, d, reference):
    """Where dp-accounting's own PLD on its usual grid says 0.13 and 13.2."""
    ours = privacy.epsilon(noise_multiplier=sigma, sampling_rate=q, steps=steps, delta=d)
    assert reference * (1 - 1e-4) <= ours <= reference * 1.003


@pytest.mark.parametrize(("sigma", "q", "steps", "d"), [(2.2, 0.3, 40, 1e-8), (30.0, 1e-3, 100_000, 1e-10)])
def test_replace_one_is_tight_too(sigma, q, steps, d):
    ours = privacy.epsilon(noise_multiplier=sigma, sampling_rate=q, steps=steps, delta=d, adjacency="replace_one")
    exact = exact_epsilon(sigma, q, steps, d, ours, "replace_one")
    assert exact * (1 - 1e-6) <= ours <= exact * 1.001


def test_delta_is_tight_and_never_below():
    run = {"noise_multiplier": 1.16329, "sampling_rate": 0.004, "steps": 10_000}
    exact = math.exp(log_delta(1.16329, 0.004, 10_000, 3.0, 1e-12))
    assert exact * (1 - 1e-5) <= privacy.delta(**run, epsilon=3.0) <= exact * 1.01


@pytest.mark.parametrize("neighbours", ["add_remove", "replace_one"])
@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.01), (3.0, 0.3), (0.7, 1.0)])
def test_masses_are_those_of_dp_accounting(sigma, q, neighbours):
    """Connect-the-dots on the same grid: masses agree to what theirs lose in second differences, and none of ours is smaller."""
    relation = dp_accounting.NeighboringRelation
    chosen = relation.ADD_OR_REMOVE_ONE if neighbours == "add_remove" else relation.REPLACE_ONE
    theirs = pld.privacy_loss_distribution.from_gaussian_mechanism(
        sigma, value_discretization_interval=1e-3, sampling_prob=q, neighboring_relation=chosen
    )
    ours = step_masses(SampledGaussian(sigma, q), neighbours, 1e-3, -50.0)
    for mine, other in zip(ours, (theirs._pmf_remove, theirs._pmf_add), strict=False):
        other = other.to_dense_pmf()
        values = dict(enumerate(other._probs, other._lower_loss))
        there = np.array([values.get(mine.lowest + place, 0.0) for place in range(len(mine.probabilities))])
        assert np.abs(mine.probabilities - there)[1:].max() < 1e-11
        assert abs(mine.probabilities.sum() + mine.infinity - 1) < 1e-10


def test_halving_the_grid_only_lowers_epsilon():
    step, tail = SampledGaussian(1.0, 0.01), math.log(1e-14)
    figures = [compose_losses([(step, 500)], "add_remove", h, tail).epsilon(1e-6, {}) for h in (8e-3, 4e-3, 2e-3, 1e-3)]
    assert figures == sorted(figures, reverse=True)


def test_what_rounding_may_hide_is_added():
    """Errors that are planted in a transform stay below what is allowed for them."""
    from lipdp.privacy import _step_losses as module

    direction = compose_losses([(SampledGaussian(1.2, 0.02), 5000)], "add_remove", 1e-3, math.log(1e-20))._directions[0]
    window = compose_losses([(SampledGaussian(1.2, 0.02), 5000)], "add_remove", 1e-3, math.log(1e-20))._window(
        direction, 4.0, 6.0, 1e-10
    )
    weights, size = direction.weights(4.0), module.fast_length(window.last - window.first + 1)
    good = module.convolve(weights, [direction.masses[0].lowest], [5000], size)
    bent = [weights[0] * (1 + 1e-16 * np.random.default_rng(0).choice([-1.0, 1.0], len(weights[0])))]
    other = module.convolve(bent, [direction.masses[0].lowest], [5000], size)
    coefficients = math.sqrt(2 / size) * float(np.linalg.norm(good.errors))
    assert np.linalg.norm(good.masses - other.masses) <= good.error + coefficients


def test_phases_are_composed_once():
    """Noise levels are one composition, dp-accounting's; thirty of them are asked for once, and asking again costs nothing."""
    run = PrivateRun(0.05, tuple((1.0 + 0.5 * level, 50) for level in range(3)), (Release("statistics", "gaussian", 20.0),))
    direct = pld.PLDAccountant()
    for sigma, steps in run.segments:
        direct.compose(privacy.event(sigma, 0.05, steps))
    direct.compose(dp_accounting.GaussianDpEvent(20.0))
    assert privacy.run_epsilon(run, 1e-5) == pytest.approx(direct.get_epsilon(1e-5), rel=1e-5)
    many = PrivateRun(0.05, tuple((1.0 + 0.05 * level, 10) for level in range(30)))
    ours, seen = privacy.run_epsilon(many, 1e-5), privacy.accounting.figure.cache_info().hits
    assert privacy.run_epsilon(many, 1e-5) == ours
    assert privacy.accounting.figure.cache_info().hits == seen + 1
