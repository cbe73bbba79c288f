"""Means, covariances and regressions from one release."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from lipdp.errors import BudgetError, ConfigurationError, DataError
from lipdp.mechanisms.spending import contributions, gaussian_multiplier, release_moments, release_query, sensitivities
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


@pytest.mark.parametrize("d", [1, 2, 3])
def test_sensitivities_hold_for_all_pairs_of_a_grid_and_are_nearly_reached(d: int) -> None:
    axis = np.linspace(-1, 1, 81 if d == 1 else 9 if d == 2 else 5)
    z = np.stack(np.meshgrid(*[axis] * d), -1).reshape(-1, d)
    v = contributions(z) / 2**24
    gap = np.abs(v[:, None] - v[None])
    first, second = sensitivities(d)
    assert 0.72 * first < gap.sum(-1).max() <= first
    assert 0.72 * second < np.sqrt((gap**2).sum(-1)).max() <= second


def test_rho_is_charged_as_gaussian_noise_of_that_rho(tmp_path: Path) -> None:
    """σ² = 1/2ρ, whichever neighbours the budget is for: its ε is that of the exact curve at this σ."""
    x, rho = table(200), 0.05
    for adjacency in ("replace_one", "add_remove"):
        budget = Budget(tmp_path / adjacency, epsilon=5.0, delta=1e-6, dataset="d", adjacency=adjacency)
        released = release_moments(x, BOUNDS, rho=rho, budget=budget)
        assert (released.epsilon, released.delta, released.rho) == (None, 0.0, rho)
        assert gaussian_multiplier(budget.spent, 1e-6) == pytest.approx(math.sqrt(0.5 / rho), rel=1e-4)
        assert released.noise * 200 == pytest.approx(math.sqrt(0.5 / rho) * sensitivities(3)[1], rel=1e-6)
    for bad in ({}, {"epsilon": 1.0, "rho": 1.0}, {"rho": 1.0, "delta": 1e-6}, {"rho": -1.0}):
        with pytest.raises(ConfigurationError):
            release_moments(x, BOUNDS, **bad)


def test_a_delta_that_the_noise_itself_would_spend_gets_laplace_noise() -> None:
    wide = np.random.default_rng(1).uniform(-1, 1, (50, 12))
    assert release_moments(wide, [(-1.0, 1.0)] * 12, 1.0, 1e-33).delta == 0.0
    assert release_moments(wide, [(-1.0, 1.0)] * 12, 100.0, 1e-6).delta == 0.0


def test_own_queries(tmp_path: Path) -> None:
    x = np.array([1.0, 2.0, 7.0, 4.0])
    budget = Budget(tmp_path / "b", epsilon=3.0, delta=1e-6, dataset="d", adjacency="replace_one")
    released = release_query(lambda data: np.clip(data, 0, 5).sum(), x, 5.0, 2.0, budget=budget)
    assert budget.spent == pytest.approx(2.0)
    assert released.std == pytest.approx(math.sqrt(2) * 2.5)
    draws = [release_query(lambda data: [data.sum(), 0.0], x, 1.0, 1.0).values for _ in range(400)]
    assert np.mean(draws, 0) == pytest.approx([14.0, 0.0], abs=0.35)
    assert np.std(draws, 0) == pytest.approx([math.sqrt(2)] * 2, rel=0.2)
    many = release_query(lambda data: np.zeros(200), x, 200.0, 1.0, 1e-6, l2_sensitivity=math.sqrt(200))
    assert many.spent.delta == 1e-6
    assert many.values.std() == pytest.approx(many.std, rel=0.2)
    for bad, kind in (
        (lambda data: math.nan, DataError),
        (lambda data: "12", DataError),
        (lambda data: np.ones((2, 2)), DataError),
        (lambda data: [], DataError),
        ("mean", ConfigurationError),
    ):
        with pytest.raises(kind):
            release_query(bad, x, 1.0, 0.5, budget=budget)
    with pytest.raises(ConfigurationError, match="above the L1"):
        release_query(len, x, 1.0, 0.5, l2_sensitivity=2.0, budget=budget)
    assert budget.spent == pytest.approx(2.0)
    with pytest.raises(BudgetError):
        release_query(len, x, 1.0, 1.5, budget=budget)


@pytest.mark.parametrize("given", [{"epsilon": 1.0}, {"epsilon": 1.0, "delta": 1e-5}, {"rho": 1.0}, {"rho": 1e-300}])
@pytest.mark.parametrize("size", [5e-324, 1e-310, 1e-300, 1e-200, 1e200, 1e300, 1.7e308])
def test_sensitivities_at_the_ends_of_float64(tmp_path: Path, given: dict[str, float], size: float) -> None:
    """Either a release that does not tell 0 from the sensitivity, or a refusal that costs nothing; no raw error after the charge.

    Gaussian noise of std 1e-300 was none: 0 had noise, and all else was brought to the end of the numbers.
    """
    budget = Budget(tmp_path / "budget.json", epsilon=1000, delta=1e-6, dataset="some", adjacency="replace_one")

    def released(value: float) -> np.ndarray:
        return release_query(lambda x: [x] * 9, value, size, l2_sensitivity=size, budget=budget, **given).values

    if "rho" in given and (given["rho"] < 1 or not 1e-270 < size < 1e270):
        for value in (0.0, size):
            with pytest.raises(ConfigurationError, match="no Gaussian noise can be drawn"):
                released(value)
        assert budget.spent == 0.0
        return
    low, high = (np.sort(released(value)) for value in (0.0, size))
    assert budget.spent > 0
    assert np.isfinite(low).all()
    assert np.isfinite(high).all()
    assert low[0] <= high[-1]  # nine draws each, and noise as large as their distance: the ranges meet
    assert high[0] <= low[-1]


def test_wrong_arguments_are_named_before_anything_is_charged(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "budget.json", epsilon=10, delta=1e-5, dataset="some", adjacency="replace_one")
    for bad in ("replace-one", None, "add"):
        with pytest.raises(ConfigurationError, match="adjacency"):
            release_query(lambda x: 1.0, [1], 1.0, 1.0, adjacency=bad, budget=budget)  # type: ignore[arg-type]
    for bounds in (None, 5, (0, 1), [("0", "1")], [], [(0, True)]):
        with pytest.raises(ConfigurationError, match="bounds is"):
            release_moments(table(10)[:, :1], bounds, 1.0, budget=budget)  # type: ignore[arg-type]
    assert budget.spent == 0.0
    with pytest.raises(ConfigurationError, match="target is 'a'"):
        release_moments(table(10), BOUNDS, 1.0).regression("a")  # type: ignore[arg-type]
