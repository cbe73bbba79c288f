"""Public constants that take a while to compute, kept in the user's cache from one program to the next.

Dictionaries, scales and decorrelating matrices follow from drawn images and settings alone (:mod:`lipdp.features.drawings`): no
record has a part in them, so nothing has to be kept safe. The first program computes them, seconds to two minutes on a
processor, and says so to the logger ``lipdp``; the next one reads them. A file's name is a digest of what the constants follow
from, torch's version included; a file that can't be read is computed again, and where nothing can be written nothing is kept.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch

from lipdp.data.files import data_root
from lipdp.errors import LipdpError

__all__ = ["kept_constants"]

_FORMAT = 1  # to be raised whenever what is computed changes
_FOLDER = "constants"
_log = logging.getLogger("lipdp")


def kept_constants(what: str, settings: object, compute: Callable[[], Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Tensors by name: read from the cache, or computed and put there.

    Args:
        what: they are of, in words: part of the file's name, and of what the logger is told.
        settings: all that they follow from; its text is.
        compute: makes them.
    """
    told = f"{_FORMAT} {torch.__version__} {what} {settings!r}"
    file = _place(f"{what.replace(' ', '-')}-{hashlib.blake2b(told.encode(), digest_size=16).hexdigest()}.npz")
    known = None if file is None else _read(file, told)
    if known is not None:
        return known
    _log.info("computing public constants of %s from drawn images, once on this machine", what)
    started = time.monotonic()
    constants = {name: tensor.detach().cpu().contiguous() for name, tensor in compute().items()}
    _log.info("constants of %s took %.1f s", what, time.monotonic() - started)
    if file is not None:
        _write(file, told, constants)
    return constants


def _place(name: str) -> Path | None:
    try:
        return data_root() / _FOLDER / name
    except LipdpError:  # there is no folder for data here
        return None


def _read(file: Path, told: str) -> dict[str, torch.Tensor] | None:
    """What the file holds; ``None`` where there is none, or none that is whole and of these settings."""
    try:
        with np.load(file, allow_pickle=False) as stored:
            if bytes(stored["told"]).decode() != told:
                return None
            return {name: torch.from_numpy(stored[name]) for name in stored.files if name != "told"}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def _write(file: Path, told: str, constants: Mapping[str, torch.Tensor]) -> None:
    """Written whole beside its place and moved into it: two programs at once do no harm."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        handle, part = tempfile.mkstemp(dir=file.parent, suffix=".part")
        with os.fdopen(handle, "wb") as stream:
            arrays = {name: tensor.numpy() for name, tensor in constants.items()}
            np.savez(stream, told=np.frombuffer(told.encode(), dtype=np.uint8), **arrays)  # type: ignore[arg-type]
        Path(part).replace(file)
    except OSError as error:
        _log.info("constants are not kept: %s", error)
