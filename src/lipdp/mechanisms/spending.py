"""Noise on several numbers at once, for pure ε, for (ε, δ) or for ρ of zero-concentrated DP: the smaller noise, and its charge.

Laplace noise of scale Δ₁/ε has δ = 0. Gaussian noise of standard deviation σ·Δ₂ is (ε, δ)-DP for δ(ε) = Φ(1/2σ − εσ) −
e^ε·Φ(−1/2σ − εσ) (Balle and Wang 2018), and ρ-zCDP for ρ = 1/2σ². It is charged as what it is, an event of dp-accounting, so that
it composes tightly with all else. dp-accounting takes a noise multiplier of replace-one neighbours to be for half of their distance
(adding one record and removing one): such budgets are charged 2σ.

All first and second moments of several columns at once: means, covariances and linear regressions from one release.

Columns are scaled to z ∈ [−1, 1]. Of each record v = (z_i, z_i·z_j for i < j, z_i²) is summed, every entry rounded to a lattice of
2⁻²⁴. How far two of them are apart without the squares, in L1 or in squared L2, is convex in each coordinate, so largest for ±1:
where h coordinates differ, h entries z_i and h(d−h) products move by 2, and h(1+d−h) ≤ k = ⌊(d+1)²/4⌋. The d squares move by 1 each
at most. So the L1 sensitivity is 2k + d, the L2 sensitivity √(4k + d), and one lattice step more for each entry. Noise is that of
:mod:`lipdp.mechanisms.spending`; everything after is post-processing.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch.special import log_ndtr

from lipdp._checks import discreet, is_number, one_of, positive, shown, whole
from lipdp._texts import brief
from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.noise import release_noise
from lipdp.mechanisms.problem import Problem, as_numbers, each_bounds, least_of
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.budget import AnyBudget, charge, open_budget
from lipdp.privacy.costs import Pure
from lipdp.privacy.noise import DISTANCE, DRAWABLE, grid_factor, noised_on_processor
from lipdp.privacy.randomness import fresh_key

Floats = npt.NDArray[np.float64]
_ROUNDING = 2.0**-46  # of a normal distribution's values, relatively
_LARGE = 30.0  # ε above which Laplace noise is used: e^ε times the noise's own error would no longer be nothing
_FINE = 2**24  # lattice steps in one sensitivity


@dataclass(frozen=True)
class Spending:
    """What a release may cost: ε, with δ or without, or ρ.

    Attributes:
        epsilon: ε; None where ρ is given.
        delta: above 0 allows Gaussian noise, where it is the smaller one.
        rho: ρ of zero-concentrated DP: Gaussian noise.
    """

    epsilon: float | None
    delta: float = 0.0
    rho: float | None = None

    def __post_init__(self) -> None:
        if (self.epsilon is None) == (self.rho is None):
            raise ConfigurationError("give epsilon (and a delta, if Gaussian noise may be used), or rho of zCDP: one of the two.")
        for name, value in (("epsilon", self.epsilon), ("rho", self.rho)):
            if value is not None:
                positive(name, value)
        if not is_number(self.delta) or not 0 <= self.delta < 1 or (self.rho is not None and self.delta):
            raise ConfigurationError(
                f"delta is {self.delta!r}: a probability below 1, or 0 for pure differential privacy; rho has none."
            )

    def multiplier(self, size: int) -> float:
        """The least σ for a vector of ``size`` numbers; infinite where only Laplace noise will do."""
        if self.rho is not None:
            return math.sqrt(0.5 / self.rho) * (1 + 1e-12)
        assert self.epsilon is not None
        if not self.delta or self.epsilon > _LARGE:
            return math.inf
        left = self.delta - (1 + math.exp(self.epsilon)) * DISTANCE * size  # what drawing the noise may add
        return gaussian_multiplier(self.epsilon, left) if left > self.delta / 2 else math.inf

    def std(self, l2: float, size: int) -> float:
        """Of the noise on each of ``size`` numbers of this L2 sensitivity, what rounding them to its grid takes included; infinite
        where there is no such noise.
        """
        multiplier = self.multiplier(size)
        made = multiplier * l2 * grid_factor(multiplier, size) if math.isfinite(multiplier) else math.inf
        return made if DRAWABLE[0] <= made <= DRAWABLE[1] else math.inf


@dataclass(frozen=True)
class Vector:
    """Released numbers, with Laplace noise or Gaussian noise.

    Attributes:
        values: what was released, (numbers,).
        std: the standard deviation of the noise on each.
        spent: what it cost; δ is 0 where Laplace noise was used.
    """

    values: Floats
    std: float
    spent: Spending


def gaussian_multiplier(epsilon: float, delta: float) -> float:
    """The least σ with which noise σ·Δ₂ is (ε, δ)-DP, rounded up: by bisection of the exact curve, which falls in σ."""

    def curve(sigma: float) -> float:
        a, b = (torch.tensor(x, dtype=torch.float64) for x in (0.5 / sigma - epsilon * sigma, -0.5 / sigma - epsilon * sigma))
        upper, lower = float(torch.exp(log_ndtr(a))), float(torch.exp(epsilon + log_ndtr(b)))
        return upper - lower + _ROUNDING * upper  # what the difference may hide

    low, high = 1e-6, 1.0
    while curve(high) > delta:
        low, high = high, 2 * high
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if curve(middle) > delta else (low, middle)
    return high * (1 + 1e-9)


def release_vector(
    values: Sequence[float] | Floats,
    l1: float,
    l2: float,
    spending: Spending,
    *,
    adjacency: Adjacency,
    budget: AnyBudget,
    what: str,
) -> Vector:
    """Numbers of joint sensitivities L1 and L2 with noise on each; charged first.

    For Laplace noise they are rounded to 2⁻²⁴ of the sensitivity, and each may move by one step more. Gaussian noise has a grid of
    its own, and counts it.
    """
    exact = np.asarray(values, dtype=np.float64)
    std, account = spending.std(l2, len(exact)), open_budget(budget)
    pure = spending.rho is None and math.sqrt(2) * l1 / spending.epsilon <= std  # type: ignore[operator]
    if not pure:
        if not math.isfinite(std):
            raise ConfigurationError(
                f"no Gaussian noise can be drawn for rho {brief(spending.rho)} and an L2 sensitivity of {l2:g}: it is too large or "
                "too small for float64. Use another rho, or other units."
            )
        if account is not None:
            account.charge(gaussian_event(spending.multiplier(len(exact)), account.adjacency, adjacency), what)
        return Vector(noised_on_processor(exact, std, fresh_key()), std, spending)
    assert spending.epsilon is not None
    charge(account, Pure(spending.epsilon, adjacency), what)
    step = Fraction(2) ** math.frexp(l1)[1] / _FINE
    moved = math.ceil(Fraction(l1) / step) + len(exact)
    steps = [round(Fraction(value) / step) for value in exact.tolist()]
    noisy = release_noise("laplace", steps, moved, least_of(spending.epsilon))
    most = Fraction(sys.float_info.max)
    released = np.array([float(max(min(value * step, most), -most)) for value in noisy])
    return Vector(released, math.sqrt(2) * l1 / spending.epsilon, Spending(spending.epsilon))


def gaussian_event(multiplier: float, paying: Adjacency, proved: Adjacency) -> Any:
    """Gaussian noise of σ for ``proved`` neighbours, as ``paying``'s budget understands it (the module's own text).

    Proved for replacing a record, it holds for one that is removed too: what is not there is a blank one. Proved for adding or
    removing one, replacing is twice as far, which is what a budget for replacing makes of σ by itself.
    """
    from dp_accounting import dp_event

    return dp_event.GaussianDpEvent(2 * multiplier if (paying, proved) == ("replace_one", "replace_one") else multiplier)


@discreet
def release_query(
    query: Any,
    x: Any,
    sensitivity: float,
    epsilon: float | None = None,
    delta: float = 0.0,
    *,
    rho: float | None = None,
    l2_sensitivity: float | None = None,
    adjacency: Adjacency = "replace_one",
    budget: AnyBudget = None,
) -> Vector:
    """Your own statistic with noise. That its sensitivity is true, as computed in floating point, is for you to prove.

    Args:
        query: a function of ``x`` that gives a number or a vector of a fixed length.
        x: the private data, handed to ``query`` as they are.
        sensitivity: the largest L1 distance of its answers for neighbours.
        epsilon: of the release, unless ``rho`` is given.
        delta: above 0 allows Gaussian noise; it is used where it is the smaller one.
        rho: ρ of zero-concentrated DP, instead of ``epsilon``.
        l2_sensitivity: the largest L2 distance, for Gaussian noise; by default the L1 one, which is not below it.
        adjacency: which neighbours the sensitivity is proved for.
        budget: charged after the query was computed, before noise is drawn.
    """
    spending = Spending(epsilon, delta, rho)
    one_of("adjacency", adjacency, get_args(Adjacency))
    first = positive("sensitivity", sensitivity)
    second = first if l2_sensitivity is None else positive("l2_sensitivity", l2_sensitivity)
    if second > first:
        raise ConfigurationError(f"l2_sensitivity is {second:g}, above the L1 sensitivity {first:g}: an L2 norm never is.")
    if not callable(query):
        raise ConfigurationError(f"query is {shown(query)}: a function of the data.")
    try:
        answers = as_numbers(query(x)).numpy()
    except DataError as error:
        raise DataError(f"the query gave no number or vector of numbers: {error}") from None
    if answers.ndim > 1 or not answers.size or not bool(np.isfinite(answers).all()):
        raise DataError("the query's answer has to be a finite number, or a vector of them: its sensitivity can't hold otherwise.")
    name = getattr(query, "__name__", "a query")
    return release_vector(answers.reshape(-1), first, second, spending, adjacency=adjacency, budget=budget, what=name)


@dataclass(frozen=True)
class Moments:
    """Released means and second moments of d columns; all that is computed from them is free.

    Attributes:
        bounds: (lo, hi) of each column.
        n: the number of records, public.
        first: noisy means of the scaled columns, (d,).
        second: noisy means of their products, (d, d).
        noise: standard deviation of the noise on each of these.
        epsilon: of the release; None where ρ was given.
        delta: of the release; 0 where Laplace noise was used.
        rho: of the release, where it was given.
    """

    bounds: tuple[tuple[float, float], ...]
    n: int
    first: Floats
    second: Floats
    noise: float
    epsilon: float | None
    delta: float
    rho: float | None = None

    @property
    def _halves(self) -> Floats:
        return np.array([(high - low) / 2 for low, high in self.bounds])

    @property
    def means(self) -> Floats:
        """Of the columns, in their own units and inside their bounds."""
        middles = np.array([(high + low) / 2 for low, high in self.bounds])
        made: Floats = middles + self._halves * np.clip(self.first, -1, 1)
        return made

    @property
    def covariance(self) -> Floats:
        """Of the columns, in their own units (÷ n): the nearest matrix without negative eigenvalues."""
        values, vectors = np.linalg.eigh(self._scaled_covariance())
        made: Floats = (vectors * values.clip(min=0)) @ vectors.T * np.outer(self._halves, self._halves)
        return made

    def _scaled_covariance(self) -> Floats:
        mean = np.clip(self.first, -1, 1)
        made: Floats = self.second - np.outer(mean, mean)
        return made

    def regression(self, target: int) -> tuple[Floats, float]:
        """Coefficients and intercept of the least squares fit of column ``target`` from all others, in the columns' units.

        Eigenvalues below 2√d of the noise's standard deviations, about the largest one of a random symmetric matrix of such noise,
        can't be told from noise: they count as that. Larger ones stay as they are (a ridge on all of them lost 2 to 8 times more).
        """
        d = len(self.bounds)
        if whole("target", target, least=0) >= d:
            raise ConfigurationError(f"target is {target}: there are columns 0 to {d - 1}.")
        others = [column for column in range(d) if column != target]
        matrix = self._scaled_covariance()
        least = 2 * math.sqrt(d) * self.noise
        values, vectors = np.linalg.eigh(matrix[np.ix_(others, others)])
        solved = vectors @ ((vectors.T @ matrix[others, target]) / values.clip(min=least))
        slopes: Floats = solved * self._halves[target] / self._halves[others]
        return slopes, float(self.means[target] - slopes @ self.means[others])


def sensitivities(columns: int) -> tuple[float, float]:
    """L1 and L2, of the sums of v: as derived above, with the rounding."""
    corner, rounding = (columns + 1) ** 2 // 4, (columns + columns * (columns + 1) // 2) / _FINE
    return 2 * corner + columns + rounding, math.sqrt(4 * corner + columns) + rounding


def contributions(z: Floats) -> npt.NDArray[np.int64]:
    """v of each record z (n, d) ∈ [−1, 1], in lattice steps, (n, d + d(d+1)/2)."""
    upper = np.triu_indices(z.shape[1])
    entries = np.concatenate([z, z[:, upper[0]] * z[:, upper[1]]], 1)
    steps: npt.NDArray[np.int64] = np.rint(entries * _FINE).astype(np.int64)
    return steps


def release_moments(
    x: Any,
    bounds: Sequence[Sequence[float]],
    epsilon: float | None = None,
    delta: float = 0.0,
    *,
    rho: float | None = None,
    budget: AnyBudget = None,
    clamp: bool = False,
) -> Moments:
    """Means and second moments of the columns of ``x`` (n, d), for ε (and δ) in all, replace-one. n is public.

    Args:
        x: the private table.
        bounds: (lo, hi) of each column, true of every possible record.
        epsilon: of the release.
        delta: above 0 allows Gaussian noise; it is used, and charged, where it is the smaller one.
        rho: ρ of zero-concentrated DP instead of ε: Gaussian noise.
        budget: charged before noise is drawn, after all is checked.
        clamp: move values outside of the bounds to the nearest bound, instead of refusing them.
    """
    spending, pairs, data = Spending(epsilon, delta, rho), each_bounds(bounds), as_numbers(x)
    if data.ndim != 2 or data.shape[1] != len(pairs):
        raise DataError(f"the dataset has shape {tuple(data.shape)}: give (n, {len(pairs)}), a column for each of the bounds.")
    problems = [Problem.of("mean", 1.0, data.shape[0], pair) for pair in pairs]
    if len(data) * _FINE >= 2**53:
        raise DataError(f"there are {len(data)} records: sums of up to 2^29 are exact.")
    for problem, column in zip(problems, data.T, strict=True):
        problem.dataset(column, clamp)  # refuses what is no number, or outside
    middle = torch.tensor([(problem.low + problem.high) / 2 for problem in problems], dtype=torch.float64)
    half = torch.tensor([problem.width / 2 for problem in problems], dtype=torch.float64)
    sums = contributions(((data - middle) / half).clamp(-1, 1).numpy()).sum(0) / _FINE
    released = release_vector(
        sums, *sensitivities(len(pairs)), spending, adjacency="replace_one", budget=budget, what="means and covariances"
    )
    return _moments(released, problems)


def _moments(released: Vector, problems: list[Problem]) -> Moments:
    d, n = len(problems), problems[0].n
    values = released.values / n
    second = np.zeros((d, d))
    second[np.triu_indices(d)] = values[d:]
    second = np.triu(second) + np.triu(second, 1).T
    bounds = tuple((problem.low, problem.high) for problem in problems)
    spent = released.spent
    return Moments(bounds, n, values[:d], second, released.std / n, spent.epsilon, spent.delta, spent.rho)
