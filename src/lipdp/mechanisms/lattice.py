"""The numbers of a range that can be an answer: decimals, counted and drawn in whole numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
_ROUND, _MOST = COPIES // 10, COPIES // 10**4  # on round numbers, at most; and for each of a level


def check_step(step: float | None, low: float, high: float) -> None:
    """Refuse a step that leaves fewer than two numbers of a range, or more than 10⁷."""
    if step is not None and not (is_number(step) and 0 < step <= high - low <= 1e7 * step):
        raise ConfigurationError(f"step is {step!r}: above 0, at most the range {high - low:g}, at least 10^-7 of it; e.g. 1.")


@dataclass(frozen=True)
class Lattice:
    """The candidates: whole numbers ``first`` … ``last`` of steps above ``origin``, in the user's units.

    ``levels`` are (m, copies of each multiple of m), the ends of the range being a level of their own with m = 0.
    """

    origin: float
    step: Fraction
    first: int
    last: int
    levels: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, low: float, high: float, rounds: bool) -> Lattice:
        """The decimal lattice of a range, with or without a liking for round numbers."""
        digits = math.floor(math.log10(high - low)) - _MILLION
        step = Fraction(10) ** digits
        # Far from 0 the multiples of a fine step are no floats: there, round is what is round from the low end.
        origin = 0.0 if max(abs(low), abs(high)) / step < 2**50 else low
        # As decimals: 0.7 is meant to be a multiple of 0.1, whatever the float is.
        ends = [(Fraction(repr(end)) - Fraction(repr(origin))) / step for end in (low, high)]
        first, last = math.ceil(ends[0]), math.floor(ends[1])
        sizes = sorted({5**half * 10**k for half in (0, 1) for k in range(_MILLION + 2)} - {1})
        counted = [(0, 2), *((m, last // m - (first - 1) // m) for m in sizes)]
        liked = [(m, count) for m, count in counted if 2 <= count <= 20_001] if rounds else []
        levels = [(m, min(_ROUND // len(liked) // count, _MOST)) for m, count in liked]
        rest = COPIES - sum(copies * count for (_, copies), (_, count) in zip(levels, liked, strict=True))
        return cls(origin, step, first, last, ((1, rest // (last - first + 1)), *levels))

    @classmethod
    def of_steps(cls, low: float, high: float, step: float) -> Lattice:
        """low, low + step, … up to high: for columns of which it is public that they hold no other numbers."""
        size = Fraction(repr(float(step)))
        last = (Fraction(repr(high)) - Fraction(repr(low))) // size
        return cls(low, size, 0, last, ((1, COPIES // (last + 1)),))

    def value(self, place: int) -> float:
        """A candidate in the user's units, as the decimal that it is."""
        return float(place * self.step + Fraction(repr(self.origin)))

    def places(self, x: Tensor) -> Tensor:
        """Each record's nearest candidate, int64: record by record, so neighbours stay neighbours."""
        return ((x - self.origin) / float(self.step)).round().to(torch.int64).clamp(self.first, self.last)

    def copies(self, first: int, last: int) -> int:
        """Of all candidates first … last."""
        return sum(copies * len(self._multiples(m, first, last)) for m, copies in self.levels)

    def candidate(self, first: int, last: int, number: int) -> int:
        """The one that copy ``number`` of :meth:`copies` belongs to."""
        for m, copies in self.levels:
            own = self._multiples(m, first, last)
            if number < copies * len(own):
                return own[number // copies]
            number -= copies * len(own)
        raise AssertionError

    def _multiples(self, m: int, first: int, last: int) -> Sequence[int]:
        """Those of a level among first … last."""
        if m == 0:
            return [place for place in (self.first, self.last) if first <= place <= last]
        return range(-(-first // m) * m, last + 1, m)

    def values(self, places: Tensor) -> Tensor:
        """Candidates in the user's units."""
        return places.to(torch.float64) * float(self.step) + self.origin
