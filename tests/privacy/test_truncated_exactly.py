"""Truncated Poisson samples against densities that are written down from what is drawn, not from anybody's analysis."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.optimize import brentq
from scipy.stats import binom

from lipdp.privacy import PrivateRun, Sampling, run_epsilon


def sums(n, q, most, others, own):
    """{sum: its probability} over samples of n − 1 records of value ``others`` and, unless ``None``, one of value ``own``."""
    found: dict[float, float] = {}
    for k in range(n):  # of the others are drawn
        chance = float(binom.pmf(k, n - 1, q))
        cases = [(min(k, most) * others, 1.0)]
        if own is not None:
            stays = min(1.0, most / (k + 1))
            cases = [
                (min(k, most) * others, 1 - q),
                (min(k, most - 1) * others + own, q * stays),
                (most * others, q * (1 - stays)),
            ]
        for value, part in cases:
            found[value] = found.get(value, 0.0) + chance * part
    return found


def true_epsilon(one, two, sigma, delta):
    """The least ε with δ(ε) ≤ delta for these two mixtures of Gaussians, by integration."""
    z, step = np.linspace(-40.0, 40.0, 80_001, retstep=True)

    def density(mixture):
        return sum(p * np.exp(-((z - m) ** 2) / (2 * sigma**2)) for m, p in mixture.items()) / (sigma * math.sqrt(2 * math.pi))

    a, b = density(one), density(two)

    def excess(epsilon):
        return float(np.maximum(a - math.exp(epsilon) * b, 0).sum() * step) - delta

    return 0.0 if excess(0.0) <= 0 else brentq(excess, 0, 60)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize(
    ("n", "most", "q", "sigma", "delta"),
    [(25, 8, 0.3, 0.7, 1e-2), (4, 1, 0.02, 0.5, 1e-4), (20, 10, 0.6, 1.0, 1e-4), (26, 8, 0.02, 2.0, 1e-4), (17, 1, 0.1, 1.0, 1e-2)],
)
def test_no_pair_of_neighbours_exceeds_what_is_claimed(n, most, q, sigma, delta, adjacency):
    claimed = run_epsilon(PrivateRun(q, ((sigma, 1),), (), Sampling("truncated_poisson", n, most)), delta, "pld", adjacency)
    worst = 0.0
    for others in (-1, 0, 1):  # those who are pushed out may point anywhere
        for own, instead in [(1, None)] if adjacency == "add_remove" else [(1, -1), (1, 0)]:
            one, two = sums(n, q, most, others, own), sums(n, q, most, others, instead)
            assert math.isclose(sum(one.values()), 1)
            worst = max(worst, true_epsilon(one, two, sigma, delta), true_epsilon(two, one, sigma, delta))
    assert worst <= claimed * (1 + 1e-4)
    if binom.sf(most, n - 1, q) < 1e-8:  # where nothing is cut, it is the Poisson figure
        assert worst >= 0.99 * claimed
