"""Conditions that are not waited for: a certificate that is computed on a device, and believed only once it was read.

Reading one number from a GPU stops the host until all that was asked of the GPU is done. Whoever computes something that is only
good if a condition holds (a projection with its certificate) asks :func:`holds`; whoever uses the results in a block of
:func:`deferred_checks` gets a list of conditions instead, and must know all of them to be true before anything leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["deferred_checks", "holds", "is_deferring"]

_conditions: ContextVar[list[torch.Tensor] | None] = ContextVar("conditions", default=None)


@contextmanager
def deferred_checks() -> Iterator[list[torch.Tensor]]:
    """Within the block :func:`holds` does not wait for the device: it takes its conditions for granted and lists them.

    What was computed may be used only once all of them are known to be true.
    """
    conditions: list[torch.Tensor] = []
    token = _conditions.set(conditions)
    try:
        yield conditions
    finally:
        _conditions.reset(token)


def is_deferring() -> bool:
    """Whether checks are deferred, and no value may be read from the device."""
    return _conditions.get() is not None


def holds(condition: torch.Tensor) -> bool:
    """Whether ``condition`` is true everywhere; under :func:`deferred_checks` it is noted and assumed."""
    pending = _conditions.get()
    if pending is None:
        return bool(condition.all())
    pending.append(condition.all())
    return True
