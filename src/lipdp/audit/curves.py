"""Trade-off curves: how well one record more or less can be told, as a function, for mechanisms that are known.

A mechanism has the curve f if no test of "absent" against "present" with false alarms α misses less than f(α) (f-DP). Audits use
its power, P(α) = 1 − f(α), which is concave, and the inverse of that: the least false alarms of a test with a given power.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lipdp._checks import is_number, positive, probability
from lipdp.errors import ConfigurationError
from lipdp.privacy.accounting import privacy_profile
from lipdp.privacy.runs import PrivateRun

__all__ = [
    "Curve",
    "GaussianCurve",
    "ProfileCurve",
    "bisect",
    "gaussian_delta",
    "gaussian_epsilon",
    "gaussian_mu",
    "run_curve",
    "scaled_run",
]

_NORMAL = NormalDist()
_LOSSES = np.concatenate([np.linspace(0.0, 8.0, 321), np.linspace(8.1, 40.0, 160)])  # where profiles are looked at


class Curve(Protocol):
    """A trade-off curve, by the inverse of its power."""

    def least_alarms(self, power: float) -> float:
        """The least α with P(α) ≥ power, for a power in [0, 1]. It rises with the power, from 0."""
        ...


@dataclass(frozen=True)
class GaussianCurve:
    """Of telling N(μ, 1) from N(0, 1): P(α) = Φ(Φ⁻¹(α) + μ)."""

    mu: float

    def least_alarms(self, power: float) -> float:
        """Φ(Φ⁻¹(power) − μ)."""
        if power <= 0 or power >= 1:
            return min(max(power, 0.0), 1.0)
        return _NORMAL.cdf(_NORMAL.inv_cdf(power) - self.mu)


class ProfileCurve:
    """Of a mechanism that is (ε_k, δ_k)-differentially private for many k at once: the largest of their lines.

    Fewer k give a curve of more mechanisms, so that an audit against it stays true.
    """

    def __init__(self, epsilons: npt.NDArray[np.float64], deltas: npt.NDArray[np.float64]) -> None:
        # Both kinds of lines as slope·power + offset.
        self._slopes = np.concatenate([np.exp(-epsilons), np.exp(epsilons)])
        self._offsets = np.concatenate([-deltas * np.exp(-epsilons), 1 - deltas - np.exp(epsilons)])

    def least_alarms(self, power: float) -> float:
        """The largest of the lines' values."""
        return max(0.0, float((self._slopes * power + self._offsets).max()))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """δ(ε) of the Gaussian curve: Φ(μ/2 − ε/μ) − e^ε·Φ(−μ/2 − ε/μ), the mass that the privacy loss has above ε."""
    if mu == 0:
        return 0.0
    upper = _NORMAL.cdf(mu / 2 - epsilon / mu)
    tail = -mu / 2 - epsilon / mu
    # e^ε·Φ(tail) by logarithms: Φ underflows where e^ε overflows.
    lower = math.exp(epsilon + _log_cdf(tail)) if upper > 0 else 0.0
    return max(0.0, upper - lower)


def _log_cdf(value: float) -> float:
    from scipy.special import log_ndtr

    return float(log_ndtr(value))


def gaussian_epsilon(mu: float, delta: float) -> float:
    """ε of the Gaussian curve at δ, by bisection: δ(ε) falls with ε."""
    d = probability(delta)
    if not (is_number(mu) and mu >= 0):
        raise ConfigurationError(f"mu is {mu!r}: the distance of two Gaussians in units of their deviation, at least 0.")
    if gaussian_delta(mu, 0.0) <= d:
        return 0.0
    low, high = 0.0, 1.0
    while gaussian_delta(mu, high) > d:
        low, high = high, 2 * high
    return bisect(lambda e: gaussian_delta(mu, e) > d, low, high)[0]


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest μ whose Gaussian curve is (ε, δ)-differentially private: the inverse of :func:`gaussian_epsilon`."""
    e, d = positive("epsilon", epsilon), probability(delta)
    high = 1.0
    while gaussian_delta(high, e) <= d:
        high *= 2
    return bisect(lambda mu: gaussian_delta(mu, e) <= d, 0.0, high)[0]


def bisect(holds: Callable[[float], bool], low: float, high: float, steps: int = 60) -> tuple[float, float]:
    """An interval around the place where ``holds`` turns from true (at ``low``) to false (at ``high``)."""
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low, high


def scaled_run(run: PrivateRun, factor: float) -> PrivateRun:
    """The same run with all of its Gaussian noise multiplied."""
    segments = tuple((sigma * factor, steps) for sigma, steps in run.segments)
    releases = tuple(dataclasses.replace(r, amount=r.amount * factor) if r.kind == "gaussian" else r for r in run.releases)
    return PrivateRun(run.sampling_rate, segments, releases)


@lru_cache(maxsize=256)
def run_curve(run: PrivateRun, *, coarse: bool = False) -> Curve:
    """The curve that a run promises for one record more or less: of one Gaussian where nothing is sampled, else by its δ(ε).

    Without sampling, T steps of multiplier σ are one Gaussian mechanism of μ = √(Σ 1/σ²). ``coarse``: faster, and allowing more.
    """
    if run.sampling_rate == 1 and not run.releases:
        return GaussianCurve(math.sqrt(sum(steps / sigma**2 for sigma, steps in run.segments)))
    try:
        deltas = privacy_profile(run, _LOSSES.tolist(), coarse=coarse)
    except ConfigurationError:  # too wide a loss for a distribution of it
        deltas = privacy_profile(run, _LOSSES.tolist(), "rdp")
    return ProfileCurve(_LOSSES, np.array(deltas))
