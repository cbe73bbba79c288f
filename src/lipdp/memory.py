"""Buffers that are freed and needed again, thousands of times in a run."""

from __future__ import annotations

import torch

__all__ = ["keep_freed_memory"]

_LARGEST_KEPT = 31 * 2**20


def keep_freed_memory() -> None:
    """Let the C library keep freed buffers for the next microbatch, instead of giving them back to the system each time.

    Memory that was given back has to be cleared and mapped again page by page: a fifth of the time of a small network's step was
    that. glibc gives blocks back that are larger than the largest one it has seen freed, up to 32 MB, and keeps twice that much at
    the end of its heap. So it is shown a large one, which is never touched and costs nothing. Other libraries are not affected.
    """
    torch.empty(_LARGEST_KEPT, dtype=torch.uint8)
