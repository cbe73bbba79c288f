"""The analyses of runs: by privacy loss distributions, and by Rényi divergences (dp-accounting's).

Privacy loss distributions stand on a grid that adapts: the smallest ε that can be shown for sampled Gaussians, in seconds. Every
grid rounds up, so each one gives an upper bound, and halving it gives a smaller one: it is halved until that moves ε by less than
:data:`PRECISION`, or :data:`MOST_BINS` points are reached (then a warning says how far it got). Errors fall as h², so what is left
is about a third of the last move. Ordinary runs end on dp-accounting's usual grid of 1e-4, with its figures.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple

from lipdp.errors import LipdpWarning
from lipdp.privacy._composed_losses import Composition, Known, Parts, compose_losses
from lipdp.privacy._step_losses import Neighbours, deviation, largest_loss
from lipdp.privacy.accounting import Adjacency, step_event
from lipdp.privacy.runs import PrivateRun

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


FEW_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256)
"""Whole orders, which cost 3 ms in all: sums of positive terms."""
_ROUNDING = 1e-15


def run_epsilon(run: PrivateRun, d: float, orders: tuple[float, ...] | None = None) -> float:
    """ε at δ of the Gaussian parts of a run, at dp-accounting's orders or these."""
    return events_epsilon(_run_events(run), d, _neighbours(run), orders)


def run_delta(run: PrivateRun, epsilon: float) -> float:
    """δ at ε of the Gaussian parts of a run."""
    from dp_accounting.rdp import rdp_privacy_accountant

    return float(rdp_privacy_accountant.compute_delta(*_composed(_run_events(run), _neighbours(run)), epsilon)[0])


def as_known(event: Any, adjacency: Adjacency) -> Any | None:
    """A noise event as dp-accounting's Rényi accountant takes it for these neighbours; ``None`` where it has no analysis of it.

    The noise of a sum over *all* records is said against one record's part of it, and replacing that moves the sum twice as far.
    The accountant of losses doubles by itself, this one does not. Of samples of fixed size it is said against the replacement.
    """
    import dp_accounting as dp

    sampled = isinstance(event, dp.PoissonSampledDpEvent)
    inner = event.event if sampled or isinstance(event, dp.SampledWithoutReplacementDpEvent) else event
    if not isinstance(inner, dp.GaussianDpEvent):
        return None
    if isinstance(event, dp.SampledWithoutReplacementDpEvent):
        return event if adjacency == "replace_one" else None
    if adjacency == "add_remove":
        return event
    return None if sampled and event.sampling_probability < 1 else dp.GaussianDpEvent(inner.noise_multiplier / 2)


@lru_cache(maxsize=256)  # those of samples without replacement take seconds
def divergences(event: Any, adjacency: Adjacency, orders: tuple[float, ...] | None = None) -> tuple[Any, Any]:
    """Orders, and the Rényi divergences of one event that is :func:`as_known` at them; by default at dp-accounting's orders."""
    import dp_accounting as dp
    import numpy as np
    from dp_accounting import rdp

    relation = dp.NeighboringRelation.REPLACE_ONE if adjacency == "replace_one" else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    ledger = rdp.RdpAccountant(orders, relation)
    with quiet():
        ledger.compose(as_known(event, adjacency))
    return ledger.orders, np.asarray(ledger.rdp, dtype=np.float64)


def events_epsilon(
    events: Sequence[tuple[Any, int]], d: float, adjacency: Adjacency, orders: tuple[float, ...] | None = None
) -> float:
    """ε at δ of such events, so many of each."""
    from dp_accounting import rdp

    return float(rdp.compute_epsilon(*_composed(events, adjacency, orders), d)[0])


def _composed(events: Sequence[tuple[Any, int]], adjacency: Adjacency, orders: tuple[float, ...] | None = None) -> tuple[Any, Any]:
    """Orders, and the divergences of all events with what rounding may have taken: at small q, logarithms of sums near 1."""
    import numpy as np

    each = [(*divergences(event, adjacency, orders), count) for event, count in events if count]
    total = sum(count * np.maximum(values, 0.0) for _, values, count in each)
    return each[0][0], total + (sum(count for *_, count in each) + 1) * _ROUNDING


def _run_events(run: PrivateRun) -> list[tuple[Any, int]]:
    """The Gaussian parts of a run, equal steps counted together."""
    import dp_accounting as dp

    counts: dict[float, int] = {}
    for sigma, steps in run.segments:
        counts[sigma] = counts.get(sigma, 0) + steps
    steps_of = [(step_event(run, sigma), steps) for sigma, steps in counts.items()]
    return steps_of + [(dp.GaussianDpEvent(sigma), 1) for sigma in run.gaussian_releases]


def _neighbours(run: PrivateRun) -> Adjacency:
    return "replace_one" if run.sampling.scheme == "fixed_size" else "add_remove"


@contextmanager
def quiet() -> Iterator[None]:
    """Drops dp-accounting's log line about orders it leaves out: sound (fewer orders only raise ε), and frequent."""

    def wanted(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)
