"""Sums over microbatches that do not depend on the order, nor on which process has computed which: in whole numbers.

Floating-point sums depend on their order; ranks that add up other microbatches, or as many ranks more, get sums that differ in the
last bits. Noise depends on all bits of what it is added to (:mod:`lipdp.training.streams`), so those would be other releases. Here
the sum P of one microbatch, in float64, is written as (a + l·2⁻⁴⁸)·u with whole numbers a and l, |l| ≤ 2⁴⁷, and u the power of two
2²⁴·g, g the grid of the release (:mod:`lipdp.privacy.noise`). Whole numbers are added without any rounding, by whoever and in
whatever order.

*What it costs in sensitivity.* P is rounded to a multiple of 2⁻²⁴·g, by g·2⁻²⁵ at most. One record more changes two microbatches at
most (:mod:`lipdp.training.seats`), so the distance of two neighbours' sums grows by 2·2·g·2⁻²⁵ = g·2⁻²³ per coordinate;
:func:`lipdp.privacy.noise.grid_factor` has room for it.

*That nothing overflows.* A coordinate of P is at most Δ·rows, and Δ ≤ s/σ, s < 2⁴²·g: |a| ≤ 2¹⁸·rows/σ, and over all records of a
sample of n, |Σa| ≤ 2¹⁸·n/σ. :func:`check_range` refuses what could leave 63 bits, by public numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from lipdp.errors import ConfigurationError
from lipdp.privacy.noise import grid

__all__ = ["Turn", "carried", "check_range", "exact", "floating", "unit_of"]

_COARSE, _FINE = 24, 48  # bits: of u above the grid, and of l below u
_SUMMED = 14  # log2 of the microbatches of one rank in a step, and of the ranks, at most
_MOST = 2.0**43  # records of a sample over σ, see above


@dataclass(frozen=True)
class Turn:
    """Which microbatches of a step are this process's, and how it adds them up.

    Attributes:
        rank: of this process: microbatch number n is its own if n leaves this remainder.
        ranks: how many processes there are.
        begin: called with the number of each microbatch before it is computed: its random draws start at a place of their own.
        units: by parameter, u; sums are then whole numbers. ``None``: they are floating point.
    """

    rank: int = 0
    ranks: int = 1
    begin: Callable[[int], None] = field(default=lambda number: None)
    units: Mapping[str, float] | None = None

    def starts(self, number: int) -> bool:
        """Whether this microbatch is to be computed here; if so, it begins."""
        if number % self.ranks != self.rank:
            return False
        self.begin(number)
        return True

    def summand(self, sums: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The sums of one microbatch, as they are added up."""
        return sums if self.units is None else {name: exact(value, self.units[name]) for name, value in sums.items()}


def unit_of(std: float) -> float:
    """u for a sum that gets noise of this standard deviation; 1 for one that gets none, which is zero."""
    return math.ldexp(grid(std), _COARSE) if std > 0 else 1.0


def exact(value: torch.Tensor, unit: float) -> torch.Tensor:
    """(a, l) of a sum in float64: whole numbers, of shape (2, …). What is not finite has no meaning here."""
    scaled = value.detach().to(torch.float64) * (1 / unit)
    whole = torch.round(scaled)
    rest = torch.round((scaled - whole).mul_(2.0**_FINE))
    return torch.stack([whole.to(torch.int64), rest.to(torch.int64)])


def carried(pair: torch.Tensor) -> torch.Tensor:
    """The same sum with |l| ≤ 2⁴⁷, so that as many again can be added; in its place."""
    over = (pair[1] + (1 << (_FINE - 1))) >> _FINE
    pair[0] += over
    pair[1] -= over.bitwise_left_shift_(_FINE)
    return pair


def floating(pair: torch.Tensor, unit: float) -> torch.Tensor:
    """The float64 next to (a + l·2⁻⁴⁸)·u: a function of the exact sum alone, however it is split into a and l."""
    whole, rest = carried(pair)
    total: torch.Tensor = whole.to(torch.float64) + rest.to(torch.float64) * 2.0**-_FINE
    return total * unit


def check_range(records: int, microbatches: int, ranks: int, multiplier: float) -> None:
    """Refuse runs whose exact sums might not fit into 64 bits: public numbers, so that it says nothing about the data."""
    if records / multiplier > _MOST:
        raise ConfigurationError(
            f"a noise multiplier of {multiplier:g} with {records:,} records is too small for several processes: their sums are "
            f"added up in 64-bit whole numbers, which have room for {_MOST:g} times the noise. Train in one process."
        )
    if microbatches > 2**_SUMMED or ranks > 2**_SUMMED:
        raise ConfigurationError(
            f"{microbatches:,} microbatches a step on each of {ranks:,} ranks: at most {2**_SUMMED:,} of each can be added up "
            "exactly. Pass a larger microbatch_size."
        )
