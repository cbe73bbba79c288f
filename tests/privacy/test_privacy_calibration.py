"""The noise for a budget, and the steps for a budget: the answers fit, and nothing better does."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp import privacy
from lipdp.errors import BudgetError, ConfigurationError
from lipdp.privacy import accounting, calibration

CASES = [
    (1.0, 0.01, 10_000, "pld", "add_remove"),
    (3.0, 0.034, 600, "pld", "add_remove"),
    (8.0, 0.3, 1_000, "pld", "replace_one"),
    (0.1, 0.01, 100, "pld", "add_remove"),
    (2.0, 1.0, 50, "pld", "replace_one"),
    (1.0, 0.01, 10_000, "rdp", "add_remove"),
    (20.0, 0.3, 1, "rdp", "add_remove"),
]


@pytest.mark.parametrize(("target", "q", "steps", "accountant", "adjacency"), CASES)
def test_calibrated_noise_fits_and_is_least(target, q, steps, accountant, adjacency):
    run = {"sampling_rate": q, "steps": steps, "delta": 1e-5, "accountant": accountant, "adjacency": adjacency}
    sigma = privacy.calibrate_noise(epsilon=target, **run)
    assert privacy.epsilon(noise_multiplier=sigma, **run) <= target
    for less in (1e-3, 1.1e-5):
        assert privacy.epsilon(noise_multiplier=sigma * (1 - less), **run) > target


@pytest.mark.parametrize(("target", "q", "steps", "accountant", "adjacency"), CASES)
def test_max_steps_fits_and_one_more_does_not(target, q, steps, accountant, adjacency):
    how = {"sampling_rate": q, "delta": 1e-5, "accountant": accountant, "adjacency": adjacency}
    sigma = 0.9 * privacy.calibrate_noise(epsilon=target, steps=steps + 1, **how) if steps > 1 else 0.95
    most = privacy.max_steps(epsilon=target, noise_multiplier=sigma, **how)
    assert privacy.epsilon(noise_multiplier=sigma, steps=most, **how) <= target
    assert privacy.epsilon(noise_multiplier=sigma, steps=most + 1, **how) > target


def test_the_two_searches_agree():
    how = {"sampling_rate": 0.1, "delta": 1e-5}
    sigma = privacy.calibrate_noise(epsilon=1.0, steps=500, **how)
    assert privacy.max_steps(epsilon=1.0, noise_multiplier=sigma, **how) == 500


def test_exactly_at_the_budget_is_within_it():
    how = {"sampling_rate": 0.02, "delta": 1e-5, "noise_multiplier": 1.3}
    assert privacy.max_steps(epsilon=privacy.epsilon(steps=77, **how), **how) == 77


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_one_step_too_many(accountant):
    with pytest.raises(BudgetError, match="Even one step"):
        privacy.max_steps(epsilon=0.1, delta=1e-5, noise_multiplier=1.0, sampling_rate=0.5, accountant=accountant)


def test_a_budget_that_limits_nothing():
    with pytest.raises(ConfigurationError, match="10,000,000 steps"):
        privacy.max_steps(epsilon=8.0, delta=1e-5, noise_multiplier=50.0, sampling_rate=0.001, accountant="rdp")


@pytest.mark.filterwarnings("ignore:epsilon .* may be larger")
def test_a_budget_no_noise_can_meet():
    """The search ends with an error where σ = 1e8 is too little."""
    with pytest.raises(BudgetError, match="No noise multiplier"):
        privacy.calibrate_noise(epsilon=1e-9, delta=1e-12, sampling_rate=0.5, steps=10)


def test_tiny_deltas():
    """Nothing is cut off below 1e-15, as it is in dp-accounting's own PLD."""
    tight, loose = (
        privacy.calibrate_noise(epsilon=1.0, delta=1e-17, sampling_rate=0.01, steps=10, accountant=how) for how in ("pld", "rdp")
    )
    assert 1 < tight < loose < 10


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_budget_that_needs_no_noise(accountant):
    """A token amount of it; also where δ > q hides the record anyway."""
    assert 0 < privacy.calibrate_noise(epsilon=1e9, delta=1e-5, sampling_rate=0.01, steps=1, accountant=accountant) <= 1e-3
    if accountant == "pld":
        assert 0 < privacy.calibrate_noise(epsilon=1.0, delta=0.5, sampling_rate=0.01, steps=1) <= 1e-3


def test_few_calls_of_the_accountant():
    figures = accounting.figure
    figures.cache_clear()
    privacy.calibrate_noise(epsilon=2.5, delta=1e-5, sampling_rate=0.05, steps=300)
    assert figures.cache_info().misses <= 6
    figures.cache_clear()
    privacy.max_steps(epsilon=2.5, delta=1e-5, sampling_rate=0.05, noise_multiplier=1.5)
    assert figures.cache_info().misses <= 7


@pytest.mark.parametrize("tolerance", [0, -1e-5, 1.0, 1e-12, math.nan, True])
def test_bad_tolerance(tolerance):
    with pytest.raises(ConfigurationError, match="tolerance"):
        privacy.calibrate_noise(epsilon=1.0, delta=1e-5, sampling_rate=0.1, steps=1, tolerance=tolerance)


@pytest.mark.parametrize("steps", [0, -3, 1.5, True])
def test_calibration_needs_steps(steps):
    with pytest.raises(ConfigurationError, match="steps"):
        privacy.calibrate_noise(epsilon=1.0, delta=1e-5, sampling_rate=0.1, steps=steps)


@settings(max_examples=200, deadline=None)
@given(
    power=st.floats(0.2, 4),
    scale=st.floats(1e-3, 1e3),
    kink=st.floats(0.1, 50),
    guess=st.floats(0.01, 1e3),
    floor=st.booleans(),
)
def test_noise_search_on_any_falling_curve(power, scale, kink, guess, floor):
    """Kinked power laws that are 0 or infinite beyond some point, from any start: the answer is a certified bracket."""

    def cost(x):
        if floor and x < kink / 10:
            return math.inf
        return scale * x**-power if x < kink else max(0.0, scale * kink**-power * (2 - x / kink))

    found, _ = calibration.smallest_noise(cost, 1.0, guess, -1.5, 1e-5)
    assert cost(found) <= 1.0
    assert found <= 1e-3 or cost(found * (1 - 1.01e-5)) > 1.0


@settings(max_examples=200, deadline=None)
@given(
    power=st.floats(0.2, 3),
    most=st.integers(0, calibration.MAX_STEPS),
    guess=st.integers(0, 10**8),
    jump=st.sampled_from([1, 50, math.inf]),
)
def test_step_search_on_any_rising_curve(power, most, guess, jump):
    calls = []

    def cost(n):
        calls.append(n)
        return ((n + 0.5) / (most + 1)) ** power * (jump if n > most else 1)

    assert calibration.most_steps(cost, 1.0, guess) == most
    assert len(calls) < 75
