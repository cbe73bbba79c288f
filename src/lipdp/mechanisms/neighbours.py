"""A mechanism that was read from a file shows once more that neighbouring datasets do not move it further than it says.

The sensitivity follows from the file's content by proof. This is a second, independent look: what would be noised is computed for
datasets that differ in one record, hard ones among them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.mechanisms.centred import CentredMechanism
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism, SelectionMechanism
from lipdp.mechanisms.squares import SquaresMechanism

__all__ = ["check_moves", "neighbours"]

_PAIRS, _LARGEST = 24, 20_000  # pairs, and records above which nothing is tried: reading a file should be quick


def neighbours(n: int, pairs: int = _PAIRS) -> tuple[Tensor, Tensor]:
    """Sorted unit datasets in pairs that differ in one record: uniform ones, of ends only, half and half, and constant ones."""
    generator = torch.Generator().manual_seed(n)
    t = torch.rand(pairs, n, generator=generator, dtype=torch.float64)
    quarter = pairs // 4
    t[:quarter] = t[:quarter].round()
    t[quarter : 2 * quarter] = (torch.arange(n) < n // 2).to(torch.float64)
    t[2 * quarter : 3 * quarter] = t[2 * quarter : 3 * quarter, :1]
    other = t.clone()
    other[:, 0] = torch.where(torch.rand(pairs, generator=generator) < 0.5, 1 - t[:, 0].round(), t[:, 0].round())
    return t.sort(-1).values, other.sort(-1).values


def check_moves(mechanism: Mechanism) -> None:
    """Refuse a mechanism that such a pair moves further than its sensitivity."""
    if mechanism.problem.n > _LARGEST:
        return
    one, other = neighbours(mechanism.problem.n)
    if isinstance(mechanism, AdditiveMechanism):
        moved = int((mechanism.statistic.integers(one) - mechanism.statistic.integers(other)).abs().sum(1).max())
        allowed = mechanism.statistic.sensitivity
    elif isinstance(mechanism, SelectionMechanism):
        moved = int((mechanism.utility.integers(one) - mechanism.utility.integers(other)).abs().max())
        allowed = mechanism.utility.sensitivity
    elif isinstance(mechanism, SquaresMechanism):
        sums = zip(mechanism.statistic(one), mechanism.statistic(other), strict=True)
        moved, allowed = max(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in sums), mechanism.moves
    elif isinstance(mechanism, CentredMechanism):
        for centre in (0, 2**29, 2**30 - 1, 2**30):
            pairs = zip(mechanism.statistic(one, centre), mechanism.statistic(other, centre), strict=True)
            moved, allowed = max(abs(a - b) for a, b in pairs), mechanism.moves(centre)
            if moved > allowed:
                break
    else:
        return
    if moved > allowed:
        raise ConfigurationError(f"one record moves what it noises by {moved} steps, and its noise is for {allowed}.")
