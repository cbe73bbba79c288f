"""Hostile edits of nested plain data: every field of a file, one at a time, with values that somebody might put there."""

from __future__ import annotations

import copy
import itertools
import math
import os
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lipdp.errors import LipdpError

Path = tuple[Any, ...]
Edit = tuple[str, Callable[[], Any]]
_DROP = object()

VALUES: tuple[Any, ...] = (
    -1,
    0,
    -0.5,
    math.nan,
    math.inf,
    -math.inf,
    1e308,
    1e-308,
    10**30,
    2**31,
    0.999,
    "",
    "x",
    "1",
    "∞ ñ 🙂",
    "\ud800",
    None,
    True,
    False,
    [],
    {},
    [[[]]],
    [1, 2, 3],
    {"a": 1},
    ["x", "x"],
)


def places(content: Any, path: Path = ()) -> Iterator[Path]:
    """Where something stands in nested dicts and lists: every container and every leaf, the whole left out."""
    if path:
        yield path
    if isinstance(content, dict):
        for key, part in content.items():
            yield from places(part, (*path, key))
    elif isinstance(content, list | tuple):
        for number, part in enumerate(content):
            yield from places(part, (*path, number))


def at(content: Any, path: Path) -> Any:
    for key in path:
        content = content[key]
    return content


def put(content: Any, path: Path, value: Any) -> Any:
    """A copy with another value there; tuples on the way become lists."""
    if not path:
        return value
    key, *rest = path
    if isinstance(content, tuple):
        content = list(content)
    parts: Any = dict(content) if isinstance(content, dict) else list(content)
    if rest:
        parts[key] = put(parts[key], tuple(rest), value)
    elif value is _DROP:
        del parts[key]
    else:
        parts[key] = value
    return parts


def variants(value: Any) -> Iterator[tuple[str, Any]]:
    """Values near to the one that stands there, and so harder to notice."""
    if isinstance(value, bool):
        yield "the other", not value
    elif isinstance(value, int | float):
        yield from (("negative", -value), ("half", value / 2), ("double", 2 * value), ("a hundred times", 100 * value))
        yield "almost", value * (1 - 1e-4)
        if isinstance(value, int):
            yield from (("one more", value + 1), ("one less", value - 1), ("halved", value // 2), ("as a float", float(value)))
    elif isinstance(value, str):
        yield from (("longer", value + "x"), ("shorter", value[:-1]), ("a list of it", [value]), ("spaces", f" {value} "))
    elif isinstance(value, torch.Tensor):
        yield from tensor_variants(value)
    elif isinstance(value, dict):
        yield "with an unknown field", {**value, "unknown": 1}
        yield "with a number as a name", {**value, 7: 1}
    elif isinstance(value, list | tuple) and value:
        yield from (("twice", [*value, *value]), ("reversed", list(reversed(value))), ("shorter", list(value[:-1])))
        yield from (("first twice", [value[0], *value]), ("nested", [value]))


def tensor_variants(value: torch.Tensor) -> Iterator[tuple[str, Any]]:
    real = value.is_floating_point() or value.is_complex()
    for name, number in (("nan", math.nan), ("inf", math.inf), ("1e30", 1e30), ("-1e30", -1e30)) if real else ():
        edited = value.detach().clone().to(value.dtype)
        edited.reshape(-1)[:1] = number
        yield f"one {name}", edited
    if value.dtype != torch.bool:
        yield from (("negative", -value), ("a hundred times", 100 * value), ("shifted", value + 3), ("doubled", 2 * value))
        if not real:
            yield "huge", torch.full_like(value, 2**62) if value.dtype == torch.int64 else torch.full_like(value, 100)
    yield "zeros", torch.zeros_like(value)
    yield "transposed", value.flip(0) if value.ndim else value[None]
    yield "longer", torch.cat([value.reshape(-1), value.reshape(-1)[:1]])
    yield "empty", value.reshape(-1)[:0]
    yield "as a list", value.tolist()
    for dtype in (torch.float64, torch.float16, torch.int32, torch.complex64, torch.bool):
        if dtype != value.dtype:
            yield f"as {dtype}", value.to(dtype)
    yield "sparse", value.to_sparse() if value.ndim else None
    yield "not a tensor's shape", value[..., None]


def edits(content: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """(what was done, the content with it) for one place."""
    present = at(content, path)
    where = "/".join(map(str, path))
    for value in VALUES:
        yield f"{where} = {value!r}", put(content, path, value)
    for name, value in variants(present):
        yield f"{where}: {name}", put(content, path, value)
    yield f"{where}: left out", put(content, path, _DROP)
    siblings = at(content, path[:-1])
    others = list(siblings) if isinstance(siblings, dict) else list(range(len(siblings)))
    for other in others:
        if other != path[-1] and type(siblings[other]) is type(present):
            swapped = put(put(content, path, siblings[other]), (*path[:-1], other), present)
            yield f"{where}: changed places with {other}", swapped
            break


def all_edits(content: Any, each: int | None = None, seed: int = 0) -> Iterator[tuple[str, Any]]:
    """Every edit of every place, or in the suite ``each`` of every *kind of place* (its path without the numbers of lists).

    Which ones moves on from day to day, so that all come by (LIPDP_ROTATION=N repeats those of day N, which a failure names).
    LIPDP_HOSTILE=all makes all of them, LIPDP_HOSTILE=K/N the K-th of N parts of them.
    """
    part = os.environ.get("LIPDP_HOSTILE", "")
    if part or each is None:
        number, parts = (0, 1) if part in ("", "all") else map(int, part.split("/"))
        yield from itertools.islice(_every(content), number, None, parts)
        return
    kinds: dict[Path, list[Path]] = {}
    for path in places(content):
        kinds.setdefault(tuple("*" if isinstance(key, int) else key for key in path), []).append(path)
    draw = random.Random(f"{seed} {rotation()}")
    for paths in kinds.values():
        for _ in range(each):
            name, edited = draw.choice(list(edits(content, draw.choice(paths))))
            yield f"(LIPDP_ROTATION={rotation()}) {name}", edited


def rotation() -> int:
    """The day, unless LIPDP_ROTATION says another number."""
    return int(os.environ.get("LIPDP_ROTATION") or time.time() // 86400)


def _every(content: Any) -> Iterator[tuple[str, Any]]:
    for path in places(content):
        yield from edits(content, path)


def refused_or(name: str, use: Callable[[Any], Any], content: Any, check: Callable[[Any], None]) -> str:
    """Uses the content: "refused" by an error of the library that says something, or else checked to be harmless."""
    try:
        made = use(copy.deepcopy(content))
    except LipdpError as error:
        if len(str(error)) < 20:
            raise AssertionError(f"{name}: refused without a reason: {error}") from error
        return "refused"
    except Exception as error:
        raise AssertionError(f"{name}: raw {type(error).__name__}: {error}") from error
    try:
        check(made)
    except LipdpError:
        return "refused"
    except AssertionError:
        raise
    except Exception as error:
        raise AssertionError(f"{name}: raw {type(error).__name__} in use: {error}") from error
    return "harmless"
