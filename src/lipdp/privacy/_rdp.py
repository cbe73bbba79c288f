"""Rényi divergences of a run, by dp-accounting."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from lipdp.privacy.accounting import Adjacency, step_event
from lipdp.privacy.runs import PrivateRun

__all__ = ["FEW_ORDERS", "as_known", "divergences", "events_epsilon", "quiet", "run_delta", "run_epsilon"]

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
