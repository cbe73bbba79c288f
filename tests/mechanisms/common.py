"""What the tests share: small settings, and one quickly learned mechanism of each kind."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lipdp.mechanisms import Comparison, Mixture, Problem, Settings, compare
from lipdp.mechanisms.distributions import draw
from lipdp.mechanisms.learn_parts import SumSettings, UtilitySettings

N, BOUNDS = 20, (0.0, 10.0)

TINY = Settings(
    training=600,
    validation=200,
    held_out=300,
    sums=SumSettings(screening=10, steps=40, batch=128, width=16),
    utility=UtilitySettings(steps=10, batch=32, responses=(16,), channels=4, kernel=3),
    expert="textbook",
    robust=120,
)


@cache
def compared(query: str, loss: str = "squared", epsilon: float = 1.0) -> Comparison:
    return compare(query, epsilon, N, BOUNDS, loss=loss, robustness=None, settings=TINY)


def datasets(count: int, seed: int, n: int = N, components: int = 4) -> Tensor:
    """Unit datasets of the default prior."""
    return draw(Mixture(components, *BOUNDS), Problem.of("mean", 1.0, n, BOUNDS), count, seed)


def private(seed: int = 0, n: int = N) -> Tensor:
    """A dataset in the user's units."""
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)) * 10
