"""Places where a Ctrl-C can arrive: every line, call and return of lipdp's own code; every instruction where that is asked for."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import lipdp

_HOME = str(Path(lipdp.__file__).parent)


class Point(NamedTuple):
    """A place in the code, and which time it is reached.

    Attributes:
        place: file, name of the function, line, instruction.
        event: "call", "line", "opcode" or "return".
        time: the first time is 0.
    """

    place: tuple[str, str, int, int]
    event: str
    time: int

    def __str__(self) -> str:
        file, function, line, _ = self.place
        return f"{self.event} in {function}, {file}:{line}, time {self.time}"


class Interruption:
    """Within :meth:`during` a work is traced, and ``error`` raised at one point of it, once.

    Args:
        at: where; None: the points are counted only.
        error: what is raised there.
        files: parts of paths under lipdp that are traced; "" is all of them.
        finely: names of functions whose every instruction is a point.
    """

    def __init__(
        self,
        at: Point | None = None,
        error: BaseException | None = None,
        files: tuple[str, ...] = ("",),
        finely: tuple[str, ...] = (),
    ) -> None:
        self.at, self.error, self.finely = at, error, finely
        self.files = tuple(f"{_HOME}/{part}" for part in files)
        self.times: dict[tuple[Any, str], int] = {}
        self.raised = False

    def during(self, work: Callable[[], None]) -> None:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            work()
        finally:
            sys.settrace(before)

    def points(self) -> list[Point]:
        """The first and the last time at each place that was reached."""
        return [
            Point(place, event, time) for (place, event), times in self.times.items() for time in sorted({0, times - 1})
        ]  # fmt: skip

    def _called(self, frame: FrameType, event: str, argument: object) -> Any:
        """Where an error is to be raised, only functions of that name are followed, and none after it: the rest is not slowed."""
        if self.raised or (self.at is not None and frame.f_code.co_name != self.at.place[1]):
            return None
        file = frame.f_code.co_filename
        if not file.startswith(self.files) and not (file == contextlib.__file__ and _is_ours(frame.f_back)):
            return None
        frame.f_trace_opcodes = frame.f_code.co_name in self.finely
        self._reached(frame, event)
        return self._inside

    def _inside(self, frame: FrameType, event: str, argument: object) -> Any:
        if event != "exception":
            self._reached(frame, event)
        return self._inside

    def _reached(self, frame: FrameType, event: str) -> None:
        if frame.f_lasti in _exits(frame.f_code):
            return
        instruction = frame.f_lasti if event == "opcode" else -1
        place = frame.f_code.co_filename.removeprefix(_HOME), frame.f_code.co_name, frame.f_lineno, instruction
        time = self.times.get((place, event), 0)
        self.times[place, event] = time + 1
        if self.error is not None and not self.raised and self.at == (place, event, time):
            self.raised = True
            raise self.error


def _is_ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(_HOME)


@lru_cache(maxsize=4096)
def _exits(code: CodeType) -> frozenset[int]:
    """Instructions from the end of a ``with`` block to the call of its ``__exit__``: Python delivers no signal there."""
    steps = list(dis.get_instructions(code))
    found = {step.offset for step in steps if step.opname in ("PUSH_EXC_INFO", "WITH_EXCEPT_START")}
    for first, second, third in zip(steps, steps[1:], steps[2:], strict=False):
        if all(step.opname == "LOAD_CONST" and step.argval is None for step in (first, second, third)):
            found |= {step.offset for step in steps if first.offset <= step.offset <= third.offset + 6}
    return frozenset(found)
