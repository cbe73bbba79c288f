"""Checks of arguments that every room needs, of numbers and of names that people type; and what an error may say of them.

Numbers come back as a plain float or int. Names of datasets, recipes and models are not told apart by case, dashes, underscores
and slashes.

**Where private records are at hand**, nothing may be said that stands in one of them. An error, a warning, a chained exception or a
log record outlives the call: people paste them into issues, services collect them. So messages about records are formed from public
things only: names of columns and arguments, types, declared ranges, numbers of records. Which record it was, what stands in it and
what its file is called are not public.

- :func:`shown` is how an argument appears in a message: settings as they are, what may hold records by its type and shape;
  :func:`kind_of` is how records do.
- :func:`named` is how somebody else's exception appears in a message of ours.
- :func:`discreet` wraps what people call with records. Errors of lipdp pass, without the exceptions behind them (numpy and pandas
  show the cell that they stumbled over); every other exception is replaced by its type and the place that it comes from.

``LIPDP_DEBUG=1`` shows other people's exceptions as they are: to whoever holds the records, and to nobody else.
"""

from __future__ import annotations

import datetime
import difflib
import functools
import math
import numbers
import os
import re
import traceback
from collections.abc import Callable, Iterable
from numbers import Real
from operator import index
from pathlib import PurePath
from typing import Any, ParamSpec, Protocol, TypeVar

from lipdp.errors import ConfigurationError, DataError, LipdpError, LipdpNotice, LipdpWarning, UnexpectedError

N = TypeVar("N")


def is_number(value: object) -> bool:
    """Whether it is a finite real number, Python's or numpy's; a bool is not meant as one."""
    return not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)


class Named(Protocol):
    """What has a name."""

    @property
    def name(self) -> str:
        """It."""


R = TypeVar("R", bound=Named)


def named_one(what: str, name: str, rows: Iterable[R]) -> R:
    """The row of this name; KeyError, which lists the others, where there is none."""
    by_name = {row.name: row for row in rows}
    if name not in by_name:
        raise KeyError(f"there is no {what} {name!r}; there are {', '.join(by_name)}")
    return by_name[name]


def instance(name: str, value: object, kind: type | tuple[type, ...], advice: str) -> None:
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


def positive(name: str, value: float, *, zero: bool = False, infinite: bool = False) -> float:
    """A finite number above 0; where it is said, 0 or ∞ is one too."""
    if not (is_number(value) and (value > 0 or (zero and value == 0))) and not (infinite and value == math.inf):
        wanted = f"{'number' if infinite else 'finite number'}{', 0 or above' if zero else ' above 0'}"
        raise ConfigurationError(f"{name} is {shown(value)}: it has to be a {wanted}.")
    return float(value)


def one_of(name: str, value: N, known: Iterable[object]) -> N:
    """One of these, spelled as they are."""
    names = tuple(known)
    if value not in names:
        raise ConfigurationError(f"{name} is {shown(value)}: choose one of {', '.join(map(str, names))}.")
    return value


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


P = ParamSpec("P")
T = TypeVar("T")

_FEW, _LONG = 6, 60  # entries of a list, and characters of a text, that are taken for a setting


def debugging() -> bool:
    """Whether the user asks to see errors as they are."""
    return os.environ.get("LIPDP_DEBUG", "0") not in ("", "0")


def shown(value: object) -> str:
    """An argument in a message: a setting as it is; what may hold records, by its type and shape.

    Example:
        >>> shown((0, 1)), shown("auto"), shown(list(range(800)))
        ('(0, 1)', "'auto'", 'a list of 800')
    """
    return repr(value) if _is_setting(value) else kind_of(value)


def kind_of(value: object) -> str:
    """What was given as records, in a message: its type and shape, whatever it is.

    Example:
        >>> kind_of([3, 4]), kind_of("Ann")
        ('a list of 2', 'a str')
    """
    shape = getattr(value, "shape", None)
    if isinstance(shape, tuple):
        return f"{_kind(value)} of shape {tuple(shape)}"
    if isinstance(value, str | bytes):
        return _kind(value)
    try:
        return f"{_kind(value)} of {len(value)}"  # type: ignore[arg-type]
    except TypeError:
        return _kind(value)


