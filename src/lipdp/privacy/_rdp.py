"""Rényi divergences of a run, by dp-accounting."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lipdp.privacy.accounting import step_event
from lipdp.privacy.runs import PrivateRun

__all__ = ["FEW_ORDERS", "quiet", "run_delta", "run_epsilon"]

FEW_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256)
"""Whole orders, which cost 3 ms in all: sums of positive terms."""
_ROUNDING = 1e-15


def run_epsilon(run: PrivateRun, d: float, orders: Sequence[float] | None = None) -> float:
    """ε at δ of the Gaussian parts of a run, at dp-accounting's orders or these."""
    from dp_accounting import rdp

    ledger = _ledger(run, orders)
    return float(rdp.compute_epsilon(ledger.orders, _rounded_up(ledger, run), d)[0])


def run_delta(run: PrivateRun, epsilon: float) -> float:
    """δ at ε of the Gaussian parts of a run."""
    from dp_accounting.rdp import rdp_privacy_accountant

    ledger = _ledger(run, None)
    return float(rdp_privacy_accountant.compute_delta(ledger.orders, _rounded_up(ledger, run), epsilon)[0])


def _ledger(run: PrivateRun, orders: Sequence[float] | None) -> Any:
    """dp-accounting's RDP accountant that has seen the Gaussian parts of the run."""
    import dp_accounting as dp
    from dp_accounting import rdp

    fixed = run.sampling.scheme == "fixed_size"
    relation = dp.NeighboringRelation.REPLACE_ONE if fixed else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    ledger = rdp.RdpAccountant(orders, relation)
    counts: dict[float, int] = {}
    for sigma, steps in run.segments:
        counts[sigma] = counts.get(sigma, 0) + steps
    with quiet():
        for sigma, steps in counts.items():
            if steps:
                ledger.compose(step_event(run, sigma), steps)
        for sigma in run.gaussian_releases:  # of all records: replacing one moves such a sum twice as far
            ledger.compose(dp.GaussianDpEvent(sigma / 2 if fixed else sigma))
    return ledger


def _rounded_up(ledger: Any, run: PrivateRun) -> Any:
    """Its divergences, each with what rounding may have taken from it: at small q they are logarithms of sums near 1."""
    import numpy as np

    return np.maximum(ledger.rdp, 0.0) + (run.steps + 1) * _ROUNDING


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
