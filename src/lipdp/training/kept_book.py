"""The file that a run keeps its book in, as an engine sees it: when it is opened, and how far it had come."""

from __future__ import annotations

import json
import os
from pathlib import Path

from lipdp.training.book import BookFile
from lipdp.training.distributed import Ranks
from lipdp.training.positions import close_book, is_book_open, know_draws, open_book, sync_book

__all__ = ["KeptBook"]


class KeptBook:
    """A run's book on disk (:mod:`lipdp.training.book`), or none where ``path`` is None.

    Attributes:
        path: its file.
        since: how far it had come when the run was saved.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self.path = None if path is None else Path(path).absolute()
        self.since: str | None = None
        self._opened: bytes | None = None  # the run whose book is open
        self._file: BookFile | None = None  # where this rank writes it

    def open(self, run: bytes, ranks: Ranks) -> None:
        """Keep the run's book in its file from here on; on all ranks what it says is known."""
        path = self.path
        if path is None or (self._opened == run and is_book_open(run)):
            return

        def read() -> bytes:
            self._file = open_book(run, path, self.since)
            return json.dumps([[*draw, tag.hex()] for draw, tag in self._file.draws.items()]).encode()

        told = ranks.shared(ranks.by_first(read) or b"")
        know_draws(run, {(position, number): bytes.fromhex(tag) for position, number, tag in json.loads(told)})
        self._opened = run

    def begin(self, run: bytes, ranks: Ranks) -> None:
        """Open the file of a run that is saved before its first release: a state has to say how far its book had come."""
        if self.path is not None and self.since is None and ranks.is_first:
            self._file = open_book(run, self.path, self.since)

    def sync(self, run: bytes) -> str | None:
        """Have all of it on disk; how far it has come."""
        self.since = sync_book(run) or self.since
        return self.since

    def seen(self, run: bytes) -> BookFile | None:
        """The file, all of it on disk, for who remembers how far it has come; ``None`` where none is written here."""
        self.sync(run)
        return self._file

    def close(self, run: bytes) -> None:
        """Let the file go."""
        self.since = close_book(run) or self.since
        self._opened = self._file = None
