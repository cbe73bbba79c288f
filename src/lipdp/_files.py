"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

__all__ = ["PUBLIC", "written_whole"]

PUBLIC = 0o644


@contextmanager
def written_whole(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file to write, moved into its place when the block ends: nobody reads half of it, two writers at once do no harm.

    Where the block fails or is interrupted, what was there before stays. Its folder is made.

    Args:
        path: its place.
        mode: who may read it; by default its owner only. ``PUBLIC``: everybody.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.", suffix=".part")
    part = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        part.chmod(mode)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
