"""What gets noised: integer statistics of a dataset with a proved L1 sensitivity under replacing one record.

They are integers on a fine public lattice, so that sums are exact, the sensitivity is an integer, and the noise can be drawn
without floating point. ``unit`` is the lattice's step; ``integers(t)·unit`` is the statistic as a real number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.mechanisms.queries import Query

__all__ = ["PiecewiseSum", "QueryStatistic", "Statistic", "hats", "knot_sensitivity", "statistic_from_state"]

_FINE = 2**24  # lattice steps in one sensitivity of a learned sum
_QUERY_FINE = 2**36  # lattice steps in the unit interval, for a query answered directly
_CHUNK = 2_000_000  # interpolated values at a time


def knot_sensitivity(table: Tensor) -> Tensor:
    """max_{a,b} Σ_j |φ_j(a) − φ_j(b)| of a piecewise-linear φ, from its values (K, m) at the knots.

    Exact: on a product of two cells, (a, b) ↦ ‖φ(a) − φ(b)‖₁ is a norm of an affine map, so convex, so largest at a corner,
    and the corners are pairs of knots.
    """
    return (table[:, None] - table[None]).abs().sum(-1).amax()


def hats(t: Tensor, knots: Tensor) -> Tensor:
    """Σ_i hat_k(x_i) as (batch, K): the weights with which a dataset falls on the knots, so that Σ_i φ(x_i) = hats @ table."""
    place, part = _cell(t, knots)
    made = t.new_zeros(t.shape[0], knots.shape[0])
    made.scatter_add_(1, place, 1 - part)
    return made.scatter_add_(1, place + 1, part)


def _cell(t: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    place = (torch.searchsorted(knots, t.contiguous(), right=True) - 1).clamp(0, knots.shape[0] - 2)
    left, right = knots[place], knots[place + 1]
    return place, ((t - left) / (right - left)).clamp(0, 1)


@dataclass(frozen=True)
class PiecewiseSum:
    """s = Σ_i φ(x_i) for a piecewise-linear φ: [0, 1] → ℤᵐ (rounded), given by its values at knots.

    Sensitivity: D + m, with D = max over pairs of knots of ‖φ(a) − φ(b)‖₁. Each coordinate of a record's contribution is the
    interpolated value rounded to an integer, off by at most ½ (and 2⁻²⁰ of floating point), so two contributions differ by at
    most D + m(1 + 2⁻¹⁹) in L1; being an integer, that is at most D + m. Sums of integers are exact. n plays no part.
    """

    knots: Tensor
    table: Tensor
    unit: float

    @classmethod
    def quantised(cls, knots: Tensor, table: Tensor) -> PiecewiseSum:
        """From real values at the knots; the lattice is 2⁻²⁴ of their sensitivity."""
        values, places = table.detach().to(torch.float64), knots.detach().to(torch.float64)
        size = float(knot_sensitivity(values))
        if not (math.isfinite(size) and size > 0):
            raise ConfigurationError(
                f"the statistic's values at its knots have sensitivity {size:g}: it has to be finite and above 0 (a constant "
                "statistic tells nothing)."
            )
        if places.ndim != 1 or values.shape[0] != places.shape[0] or bool((places.diff() <= 0).any()):
            raise ConfigurationError("knots have to be increasing, with one row of the table for each.")
        if float(places[0]) != 0.0 or float(places[-1]) != 1.0:
            raise ConfigurationError(f"knots go from {float(places[0]):g} to {float(places[-1]):g}: they have to span [0, 1].")
        unit = size / _FINE
        # φ up to a constant: only differences count, and small integers leave room for large n.
        return cls(places, ((values - values[:1]) / unit).round().to(torch.int64), unit)

    @property
    def dimension(self) -> int:
        """m."""
        return self.table.shape[1]

    @property
    def sensitivity(self) -> int:
        """D + m, in lattice steps."""
        return int(knot_sensitivity(self.table)) + self.dimension

    def contributions(self, t: Tensor) -> Tensor:
        """φ(x_i) of each record, (…, m), as integers."""
        place, part = _cell(t, self.knots)
        low, high = self.table[place].to(torch.float64), self.table[place + 1].to(torch.float64)
        return (low + part[..., None] * (high - low)).round().to(torch.int64)

    def integers(self, t: Tensor) -> Tensor:
        """The sums, (batch, m)."""
        rows = max(_CHUNK // (t.shape[1] * self.dimension), 1)
        return torch.cat([self.contributions(part).sum(1) for part in torch.split(t, rows)])

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""
        return {"kind": "sum", "knots": self.knots, "table": self.table, "unit": self.unit}


@dataclass(frozen=True)
class QueryStatistic:
    """The query itself, of the data clipped to a window [a, b] of the unit interval.

    Sensitivity: the query's own times (b−a)^power (clipping is done record by record, and leaves n points of [a, b]), rounded
    up, plus one for rounding the answer to the lattice.
    """

    query: Query
    n: int
    window: tuple[float, float] = (0.0, 1.0)

    @property
    def unit(self) -> float:
        """The lattice's step."""
        return 1 / _QUERY_FINE

    @property
    def dimension(self) -> int:
        """One number."""
        return 1

    @property
    def sensitivity(self) -> int:
        """In lattice steps."""
        width = Fraction(self.window[1]) - Fraction(self.window[0])
        return math.ceil(self.query.sensitivity(self.n) * width**self.query.power * _QUERY_FINE) + 1

    def integers(self, t: Tensor) -> Tensor:
        """The answers, (batch, 1)."""
        return (self.query(t.clamp(*self.window)) * _QUERY_FINE).round().to(torch.int64)[:, None]

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": "query", "query": [self.query.kind, str(self.query.p)], "n": self.n, "window": list(self.window)}


class Statistic(Protocol):
    """What an additive mechanism needs of its statistic: integers of a proved L1 sensitivity."""

    @property
    def unit(self) -> float:
        """The lattice's step."""

    @property
    def dimension(self) -> int:
        """How many numbers."""

    @property
    def sensitivity(self) -> int:
        """L1, under replacing one record, in lattice steps."""

    def integers(self, t: Tensor) -> Tensor:
        """(batch, dimension), int64, of sorted unit datasets."""

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""


def statistic_from_state(state: dict[str, Any]) -> Statistic:
    """The inverse of ``state()``."""
    if state["kind"] == "laplace network":
        from lipdp.mechanisms.paper import statistic_from_paper  # it is built on this module

        return statistic_from_paper(state)
    if state["kind"] == "sum":
        return PiecewiseSum(state["knots"], state["table"], state["unit"])
    low, high = state["window"]
    return QueryStatistic(Query(state["query"][0], Fraction(state["query"][1])), state["n"], (low, high))
