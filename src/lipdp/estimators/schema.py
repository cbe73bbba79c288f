"""What is public about a table: ranges of numbers, categories, and the rows of bounded numbers that they make of it.

A range or a list of categories that was read off the private rows would be a release that nobody paid for. So both are declared
here, or found privately (:mod:`lipdp.estimators.methods`). Each row is encoded by itself: a number becomes 2(x − low)/(high − low)
− 1, clipped to [−1, 1]; a date likewise; a category a block with a 1. So an encoded row of k columns has norm at most √k,
whatever stands in it.
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import numpy.typing as npt

from lipdp._checks import is_number, shown
from lipdp.errors import ConfigurationError, DataError

Floats = npt.NDArray[np.float64]
_MISSING, _LISTED = ", or missing", 12  # words; categories that are told one by one


def _check_flag(name: str, value: Any) -> None:
    """Refuse words: "no" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise ConfigurationError(f"{name} is {shown(value)}: whether values of the column may be {name}, true or false")


@dataclass(frozen=True)
class Numeric:
    """A column of numbers with a *public* range; what lies outside counts as its end.

    Args:
        low: least value that is told apart.
        high: largest one.
        missing: whether values may be missing (NaN, None): they get an indicator of their own. Otherwise one is an error.
    """

    low: float
    high: float
    missing: bool = False

    def __post_init__(self) -> None:
        _check_flag("missing", self.missing)
        ends = is_number(self.low) and is_number(self.high)
        if not (ends and self.low <= self.high and math.isfinite(float(self.high) - float(self.low))):
            raise ConfigurationError(
                "a numeric column has a public range, two finite numbers, the lower one first; not "
                f"({shown(self.low)}, {shown(self.high)})"
            )

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return 1 + self.missing

    @property
    def said(self) -> str:
        """What is public of it, in words."""
        return f"from {_exactly(self.low)} to {_exactly(self.high)}{_MISSING if self.missing else ''}"

    def encode(self, name: str, values: Any) -> Floats:
        """(rows, width), every row of norm at most 1."""
        numbers = _numbers(name, values)
        absent = ~np.isfinite(numbers)
        if absent.any() and not self.missing:
            kind = "a missing value (NaN)" if np.isnan(numbers).any() else "an infinity"
            raise DataError(
                f"column {name!r} has {kind}. Declare it with lipdp.estimators.numeric(low, high, missing=True), or repair "
                "such rows"
            )
        half = (self.high - self.low) / 2
        middle = self.low + half
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.clip((numbers - middle) / half, -1, 1) if half > 0 else np.zeros_like(numbers)
        scaled = np.where(absent, 0.0, scaled)
        return np.stack([scaled, absent], axis=1) if self.missing else scaled[:, None]


@dataclass(frozen=True, init=False)
class Categorical:
    """A column of categories from a *public* list.

    Args:
        values: the categories, each once.
        other: whether other values (and missing ones) may occur: they share one category more. Otherwise one is an error.
    """

    values: tuple[Hashable, ...]
    other: bool = False

    def __init__(self, values: Sequence[Hashable], other: bool = False) -> None:
        if isinstance(values, str) or not hasattr(values, "__iter__"):
            raise ConfigurationError(f"the categories of a column are a list of values, not {shown(values)}")
        listed = tuple(value.item() if isinstance(value, np.generic) else value for value in values)
        if not listed or len(set(listed)) < len(listed):
            raise ConfigurationError(
                f"the categories of a column are a list of different values, at least one, not {shown(listed)}"
            )
        _check_flag("other", other)
        object.__setattr__(self, "values", listed)
        object.__setattr__(self, "other", bool(other))

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return len(self.values) + self.other

    @property
    def said(self) -> str:
        """What is public of it, in words."""
        listed = ", ".join(map(_exactly, self.values[:_LISTED]))
        more = f" and {len(self.values) - _LISTED} more" if len(self.values) > _LISTED else ""
        return f"one of {listed}{more}{', or another' if self.other else ''}"

    def encode(self, name: str, values: Any) -> Floats:
        """(rows, width): a 1 where the category is."""
        places = {value: place for place, value in enumerate(self.values)}
        codes = np.array([_place(places, value) for value in np.asarray(values, dtype=object).tolist()], dtype=np.int64)
        if not self.other and (codes < 0).any():
            raise DataError(
                f"column {name!r} has values that are not among its {len(self.values)} declared categories"
                f"{self._difference(values)}. Declare them all, or take lipdp.estimators.categorical([…], other=True), which gives "
                "the rest, and missing values, one category of their own"
            )
        codes = np.where(codes < 0, len(self.values), codes)
        return np.eye(self.width)[codes]

    def _difference(self, values: Any) -> str:
        """What of the declaration and the column's type says that another kind of column was meant."""
        numbers = all(is_number(value) for value in self.values)
        if not is_numeric(values):
            return ""
        if not numbers:
            return f" (texts, where the column is of type {values.dtype})"
        pair = len(self.values) == 2
        return f" (a list, {shown(list(self.values))}, is of categories; a range is a pair, (low, high))" if pair else ""


