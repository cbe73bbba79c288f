"""Conditions that are not waited for: a certificate that is computed on a device, and believed only once it was read.

Reading one number from a GPU stops the host until all that was asked of the GPU is done. Whoever computes something that is only
good if some numbers are finite (a projection with its certificate) asks :func:`are_finite`; whoever uses the results in a block of
:func:`deferred_checks` gets a list of conditions instead, and must know all of them to be true before anything leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["are_finite", "deferred_checks", "is_deferring"]

_numbers: ContextVar[list[torch.Tensor] | None] = ContextVar("numbers", default=None)


@contextmanager
def deferred_checks() -> Iterator[list[torch.Tensor]]:
    """Within the block :func:`are_finite` does not wait for the device: it takes its numbers for finite and notes them.

    At the end of the block the list has a condition for all of them: what was computed may be used once that is known to be true.
    """
    conditions: list[torch.Tensor] = []
    noted: list[torch.Tensor] = []
    token = _numbers.set(noted)
    try:
        yield conditions
    finally:
        _numbers.reset(token)
    if noted:
        conditions.append(torch.isfinite(torch.cat([numbers.detach().reshape(-1) for numbers in noted])).all())


def is_deferring() -> bool:
    """Whether checks are deferred, and no value may be read from the device."""
    return _numbers.get() is not None


def are_finite(numbers: torch.Tensor) -> bool:
    """Whether all of them are finite; under :func:`deferred_checks` they are noted, and it is assumed."""
    noted = _numbers.get()
    if noted is None:
        return bool(torch.isfinite(numbers).all())
    noted.append(numbers)
    return True
