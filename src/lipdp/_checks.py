"""Checks of arguments that every room needs: of numbers, and of names that people type.

Numbers come back as a plain float or int. Names of datasets, recipes and models are not told apart by case, dashes, underscores
and slashes.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable
from numbers import Real
from operator import index
from typing import Any

from lipdp._discreet import shown
from lipdp.errors import ConfigurationError, DataError

__all__ = [
    "choose",
    "instance",
    "is_number",
    "known_device",
    "match",
    "no_gradient",
    "positive",
    "probability",
    "rate",
    "whole",
]


def is_number(value: object) -> bool:
    """Whether it is a finite real number, Python's or numpy's; a bool is not meant as one."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


def instance(name: str, value: object, kind: type, advice: str) -> None:
    """Refuse an argument that is no ``kind``: a class in the place of its object, arguments in another order, a path, a text.

    Args:
        name: of the argument.
        value: that was given.
        kind: that it has to be of.
        advice: what to give.
    """
    if not isinstance(value, kind):
        given = f"the class {value.__name__}" if isinstance(value, type) else shown(value)
        raise ConfigurationError(f"{name} is {given}: {advice}")


def known_device(device: Any) -> Any:
    """The torch.device of this name, one that is here. (torch lists all that it was ever built for, where there is none.)"""
    import torch

    advice = "take 'cpu', 'cuda' or 'cuda:1', or leave device out (`lipdp doctor` says what is there)"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigurationError(f"there is no device {shown(device)}: {advice}") from None
    try:
        if place.type == "meta":
            raise NotImplementedError
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, NotImplementedError):
        what = "torch sees no GPU here" if place.type == "cuda" and not torch.cuda.is_available() else "torch can't compute there"
        raise ConfigurationError(f"device is {shown(device)}, and {what}: {advice}") from None
    return place


def no_gradient() -> DataError:
    """The error of a loss that no parameter has a part in."""
    import torch

    if not torch.is_grad_enabled():
        return DataError("gradients are switched off here, by torch.no_grad() or torch.inference_mode(): train outside of it")
    return DataError("the loss does not depend on any trainable parameter")


def positive(name: str, value: float) -> float:
    """A finite number above 0."""
    if not (is_number(value) and value > 0):
        raise ConfigurationError(f"{name} is {shown(value)}: it has to be a finite number above 0.")
    return float(value)


def probability(value: float) -> float:
    """A number strictly between 0 and 1: a delta."""
    if not (is_number(value) and 0 < value < 1):
        raise ConfigurationError(
            f"delta is {shown(value)}: a probability strictly between 0 and 1, best well below 1 / dataset size, e.g. 1e-5."
        )
    return float(value)


def rate(value: float) -> float:
    """A sampling rate: above 0, at most 1."""
    if not (is_number(value) and 0 < value <= 1):
        raise ConfigurationError(
            f"sampling_rate is {shown(value)}: each record's chance to be in a step, above 0 and at most 1 "
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
        raise ConfigurationError(f"{name} is {shown(value)}: it has to be a whole number (an int), at least {least}.")
    return count


_SEPARATORS = re.compile("[-_/ ]")


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name.casefold())


def match(name: object, known: Iterable[str]) -> str | None:
    """The known name that is meant: this one, or the one that differs in case, dashes, underscores, slashes and blanks only."""
    if not isinstance(name, str):
        return None
    names = tuple(known)
    if name in names:
        return str(name)
    same = [other for other in names if _plain(other) == _plain(name)]
    return same[0] if len(same) == 1 else None


def choose(kind: str, name: object, known: Iterable[str], choices: str | None = None) -> str:
    """The known name that is meant. An unknown one is refused with those nearest to it, and all of them.

    Args:
        kind: what has the name: "dataset".
        name: what was typed.
        known: all names.
        choices: what to say of them instead of listing all.

    Example:
        >>> choose("dataset", "Fashion-MNIST", ["mnist", "fashion_mnist"])
        'fashion_mnist'
    """
    names = tuple(known)
    meant = match(name, names)
    if meant is not None:
        return meant
    guess = " or ".join(map(repr, _nearest(name, names) if isinstance(name, str) else ()))
    meant_perhaps = f" Did you mean {guess}?" if guess else ""
    listed = choices or f"Choose one of {', '.join(map(repr, names))}."
    raise ConfigurationError(f"there is no {kind} named {shown(name)}.{meant_perhaps} {listed}")


def _nearest(name: str, names: tuple[str, ...]) -> list[str]:
    """At most three names: those with this one as a word in them (magic for adbench/magic), and those spelled much like it."""
    by_plain = {_plain(other): other for other in names}
    within = [other for other in names if name.casefold() in _SEPARATORS.split(other.casefold())]
    alike = [by_plain[plain] for plain in difflib.get_close_matches(_plain(name), by_plain, n=3)]
    return list(dict.fromkeys((*within, *alike)))[:3]
