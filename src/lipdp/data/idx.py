"""The idx format of MNIST: two zero bytes, a type, the number of dimensions, big-endian sizes, then the values."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from lipdp.data.info import Bytes
from lipdp.errors import DataError

__all__ = ["read_idx"]

_UNSIGNED_BYTE = 8


def read_idx(path: Path, dimensions: int) -> Bytes:
    """Read a gzipped idx file of bytes that has `dimensions` dimensions, e.g. 3 for images and 1 for labels."""
    try:
        with gzip.open(path, "rb") as file:
            magic = file.read(4)
            expected = bytes((0, 0, _UNSIGNED_BYTE, dimensions))
            if magic != expected:
                raise _bad(path, f"it begins with {magic.hex()} where an idx file of this kind has {expected.hex()}")
            header = file.read(4 * dimensions)
            if len(header) < 4 * dimensions:
                raise _bad(path, "it is truncated: it ends inside its header")
            shape = tuple(int(size) for size in np.frombuffer(header, dtype=">u4"))
            count = math.prod(shape)
            # One byte more than announced, so that too long is seen, and so that gzip reaches its own checksum.
            content = file.read(count + 1)
    except (OSError, EOFError, zlib.error, OverflowError, MemoryError) as error:
        raise _bad(path, f"it cannot be unpacked ({type(error).__name__}: {error})") from error
    if len(content) != count:
        found = "holds more" if len(content) > count else f"is truncated after {len(content)}"
        raise _bad(path, f"it announces {'×'.join(map(str, shape))} = {count} bytes and {found}")
    # A copy: what frombuffer gives is read-only, and torch warns of that.
    return np.frombuffer(content, dtype=np.uint8).reshape(shape).copy()


def _bad(path: Path, why: str) -> DataError:
    return DataError(f"{path} is not a sound idx file: {why}. Delete it and load again.")
