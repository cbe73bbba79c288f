"""What gets noised: integer statistics of a dataset with a proved L1 sensitivity under replacing one record.

They are integers on a fine public lattice, so that sums are exact, the sensitivity is an integer, and the noise can be drawn
without floating point. ``unit`` is the lattice's step; ``integers(t)·unit`` is the statistic as a real number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Array, Range, check_fields
from lipdp.mechanisms.problem import Problem, Query

_FINE = 2**24  # lattice steps in one sensitivity of a learned sum
_QUERY_FINE = 2**36  # lattice steps in the unit interval, for a query answered directly
PLACES = 2**30
"""… and for each record of it: their sums, and sums of squares, are whole numbers."""
_CHUNK = 2_000_000  # interpolated values at a time
_LARGEST = 2**32  # of φ's values, in lattice steps: then interpolation in float64 is right to 2⁻²⁰ of a step

UnitNumber = Annotated[float, Range(least=0, most=1)]


def places(t: Tensor, count: int = PLACES) -> Tensor:
    """Records of the unit interval as whole numbers of 1/count: record by record, so neighbours stay neighbours."""
    return (t.clamp(0, 1) * count).round().to(torch.int64)


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

    def __post_init__(self) -> None:
        check_fields(SumState("sum", self.knots, self.table, self.unit), "a sum of phi")
        places = self.knots
        if self.table.shape[0] != places.shape[0] or places.shape[0] < 2 or bool((places.diff() <= 0).any()):
            raise ConfigurationError("knots have to be increasing, with one row of the table for each.")
        if float(places[0]) != 0.0 or float(places[-1]) != 1.0:
            raise ConfigurationError(f"knots go from {float(places[0]):g} to {float(places[-1]):g}: they have to span [0, 1].")
        if self._largest > _LARGEST:
            raise ConfigurationError(
                f"the table of phi holds {self._largest}: beyond {_LARGEST} interpolation is not exact enough."
            )

    @property
    def _largest(self) -> int:
        low, high = int(self.table.min()), int(self.table.max())
        return max(-low, high)  # as Python's numbers: |−2⁶³| is none of torch's

    def check(self, problem: Problem) -> None:
        """Sums of so many records have to be exact."""
        if self._largest * problem.n >= 2**62:
            raise ConfigurationError(f"sums of {problem.n} values of phi up to {self._largest} don't fit into 64 bits.")

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

    Every record is clipped and rounded to 2⁻³⁰, which leaves n points of [a, b] (as rounded); the query of these is computed in
    whole numbers, for floating point would add more than a lattice step to a variance of 10⁷ records. Sensitivity: the query's own
    times (b−a)^power, rounded up, plus one for rounding the answer to the lattice.
    """

    query: Query
    n: Annotated[int, Range(least=2)]
    window: tuple[UnitNumber, UnitNumber] = (0.0, 1.0)

    def __post_init__(self) -> None:
        check_fields(self, "a query's statistic")
        if not self.window[0] < self.window[1]:
            raise ConfigurationError(f"the window {self.window} is empty: give its lower end first.")

    def check(self, problem: Problem) -> None:
        """Its sensitivity has to be for as many records as there are."""
        if self.n != problem.n:
            raise ConfigurationError(f"the statistic's sensitivity is for {self.n} records, and the problem has {problem.n}.")

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
        width = Fraction(round(self.window[1] * PLACES) - round(self.window[0] * PLACES), PLACES)
        return math.ceil(self.query.sensitivity(self.n) * width**self.query.power * _QUERY_FINE) + 1

    def integers(self, t: Tensor) -> Tensor:
        """The answers, (batch, 1)."""
        rows = max(_CHUNK // t.shape[1], 1)
        answers = [self._answers(places(part.clamp(*self.window))) for part in torch.split(t, rows)]
        return torch.tensor([answer for part in answers for answer in part], dtype=torch.int64)[:, None]

    def _answers(self, records: Tensor) -> list[int]:
        """The query of each row of sorted whole numbers, to the nearest lattice step."""
        n, finer = records.shape[1], _QUERY_FINE // PLACES
        if self.query.kind == "quantile":  # a half of two places is a whole number of steps
            return (self.query(records.to(torch.float64)) * finer).to(torch.int64).tolist()
        totals = records.sum(1).tolist()
        if self.query.kind == "mean":
            return [_rounded(finer * total, n) for total in totals]
        squares = records * records  # below 2⁶¹, and their halves add up
        upper, lower = (squares // PLACES).sum(1).tolist(), (squares % PLACES).sum(1).tolist()
        sums = [PLACES * high + low for high, low in zip(upper, lower, strict=True)]
        scale = n * n * PLACES**2
        return [_rounded(_QUERY_FINE * (n * square - total * total), scale) for square, total in zip(sums, totals, strict=True)]

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": "query", "query": self.query.state(), "window": list(self.window)}


def _rounded(above: int, below: int) -> int:
    """The nearest whole number to a fraction."""
    return (2 * above + below) // (2 * below)


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

    def check(self, problem: Problem) -> None:
        """Refuse a problem that its sensitivity does not hold for."""

    def state(self) -> dict[str, Any]:
        """As plain values and tensors."""


@dataclass(frozen=True)
class SumState:
    """A :class:`PiecewiseSum` in a file."""

    kind: Literal["sum"]
    knots: Annotated[Tensor, Array(1, torch.float64)]
    table: Annotated[Tensor, Array(2, torch.int64)]
    unit: Annotated[float, Range(least=1e-100, most=1e100)]

    def build(self, problem: Problem) -> PiecewiseSum:
        """The statistic."""
        return PiecewiseSum(self.knots, self.table, self.unit)


@dataclass(frozen=True)
class QueryState:
    """A :class:`QueryStatistic` in a file: for how many records is for the problem to say."""

    kind: Literal["query"]
    query: Query
    window: tuple[UnitNumber, UnitNumber]

    def build(self, problem: Problem) -> QueryStatistic:
        """The statistic."""
        return QueryStatistic(self.query, problem.n, self.window)
