"""Ranges that nobody declared, found privately: two quantiles of each column, paid for from a share of ε.

Each end is one exponential mechanism (:func:`lipdp.privacy.private_quantile`), with pure ε of its own; they add up. Nothing being
known of a column's scale, its values are looked at through t = asinh(x/u), u = 1e-6, which is increasing (so a quantile of t is t
of a quantile), and has every scale from u to 1e12 on a public interval of length 83. What the quantiles leave
out is covered by widening the range by a quarter on both sides: values beyond it count as its ends.

Equal values leave a quantile no room: between a thousand zeros there is nothing to choose. So each t is moved by a random amount
of at most 1e-3, drawn for each record by itself (a part in a thousand of the value). Neighbouring datasets stay neighbours, so ε
is the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from lipdp._texts import brief
from lipdp.errors import LipdpWarning
from lipdp.estimators.schema import Numeric
from lipdp.privacy import Adjacency, generator, private_quantile
from lipdp.privacy.budget import AnyBudget

__all__ = ["private_ranges", "rank_error"]

_UNIT, _LARGEST = 1e-6, 1e12
_REACH = math.asinh(_LARGEST / _UNIT)
_MOVED = 1e-3
_LOW, _HIGH, _WIDER = 0.1, 0.9, 0.25
_ROUGH = 0.1  # share of the records by which a quantile may be off before it is said


def rank_error(epsilon: float) -> float:
    """By how many records a quantile of pure ε is off, up to one case in twenty.

    The exponential mechanism's utility is the rank (moved by 0.9 at most by a record), so it is below the best one by more than
    2·0.9·(ln(R) + ln 20)/ε with probability 1/20; 1/R, the room at the best rank against all the room, is taken as 1/10,000.
    """
    return 2 * 0.9 * (math.log(10_000) + math.log(20)) / epsilon


def private_ranges(
    columns: Mapping[Any, np.ndarray[Any, Any]],
    epsilon: float,
    *,
    adjacency: Adjacency,
    budget: AnyBudget,
    size: int,
    seed: int | None = None,
) -> dict[Any, Numeric]:
    """A range for each column of numbers, ε-DP together (δ = 0); NaN counts as large.

    Args:
        columns: values by column, one of each for a record.
        epsilon: of all of them together.
        adjacency: which datasets are neighbours.
        budget: the account of the data, charged for each end before it is drawn.
        size: N, public: what the error is compared with, to say beforehand when ranges will be rough.
        seed: what a reproducible fit, which is not private, draws from; by default fresh keys of the operating system.
    """
    if not columns:
        return {}
    each = epsilon / (2 * len(columns))
    off = rank_error(each) / size
    if off > _ROUGH:
        warnings.warn(
            f"{len(columns)} range{'s are' if len(columns) > 1 else ' is'} found from {size} records with ε = {brief(epsilon)}: "
            f"each end may be off by {min(100.0, 100 * off):.0f} % of the records. Declare what is public: schema={{column: (low, "
            "high), …}, target=(low, high) for y; that costs no privacy.",
            LipdpWarning,
            stacklevel=4,
        )
    found = {}
    moves = np.random.default_rng(seed)
    for number, (name, values) in enumerate(columns.items()):
        seen = np.arcsinh(np.nan_to_num(values.astype(np.float64), nan=_LARGEST, posinf=_LARGEST, neginf=-_LARGEST) / _UNIT)
        seen = seen + moves.uniform(-_MOVED, _MOVED, len(seen))
        ends = []
        for share in (_LOW, _HIGH):
            draw = None if seed is None else generator(seed, number, f"range {share}")
            released = private_quantile(
                seen, share, (-_REACH, _REACH), epsilon=each, adjacency=adjacency, generator=draw, budget=budget
            )
            ends.append(released.value)
        low, high = (_UNIT * math.sinh(end) for end in sorted(ends))
        room = _WIDER * (high - low)
        found[name] = Numeric(low - room, high + room)
    return found
