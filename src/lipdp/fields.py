"""Fields checked by their annotations: when an object is made, and when it is read from a file that may hold anything.

A dataclass says what its fields may be (``steps: Annotated[int, Range(least=1)]``); :func:`check_fields` holds an object to it and
:func:`read` makes one of plain data, or refuses with the name of the field. Nothing is converted that was not meant: a bool is no
number, a text is no number, NaN and ∞ are refused unless a field says otherwise, unknown and missing fields are errors.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from numbers import Integral, Real
from typing import Annotated, Any, Literal, TypeVar, Union

import torch

from lipdp.errors import ConfigurationError, LipdpError

T = TypeVar("T")
_LARGEST = 2**53  # whole numbers above it are not told apart by floats
_FRACTION = re.compile(r"-?\d{1,400}(/\d{1,400})?")
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 60


@dataclass(frozen=True)
class Range:
    """Which numbers a field takes.

    Attributes:
        least: the smallest.
        above: a limit that is not reached itself.
        most: the largest.
        below: a limit that is not reached itself.
        infinite: ∞ is one of them; a file says it with null.
    """

    least: float = -math.inf
    above: float = -math.inf
    most: float = math.inf
    below: float = math.inf
    infinite: bool = False

    def __contains__(self, value: float) -> bool:
        if not math.isfinite(value):
            return self.infinite and value == math.inf
        return self.least <= value <= self.most and self.above < value < self.below

    def __str__(self) -> str:
        limits = (("at least", self.least), ("above", self.above), ("at most", self.most), ("below", self.below))
        return " and ".join(f"{word} {limit:g}" for word, limit in limits if math.isfinite(limit))


@dataclass(frozen=True)
class Array:
    """Which tensors a field takes: dense, finite, of this type and so many dimensions."""

    dimensions: int
    dtype: torch.dtype

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.dtype != self.dtype:
            return False
        return value.ndim == self.dimensions and value.numel() > 0 and bool(torch.isfinite(value).all())

    def __str__(self) -> str:
        return f"a finite dense tensor of {self.dimensions} dimension(s) and type {self.dtype}"


Count = Annotated[int, Range(least=1)]
Size = Annotated[int, Range(least=0)]
Positive = Annotated[float, Range(above=0)]
Scale = Annotated[float, Range(least=1e-30, most=1e30)]
"""A norm, a noise, a factor: what float32 computes with to its full relative precision, and whose square float64 holds."""
Bound = Annotated[float, Range(least=0, infinite=True)]
Probability = Annotated[float, Range(above=0, below=1)]


def check_fields(instance: Any, owner: str) -> None:
    """Refuse an instance of a dataclass with a field that its annotation does not allow.

    Args:
        instance: of a dataclass.
        owner: who it is, for the message: "a plan".

    Example:
        >>> @dataclass(frozen=True)
        ... class Part:
        ...     start: Size
        ...     def __post_init__(self) -> None:
        ...         check_fields(self, "a part")
        >>> Part(-1)
        Traceback (most recent call last):
        lipdp.errors.ConfigurationError: a part's start is -1: it has to be a whole number, at least 0
    """
    owner_type: Any = type(instance)
    for name, kind in _hints(owner_type).items():
        read(kind, getattr(instance, name), f"{owner}'s {name}")


def read(kind: Any, value: Any, where: str) -> Any:
    """``value`` as the type ``kind`` says, or a refusal that says where.

    Args:
        kind: a type annotation: numbers, texts, bools, ``Literal``, ``None``, tuples, lists, dicts with texts as keys, fractions,
            tensors (``Annotated`` with an :class:`Array`), unions, and dataclasses of these, which are read from mappings.
        value: plain data.
        where: what the value is, for the message.
    """
    rule = None
    if typing.get_origin(kind) is Annotated:
        kind, rule = typing.get_args(kind)[:2]
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        return _union(arguments, value, where, rule)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in arguments):
            return value
        raise _refusal(where, value, f"one of {', '.join(map(repr, arguments))}")
    if origin is tuple or kind is tuple:
        return _tuple(arguments, value, where)
    if origin is list:
        return [read(arguments[0], part, f"{where}[{i}]") for i, part in enumerate(_sequence(value, where))]
    if origin in (dict, Mapping) or kind is dict:
        own = value if isinstance(value, Mapping) else _refuse(where, value, "a mapping")
        inner = arguments[1] if arguments else Any
        return {read(str, key, f"a name in {where}"): read(inner, part, f"{where}[{key!r}]") for key, part in own.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return value if isinstance(value, kind) else _dataclass(kind, value, where)
    return _scalar(kind, value, where, rule)


def _scalar(kind: Any, value: Any, where: str, rule: Any) -> Any:
    if kind is float:
        return _number(value, where, rule if isinstance(rule, Range) else Range())
    if kind is int:
        return _whole(value, where, rule if isinstance(rule, Range) else Range())
    if kind is bool:
        return value if isinstance(value, bool) else _refuse(where, value, "true or false")
    if kind is str:
        return value if isinstance(value, str) and _printable(value) else _refuse(where, value, "a text")
    if kind is None or kind is type(None):
        return value if value is None else _refuse(where, value, "nothing")
    if kind is Fraction:
        return _fraction(value, where, rule)
    if isinstance(rule, Array):
        return value if value in rule else _refuse(where, value, str(rule))
    raise TypeError(f"no way to read {where} as {kind!r}")


def _whole(value: Any, where: str, limits: Range) -> int:
    number = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if number is None or abs(number) > _LARGEST or number not in limits:
        raise _refusal(where, value, f"a whole number{', ' if str(limits) else ''}{limits}")
    return number


def _number(value: Any, where: str, limits: Range) -> float:
    if value is None and limits.infinite:
        return math.inf
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:
        number = math.nan
    if number not in limits:
        raise _refusal(where, value, f"a finite number{', ' if str(limits) else ''}{limits}{' (or infinite)' * limits.infinite}")
    return number


def _fraction(value: Any, where: str, rule: Any) -> Fraction:
    number = value if isinstance(value, Fraction) else None
    if isinstance(value, str) and _FRACTION.fullmatch(value) and not re.fullmatch(r".*/0+", value):
        number = Fraction(value)
    limits = rule if isinstance(rule, Range) else Range()
    # Limits are small whole numbers: the comparison is exact.
    if number is None or not (limits.least <= number <= limits.most and limits.above < number < limits.below):
        raise _refusal(where, value, f"a fraction such as '1/3'{', ' if str(limits) else ''}{limits}")
    return number


def _union(kinds: tuple[Any, ...], value: Any, where: str, rule: Any) -> Any:
    rest = [kind for kind in kinds if kind is not type(None)]
    if value is None and len(rest) < len(kinds):
        return None
    if len(rest) == 1:
        return read(Annotated[rest[0], rule] if rule is not None else rest[0], value, where)
    named = {name: kind for kind in rest if dataclasses.is_dataclass(kind) for name in _kinds(kind)}
    if named and isinstance(value, Mapping):
        name = value.get("kind")
        if not isinstance(name, str) or name not in named:
            raise _refusal(f"{where}.kind", name, f"one of {', '.join(map(repr, named))}")
        return read(named[name], value, where)
    for kind in rest:
        try:
            return read(kind, value, where)
        except LipdpError:
            continue
    raise _refusal(where, value, f"one of {', '.join(getattr(kind, '__name__', str(kind)) for kind in rest)}")


def _kinds(kind: Any) -> tuple[str, ...]:
    """The names by which a dataclass is told from others: those that its field ``kind`` takes."""
    return typing.get_args(_hints(kind).get("kind"))


def _tuple(kinds: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    parts = _sequence(value, where)
    if len(kinds) == 2 and kinds[1] is Ellipsis:
        return tuple(read(kinds[0], part, f"{where}[{i}]") for i, part in enumerate(parts))
    if len(parts) != len(kinds):
        raise _refusal(where, value, f"a list of {len(kinds)}")
    return tuple(read(kind, part, f"{where}[{i}]") for i, (kind, part) in enumerate(zip(kinds, parts, strict=True)))


def _sequence(value: Any, where: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise _refusal(where, value, "a list")
    return value


def _dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise _refusal(where, value, f"a mapping with the fields of {kind.__name__}")
    known = {field.name: field for field in dataclasses.fields(kind) if field.init}
    unknown = [key for key in value if key not in known]
    if unknown:
        raise ConfigurationError(f"{where} has a field {_SHORT.repr(unknown[0])}, which {kind.__name__} does not know")
    nothing = dataclasses.MISSING
    required = [name for name, field in known.items() if field.default is nothing and field.default_factory is nothing]
    missing = [name for name in required if name not in value]
    if missing:
        raise ConfigurationError(f"{where} lacks the field {missing[0]!r}")
    hints = _hints(kind)
    content = {name: read(hints[name], part, f"{where}.{name}") for name, part in value.items()}
    try:
        return kind(**content)
    except LipdpError as error:
        raise type(error)(f"{where}: {error}") from error


@cache
def _hints(kind: Any) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(kind) if field.init]
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hints[name] for name in names}


def check_weights(own: Mapping[str, Any], other: Any, where: str) -> None:
    """Refuse tensors by name that are not those of a module: other names, shapes or types, or numbers that are not finite.

    Args:
        own: the module's ``state_dict()``.
        other: what shall take its place.
        where: what it is, for the message.
    """
    if not isinstance(other, Mapping) or not all(isinstance(name, str) for name in other):
        raise _refusal(where, other, "tensors by name")
    different = sorted(own.keys() ^ other.keys()) or [name for name in own if not _alike(own[name], other[name])]
    if different:
        raise ConfigurationError(f"{where} belongs to another module: {', '.join(different[:5])} differ(s)")
    broken = [name for name, mine in own.items() if isinstance(mine, torch.Tensor) and not _as_finite(mine, other[name])]
    if broken:
        raise ConfigurationError(f"{where} holds NaN or infinite numbers in {broken[0]!r}")


def _alike(own: Any, other: Any) -> bool:
    if not isinstance(own, torch.Tensor):  # a module's extra state
        return type(own) is type(other)
    dense = isinstance(other, torch.Tensor) and other.layout == own.layout
    return dense and other.shape == own.shape and other.dtype == own.dtype


def _as_finite(own: torch.Tensor, other: torch.Tensor) -> bool:
    if bool(torch.isfinite(other).all()):
        return True
    return torch.equal(torch.isfinite(other).cpu(), torch.isfinite(own).cpu())  # a mask of −∞, say


def _printable(text: str) -> bool:
    """Lone surrogates can't be written anywhere."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _refusal(where: str, value: Any, wanted: str) -> ConfigurationError:
    shown = f"a tensor of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, torch.Tensor) else _SHORT.repr(value)
    return ConfigurationError(f"{where} is {shown}: it has to be {wanted}")


def _refuse(where: str, value: Any, wanted: str) -> Any:
    raise _refusal(where, value, wanted)


def parse_json(text: Any, what: str, *, constants: bool = False) -> Any:
    """JSON as the standard has it, each name once; anything else is an error that says so.

    Python's own parser takes NaN and Infinity (here: where ``constants`` are wanted), and of two fields of one name the last.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        content = dict(pairs)
        if len(content) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise ConfigurationError(f"{what} has the field {twice!r} twice")
        return content

    def constant(word: str) -> float:
        raise ConfigurationError(f"{what} holds {word}, which is not JSON and no number to count with")

    if not isinstance(text, str):
        raise ConfigurationError(f"{what} is read from text, not from {type(text).__name__}")
    try:
        return json.loads(text, object_pairs_hook=once, parse_constant=None if constants else constant)
    except LipdpError:
        raise
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError too
        raise ConfigurationError(f"{what} is no JSON: {error}") from error
