"""Checkpoints on disk: written whole or not at all, and read only if they are what was written."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import torch

from lipdp._files import has_locks, opened, write_all, written_whole
from lipdp.errors import CheckpointError

# How often, and after how many seconds, it is asked again who holds a lock.
_PATIENCE, _PAUSE = 20, 0.1
_MAGIC = b"lipdp checkpoint 1\n"


def previous_path(path: str | Path) -> Path:
    """Where the checkpoint before the last one is kept."""
    path = Path(path)
    return path.with_name(path.name + ".previous")


def book_path(path: str | Path) -> Path:
    """The book of the run that the checkpoint is of (:mod:`lipdp.training.book`)."""
    path = Path(path)
    return path.with_name(path.name + ".book")


def lock_path(path: str | Path) -> Path:
    """The file that is locked while a run writes the checkpoint."""
    path = Path(path)
    return path.with_name(path.name + ".lock")


@contextmanager
def locked_checkpoint(path: str | Path) -> Iterator[None]:
    """Within the block nobody else writes this checkpoint; CheckpointError, which says who, where somebody does.

    Two runs that went on from one checkpoint would release twice what was paid for once. The lock is the operating system's: it
    ends with the process, however that ends (Windows has none of this kind, and nothing is locked there). What interrupted runs
    have left beside the checkpoint is removed.
    """
    path, lock = Path(path), lock_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if not has_locks():
        yield
        return
    held, process = False, os.getpid()
    try:
        with opened(lock, os.O_RDWR | os.O_CREAT, wait=False) as file:
            held = True
            who = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "since": datetime.now().astimezone().isoformat(timespec="seconds"),
            }
            os.ftruncate(file, 0)
            write_all(file, json.dumps(who).encode() + b"\n")
            for left in path.parent.glob(f"{glob.escape(path.name)}.*.tmp"):
                left.unlink(missing_ok=True)
            try:
                yield
            finally:
                with contextlib.suppress(OSError):
                    if process == os.getpid():
                        lock.unlink()  # while it is still ours
    except BlockingIOError as error:
        if held:
            raise
        raise CheckpointError(
            f"the checkpoint '{path}' is being written by {_holder(lock)}. One run writes a checkpoint at a time: two would spend "
            "its budget twice. Wait for that run or end it, or choose another file."
        ) from error


def _holder(lock: Path) -> str:
    """Who holds it, by what it wrote: which it does right after it got the lock."""
    for _ in range(_PATIENCE):
        try:
            who = json.loads(lock.read_bytes())
            return f"process {who['pid']} on {who['host']}, since {who['since']}"
        except (OSError, ValueError, KeyError, TypeError):  # it is just starting, or just ending
            time.sleep(_PAUSE)
    return "another process"


def save_checkpoint(state: dict[str, Any], path: str | Path) -> None:
    """Write ``state`` to ``path`` atomically; the checkpoint that was there stays as ``path.previous``.

    The file holds a digest of its content, so damage is noticed. It is readable by its owner only: it contains the run's
    secret key.
    """
    buffer, path = io.BytesIO(), Path(path)
    torch.save(state, buffer)
    content = buffer.getvalue()
    with written_whole(path, previous=previous_path(path)) as file:
        file.write(_MAGIC + hashlib.sha256(content).digest() + content)


def load_checkpoint(path: str | Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """The state in ``path``. A damaged file is an error that leaves everything as it is.

    Args:
        path: a file that :func:`save_checkpoint` wrote.
        device: where its tensors are put.
    """
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
