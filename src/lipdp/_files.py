"""Files that are there whole or not at all, locks on them, and writing that has reached the disk when it returns."""

from __future__ import annotations

import errno
import importlib.util
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from lipdp.errors import ConfigurationError

PUBLIC = 0o644
_CLOSED_ON_EXEC = getattr(os, "O_CLOEXEC", 0)


@contextmanager
def written_whole(path: Path, mode: int = 0o600, *, previous: Path | None = None) -> Iterator[BinaryIO]:
    """A file to write, moved into its place when the block ends: nobody reads half of it, two writers at once do no harm.

    Where the block fails or is interrupted, what was there before stays. Its folder is made.

    Args:
        path: its place.
        mode: who may read it; by default its owner only. ``PUBLIC``: everybody.
        previous: where what was there before is kept; the new one has then reached the disk before it takes its place.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{secrets.token_hex(6)}.tmp")
    new = os.O_RDWR | os.O_CREAT | os.O_EXCL | _CLOSED_ON_EXEC
    try:  # around its making too: an interrupt behind it leaves nothing
        with os.fdopen(os.open(part, new, 0o600), "wb") as file:
            yield file
            if previous is not None:
                file.flush()
                os.fsync(file.fileno())
        part.chmod(mode)
        if previous is not None and path.exists():
            previous.unlink(missing_ok=True)
            with suppress(OSError):  # file systems without hard links do without a backup
                os.link(path, previous)
        part.replace(path)
        if previous is not None:
            sync_folder(path.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


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


def unlock(descriptor: int) -> None:
    """Give the lock back at once, also where a process that was forked has the open file as well."""
    if has_locks():
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_UN)


_open: dict[int, tuple[int, Path]] = {}  # descriptors of files that are locked by this process: by which thread, and where
_waiting: list[tuple[tuple[int, Path], Callable[[], object]]] = []  # what is done by which thread once it lets a file go


def _forked() -> None:
    """Locks are the parent's: a child that lives on must not keep them when the parent has ended."""
    for descriptor in _open:
        os.close(descriptor)
    _open.clear()
    _waiting.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forked)


def when_free(path: Path, work: Callable[[], object]) -> None:
    """Do it now; or, where this thread is at work with the file at ``path``, right after.

    For what is called in the middle of anything, as garbage is collected: a thread that waits for a lock of its own waits for ever.
    """
    here = threading.get_ident(), path
    if here in list(_open.values()):
        _waiting.append((here, work))
    else:
        work()


@contextmanager
def opened(path: Path, flags: int, *, shared: bool = False, wait: bool = True) -> Iterator[int]:
    """The file at ``path``, locked: the one that is there once the lock is had, were it replaced meanwhile."""
    here = threading.get_ident(), path
    if wait and here in list(_open.values()):
        raise OSError(errno.EDEADLK, "this call has interrupted another one that is at work with it (a signal handler?)")
    while True:
        descriptor = os.open(path, flags | _CLOSED_ON_EXEC, 0o666)
        _open[descriptor] = here
        try:
            lock(descriptor, shared=shared, wait=wait)
            if is_at(descriptor, path):
                yield descriptor
                return
        finally:
            if descriptor in _open:  # a process that was forked in the block has closed it
                del _open[descriptor]
                os.close(descriptor)
            for each in [each for each in _waiting if each[0] == here]:
                _waiting.remove(each)
                each[1]()


def is_at(descriptor: int, path: Path) -> bool:
    """Whether the file at ``path`` is the open one."""
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
