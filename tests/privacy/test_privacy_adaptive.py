"""Known trap 9: the cost of adaptive clipping belongs in the budget that decides how long to train."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp.errors import ConfigurationError
from lipdp.privacy import effective_multiplier, epsilon, max_steps
from lipdp.privacy.quantile import COUNT_SENSITIVITY, AdaptiveClip, gradient_multiplier


@given(z=st.floats(0.3, 20), ratio=st.floats(1.01, 100))
@settings(max_examples=100, deadline=None)
def test_gradient_and_count_together_are_one_mechanism_of_the_total_multiplier(z: float, ratio: float) -> None:
    sigma_b = ratio * z * COUNT_SENSITIVITY
    left = gradient_multiplier(z, sigma_b)
    assert left > z
    pair = effective_multiplier({"gradient": 1.0, "count": COUNT_SENSITIVITY}, {"gradient": left, "count": sigma_b})
    assert pair == pytest.approx(z, rel=1e-9)


def test_releasing_the_count_without_paying_would_break_the_budget() -> None:
    """The trap: gradient at z, count beside it. The pair's real multiplier is smaller, so fewer steps fit the budget."""
    z, sigma_b, q, budget, delta = 1.0, 1.0, 0.05, 4.0, 1e-5
    naive = effective_multiplier({"gradient": 1.0, "count": COUNT_SENSITIVITY}, {"gradient": z, "count": sigma_b})
    assert naive == pytest.approx(1 / math.sqrt(1.25))
    claimed = max_steps(epsilon=budget, delta=delta, noise_multiplier=z, sampling_rate=q)
    really = epsilon(noise_multiplier=naive, sampling_rate=q, steps=claimed, delta=delta)
    assert really > 1.1 * budget
    # Paid inside the step, the same number of steps costs exactly the budget that was planned.
    paid = effective_multiplier(
        {"gradient": 1.0, "count": COUNT_SENSITIVITY}, {"gradient": gradient_multiplier(z, sigma_b), "count": sigma_b}
    )
    assert epsilon(noise_multiplier=paid, sampling_rate=q, steps=claimed, delta=delta) <= budget * (1 + 1e-6)


def test_one_example_moves_the_centred_count_by_a_half_and_the_batch_size_is_constant() -> None:
    clip = AdaptiveClip(quantile=0.9, rate=0.2, count_noise=10.0, batch_size=100)
    norms = torch.rand(100)
    for extra in (0.0, 1e9):
        more = torch.cat([norms, torch.tensor([extra])])
        assert abs(float(clip.centred_count(more, 0.5) - clip.centred_count(norms, 0.5))) == COUNT_SENSITIVITY
    assert clip.updated(1.0, 40.0) == pytest.approx(1.0)  # 90 of 100 below: b̃ = 0.9 exactly


def test_the_estimate_converges_to_the_quantile() -> None:
    generator = torch.Generator().manual_seed(0)
    clip = AdaptiveClip(quantile=0.9, rate=0.2, count_noise=20.0, batch_size=1000)
    value, tail = 0.01, []
    for step in range(300):
        norms = torch.randn(1000, generator=generator).abs() * 3  # 90% quantile: 3·1.6449
        noise = float(torch.randn((), generator=generator)) * clip.count_noise
        value = clip.updated(value, float(clip.centred_count(norms, value)) + noise)
        if step >= 200:
            tail.append(value)
    assert sum(tail) / len(tail) == pytest.approx(3 * 1.6449, rel=0.1)


@pytest.mark.parametrize("noise", [0.0, 0.5, -1.0, math.nan])
def test_too_little_noise_on_the_count_is_refused(noise: float) -> None:
    with pytest.raises(ConfigurationError):
        gradient_multiplier(1.0, noise)


@pytest.mark.parametrize(
    ("name", "value"), [("quantile", 0.0), ("quantile", 1.0), ("rate", 0.0), ("count_noise", -1.0), ("batch_size", 0)]
)
def test_settings_are_checked(name: str, value: float) -> None:
    good = {"quantile": 0.9, "rate": 0.2, "count_noise": 10.0, "batch_size": 100}
    with pytest.raises(ConfigurationError):
        AdaptiveClip(**{**good, name: value})
