"""Places where a process can be killed or its disk can be full: each call that changes a file, before it, halfway, after it."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

WRITES = ("write", "pwrite")
OTHERS = ("fsync", "ftruncate", "replace", "link", "unlink")


class Failpoint:
    """Counts the calls, and does ``action`` at one of them.

    Args:
        at: the number of the call, from 0 on; None: count only.
        when: "before" it, "half" through it (of a write; else before), or "after" it.
        action: what happens there.
    """

    def __init__(self, at: int | None = None, when: str = "before", action: Callable[[], None] = lambda: None) -> None:
        self.at, self.when, self.action = at, when, action
        self.calls: list[str] = []

    @contextmanager
    def installed(self) -> Iterator[Failpoint]:
        with mock.patch.multiple(os, **{name: self._wrapped(name, getattr(os, name)) for name in (*WRITES, *OTHERS)}):
            opened = os.fdopen
            with (
                mock.patch.object(os, "fdopen", lambda *a, **k: _File(self, opened(*a, **k))),
                mock.patch.object(Path, "replace", self._wrapped("replace", Path.replace)),
                mock.patch.object(Path, "unlink", self._wrapped("unlink", Path.unlink)),
            ):
                yield self

    def reached(self, name: str, half: Callable[[], Any], whole: Callable[[], Any]) -> Any:
        self.calls.append(name)
        here = self.at is not None and len(self.calls) - 1 == self.at
        if here and self.when == "before":
            self.action()
        if here and self.when == "half":
            half()
            self.action()
        result = whole()
        if here and self.when == "after":
            self.action()
        return result

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            def half() -> None:
                if name in WRITES:
                    real(args[0], args[1][: len(args[1]) // 2], *args[2:])

            return self.reached(name, half, lambda: real(*args, **options))

        return call


class _File:
    """A file object whose writes are points too."""

    def __init__(self, point: Failpoint, file: Any) -> None:
        self._point, self._file = point, file

    def __enter__(self) -> _File:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, content: bytes) -> Any:
        def half() -> None:
            self._file.write(content[: len(content) // 2])
            self._file.flush()

        return self._point.reached("file.write", half, lambda: self._file.write(content))


def die() -> None:
    """As by kill -9: nothing tidies up."""
    os.kill(os.getpid(), signal.SIGKILL)


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def in_child(work: Callable[[Callable[[str], None]], None], point: Failpoint) -> tuple[list[str], int]:
    """Run ``work(say)`` in a forked process with the point installed; what it said, and how it ended (-9 where it was killed)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.close(reader)
            real = os.write

            def say(text: str) -> None:
                real(writer, text.encode() + b"\n")

            with point.installed():
                work(say)
            code = 0
        finally:
            os._exit(code)
    os.close(writer)
    said = b""
    while chunk := os.read(reader, 65536):
        said += chunk
    os.close(reader)
    return said.decode().splitlines(), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def points(work: Callable[[], None]) -> list[tuple[int, str]]:
    """All (number, when) of the calls that ``work`` makes."""
    counter = Failpoint()
    with counter.installed():
        work()
    found = []
    for number, name in enumerate(counter.calls):
        found.append((number, "before"))
        if name in WRITES or name == "file.write":
            found.append((number, "half"))
        found.append((number, "after"))
    return found