@dataclass(frozen=True, init=False)
class Dates:
    """A column of dates or times with a *public* range: a number, as days are; what lies outside counts as its end.

    Args:
        first: the earliest that is told apart: ``"2015-01-31"``, a date or a datetime, of Python, numpy or pandas.
        last: the latest one.
        missing: whether dates may be missing (NaT, None, an empty text): they get an indicator of their own.
    """

    first: np.datetime64
    last: np.datetime64
    missing: bool

    def __init__(self, first: Any, last: Any, missing: bool = False) -> None:
        try:
            ends = [np.datetime64(_moment(end), "s") for end in (first, last)]
        except (TypeError, ValueError):
            ends = [np.datetime64("NaT")]
        if any(np.isnat(end) for end in ends) or ends[0] > ends[1]:
            raise ConfigurationError(
                "a column of dates has a public range, two dates like '2015-01-31', the earlier one first; not "
                f"({shown(first)}, {shown(last)})"
            )
        _check_flag("missing", missing)
        object.__setattr__(self, "first", ends[0])
        object.__setattr__(self, "last", ends[1])
        object.__setattr__(self, "missing", bool(missing))

    @property
    def width(self) -> int:
        """How many numbers it becomes."""
        return 1 + self.missing

    @property
    def said(self) -> str:
        """What is public of it, in words."""
        return f"dates from {self.ends[0]} to {self.ends[1]}{_MISSING if self.missing else ''}"

    @property
    def ends(self) -> tuple[str, str]:
        """First and last as texts, days without a time of day."""
        first, last = (str(end).removesuffix("T00:00:00") for end in (self.first, self.last))
        return first, last

    def encode(self, name: str, values: Any) -> Floats:
        """(rows, width), every row of norm at most 1."""
        try:
            read = days(values)
        except (TypeError, ValueError, OverflowError):  # without the cell: it is somebody's
            raise DataError(
                f"column {name!r} is declared as dates and holds something that is none. Dates are those of numpy and pandas, or "
                "texts like '2015-01-31': pandas.to_datetime reads others"
            ) from None
        if np.isnan(read).any() and not self.missing:
            raise DataError(
                f"column {name!r} has a missing date. Declare it with lipdp.estimators.dates(first, last, missing=True), or "
                "repair such rows"
            )
        low, high = days([self.first, self.last])
        return Numeric(float(low), float(high), self.missing).encode(name, read)


def days(values: Any) -> Floats:
    """Days since 1970 of dates in any form, NaN where one is missing; what is no date is a TypeError or a ValueError."""
    given = values if getattr(getattr(values, "dtype", None), "kind", "") == "M" else np.asarray(values, dtype=object)
    if given.dtype.kind == "O":
        given = np.array([np.datetime64(_moment(value), "s") for value in given.tolist()], dtype="datetime64[s]")
    seconds = np.asarray(given, dtype="datetime64[s]")  # with a time zone: in UTC
    return np.where(np.isnat(seconds), np.nan, seconds.astype(np.int64) / 86_400)


