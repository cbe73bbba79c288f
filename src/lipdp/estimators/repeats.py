"""Noticing that rows were fitted before: folds of a cross-validation, a grid of settings. A help, and no account.

Of each fit, the 64 rows with the smallest keyed hashes are remembered (their hashes, under a key of this process). Two sets of
rows that share a part p of their rows share about that part of the 64 too (a bottom-k sketch), so that folds are recognised, and
other data are not.
"""

from __future__ import annotations

import secrets
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from lipdp._texts import brief, upwards
from lipdp.errors import RepeatedRunWarning
from lipdp.training.account import are_expected

__all__ = ["forget_rows", "note_rows"]

_KEPT, _SHARED = 64, 4  # hashes of a fit; as many in common are no accident

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class _Fit:
    sketch: frozenset[int]
    epsilon: float
    delta: float
    budget: str | None


_fits: list[_Fit] = []
_key = np.random.default_rng(secrets.randbits(128))
_FACTORS: dict[int, Hashes] = {}


def note_rows(rows: Any, epsilon: float, delta: float, budget: str | None) -> None:
    """Remember a fit; warn if some of its rows were fitted before without an account that adds both up."""
    fit = _Fit(_sketch(rows), epsilon, delta, budget)
    few = min(_SHARED, len(fit.sketch))
    before = [
        other for other in _fits if len(other.sketch & fit.sketch) >= max(1, few) and (budget is None or other.budget != budget)
    ]
    _fits.append(fit)
    if before and not are_expected():
        together = epsilon + sum(other.epsilon for other in before)
        warnings.warn(
            f"this is fit {len(before) + 1} on some of the same rows in this process (folds, a grid, a repetition), and no budget "
            f"adds them up: for a row that is in all of them ε is up to {upwards(together)} at δ = "
            f"{brief(delta + sum(o.delta for o in before))}, not {upwards(epsilon)}. Give all of them one account, "
            "budget=lipdp.privacy.Budget(…), or report the sum.",
            RepeatedRunWarning,
            stacklevel=4,
        )


def forget_rows() -> None:
    """Forget all fits of this process (for tests, and for data that are public)."""
    _fits.clear()


def _sketch(rows: Any) -> frozenset[int]:
    return frozenset(np.partition(hashes, _KEPT)[:_KEPT].tolist() if len(hashes := _hashes(rows)) > _KEPT else hashes.tolist())


def _hashes(rows: Any) -> Hashes:
    """One keyed number for each row: sums of its words times secret odd numbers; texts and objects by their own hashes first."""
    words = _words(rows)
    width = words.shape[1]
    if width not in _FACTORS:
        _FACTORS[width] = _key.integers(0, 2**63, size=(width,), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    sums: Hashes = (words ^ (words >> np.uint64(29))) @ _FACTORS[width]
    mixed: Hashes = (sums ^ (sums >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return mixed


def _words(rows: Any) -> Hashes:
    """(rows, words): numbers as they lie in memory; one word for a row with anything else in it."""
    held = np.asarray(rows)
    if held.dtype.kind in "biuf":
        return np.ascontiguousarray(held.reshape(len(held), -1), dtype=np.float64).view(np.uint64)
    return np.array([[hash(repr(row)) % 2**64] for row in held.tolist()], dtype=np.uint64)
