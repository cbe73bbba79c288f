"""Means, covariances and regressions from one release."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from lipdp.errors import BudgetError, ConfigurationError, DataError
from lipdp.mechanisms.moments import contributions, gaussian_multiplier, release_moments, sensitivities
from lipdp.privacy import Budget

BOUNDS = [(0.0, 10.0), (-2.0, 2.0), (0.0, 100.0)]


def table(n: int = 4000) -> np.ndarray:
    some = np.random.default_rng(0)
    a, b = some.uniform(0, 10, n), some.normal(0, 0.6, n).clip(-2, 2)
    return np.stack([a, b, (5 * a + 10 * b + 20 + some.normal(0, 2, n)).clip(0, 100)], 1)


@pytest.mark.parametrize("d", [1, 2, 3, 6])
def test_neighbours_differ_by_no_more_than_the_sensitivities(d: int) -> None:
    some = np.random.default_rng(d)
    z = np.concatenate([some.uniform(-1, 1, (3000, d)), some.choice([-1.0, 0.0, 1.0], (3000, d))])
    v = contributions(z) / 2**24
    gap = v[some.permutation(6000)] - v[some.permutation(6000)]
    first, second = sensitivities(d)
    assert np.abs(gap).sum(1).max() <= first
    assert np.sqrt((gap**2).sum(1)).max() <= second
    if d == 1:  # from −1 to a number near 0, from 1 to −1: nearly reached
        assert np.abs(gap).sum(1).max() > 0.6 * first


def test_covariance_and_regression_follow_the_data() -> None:
    x = table()
    released = release_moments(x, BOUNDS, 5.0)
    assert np.allclose(released.means, x.mean(0), atol=[0.2, 0.1, 2])
    slopes, intercept = released.regression(2)
    assert slopes == pytest.approx([5, 10], abs=1.5)
    assert intercept == pytest.approx(20, abs=8)
    assert np.linalg.eigvalsh(released.covariance).min() > -1e-9
    near = np.sqrt(np.diag(released.covariance)) / x.std(0)
    assert near == pytest.approx(np.ones(3), abs=0.15)


def test_gaussian_noise_where_it_is_less() -> None:
    some = np.random.default_rng(1)
    wide = some.uniform(-1, 1, (500, 12))
    bounds = [(-1.0, 1.0)] * 12
    pure, approximate = release_moments(wide, bounds, 1.0), release_moments(wide, bounds, 1.0, 1e-6)
    assert (pure.delta, approximate.delta) == (0.0, 1e-6)
    assert approximate.noise < 0.5 * pure.noise
    assert release_moments(wide[:, :1], bounds[:1], 1.0, 1e-12).delta == 0.0  # one column: Laplace noise is less
    spread = np.std((approximate.first - wide.mean(0)) / approximate.noise)
    assert 0.4 < spread < 1.8


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-6), (1.0, 1e-5), (4.0, 1e-9)])
def test_the_multiplier_is_the_least_that_an_accountant_accepts(epsilon: float, delta: float) -> None:
    sigma = gaussian_multiplier(epsilon, delta)
    for factor, fits in ((1.001, True), (0.99, False)):
        accountant = PLDAccountant().compose(dp_event.GaussianDpEvent(sigma * factor))
        assert (accountant.get_epsilon(delta) <= epsilon * 1.002) == fits


def test_it_is_paid_for_once_and_refusals_cost_nothing(tmp_path: Path) -> None:
    x = table(100)
    budget = Budget(tmp_path / "b", epsilon=2.0, delta=1e-5, dataset="d", adjacency="replace_one")
    with pytest.raises(DataError, match="outside of the bounds"):
        release_moments(x * 2, BOUNDS, 1.0, budget=budget)
    with pytest.raises(DataError, match="shape"):
        release_moments(x[:, :2], BOUNDS, 1.0, budget=budget)
    for bad in ({"epsilon": 0.0}, {"epsilon": 1.0, "delta": 1.0}, {"epsilon": 1.0, "delta": math.nan}):
        with pytest.raises(ConfigurationError):
            release_moments(x, BOUNDS, budget=budget, **bad)
    assert budget.remaining == pytest.approx(2.0)
    release_moments(x, BOUNDS, 1.5, 1e-6, budget=budget)
    assert budget.remaining <= 0.501  # its δ is the smaller part of the budget's
    with pytest.raises(BudgetError):
        release_moments(x, BOUNDS, 1.5, budget=budget)
    with pytest.raises(ConfigurationError, match="columns 0 to 2"):
        release_moments(x, BOUNDS, 1.0).regression(3)