def _moment(value: Any) -> Any:
    """What numpy makes a date of; numbers are none, for nobody knows what they count."""
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        return "NaT"
    if isinstance(value, Real | np.number):
        raise TypeError
    if isinstance(value, str):
        return value.strip().removesuffix("Z")
    stamp = value.to_pydatetime() if hasattr(value, "to_pydatetime") else value
    if getattr(stamp, "tzinfo", None) is not None:
        stamp = stamp.astimezone(datetime.UTC).replace(tzinfo=None)
    return stamp


def _place(places: Mapping[Hashable, int], value: Any) -> int:
    try:
        return places.get(value, -1)
    except TypeError:  # a list, say: no category
        return -1


Column = Numeric | Categorical | Dates


@dataclass(frozen=True)
class Schema:
    """The columns of a table in their order, all of them known.

    Attributes:
        names: of the columns.
        columns: what is public about each.
    """

    names: tuple[Hashable, ...]
    columns: tuple[Column, ...]

    @property
    def width(self) -> int:
        """Numbers of an encoded row."""
        return sum(column.width for column in self.columns)

    @property
    def radius(self) -> float:
        """Bound on the norm of an encoded row: each column's part has norm 1 at most."""
        return math.sqrt(len(self.columns))

    def encode(self, table: Mapping[Hashable, Any]) -> npt.NDArray[np.float32]:
        """(rows, width) from the columns of a table by name; extra columns are left out."""
        absent = [name for name in self.names if name not in table]
        if absent:
            raise DataError(f"the table has no column {', '.join(map(repr, absent[:5]))}; it was declared, or fitted, with one")
        parts = [column.encode(str(name), table[name]) for name, column in zip(self.names, self.columns, strict=True)]
        return np.concatenate(parts, axis=1).astype(np.float32)


def read_schema(given: Any, names: Sequence[Hashable]) -> dict[Hashable, Column]:
    """What the user declared, by column: one for all (``(low, high)`` for short), a list in their order, a mapping; or nothing."""
    if given is None:
        return {}
    if isinstance(given, Numeric | Categorical | Dates):
        return dict.fromkeys(names, given)
    if isinstance(given, tuple) and len(given) == 2 and all(isinstance(end, Real) for end in given):
        return dict.fromkeys(names, Numeric(*given))
    if isinstance(given, str) or hasattr(given, "dtype"):
        raise ConfigurationError(
            f"schema is a {type(given).__name__}: what is public is said in Python, a mapping from columns to (low, high) or lists "
            "of categories (a file of such is for `lipdp train --csv … --schema FILE`)"
        )
    if isinstance(given, list) and given and all(isinstance(entry, str | Real) for entry in given):
        raise ConfigurationError(
            f"schema is {shown(given)}, which may be a range or categories of all columns: say numeric(low, high) of "
            "lipdp.estimators, for short (low, high), or categorical([…]); or give a mapping from columns to such"
        )
    if isinstance(given, Mapping):
        unknown = [name for name in given if name not in set(names)]
        if unknown:
            raise ConfigurationError(
                f"the schema declares {', '.join(map(repr, unknown[:5]))}, which the table does not have; its columns are "
                f"{', '.join(map(repr, list(names)[:8]))}{'…' if len(names) > 8 else ''}"
            )
        declared = dict(given)
    elif isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != len(names):
            raise ConfigurationError(f"the schema lists {len(given)} columns and the table has {len(names)}: give one for each")
        declared = dict(zip(names, given, strict=True))
    else:
        raise ConfigurationError(f"schema is a {type(given).__name__}: give a mapping from columns to what is public about them")
    return {name: _column(name, value) for name, value in declared.items() if value is not None}


