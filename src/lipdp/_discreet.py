"""What may be said where private records are at hand: nothing that stands in one of them.

An error, a warning, a chained exception or a log record outlives the call: people paste them into issues, services collect them.
So messages about records are formed from public things only: names of columns and arguments, types, declared ranges, numbers of
records. Which record it was, what stands in it and what its file is called are not public.

- :func:`shown` is how an argument appears in a message: settings as they are, what may hold records by its type and shape;
  :func:`kind_of` is how records do.
- :func:`named` is how somebody else's exception appears in a message of ours.
- :func:`discreet` wraps what people call with records. Errors of lipdp pass, without the exceptions behind them (numpy and pandas
  show the cell that they stumbled over); every other exception is replaced by its type and the place that it comes from.

``LIPDP_DEBUG=1`` shows other people's exceptions as they are: to whoever holds the records, and to nobody else.
"""

from __future__ import annotations

import datetime
import functools
import numbers
import os
import traceback
from collections.abc import Callable
from pathlib import PurePath
from typing import ParamSpec, TypeVar

from lipdp.errors import LipdpError, UnexpectedError

__all__ = ["as_told", "debugging", "discreet", "is_discreet", "kind_of", "named", "shown", "without_chain"]

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
    own = debugging() or isinstance(error, LipdpError) or type(error).__name__ in _PLAIN
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
    while inside is not None and inside.tb_frame.f_code.co_filename.endswith(("_discreet.py", "estimators/base.py")):
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
