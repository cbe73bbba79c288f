"""All first and second moments of several columns at once: means, covariances and linear regressions from one release.

Columns are scaled to z ∈ [−1, 1]. Of each record v = (z_i, z_i·z_j for i < j, z_i²) is summed, every entry rounded to a lattice of
2⁻²⁴. How far two of them are apart without the squares, in L1 or in squared L2, is convex in each coordinate, so largest for ±1:
where h coordinates differ, h entries z_i and h(d−h) products move by 2, and h(1+d−h) ≤ k = ⌊(d+1)²/4⌋. The d squares move by 1 each
at most. So the L1 sensitivity is 2k + d, the L2 sensitivity √(4k + d), and one lattice step more for each entry. Noise is that of
:mod:`lipdp.mechanisms.spending`; everything after is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.problem import Problem, as_numbers
from lipdp.mechanisms.spending import Spending, Vector, release_vector
from lipdp.privacy.budget import AnyBudget

__all__ = ["Moments", "contributions", "release_moments", "sensitivities"]

Floats = npt.NDArray[np.float64]
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
        if not 0 <= target < d:
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
    spending = Spending(epsilon, delta, rho)
    data = as_numbers(x)
    if data.ndim != 2 or data.shape[1] != len(bounds) or not len(bounds):
        raise DataError(f"the dataset has shape {tuple(data.shape)}: give (n, {len(bounds)}), a column for each of the bounds.")
    problems = [Problem.of("mean", 1.0, data.shape[0], pair) for pair in bounds]
    if len(data) * _FINE >= 2**53:
        raise DataError(f"there are {len(data)} records: sums of up to 2^29 are exact.")
    for problem, column in zip(problems, data.T, strict=True):
        problem.dataset(column, clamp)  # refuses what is no number, or outside
    middle = torch.tensor([(problem.low + problem.high) / 2 for problem in problems], dtype=torch.float64)
    half = torch.tensor([problem.width / 2 for problem in problems], dtype=torch.float64)
    sums = contributions(((data - middle) / half).clamp(-1, 1).numpy()).sum(0) / _FINE
    released = release_vector(
        sums, *sensitivities(len(bounds)), spending, adjacency="replace_one", budget=budget, what="means and covariances"
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