def _column(name: Hashable, value: Any) -> Column:
    """One declaration; a pair of numbers is short for a numeric column, a list for a categorical one."""
    if isinstance(value, Numeric | Categorical | Dates):
        return value
    if isinstance(value, tuple) and len(value) == 2 and all(isinstance(end, Real) for end in value):
        return Numeric(*value)
    if isinstance(value, list):
        return Categorical(value)
    if isinstance(value, tuple) and len(value) == 2 and all(hasattr(end, "year") for end in value):
        return Dates(*value)
    raise ConfigurationError(
        f"the schema says {shown(value)} of column {name!r}: take lipdp.estimators.numeric(low, high) or "
        "lipdp.estimators.categorical([…]), or (low, high) or [categories] for short; lipdp.estimators.dates(first, last) for dates"
    )


def for_each(names: Iterable[Any], read: Callable[[Any], Any]) -> dict[Any, Any]:
    """What ``read`` makes of every column. Where some can't be read, one error says what is wrong with the first, and names all."""
    made, wrong = {}, {}
    for name in names:
        try:
            made[name] = read(name)
        except DataError as error:
            wrong[name] = str(error)
    if wrong:
        first, *others = wrong
        more = f" (and column{'s' if len(others) > 1 else ''} {', '.join(map(repr, others))}: look there, too)" if others else ""
        raise DataError(f"{wrong[first]}{more}")
    return made


def is_frame(table: Any) -> bool:
    """Whether it is a DataFrame, of pandas or the like; pandas itself is not needed to tell."""
    return hasattr(table, "columns") and hasattr(table, "dtypes") and hasattr(table, "iloc")


def columns_of(table: Any) -> dict[Hashable, Any]:
    """The columns of a DataFrame by name, or of an array (rows, columns) by number."""
    if is_frame(table):
        check_names(table)
        return {name: table[name] for name in table.columns}
    return {number: table[:, number] for number in range(table.shape[1])}


def check_names(table: Any) -> None:
    """No two columns of a DataFrame have one name."""
    twice = [name for name in dict.fromkeys(table.columns) if list(table.columns).count(name) > 1]
    if twice:
        raise DataError(
            f"two columns of the table have the same name, {twice[0]!r}: rename one, so that a schema can tell them apart"
        )


def _numbers(name: str, values: Any) -> Floats:
    """A column as float64; missing ones are NaN. Texts that are no numbers, dates and objects are refused by name."""
    kind = getattr(values, "dtype", None)
    if getattr(kind, "kind", "") in ("m", "M"):
        raise DataError(
            f"column {name!r} holds dates or durations: declare dates with lipdp.estimators.dates(first, last), and make "
            "numbers of durations first (values.dt.total_seconds())"
        )
    if getattr(kind, "kind", "") == "c":
        raise DataError(f"column {name!r} holds complex numbers: give their real and imaginary parts as two columns")
    try:
        if hasattr(values, "to_numpy") and kind is not None and not isinstance(kind, np.dtype):
            return np.asarray(values.to_numpy(dtype=np.float64, na_value=np.nan), dtype=np.float64)
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):  # not `from`: torch's and numpy's texts show the cell, which is somebody's
        raise DataError(
            f"column {name!r} is declared numeric and holds something that is no number. Declare it with "
            "lipdp.estimators.categorical([…]), or repair it (a comma for the decimal point, a unit, a word for a missing value)"
        ) from None


def is_boolean(values: Any) -> bool:
    """Whether a column's *type* says that there are two values: its range is public then."""
    return _kind_of_type(values) == "b"


def is_numeric(values: Any) -> bool:
    """Whether a column's type is one of numbers; texts, objects, dates and categories are not."""
    return _kind_of_type(values) in tuple("biuf")


def _exactly(value: Any) -> str:
    """A number in all of its digits, a text as it is: in quotes where it could be taken for two, or for none."""
    if isinstance(value, str):
        return value if value.strip() == value != "" and not set(value) & set(",;\"'") else repr(value)
    return repr(float(value)).removesuffix(".0") if is_number(value) and not isinstance(value, int) else str(value)


def _kind_of_type(values: Any) -> str:
    """numpy's letter for a column's type: "b" for booleans, "i", "u", "f" for numbers; nullable, sparse and Arrow's have it."""
    kind = getattr(getattr(values, "dtype", None), "kind", "")
    return kind if isinstance(kind, str) else ""
