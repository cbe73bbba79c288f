"""Names that people type: of datasets, recipes, models. Case, dashes, underscores and slashes do not tell them apart."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from lipdp.errors import ConfigurationError

__all__ = ["choose", "match"]

_SEPARATORS = re.compile("[-_/ ]")


def _plain(name: str) -> str:
    return _SEPARATORS.sub("", name.casefold())


def match(name: object, known: Iterable[str]) -> str | None:
    """The known name that is meant: this one, or the one that differs in case, dashes, underscores, slashes and blanks only."""
    names = tuple(known)
    if name in names:
        return str(name)
    same = [other for other in names if _plain(other) == _plain(name)] if isinstance(name, str) else []
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
    raise ConfigurationError(f"there is no {kind} named {name!r}.{meant_perhaps} {listed}")


def _nearest(name: str, names: tuple[str, ...]) -> list[str]:
    """At most three names: those with this one as a word in them (magic for adbench/magic), and those spelled much like it."""
    by_plain = {_plain(other): other for other in names}
    within = [other for other in names if name.casefold() in _SEPARATORS.split(other.casefold())]
    alike = [by_plain[plain] for plain in difflib.get_close_matches(_plain(name), by_plain, n=3)]
    return list(dict.fromkeys((*within, *alike)))[:3]
