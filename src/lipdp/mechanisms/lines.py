"""A line through two columns, y ≈ a + b·x: from noisy moments, or by medians over pairs of records.

**Pairs.** Two records make a line, and so a value at each of two public places of x. Medians of these values over many pairs are
two points of a line that few strange records do not move (Theil and Sen; with private medians: Dwork and Lei, Alabi et al.). Pairs
are matched by numbers of records alone, k times, so a record is in k pairs at most: a median that is ε/2k-DP in pairs is ε/2-DP in
records, and both are ε-DP. k costs nothing: k times as many values, whose ranks are noised k times as much; and it gains what one
matching leaves out. Where x is the same for both records, they say the mean of their y.

**Order.** Tables are often sorted, and in a sorted table one other record moves many others to new numbers, and so to new partners.
So rows are brought into a secret random order first, all orders being equally likely: what is released does not depend on the order
that they came in, and neighbours may be taken to have it in common.

**Which.** The error of medians is that of ranks, times how far the values of pairs are apart, and what they lose to least squares,
some of σ²/n. Noise on moments is for the whole range, but falls with n²ε². So pairs are for nε² below 1,500, a public number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.problem import Problem, as_numbers, each_bounds, share_of
from lipdp.mechanisms.spending import release_moments
from lipdp.privacy.budget import AnyBudget, charge
from lipdp.privacy.costs import Pure
from lipdp.privacy.randomness import Stream

Method = Literal["pairs", "moments"]
_MATCHINGS, _FEW = 8, 1500.0
_PLACES = (0.25, 0.75)  # of the range of x
_WIDER = 0.5  # of the range of y that a line may leave it by at these places, on either side


@dataclass(frozen=True)
class Line:
    """A released line.

    Attributes:
        slope: by how much y grows with x.
        intercept: its value at x = 0.
        epsilon: what it cost.
        method: how it was found: "pairs" or "moments".
    """

    slope: float
    intercept: float
    epsilon: float
    method: str

    def __call__(self, x: Any) -> Any:
        """The line's value."""
        return self.intercept + self.slope * x


def pairs(n: int, matchings: int = _MATCHINGS) -> Tensor:
    """Numbers of records in pairs, (pairs, 2), each in one pair of every matching, or in none. They do not depend on data."""
    generator = torch.Generator().manual_seed(n)
    every = [torch.randperm(n, generator=generator)[: n // 2 * 2].reshape(-1, 2) for _ in range(matchings)]
    return torch.cat(every)


def shuffled(table: Tensor) -> Tensor:
    """Rows (n, …) in a random order, all n! equally likely: by 64 bits for each, drawn again where two are the same."""
    stream = Stream()
    while True:
        keys = stream.words(2 * len(table)).view(np.uint64)
        if len(np.unique(keys)) == len(keys):
            return table[torch.from_numpy(np.argsort(keys))]


def values_at(table: Tensor, matched: Tensor, place: float) -> Tensor:
    """At ``place`` of x, of the line through each pair of records (n, 2)."""
    (x, y), (other, there) = table[matched[:, 0]].T, table[matched[:, 1]].T
    apart = other - x
    slope = (there - y) / torch.where(apart == 0, 1.0, apart)
    return torch.where(apart == 0, (y + there) / 2, y + (place - x) * slope).nan_to_num(0.0)


def release_line(
    x: Any,
    bounds: Any,
    epsilon: float,
    *,
    method: Method | None = None,
    budget: AnyBudget = None,
    clamp: bool = False,
) -> Line:
    """The line by which column 1 of ``x`` (n, 2) follows from column 0, for ε in all, replace-one. n is public, the order of rows
    does not matter.

    Args:
        x: the private table.
        bounds: (lo, hi) of both columns, true of every possible record.
        epsilon: of the release.
        method: ``"pairs"`` or ``"moments"``; by default what n and ε are for.
        budget: charged before noise is drawn, after all is checked.
        clamp: move values outside of the bounds to the nearest bound, instead of refusing them.
    """
    data, ranges = as_numbers(x), each_bounds(bounds)
    if data.ndim != 2 or data.shape[1] != 2 or len(ranges) != 2 or data.shape[0] < 2:
        raise DataError(f"the table has shape {tuple(data.shape)}: give (n, 2) with bounds of both columns, the target last.")
    if method not in (None, "pairs", "moments"):
        raise ConfigurationError(f"method is {method!r}: 'pairs', 'moments', or None for what suits n and epsilon.")
    n = data.shape[0]
    share = share_of(epsilon, 2 * _MATCHINGS)
    if method == "moments" or (method is None and math.sqrt(n) * epsilon >= math.sqrt(_FEW)):
        (slope,), intercept = release_moments(data, ranges, epsilon, budget=budget, clamp=clamp).regression(1)
        return Line(float(slope), intercept, epsilon, "moments")
    across, up = (Problem.of("mean", 1.0, n, pair) for pair in ranges)
    for problem, column in zip((across, up), data.T, strict=True):
        problem.dataset(column, clamp)  # refuses what is no number, or outside
    inside = shuffled(torch.stack([data[:, 0].clamp(across.low, across.high), data[:, 1].clamp(up.low, up.high)], 1))
    matched = pairs(n)
    places = [across.low + part * across.width for part in _PLACES]
    median = Problem.of("median", share, len(matched), (up.low - _WIDER * up.width, up.high + _WIDER * up.width))
    found = [median.dataset(values_at(inside, matched, place), clamp=True) for place in places]
    charge(budget, Pure(epsilon, "replace_one"), "a line by medians of pairs")
    mechanism = IntervalMechanism.deep(median)
    low, high = (float(median.answer(mechanism._respond(values, "auto"))) for values in found)
    made = (high - low) / (places[1] - places[0])
    return Line(made, low - made * places[0], epsilon, "pairs")
