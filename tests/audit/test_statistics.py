"""Lower bounds from guesses: true for every mechanism of the claim, and near it for the mechanisms that are worst."""

from __future__ import annotations

import math

import dp_accounting
import numpy as np
import pytest
from scipy.optimize import linprog
from scipy.stats import binom

from lipdp import privacy
from lipdp.audit import statistics
from lipdp.audit.statistics import (
    GaussianCurve,
    ProfileCurve,
    gaussian_delta,
    gaussian_mu,
    run_curve,
    scaled_run,
)
from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy import PrivateRun, Release

TRIALS = 300


def approximate_curve(epsilon, delta=0.0):
    """Of all (ε, δ)-differentially private mechanisms together."""
    return ProfileCurve(np.array([epsilon]), np.array([delta]))


def gaussian_epsilon(mu, delta):
    return dp_accounting.get_epsilon_gaussian(1 / mu, delta)


def at_most_five_percent(exceeded, trials=TRIALS):
    """Whether so many failures fit a failure rate of 5%: a binomial test at 0.1%."""
    return binom.sf(exceeded - 1, trials, 0.05) > 1e-3


def coins(draw, *shape):
    return draw.random(shape) < 0.5


# ------------------------------------------------------------------ curves


@pytest.mark.parametrize("epsilon", [0.5, 1.0, 4.0, 10.0])
def test_gaussian_curves_are_those_of_the_accountant(epsilon):
    sigma = privacy.calibrate_noise(epsilon=epsilon, delta=1e-5, sampling_rate=1.0, steps=1)
    assert 1 / gaussian_mu(epsilon, 1e-5) == pytest.approx(sigma, rel=1e-3)
    assert gaussian_epsilon(gaussian_mu(epsilon, 1e-5), 1e-5) == pytest.approx(epsilon)
    assert run_curve(PrivateRun(1.0, ((2.0, 9),))) == GaussianCurve(1.5)


@pytest.mark.parametrize("power", [0.0, 1e-4, 0.05, 0.3, 0.69, 0.95, 0.9999, 1.0])
def test_a_profile_is_the_curve(power):
    """All (ε, δ) of a Gaussian together are its trade-off curve; fewer of them allow more."""
    losses = np.linspace(0.0, 8.0, 2001)
    whole = ProfileCurve(losses, np.array([gaussian_delta(1.0, e) for e in losses]))
    some = ProfileCurve(losses[::400], np.array([gaussian_delta(1.0, e) for e in losses[::400]]))
    exact = GaussianCurve(1.0).least_alarms(power)
    assert whole.least_alarms(power) == pytest.approx(exact, abs=1e-5)
    assert some.least_alarms(power) <= exact + 1e-12


def test_sampled_runs_have_curves_too():
    run = PrivateRun(0.25, ((0.8, 4),), (Release("moments", "gaussian", 3.0),))
    curve = run_curve(run)
    alone = run_curve(PrivateRun(1.0, ((0.8, 4),)))
    for power in (0.1, 0.5, 0.9):
        assert alone.least_alarms(power) < curve.least_alarms(power) < power
    assert scaled_run(run, 2.0) == PrivateRun(0.25, ((1.6, 4),), (Release("moments", "gaussian", 6.0),))
    with_pure = privacy.privacy_profile(PrivateRun(1.0, (), (Release("count", "pure", 1.0),)), [0.5, 1.0])
    assert with_pure == [1.0, 0.0]


# ------------------------------------------------------------------ the recursion is the optimum


def largest_tail(correct, guesses, canaries, slopes, offsets):
    """max P[W ≥ v] over distributions of W that satisfy Σ_(k≥j) k·p_k ≤ m·P(Σ_(k≥j−1)(r−k)·p_k/m), P⁻¹ by its lines: an LP."""
    k = np.arange(guesses + 1)
    rows, limits = [], []
    for j in range(1, guesses + 1):
        power, alarms = np.where(k >= j, k, 0) / canaries, np.where(k >= j - 1, guesses - k, 0) / canaries
        for slope, offset in zip(slopes, offsets, strict=True):
            rows.append(slope * power - alarms)
            limits.append(-offset)
    found = linprog(-(k >= correct).astype(float), np.array(rows), limits, np.ones((1, guesses + 1)), [1.0])
    assert found.status == 0
    return -found.fun


@pytest.mark.parametrize(("correct", "guesses", "canaries"), [(1, 1, 1), (5, 6, 6), (12, 15, 15), (9, 10, 30), (15, 20, 25)])
@pytest.mark.parametrize("mu", [0.3, 1.2])
def test_the_p_value_is_the_optimum_over_all_mechanisms(correct, guesses, canaries, mu):
    epsilons = np.linspace(0.0, 3.0, 13)
    curve = ProfileCurve(epsilons, np.array([gaussian_delta(mu, e) for e in epsilons]))
    optimum = largest_tail(correct, guesses, canaries, curve._slopes, curve._offsets)
    assert optimum * (1 - 1e-6) <= statistics.guess_p_value(correct, guesses, canaries, curve) <= 1.025 * optimum + 1e-9


