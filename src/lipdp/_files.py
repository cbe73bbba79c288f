"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["PUBLIC", "created", "unfinished", "written_whole"]

PUBLIC = 0o644


def unfinished(path: Path, kind: str) -> Path:
    """A name beside this file's that nobody has, for what is to take its place."""
    return path.with_name(f"{path.name}.{secrets.token_hex(6)}.{kind}")


def created(path: Path) -> BinaryIO:
    """A new file of this name, to write: readable by its owner only."""
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_CLOEXEC", 0), 0o600), "wb")


@contextmanager
def written_whole(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file to write, moved into its place when the block ends: nobody reads half of it, two writers at once do no harm.

    Where the block fails or is interrupted, what was there before stays. Its folder is made.

    Args:
        path: its place.
        mode: who may read it; by default its owner only. ``PUBLIC``: everybody.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = unfinished(path, "part")
    try:  # around its making too: an interrupt behind it leaves nothing
        with created(part) as file:
            yield file
        part.chmod(mode)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
