"""A secret in a record, and a search of all that comes out for it."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lipdp.errors import LipdpError

NUMBER = 7391046.5
TEXT = "zyxomma4711"
MARKS = ("7391046", "zyxomma", "7.391046", "7.39105e", "7.3910465")


@dataclass
class Told:
    """What a call let out: its exception, and all other texts by where they came from."""

    error: BaseException | None = None
    result: Any = None
    texts: dict[str, str] = field(default_factory=dict)

    def leaks(self, *more: object) -> list[str]:
        """Where the secret stands."""
        texts = {**self.texts, **{f"value {number}": told(value) for number, value in enumerate(more)}}
        for number, error in enumerate(chain(self.error)):
            texts[f"exception {number}: {type(error).__name__}"] = told(error)
        return [f"{place}: {text[:300]}" for place, text in texts.items() if any(mark in text.casefold() for mark in MARKS)]


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """An exception and all behind it."""
    waiting, seen = [error], set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, one.__context__, *(part for part in one.args if isinstance(part, BaseException))]


def told(value: object, depth: int = 0) -> str:
    """All that can be read off a value: its texts, and what hangs on it."""
    parts = [_text(value)]
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray):
        parts += [str(value.tolist())]
    elif isinstance(value, bytes):
        parts.append(value.decode("latin-1"))
    elif depth < 4:
        inside: list[object] = []
        if isinstance(value, dict):
            inside += [*value, *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            inside += list(value)
        if isinstance(value, BaseException):
            inside += [*value.args, *getattr(value, "__notes__", ()), getattr(value, "object", None), vars(value)]
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
            inside.append(vars(value))
        parts += [told(part, depth + 1) for part in inside]
    return "\n".join(parts)


def _text(value: object) -> str:
    try:
        return f"{value!s} {value!r}"
    except Exception:  # what can't be read tells nothing
        return ""


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage() + (told(record.exc_info[1]) if record.exc_info and record.exc_info[1] else ""))


def listen(call: Callable[[], Any]) -> Told:
    """Call it, and keep its exception, warnings, log records and what it writes."""
    heard, kept, root = Told(), _Kept(), logging.getLogger()
    level, out, err = root.level, io.StringIO(), io.StringIO()
    root.addHandler(kept)
    root.setLevel(logging.DEBUG)
    try:
        with warnings.catch_warnings(record=True) as warned, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            warnings.simplefilter("always")
            try:
                heard.result = call()
            except Exception as error:
                heard.error = error
    finally:
        root.removeHandler(kept)
        root.setLevel(level)
    heard.texts = {
        "warnings": "\n".join(told(one.message) for one in warned),
        "log": "\n".join(kept.lines),
        "stdout": out.getvalue(),
        "stderr": err.getvalue(),
    }
    return heard


def files_of(folder: Path) -> dict[str, str]:
    """Names and contents of all files below a folder."""
    found = [Path(place) / name for place, _, names in os.walk(folder) for name in names]
    return {str(file): file.read_bytes().decode("latin-1") for file in found}


def check(call: Callable[[], Any], *more: object, what: object = "") -> Told:
    """Nothing tells of the secret, and what is raised is lipdp's own."""
    heard = listen(call)
    assert not heard.leaks(*more), (what, heard.leaks(*more))
    assert heard.error is None or isinstance(heard.error, LipdpError), (what, repr(heard.error))
    return heard
