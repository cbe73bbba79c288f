"""Checks of arguments that the modules of this folder share. Each returns the value as a plain float or int."""

from __future__ import annotations

import math
from numbers import Real
from operator import index

from lipdp.errors import ConfigurationError


def is_number(value: object) -> bool:
    """Whether it is a finite real number, Python's or numpy's; a bool is not meant as one."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def positive(name: str, value: float) -> float:
    """A finite number above 0."""
    if not (is_number(value) and value > 0):
        raise ConfigurationError(f"{name} is {value!r}: it has to be a finite number above 0.")
    return float(value)


def probability(value: float) -> float:
    """A number strictly between 0 and 1: a delta."""
    if not (is_number(value) and 0 < value < 1):
        raise ConfigurationError(
            f"delta is {value!r}: a probability strictly between 0 and 1, best well below 1 / dataset size, e.g. 1e-5."
        )
    return float(value)


def rate(value: float) -> float:
    """A sampling rate: above 0, at most 1."""
    if not (is_number(value) and 0 < value <= 1):
        raise ConfigurationError(
            f"sampling_rate is {value!r}: each record's chance to be in a step, above 0 and at most 1 "
            "(expected batch size / dataset size)."
        )
    return float(value)


def whole(name: str, value: int, least: int = 1) -> int:
    """A whole number, at least ``least``; floats and bools are refused."""
    try:
        count = index(value) if not isinstance(value, bool) else least - 1
    except TypeError:
        count = least - 1
    if count < least:
        raise ConfigurationError(f"{name} is {value!r}: it has to be a whole number (an int), at least {least}.")
    return count