@pytest.mark.parametrize(("correct", "guesses", "canaries"), [(9, 10, 10), (80, 100, 100), (55, 60, 100)])
def test_for_pure_privacy_it_is_the_binomial(correct, guesses, canaries):
    exact = binom.sf(correct - 1, guesses, 1 / (1 + math.exp(-0.8)))
    assert statistics.approximate_p_value(correct, guesses, canaries, 0.8, 0.0) == pytest.approx(exact)
    found = statistics.guess_p_value(correct, guesses, canaries, approximate_curve(0.8))
    assert exact * (1 - 1e-6) <= found <= 1.2 * exact  # the sum over all canaries allows a little more
    assert statistics.approximate_p_value(correct, guesses, canaries, 0.8, 1e-3) > exact


# ------------------------------------------------------------------ truth


def test_randomised_response_is_never_overstated_and_nearly_reached():
    """The worst of all ε-private mechanisms: each coin is shown, and turned with probability 1/(1+e^ε)."""
    draw, epsilon, m = np.random.default_rng(0), 2.0, 4000
    right = draw.binomial(m, 1 / (1 + math.exp(-epsilon)), TRIALS)
    found = np.array([statistics.one_run_epsilon(int(v), m, m) for v in right])
    assert at_most_five_percent((found > epsilon).sum())
    assert (found > epsilon).sum() > 0  # it is tight: at 95% some are
    assert np.median(found) > 0.9 * epsilon


@pytest.mark.parametrize("share", [1.0, 0.05])
def test_one_run_of_a_gaussian_mechanism(share):
    """Coins with Gaussian noise, the surest guesses: none of the bounds is above the truth too often."""
    draw, mu, m, delta = np.random.default_rng(1), 1.0, 200, 1e-3
    truth, exceeded, curved = gaussian_epsilon(mu, delta), 0, 0
    for _ in range(TRIALS):
        inside = coins(draw, m)
        scores = mu * inside + draw.normal(size=m) - mu / 2
        sure = np.argsort(-abs(scores))[: int(share * m)]
        v, r = int(((scores > 0) == inside)[sure].sum()), len(sure)
        exceeded += statistics.one_run_epsilon(v, r, m, delta) > truth
        curved += statistics.refutes(v, r, m, GaussianCurve(mu), 0.05)
    assert at_most_five_percent(exceeded)
    assert at_most_five_percent(curved)


def test_a_mechanism_that_tells_all_or_nothing():
    """With probability δ it shows every coin: (0, δ)-private, and all guesses are right that often. A binomial would be fooled."""
    m, delta = 200, 0.06
    assert statistics.one_run_epsilon(m, m, m, delta) == 0.0
    assert statistics.guess_p_value(m, m, m, approximate_curve(0.0, delta)) >= delta
    assert statistics.guess_p_value(m, m, m, approximate_curve(0.0, 1e-6)) < 1e-3


def test_many_runs_of_a_gaussian_mechanism():
    draw, mu, delta = np.random.default_rng(2), 1.5, 1e-2
    truth, found = gaussian_epsilon(mu, delta), []
    for _ in range(100):
        absent, present = draw.normal(size=2000), mu + draw.normal(size=2000)
        found.append(statistics.many_run_epsilon(absent, present, delta))
    assert at_most_five_percent((np.array(found) > truth).sum(), 100)
    assert np.median(found) > 0.5 * truth
    many = statistics.many_run_epsilon(draw.normal(size=300_000), mu + draw.normal(size=300_000), delta)
    assert 0.8 * truth < many <= truth
    assert statistics.many_run_epsilon(absent, absent, delta) == 0.0


def test_families_are_searched_to_the_place_where_they_stop_being_refuted():
    found = statistics.one_run_bound(690, 1000, 1000, GaussianCurve)
    assert statistics.refutes(690, 1000, 1000, GaussianCurve(found), 0.05)
    assert not statistics.refutes(690, 1000, 1000, GaussianCurve(1.01 * found), 0.05)
    assert statistics.one_run_bound(500, 1000, 1000, GaussianCurve) == 0.0


@pytest.mark.parametrize(("hits", "count"), [(0, 10), (3, 10), (10, 10)])
def test_clopper_pearson(hits, count):
    low, high = statistics.clopper_pearson(hits, count, 0.975)
    assert (low == 0) == (hits == 0)
    assert (high == 1) == (hits == count)
    assert hits == 0 or binom.sf(hits - 1, count, low) == pytest.approx(0.025)
    assert hits == count or binom.cdf(hits, count, high) == pytest.approx(0.025)


def test_impossible_counts_are_refused():
    with pytest.raises(DataError, match="can't be"):
        statistics.one_run_epsilon(11, 10, 20)
    with pytest.raises(DataError, match="can't be"):
        statistics.clopper_pearson(2, 1, 0.95)
    with pytest.raises(ConfigurationError, match="confidence"):
        statistics.one_run_epsilon(1, 10, 20, confidence=1.0)
    with pytest.raises(DataError, match="4 finite"):
        statistics.many_run_epsilon([0.0], [1.0], 1e-5)