def _is_setting(value: object, depth: int = 0) -> bool:
    if isinstance(value, str):
        return len(value) <= _LONG
    if isinstance(value, numbers.Number | PurePath | datetime.date | type | None):
        return True
    if f"{type(value).__module__}.{type(value).__qualname__}" in ("numpy.bool", "torch.dtype", "torch.device"):
        return True
    if depth < 2 and type(value) in (tuple, list, set, frozenset):
        return len(value) <= _FEW and all(_is_setting(entry, depth + 1) for entry in value)  # type: ignore[arg-type, attr-defined]
    if depth < 2 and isinstance(value, dict):
        return len(value) <= _FEW and all(_is_setting(part, depth + 1) for pair in value.items() for part in pair)
    return False


def _kind(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' or name.startswith('nd') else 'a'} {name}"


_PLAIN = ("MemoryError", "OutOfMemoryError", "NotFittedError")  # Python's, torch's, scikit-learn's: of fixed texts and sizes


def discreet(call: Callable[P, T]) -> Callable[P, T]:
    """``call``, whose exceptions tell nothing of the records that it was given."""

    @functools.wraps(call)
    def quiet(*args: P.args, **kwargs: P.kwargs) -> T:
        failure: Exception
        try:
            return call(*args, **kwargs)
        except LipdpError as error:
            failure = error
        except Exception as error:
            if debugging():
                raise
            failure = as_told(error)
        # Raised here, outside of the handlers: nothing becomes its context.
        try:
            raise without_chain(failure)
        finally:
            del failure

    quiet._is_discreet = True  # type: ignore[attr-defined]
    return quiet


def as_told(error: Exception) -> Exception:
    """An exception that tells nothing of a record: itself, where it is lipdp's own or of a fixed text, or what stands for it."""
    own = debugging() or isinstance(error, LipdpError | LipdpWarning | LipdpNotice) or type(error).__name__ in _PLAIN
    return error if own or _is_miscalled(error) else _replaced(error)


def named(error: BaseException) -> str:
    """An exception in a message of ours: lipdp's own with its text, somebody else's by its type.

    Example:
        >>> named(KeyError("Ann"))
        'KeyError (LIPDP_DEBUG=1 shows its text)'
    """
    kind = type(error).__name__
    return f"{kind}: {error}" if debugging() or isinstance(error, LipdpError) else f"{kind} (LIPDP_DEBUG=1 shows its text)"


def _is_miscalled(error: Exception) -> bool:
    """Whether arguments did not fit the signature, so that nothing has run: Python's text is of their names."""
    inside = error.__traceback__.tb_next if error.__traceback__ is not None else None
    while inside is not None and inside.tb_frame.f_code.co_filename.endswith(("_checks.py", "estimators/base.py")):
        inside = inside.tb_next
    return isinstance(error, TypeError) and inside is None and "argument" in str(error)


def is_discreet(call: object) -> bool:
    """Whether it is what :func:`discreet` gave back."""
    return getattr(call, "_is_discreet", False) is True


def without_chain(error: Exception) -> Exception:
    """An exception without those behind it, whose texts are not lipdp's. (Not those that the caller was handling before.)"""
    if not debugging():
        error.__cause__ = error.__context__ = None
    return error


def _replaced(error: Exception) -> UnexpectedError:
    """What stands for an exception of somebody else: its type and its place; the system's own words of a file."""
    frames = traceback.extract_tb(error.__traceback__)
    place = ""
    if frames:
        own = next((frame for frame in reversed(frames) if f"{os.sep}lipdp{os.sep}" in frame.filename), frames[-1])
        place = f" at {_short(own.filename)}:{own.lineno}"
        if frames[-1] is not own:
            place += f", in {_short(frames[-1].filename)}:{frames[-1].lineno}"
    told = f" ({os.strerror(error.errno)})" if isinstance(error, OSError) and error.errno else ""
    usual = ""
    if isinstance(error, RuntimeError) and "torch" in place:  # what torch's operations raise
        usual = (
            ". Usually records have another shape or type than the model takes: try it on a made-up one, model(torch.zeros(1, …))"
        )
    return UnexpectedError(
        f"an unexpected {type(error).__name__}{told}{place}, with records at hand: its text may tell of one of them, "
        f"and is not shown{usual}. LIPDP_DEBUG=1 shows it, to be read by whoever holds the records and by nobody else"
    )


def _short(file: str) -> str:
    """The last two parts of a path: no home folder in an error."""
    return "/".join(PurePath(file).parts[-2:])
