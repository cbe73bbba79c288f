"""Checkpoints on disk: written whole or not at all, and read only if they are what was written."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

from lipdp.errors import CheckpointError

__all__ = ["load_checkpoint", "previous_path", "save_checkpoint"]

_MAGIC = b"lipdp checkpoint 1\n"


def previous_path(path: str | Path) -> Path:
    """Where the checkpoint before the last one is kept."""
    path = Path(path)
    return path.with_name(path.name + ".previous")


def save_checkpoint(state: dict[str, Any], path: str | Path) -> None:
    """Write ``state`` to ``path`` atomically; the checkpoint that was there stays as ``path.previous``.

    The file holds a digest of its content, so damage is noticed. It is readable by its owner only: it contains the run's
    secret key.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    torch.save(state, buffer)
    content = buffer.getvalue()
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".tmp")  # mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(_MAGIC + hashlib.sha256(content).digest() + content)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            backup = previous_path(path)
            backup.unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # file systems without hard links do without a backup
                os.link(path, backup)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state in ``path``. A damaged file is an error that leaves everything as it is."""
    path = Path(path)
    advice = f" The one before it may be at '{previous_path(path)}'." if previous_path(path).exists() else ""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"the checkpoint '{path}' can't be read: {error}.{advice}") from error
    head = len(_MAGIC)
    if not data.startswith(_MAGIC):
        raise CheckpointError(f"'{path}' is not a lipdp checkpoint.{advice}")
    digest, content = data[head : head + 32], data[head + 32 :]
    if hashlib.sha256(content).digest() != digest:
        raise CheckpointError(f"the checkpoint '{path}' is damaged: its content does not match its digest.{advice}")
    # weights_only: a checkpoint is data; it never runs code.
    try:
        state = torch.load(io.BytesIO(content), map_location=device, weights_only=True)
    except Exception as error:  # a pickle that is not plain data raises nearly anything
        raise CheckpointError(f"the checkpoint '{path}' can't be read as plain data: {error}.{advice}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"the checkpoint '{path}' holds a {type(state).__name__}, not a state.{advice}")
    return state
