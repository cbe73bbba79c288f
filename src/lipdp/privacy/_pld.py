"""Privacy loss distributions on a grid that adapts: the smallest ε that can be shown for sampled Gaussians, in seconds.

Every grid rounds up, so each one gives an upper bound, and halving it gives a smaller one: it is halved until that moves ε by
less than :data:`PRECISION`, or :data:`MOST_BINS` points are reached (then a warning says how far it got). Errors fall as h², so
what is left is about a third of the last move. Ordinary runs end on dp-accounting's usual grid of 1e-4, with its figures.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import NamedTuple

from lipdp.errors import LipdpWarning
from lipdp.privacy._composed_losses import Composition, Known, Parts, compose_losses
from lipdp.privacy._step_losses import Neighbours, deviation, largest_loss

__all__ = ["MOST_BINS", "PRECISION", "Figure", "grid_epsilon", "parts_delta", "parts_epsilon"]

PRECISION = 1e-3
"""The PLD's grid is halved until that moves ε by less than this share of it."""
MOST_BINS = 1 << 22
"""Points of the largest grid that the PLD accountant goes to: about a second on one core."""

_USUAL_GRID = 1e-4  # dp-accounting's default; all grids are this times a power of two
_EASY_BINS = 1 << 18  # up to so many points no grid is left that is coarser than the usual one
_FIRST_BINS = 1 << 14
_SEARCH_BINS = 1 << 18
_BEYOND = math.log(1e5)  # the largest losses of all steps, counted as infinite, make up this part of δ
_DELTA_PRECISION = 0.01


class Figure(NamedTuple):
    """An upper bound, by how much it may be too large where that is too much, and its grid (0: none)."""

    value: float
    loose: float = 0.0
    grid: float = 0.0

    def told(self, what: str) -> float:
        """The value, with a warning where it may be loose."""
        if self.loose:
            warnings.warn(
                f"{what} {self.value:.6g} may be larger than it need be, by about {self.loose:.2%}: so much did the last halving "
                f"of the grid still move it (of {MOST_BINS:,} points at most), or is there for rounding. It is an upper bound.",
                LipdpWarning,
                stacklevel=4,
            )
        return self.value


def parts_epsilon(parts: Parts, d: float, neighbours: Neighbours) -> Figure:
    """ε at δ of sampled Gaussian steps, at any rates and noises.

    A step without the record is the same for both neighbours: all of them differ by Σ nᵢqᵢ at most in total variation. Where that
    is no more than δ, ε is 0.
    """
    if math.fsum(count * step.rate for step, count in parts) <= d:
        return Figure(0.0)
    return _refined(parts, neighbours, _log_tail(parts, d), lambda composed, known: composed.epsilon(d, known), PRECISION)


def parts_delta(parts: Parts, epsilon: float, neighbours: Neighbours) -> Figure:
    """δ at ε of sampled Gaussian steps; its grid is halved until that moves δ by less than 1%."""
    log_tail = -60.0 - math.log(sum(count for _, count in parts))
    return _refined(parts, neighbours, log_tail, lambda composed, known: composed.delta(epsilon, known), _DELTA_PRECISION)


def grid_epsilon(parts: Parts, d: float, neighbours: Neighbours, grid: float = 0.0) -> float:
    """ε on one grid alone: about the one given (not with too many points), or the first one. An upper bound, for searches."""
    log_tail = _log_tail(parts, d)
    least = max(largest_loss(step, neighbours, log_tail) for step, _ in parts) / _SEARCH_BINS
    h = max(grid, least) if grid else _first_grid(parts, neighbours, log_tail)
    return compose_losses(parts, neighbours, h, log_tail).epsilon(d, {})


def _log_tail(parts: Parts, d: float) -> float:
    return math.log(d) - math.log(sum(count for _, count in parts)) - _BEYOND


def _refined(
    parts: Parts,
    neighbours: Neighbours,
    log_tail: float,
    measure: Callable[[Composition, dict[int, Known]], float],
    precision: float,
) -> Figure:
    """The measure on the first grid that is fine enough.

    Fine enough is a grid if halving led to it and hardly moved the measure, or if halving it would hardly: errors fall as h², so
    the next move is foretold by the last two. A finer one is of no use where there are too many points, or where rounding, of
    which there is at least twice as much on the next grid, is more than what halving gains.
    """
    h, known = _first_grid(parts, neighbours, log_tail), dict[int, Known]()
    before = moved = math.inf
    while True:
        composed = compose_losses(parts, neighbours, h, log_tail)
        value = measure(composed, known)
        earlier, moved = moved, (before - value) / value if value else before
        settled = moved <= precision or (moved < earlier < math.inf and moved * moved / earlier <= precision)
        if math.isinf(value) or (settled and (h <= _USUAL_GRID or composed.bins > _EASY_BINS)):
            return Figure(value, composed.rounding if composed.rounding > precision else 0.0, h)
        if 2 * composed.bins > MOST_BINS or 4 * composed.rounding > moved:
            return Figure(value, max(moved, composed.rounding), h)
        before, h = value, h / 2


def _first_grid(parts: Parts, neighbours: Neighbours, log_tail: float) -> float:
    """The usual grid times a power of two: about an eighth of a step's standard deviation, with not too many points.

    Twice the usual one where that would be coarser, and the usual one has not too many points either.
    """
    total = sum(count for _, count in parts)
    typical = math.sqrt(sum(count / total * deviation(step, neighbours) ** 2 for step, count in parts))
    largest = max(largest_loss(step, neighbours, log_tail) for step, _ in parts)
    wanted = max(typical / 8, largest / _FIRST_BINS)
    if largest + 12 * math.sqrt(total) * typical <= _EASY_BINS * _USUAL_GRID:
        wanted = min(wanted, 2 * _USUAL_GRID)
    return float(_USUAL_GRID * 2.0 ** math.floor(math.log2(wanted / _USUAL_GRID) + 1e-9))
