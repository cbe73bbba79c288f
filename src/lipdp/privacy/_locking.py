"""Locks of files between processes, and writing that has reached the disk when it returns."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lipdp.errors import ConfigurationError

__all__ = ["has_locks", "lock", "opened", "sync_folder", "write_all"]

_CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0)


def has_locks() -> bool:
    """Whether this system has the locks of files that are used here; Windows has not."""
    return importlib.util.find_spec("fcntl") is not None


def lock(descriptor: int, *, shared: bool = False, wait: bool = True) -> None:
    """Take the lock of an open file: exclusive, or shared with other readers. BlockingIOError where it is taken and not waited for.

    The operating system gives it back when the file is closed, also by a process that is killed.
    """
    if not has_locks():  # no lock, so no promise
        raise ConfigurationError("a budget needs fcntl file locks, which this system lacks: use Linux or macOS.")
    import fcntl

    fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))


@contextmanager
def opened(path: Path, flags: int, *, shared: bool = False, wait: bool = True) -> Iterator[int]:
    """The file at ``path``, locked: the one that is there once the lock is had, were it replaced meanwhile."""
    while True:
        descriptor = os.open(path, flags | _CLOSED_ON_EXEC, 0o666)
        try:
            lock(descriptor, shared=shared, wait=wait)
            if _is_at(descriptor, path):
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        there = path.stat()
    except FileNotFoundError:
        return False
    mine = os.fstat(descriptor)
    return (mine.st_dev, mine.st_ino) == (there.st_dev, there.st_ino)


def write_all(descriptor: int, content: bytes) -> None:
    """All of it: a write may take only a part."""
    while content:
        content = content[os.write(descriptor, content) :]


def sync_folder(folder: Path) -> None:
    """Make new and renamed files of a folder last."""
    if os.name == "nt":  # folders are no files there
        return
    descriptor = os.open(folder, os.O_RDONLY | _CLOSED_ON_EXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
