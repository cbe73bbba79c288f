"""Lower bounds on ε from guesses: what a count of right guesses says about every mechanism that could have led to it.

The experiment: m records (*canaries*) are each put into the data, or not, by a fair coin. Who sees what was released guesses the
coins of some of them, r in all, and v guesses are right. Were the mechanism private, so many would be unlikely. All functions here
return *lower* bounds that hold with a given confidence, whatever the guesser does and knows.

- :func:`one_run_epsilon`: (ε, δ), no assumption at all (Steinke, Nasr, Jagielski 2023).
- :func:`guess_p_value`, :func:`one_run_bound`: against a whole trade-off curve (as Mahloujifar, Melis, Chaudhuri 2024), from one
  run or from several on records of their own.
- :func:`many_run_epsilon`: (ε, δ) from independent runs with and without one record, by Clopper–Pearson limits.

**Trade-off curves** say how well one record more or less can be told, as a function, for mechanisms that are known. A mechanism has
the curve f if no test of "absent" against "present" with false alarms α misses less than f(α) (f-DP). Audits use its power, P(α) =
1 − f(α), which is concave, and the inverse of that: the least false alarms of a test with a given power.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Protocol

import numpy as np
import numpy.typing as npt

from lipdp._checks import is_number, positive, probability, whole
from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy.accounting import privacy_profile
from lipdp.privacy.runs import PrivateRun

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


def gaussian_mu(epsilon: float, delta: float) -> float:
    """The largest μ whose Gaussian curve is (ε, δ)-differentially private: the inverse of its ε at δ."""
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


_LARGEST = 60.0  # of ε: no count of guesses says more


def clopper_pearson(hits: int, count: int, confidence: float) -> tuple[float, float]:
    """Limits of a probability from ``hits`` of ``count`` independent trials; *each* holds with the confidence.

    The lower one is the p for which so many hits or more have probability 1 − confidence: a quantile of a beta distribution.
    """
    n, k = whole("count", count), whole("hits", hits, least=0)
    if k > n:
        raise DataError(f"{k} hits of {n} trials can't be")
    low, high = _limits(np.array([k]), n, check_confidence(confidence))
    return float(low[0]), float(high[0])


def check_confidence(value: float) -> float:
    """A number strictly between 0 and 1."""
    if not (is_number(value) and 0 < value < 1):
        raise ConfigurationError(f"confidence is {value!r}: a probability strictly between 0 and 1, e.g. 0.95")
    return float(value)


def _check_guesses(correct: int, guesses: int, canaries: int) -> tuple[int, int, int]:
    m = whole("canaries", canaries)
    r, v = whole("guesses", guesses, least=0), whole("correct", correct, least=0)
    if not v <= r <= m:
        raise DataError(f"{v} right guesses of {r} about {m} canaries can't be")
    return v, r, m


# --- one run, (ε, δ) --------------------------------------------------------------------------------------------------------------


def approximate_p_value(correct: int, guesses: int, canaries: int, epsilon: float, delta: float) -> float:
    """A bound on the probability of so many right guesses for any (ε, δ)-differentially private mechanism.

    For δ = 0 a guess is right with probability e^ε/(1+e^ε) at most, whatever the others' results are: W̌ ~ Binomial(r, that)
    dominates. A δ adds, over all canaries, a mass of 2mδ that can lift counts by i at the price of i shares of it:
    ``P[W ≥ v] ≤ P[W̌ ≥ v] + 2mδ·max_i P[v > W̌ ≥ v − i]/i`` (theorem 5.2 of Steinke, Nasr and Jagielski).
    """
    from scipy.stats import binom

    v, r, m = _check_guesses(correct, guesses, canaries)
    share = 1 / (1 + math.exp(-epsilon))
    chance = float(binom.sf(v - 1, r, share))
    if delta > 0 and v > 0:
        below = np.cumsum(binom.pmf(np.arange(v - 1, -1, -1), r, share))
        chance += 2 * m * delta * float((below / np.arange(1, v + 1)).max())
    return min(1.0, chance)


def one_run_epsilon(correct: int, guesses: int, canaries: int, delta: float = 0.0, confidence: float = 0.95) -> float:
    """The largest ε such that every (ε, δ)-private mechanism makes so many right guesses with probability 1 − confidence at most.

    Nothing is assumed: the guesses may depend on each other in any way, and on everything that is released.

    Args:
        correct: right guesses.
        guesses: how many were made; which ones may depend on what was released, not on the coins.
        canaries: coins in all.
        delta: of the claim.
        confidence: of the bound.

    Example:
        >>> round(one_run_epsilon(correct=950, guesses=1000, canaries=1000), 2)    # 95% right: log(0.95/0.05) = 2.94
        2.7
    """
    level = 1 - check_confidence(confidence)
    if approximate_p_value(correct, guesses, canaries, 0.0, delta) > level:
        return 0.0
    return bisect(lambda e: approximate_p_value(correct, guesses, canaries, e, delta) <= level, 0.0, _LARGEST)[0]


# --- one run, trade-off curves ----------------------------------------------------------------------------------------------------


def refutes(correct: int, guesses: int, canaries: int, curve: Curve, level: float) -> bool:
    """Whether no mechanism of this curve makes so many right guesses with a probability of ``level`` or more.

    Let W be the right guesses, T_j = P[W ≥ j]. For a canary i the event "it is guessed *in*, and j − 1 others are right" means with
    i in: right, W ≥ j; with i out: wrong, W ≥ j − 1. So by the curve's power P, and by its concavity for the average over coins and
    canaries, ``Σ_(k≥j) k·p_k ≤ m·P((Σ_(k≥j−1) (r − k)·p_k)/m)``. With Σ_(k≥j) k·p_k = j·T_j + S_j, S_j = Σ_(k>j) T_k, this is

        T_(j−1) ≥ (m·P⁻¹((j·T_j + S_j)/m) + S_j + T_j)/(r − j + 1),

    whose right side rises with every T_k. Going down from T_v = level with nothing above v gives the least T_0 that is possible; a
    T_0 above 1 is a contradiction.
    """
    v, r, m = _check_guesses(correct, guesses, canaries)
    tail, above = level, 0.0  # T_j and S_j
    for j in range(v, 0, -1):
        power = (j * tail + above) / m
        if power > 1:
            return True
        above += tail
        tail = max(tail, (m * curve.least_alarms(power) + above) / (r - j + 1))
        if tail > 1:
            return True
    return False


def guess_p_value(correct: int, guesses: int, canaries: int, curve: Curve) -> float:
    """The largest probability that a mechanism of this curve can make so many right guesses with; see :func:`refutes`.

    To within a factor of 1.02, upwards; below 1e-12 it is reported as that.
    """
    low, high = math.log(1e-12), 0.0
    if refutes(correct, guesses, canaries, curve, math.exp(low)):
        return math.exp(low)
    if not refutes(correct, guesses, canaries, curve, 1.0):
        return 1.0
    steps = math.ceil(math.log2(-low / 0.02))
    return math.exp(bisect(lambda x: not refutes(correct, guesses, canaries, curve, math.exp(x)), low, high, steps)[1])


def one_run_bound(
    correct: int,
    guesses: int,
    canaries: int,
    family: Callable[[float], Curve],
    confidence: float = 0.95,
    *,
    least: float = 1e-3,
    most: float = 64.0,
    precision: float = 1e-3,
) -> float:
    """The largest x for which the guesses refute ``family(x)`` with this confidence, the curves rising with x (0 if none is).

    Args:
        correct: right guesses.
        guesses: how many were made.
        canaries: coins in all.
        family: curves by a number, each telling more than the one before: :class:`~lipdp.audit.statistics.GaussianCurve` by μ, say.
        confidence: of the bound.
        least: where the search begins; 0 is returned if this is not refuted.
        most: where it ends.
        precision: of x, relative; the result is rounded down.

    Example:
        >>> from lipdp.audit.statistics import GaussianCurve
        >>> round(one_run_bound(690, 1000, 1000, GaussianCurve), 2)      # Φ(μ/2) = 69% for μ = 0.99, if guesses are independent
        0.34
    """
    level = 1 - check_confidence(confidence)

    def refuted(x: float) -> bool:
        return refutes(correct, guesses, canaries, family(x), level)

    low = least
    if not refuted(low):
        return 0.0
    high = low
    while high < most and refuted(high):
        low, high = high, min(2 * high, most)
    if low == high:
        return most
    return bisect(refuted, low, high, max(1, math.ceil(math.log2((high - low) / low / precision))))[0]


# --- many runs --------------------------------------------------------------------------------------------------------------------


def many_run_epsilon(absent: Sequence[float], present: Sequence[float], delta: float, confidence: float = 0.95) -> float:
    """A lower bound on ε from scores of independent runs without and with a record; nothing else is assumed.

    An event S with P(S|present) > e^ε·P(S|absent) + δ, or the other way round, disproves (ε, δ). Among thresholds, the best is
    chosen on one half of the runs and tested on the other with Clopper–Pearson limits that hold together with the confidence.

    Args:
        absent: a score for each run without the record; higher should mean "present".
        present: for each run with it.
        delta: of the claim.
        confidence: of the bound.
    """
    level = 1 - check_confidence(confidence)
    without, with_it = np.asarray(absent, dtype=float), np.asarray(present, dtype=float)
    if min(len(without), len(with_it)) < 4 or not (np.isfinite(without).all() and np.isfinite(with_it).all()):
        raise DataError("many_run_epsilon needs at least 4 finite scores of runs without the record, and 4 of runs with it")
    halves = [(scores[0::2], scores[1::2]) for scores in (without, with_it)]
    places = np.unique(np.concatenate([halves[0][0], halves[1][0]]))
    if len(places) > 512:
        places = places[np.linspace(0, len(places) - 1, 512).astype(int)]
    limit = 1 - level / 2
    swaps = ((halves[0], halves[1], 1), (halves[0], halves[1], -1), (halves[1], halves[0], 1), (halves[1], halves[0], -1))
    tried = [(_disproved(rare[0], often[0], places, sign, delta, limit), rare, often, sign) for rare, often, sign in swaps]
    values, rare, often, sign = max(tried, key=lambda entry: float(entry[0].max()))
    chosen = places[[int(values.argmax())]]
    return max(0.0, float(_disproved(rare[1], often[1], chosen, sign, delta, limit)[0]))


Numbers = npt.NDArray[np.float64]


def _disproved(rare: Numbers, often: Numbers, places: Numbers, sign: int, delta: float, confidence: float) -> Numbers:
    """log((P_low(S|often) − δ)/P_high(S|rare)) of the events S = {sign·score > sign·place}."""
    above, below = (_counts(scores, places, sign) for scores in (often, rare))
    low = _limits(above, len(often), confidence)[0] - delta
    high = _limits(below, len(rare), confidence)[1]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(low > 0, np.log(np.maximum(low, 1e-300) / high), -np.inf))


def _counts(scores: Numbers, places: Numbers, sign: int) -> npt.NDArray[np.int64]:
    ordered = np.sort(scores)
    if sign > 0:
        return np.asarray(len(scores) - np.searchsorted(ordered, places, side="right"))
    return np.asarray(np.searchsorted(ordered, places, side="left"))


def _limits(hits: npt.NDArray[np.int64], count: int, confidence: float) -> tuple[Numbers, Numbers]:
    """Clopper–Pearson limits of many counts."""
    from scipy.stats import beta

    low = np.where(hits > 0, beta.ppf(1 - confidence, np.maximum(hits, 1), count - hits + 1), 0.0)
    high = np.where(hits < count, beta.ppf(confidence, hits + 1, np.maximum(count - hits, 1)), 1.0)
    return low, high
