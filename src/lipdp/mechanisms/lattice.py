"""The numbers of a range that can be an answer: decimals, counted and drawn in whole numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import torch
from torch import Tensor

from lipdp._checks import is_number
from lipdp.errors import ConfigurationError
from lipdp.fields import Range

__all__ = ["COPIES", "Lattice", "Step", "check_step"]

Step = Annotated[float, Range(above=0)]

COPIES = 2**80
"""Of all candidates together, before tilts."""
_MILLION = 6  # decimal digits of the range in its finest step


def check_step(step: float | None, low: float, high: float) -> None:
    """Refuse a step that leaves fewer than two numbers of a range, or more than 10⁷."""
    if step is not None and not (is_number(step) and 0 < step <= high - low <= 1e7 * step):
        raise ConfigurationError(f"step is {step!r}: above 0, at most the range {high - low:g}, at least 10^-7 of it; e.g. 1.")


@dataclass(frozen=True)
class Lattice:
    """The candidates: whole numbers ``first`` … ``last`` of steps above ``origin``, in the user's units."""

    origin: float
    step: Fraction
    first: int
    last: int

    @classmethod
    def of(cls, low: float, high: float) -> Lattice:
        """The decimal lattice of a range."""
        digits = math.floor(math.log10(high - low)) - _MILLION
        step = Fraction(10) ** digits
        # Far from 0 the multiples of a fine step are no floats: there, they are counted from the low end.
        origin = 0.0 if max(abs(low), abs(high)) / step < 2**50 else low
        # As decimals: 0.7 is meant to be a multiple of 0.1, whatever the float is.
        ends = [(Fraction(repr(end)) - Fraction(repr(origin))) / step for end in (low, high)]
        return cls(origin, step, math.ceil(ends[0]), math.floor(ends[1]))

    @classmethod
    def of_steps(cls, low: float, high: float, step: float) -> Lattice:
        """low, low + step, … up to high: for columns of which it is public that they hold no other numbers."""
        size = Fraction(repr(float(step)))
        return cls(low, size, 0, (Fraction(repr(high)) - Fraction(repr(low))) // size)

    @property
    def each(self) -> int:
        """Copies of a candidate."""
        return COPIES // (self.last - self.first + 1)

    def value(self, place: int) -> float:
        """A candidate in the user's units, as the decimal that it is."""
        return float(place * self.step + Fraction(repr(self.origin)))

    def places(self, x: Tensor) -> Tensor:
        """Each record's nearest candidate, int64: record by record, so neighbours stay neighbours."""
        return ((x - self.origin) / float(self.step)).round().to(torch.int64).clamp(self.first, self.last)

    def values(self, places: Tensor) -> Tensor:
        """Candidates in the user's units."""
        return places.to(torch.float64) * float(self.step) + self.origin
