"""All first and second moments of several columns at once: means, covariances and linear regressions from one release.

Columns are scaled to z ∈ [−1, 1]. Of each record v = (z_i, z_i·z_j for i < j, z_i²) is summed, every entry rounded to a lattice of
2⁻²⁴. Replacing a record moves an entry z_i or z_i·z_j by at most 2 and z_i² by at most 1, with k = d + d(d−1)/2 of the first sort
and d of the second: L1 sensitivity 2k + d, L2 sensitivity √(4k + d), and one lattice step for rounding each entry.

With δ = 0 every sum gets Laplace noise of scale Δ₁/ε; with δ > 0 Gaussian noise of σ·Δ₂, σ from the exact curve of the Gaussian
mechanism (Balle and Wang 2018), δ(ε) = Φ(1/2σ − εσ) − e^ε·Φ(−1/2σ − εσ), where that is less. Everything after is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.special import log_ndtr

from lipdp._checks import is_number, positive
from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.noise import release_noise
from lipdp.mechanisms.problem import Problem
from lipdp.privacy.budget import AnyBudget, charge
from lipdp.privacy.costs import Approximate, Pure
from lipdp.privacy.noise import grid_factor, noised_on_processor
from lipdp.privacy.randomness import fresh_key

__all__ = ["Moments", "contributions", "gaussian_multiplier", "release_moments", "sensitivities"]

Floats = npt.NDArray[np.float64]
_ROUNDING = 2.0**-46  # of a normal distribution's values, relatively
_FINE = 2**24  # lattice steps in 1


@dataclass(frozen=True)
class Moments:
    """Released means and second moments of d columns; all that is computed from them is free.

    Attributes:
        bounds: (lo, hi) of each column.
        n: the number of records, public.
        first: noisy means of the scaled columns, (d,).
        second: noisy means of their products, (d, d).
        noise: standard deviation of the noise on each of these.
        epsilon: of the release.
        delta: of the release; 0 where Laplace noise was used.
    """

    bounds: tuple[tuple[float, float], ...]
    n: int
    first: Floats
    second: Floats
    noise: float
    epsilon: float
    delta: float

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

        With a ridge of 2√d of the noise's standard deviations, about the largest eigenvalue of a random symmetric matrix of such
        noise: below it a direction of the data can't be told from noise.
        """
        d = len(self.bounds)
        if not 0 <= target < d:
            raise ConfigurationError(f"target is {target}: there are columns 0 to {d - 1}.")
        others = [column for column in range(d) if column != target]
        matrix = self._scaled_covariance()
        ridge = 2 * math.sqrt(d) * self.noise
        values, vectors = np.linalg.eigh(matrix[np.ix_(others, others)])
        solved = vectors @ ((vectors.T @ matrix[others, target]) / (values.clip(min=0) + ridge))
        slopes: Floats = solved * self._halves[target] / self._halves[others]
        return slopes, float(self.means[target] - slopes @ self.means[others])


def sensitivities(columns: int) -> tuple[float, float]:
    """L1 and L2, of the sums of v."""
    pairs = columns + columns * (columns - 1) // 2
    return float(2 * pairs + columns), math.sqrt(4 * pairs + columns)


def contributions(z: Floats) -> npt.NDArray[np.int64]:
    """v of each record z (n, d) ∈ [−1, 1], in lattice steps, (n, d + d(d+1)/2)."""
    upper = np.triu_indices(z.shape[1])
    entries = np.concatenate([z, z[:, upper[0]] * z[:, upper[1]]], 1)
    steps: npt.NDArray[np.int64] = np.rint(entries * _FINE).astype(np.int64)
    return steps


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


def release_moments(
    x: Any,
    bounds: Sequence[Sequence[float]],
    epsilon: float,
    delta: float = 0.0,
    *,
    budget: AnyBudget = None,
    clamp: bool = False,
) -> Moments:
    """Means and second moments of the columns of ``x`` (n, d), for ε (and δ) in all, replace-one. n is public.

    Args:
        x: the private table.
        bounds: (lo, hi) of each column, true of every possible record.
        epsilon: of the release.
        delta: above 0 allows Gaussian noise; it is used, and δ charged, where it is the smaller one.
        budget: charged before noise is drawn, after all is checked.
        clamp: move values outside of the bounds to the nearest bound, instead of refusing them.
    """
    spent = positive("epsilon", epsilon)
    if not is_number(delta) or not 0 <= delta < 1:
        raise ConfigurationError(f"delta is {delta!r}: a probability below 1, or 0 for pure differential privacy.")
    data = torch.as_tensor(x, dtype=torch.float64)
    if data.ndim != 2 or data.shape[1] != len(bounds) or not len(bounds):
        raise DataError(f"the dataset has shape {tuple(data.shape)}: give (n, {len(bounds)}), a column for each of the bounds.")
    problems = [Problem.of("mean", spent, data.shape[0], pair) for pair in bounds]
    for problem, column in zip(problems, data.T, strict=True):
        problem.dataset(column, clamp)  # refuses what is no number, or outside
    middle = torch.tensor([(problem.low + problem.high) / 2 for problem in problems], dtype=torch.float64)
    half = torch.tensor([problem.width / 2 for problem in problems], dtype=torch.float64)
    steps = contributions(((data - middle) / half).clamp(-1, 1).numpy()).sum(0)
    first, second = sensitivities(len(bounds))
    laplace = math.sqrt(2) * first / spent
    multiplier = gaussian_multiplier(spent, delta) if delta > 0 else math.inf
    if multiplier * second < laplace:
        charge(budget, Approximate(spent, delta, "replace_one"), "means and covariances")
        # Rounding an entry of both neighbours moves their distance by a step each; the grid of the noise is counted by its factor.
        std = multiplier * (second + math.sqrt(len(steps)) / _FINE) * grid_factor(multiplier, len(steps))
        noisy = noised_on_processor(steps / _FINE, std, fresh_key())
        used = delta
    else:
        charge(budget, Pure(spent, "replace_one"), "means and covariances")
        size = int(first) * _FINE + len(steps)
        noisy = np.array(release_noise("laplace", steps.tolist(), size, Fraction(spent))) / _FINE
        std, used = laplace, 0.0
    return _moments(noisy / data.shape[0], problems, std / data.shape[0], spent, used)


def _moments(values: Floats, problems: list[Problem], noise: float, epsilon: float, delta: float) -> Moments:
    d = len(problems)
    second = np.zeros((d, d))
    second[np.triu_indices(d)] = values[d:]
    second = np.triu(second) + np.triu(second, 1).T
    bounds = tuple((problem.low, problem.high) for problem in problems)
    return Moments(bounds, problems[0].n, values[:d], second, noise, epsilon, delta)
