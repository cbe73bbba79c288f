"""A text file that only grows, line by line, and a second one beside it that says how far it was promised.

Each line is a JSON object with the digest of the line before it. That alone does not notice a last line that was edited or cut
off. So after a line has reached the disk, and before anybody is told, the *head* is written: how many lines there are, how many
bytes, the digest of the last one. It has two slots of fixed size, written in turn, so that a write that is torn leaves the other.

What a reader may find, and what it means:

- lines up to the head: they were promised. One that is missing or different is damage, and nothing goes on.
- whole lines after the head: written, never promised (the writer was stopped in between). They count.
- a last line without an end after the head: never promised. It does not count, and the next writer removes it.
- one slot that can't be read, and no line after the other: a slot is only ever half-written after its line. Damage.

Locks between processes, and writing that has reached the disk when it returns: :mod:`lipdp._files`.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lipdp._files import opened, sync_folder, write_all
from lipdp.errors import BudgetError, ConfigurationError, DataError

_SLOT = 256  # bytes; a disk writes them at once


@dataclass(frozen=True)
class _Mark:
    """A place between two lines."""

    lines: int = 0
    size: int = 0
    digest: str = ""

    def after(self, line: bytes) -> _Mark:
        """The place after ``line``, which has no end of line."""
        return _Mark(self.lines + 1, self.size + len(line) + 1, hashlib.sha256(line).hexdigest())


class Journal:
    """The file at ``path``. It remembers how far it has read: lines are read once."""

    def __init__(self, path: str | os.PathLike[str], what: str) -> None:
        self.path = Path(os.path.realpath(path))  # the head lies beside the file itself, whatever links lead to it
        self.head_path = self.path.with_name(self.path.name + ".head")
        self.what = what
        self._mark = self._furthest = _Mark()

    def rewind(self) -> None:
        """Read from the beginning again. What was seen once has to be there still."""
        self._mark = _Mark()

    def create(self, header: dict[str, Any]) -> bool:
        """Begin the file with this line; False where there is one already."""
        if not self.path.parent.is_dir():
            raise ConfigurationError(f"the folder {self.path.parent} of the {self.what} does not exist: make it first.")
        line = _text({**header, "previous": ""})
        mark = _Mark().after(line)
        with self._failures("begun"), opened(self.head_path, os.O_RDWR | os.O_CREAT) as head:
            if self.path.exists():
                return False
            before = [slot for slot in _slots(head) if slot is not None]
            if any(slot.lines > 1 for slot in before):
                raise DataError(
                    f"the {self.what} {self.path} is gone, but {self.head_path} says that it had "
                    f"{max(slot.lines for slot in before) - 1} entries. Restore the file; or, for other data, choose another name."
                )
            for slot in range(2):
                _write_slot(head, slot, mark)
            os.fsync(head)
            # Whole or not at all; under the head's lock, so the name is nobody else's.
            temporary = self.path.with_name(self.path.name + ".new")
            file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                write_all(file, line + b"\n")
                os.fsync(file)
            finally:
                os.close(file)
            os.replace(temporary, self.path)  # noqa: PTH105
            sync_folder(self.path.parent)
        return True

    @contextmanager
    def reading(self) -> Iterator[Session]:
        """What was written since the last time, with no writer at work."""
        with self._failures("read"), opened(self.path, os.O_RDONLY, shared=True) as file:
            yield Session(self, file)

    @contextmanager
    def writing(self) -> Iterator[Session]:
        """As :meth:`reading`, alone, and with lines to append."""
        with self._failures("written"), opened(self.path, os.O_RDWR) as file:
            yield Session(self, file)

    def damaged(self, why: str) -> DataError:
        """The error for a file that is not what was written."""
        return DataError(
            f"the {self.what} {self.path} is damaged: {why}. What was spent is not known, so nothing more is released. Restore it "
            f"and {self.head_path.name} from a backup that is up to date, or count all of it as spent."
        )

    @contextmanager
    def _failures(self, verb: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ConfigurationError(f"there is no {self.what} at {self.path}: begin it first, or check the path.") from error
        except OSError as error:
            reason = error.strerror or str(error)
            room = " Make room on the disk and try again." if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise BudgetError(f"the {self.what} {self.path} can't be {verb}: {reason}. Nothing was released.{room}") from error


class Session:
    """A journal under its lock."""

    def __init__(self, journal: Journal, file: int) -> None:
        self._journal, self._file = journal, file
        self._slots = self._read_slots()
        self.torn = 0
        """Bytes at the end that were never promised."""

    def new_lines(self) -> list[dict[str, Any]]:
        """What was written since this process last looked, checked."""
        journal, mark, promised = self._journal, self._journal._mark, self._promised()
        size = os.fstat(self._file).st_size
        if size < journal._furthest.size:
            raise journal.damaged(f"it had {journal._furthest.size} bytes when this process last read it, and has {size}")
        content = _read(self._file, mark.size, size)
        whole, found = content.rfind(b"\n") + 1, []
        self._compare(mark, promised)
        for text in content[:whole].split(b"\n")[:-1]:
            line = _parsed(text)
            if line is None:
                raise journal.damaged(f"line {mark.lines + 1} can't be read")
            if line.get("previous") != mark.digest:
                raise journal.damaged(f"line {mark.lines + 1} does not follow from the one before")
            mark = mark.after(text)
            self._compare(mark, promised)
            found.append(line)
        if mark.lines < promised.lines:
            raise journal.damaged(f"it has {mark.lines} lines, and {journal.head_path.name} says that there were {promised.lines}")
        if None in self._slots and mark.lines <= promised.lines:
            raise journal.damaged(f"half of {journal.head_path.name} can't be read")
        self.torn = size - mark.size
        journal._mark = journal._furthest = mark
        return found

    def append(self, line: dict[str, Any]) -> None:
        """Write one more line, after :meth:`new_lines`. When this returns it is on the disk and promised.

        A failure before the line is whole leaves the file as it was. One after it leaves a line that counts; nobody was told.
        """
        journal, before = self._journal, self._journal._mark
        text = _text({**line, "previous": before.digest})
        after = before.after(text)
        if self.torn:
            os.ftruncate(self._file, before.size)
            self.torn = 0
        os.lseek(self._file, before.size, os.SEEK_SET)
        try:
            write_all(self._file, text + b"\n")
            os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, before.size)
            raise
        self._promise(after)
        journal._mark = journal._furthest = after

    # ------------------------------------------------------------------ the head

    def _read_slots(self) -> list[_Mark | None]:
        try:
            head = os.open(self._journal.head_path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            raise self._journal.damaged(f"{self._journal.head_path.name}, which belongs to it, is missing{self._doubt()}") from None
        try:
            return _slots(head)
        finally:
            os.close(head)

    def _doubt(self) -> str:
        """What speaks for another file having been meant."""
        path = self._journal.path
        if path.suffix == ".head" and path.with_suffix("").exists():
            return f" (is {path.with_suffix('').name} meant, which it belongs to?)"
        if _read(self._file, 0, 1) == b"{":
            return ""
        return f" (is it the right file? Its first line is none of a {self._journal.what})"

    def _promised(self) -> _Mark:
        valid = [slot for slot in self._slots if slot is not None]
        if not valid:
            raise self._journal.damaged(f"{self._journal.head_path.name} can't be read")
        return max(valid, key=lambda slot: slot.lines)

    def _compare(self, mark: _Mark, promised: _Mark) -> None:
        if mark.lines == promised.lines and mark != promised:
            raise self._journal.damaged(f"line {mark.lines} is not the one that was promised in {self._journal.head_path.name}")
        if mark.lines == self._journal._furthest.lines and mark != self._journal._furthest:
            raise self._journal.damaged(f"line {mark.lines} is not what it was when this process last read it")

    def _promise(self, mark: _Mark) -> None:
        """Into the slot that is not the last good one."""
        first, second = self._slots
        into = 0 if first is None or (second is not None and first.lines < second.lines) else 1
        head = os.open(self._journal.head_path, os.O_RDWR | os.O_CLOEXEC)
        try:
            _write_slot(head, into, mark)
            os.fsync(head)
        finally:
            os.close(head)
        self._slots[into] = mark


def _text(line: dict[str, Any]) -> bytes:
    return json.dumps(line, sort_keys=True, ensure_ascii=True, allow_nan=False).encode()


def _parsed(text: bytes) -> dict[str, Any] | None:
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) else None


def _read(file: int, start: int, stop: int) -> bytes:
    chunks, place = [], start
    while place < stop:
        chunk = os.pread(file, stop - place, place)
        if not chunk:
            break
        chunks.append(chunk)
        place += len(chunk)
    return b"".join(chunks)


def _slots(head: int) -> list[_Mark | None]:
    content = _read(head, 0, os.fstat(head).st_size)
    return [_slot(content[start : start + _SLOT]) for start in (0, _SLOT)]


def _slot(content: bytes) -> _Mark | None:
    line = _parsed(content) if len(content) == _SLOT and content.endswith(b"\n") else None
    if line is None:
        return None
    try:
        mark = _Mark(line["lines"], line["size"], line["digest"])
    except KeyError:
        return None
    return mark if content == _slot_text(mark) else None


def _slot_text(mark: _Mark) -> bytes:
    content = f"{mark.lines} {mark.size} {mark.digest}"
    check = hashlib.sha256(content.encode()).hexdigest()[:32]
    line = {"lines": mark.lines, "size": mark.size, "digest": mark.digest, "check": check}
    return _text(line).ljust(_SLOT - 1) + b"\n"


def _write_slot(head: int, slot: int, mark: _Mark) -> None:
    content = _slot_text(mark)
    if os.pwrite(head, content, slot * _SLOT) != len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
