"""The book of a run on disk: what stands for each of its releases, written before it is handed out.

A run that was killed goes on from its last checkpoint, and makes the steps behind it again. Made again with the same sums they are
the same releases. With other sums (another machine, another number of threads, another ``microbatch_size``, kernels that add in any
order) they would be second ones that nobody pays for; the book is what tells, and they are given up instead.

A text file of one line a draw, for its owner's eyes only. A line that was not finished was never promised. It is not waited for
until it has reached the disk (a killed process loses nothing of it, a power failure may) but where the run is saved: with what is
saved goes a mark of how far the book had come, so that an older one is not taken for it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lipdp._files import has_locks, is_at, lock, sync_folder, unlock, write_all
from lipdp.errors import CheckpointError

Draw = tuple[int | str, int]
"""A position (a step's number, or a release's name), and which of its draws."""

_HEAD = "lipdp book 1 "
_TAG = re.compile(r"[0-9a-f]{32}")
MARK = re.compile(r"[0-9]{1,18} [0-9a-f]{64}")
"""How a mark of a book is written: the number of its bytes, and a digest of them."""


class BookFile:
    """The file at ``path``, open for one run and locked for as long as it is: until it is closed, or nobody has this object.

    Attributes:
        draws: what earlier processes of this run have drawn; ``b""`` where what stands for it is not known.
    """

    def __init__(self, path: str | os.PathLike[str], run: bytes, since: str | None = None) -> None:
        """Open it, or begin it.

        Args:
            path: of the file.
            run: name of the run, which may be told to anyone.
            since: the :attr:`mark` that the run was saved with, if it was: there has to be a book that has come as far.
        """
        self.path = Path(path).absolute()  # the same one, also where the process goes to another folder
        self.draws: dict[Draw, bytes] = {}
        self._process = os.getpid()
        self._led = ""  # a mark that it is known to have had
        try:
            self._open(run, since)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"the book '{self.path}' can't be opened: {error}. Nothing was released.") from error

    def _open(self, run: bytes, since: str | None) -> None:
        is_there = self.path.exists()
        if since is not None and not is_there:
            raise CheckpointError(
                f"the book of this run, '{self.path}', is not there: it tells which steps were made after the run was saved, so "
                "that none is made twice and paid for once. Put the file there that was written with the checkpoint. If it is "
                "lost, this run can't go on: its weights can be used, or trained further by a new run, whose epsilon comes on top."
            )
        if is_there and not stat.S_ISREG(self.path.stat().st_mode):  # a device or a pipe, which may be read for ever
            raise CheckpointError(f"the book '{self.path}' can't be opened: it is no ordinary file. Choose another one.")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_CLOEXEC", 0), 0o600)
        self._file = os.fdopen(descriptor, "r+b", buffering=0)  # let go with this object, too
        try:
            self._take(run, since)
        except BaseException:
            self._file.close()
            raise
        if not is_there:
            sync_folder(self.path.parent)

    def _take(self, run: bytes, since: str | None) -> None:
        if has_locks():
            try:
                lock(self._file.fileno(), wait=False)
            except BlockingIOError as error:
                raise CheckpointError(
                    f"the book '{self.path}' is held by another process, or by another engine of this one: one run writes it at a "
                    "time. Wait for that run or end it (engine.close()), or choose another file."
                ) from error
        if not is_at(self._file.fileno(), self.path):
            raise CheckpointError(f"the book '{self.path}' was moved or replaced while it was opened. Try again.")
        head = f"{_HEAD}{run.hex()}\n".encode()
        content = self._file.readall()
        whole = content[: content.rfind(b"\n") + 1]  # the rest was never promised
        if since is not None and not _leads_to(whole, since):
            raise CheckpointError(
                f"the book '{self.path}' is not the one that this run was saved with, or an older copy of it: it lacks what the "
                "book said by then, so it can't tell what was released afterwards. Put the file there that was written with the "
                "checkpoint; or make a new run, whose epsilon comes on top."
            )
        if not whole and head.startswith(content):
            whole = head
            self._file.truncate(0)
            write_all(self._file.fileno(), head)
        elif not whole.startswith(head):
            raise CheckpointError(
                f"'{self.path}' is not the book of this run: it was begun by another one, or it is no book. Choose another file, "
                "or remove this one, if the run that it belongs to will never go on."
            )
        else:
            self.draws = dict(self._read(line) for line in whole[len(head) :].decode(errors="replace").splitlines())
            self._file.truncate(len(whole))
        self._until = len(whole), hashlib.sha256(whole)
        held = os.fstat(self._file.fileno())
        self._place = held.st_dev, held.st_ino

    def _read(self, line: str) -> tuple[Draw, bytes]:
        try:
            position, number, tag = json.loads(line)
        except (ValueError, TypeError, RecursionError):
            position = number = tag = None
        fits = type(position) in (int, str) and (isinstance(position, str) or 0 <= position < 2**48)
        if not (fits and type(number) is int and number >= 0 and isinstance(tag, str) and (not tag or _TAG.fullmatch(tag))):
            raise CheckpointError(
                f"the book '{self.path}' is damaged at the line {line[:60]!r}: nothing can go on by it. Take a copy of the book "
                "and the checkpoint that belong together."
            )
        return (position, number), bytes.fromhex(tag)

    @property
    def mark(self) -> str:
        """How far it has come: all that it says by now is in every book that has this mark."""
        size, digest = self._until
        return f"{size} {digest.hexdigest()}"

    def leads_to(self, mark: str) -> bool:
        """Whether it says all that the book said that had this mark."""
        if mark not in (self._led, self.mark):
            try:
                content = self.path.read_bytes()[: self._until[0]]
            except OSError:
                return False
            if not (MARK.fullmatch(mark) and _leads_to(content, mark)):
                return False
        self._led = mark
        return True

    def write(self, draws: Mapping[Draw, bytes]) -> None:
        """What stands for draws that are about to be handed out; ``b""``: it is told later."""
        if self._process != os.getpid():
            raise CheckpointError(f"the book '{self.path}' was opened by another process, of which this one is a copy (os.fork)")
        self.check()
        lines = "".join(f"{json.dumps([*draw, tag.hex()])}\n" for draw, tag in draws.items()).encode()
        size, digest = self._until[0] + len(lines), self._until[1].copy()
        digest.update(lines)
        before, after = self._until, (size, digest)
        try:
            write_all(self._file.fileno(), lines)
            self._until = after
        except BaseException as error:  # a Ctrl-C, too
            if self._until is after:
                raise
            with contextlib.suppress(OSError):
                self._file.truncate(before[0])  # nothing is half-written, and what nobody was told is not there
            if not isinstance(error, OSError):
                raise
            raise CheckpointError(
                f"the book '{self.path}' can't be written: {error}. Nothing was released in this step. Make room (or give the "
                "right to write), and go on."
            ) from error

    def check(self) -> None:
        """Refuse to go on where its path leads to another file, or others have written to it: who goes on later reads that one."""
        try:
            there = self.path.stat()
            same = (there.st_dev, there.st_ino) == self._place and there.st_size == self._until[0]
        except OSError:
            same = False
        if not same:
            raise CheckpointError(
                f"the book '{self.path}' was moved, replaced, removed or written to while this run writes it: what a later "
                "process reads there would lack releases of this run. Nothing was released. Put the file back that was there, and "
                "go on. If it is lost, this run can't go on: its weights can be used, or trained further by a new run, whose "
                "epsilon comes on top."
            )

    def sync(self) -> None:
        """Wait until all of it has reached the disk, where its path leads."""
        self.check()
        self._sync()

    def _sync(self) -> None:
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise CheckpointError(f"the book '{self.path}' does not reach the disk: {error}") from error

    def close(self) -> None:
        """Let it go; all of it has reached the disk. Other processes that were forked from this one hold its lock no longer."""
        try:
            if self._process == os.getpid():
                self._sync()
                unlock(self._file.fileno())
        finally:
            self._file.close()

    def close_copy(self) -> None:
        """In a process that was forked from the run's: the file and its lock are the run's alone."""
        self._file.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> BookFile:
        """Copies of an engine are the same run, and it has one book."""
        return self


def _leads_to(content: bytes, mark: str) -> bool:
    """Whether a book of this content has come as far as the mark."""
    size, _, digest = mark.partition(" ")
    return len(content) >= int(size) and hashlib.sha256(content[: int(size)]).hexdigest() == digest
