"""What the tests share: small settings, and one quickly learned mechanism of each kind."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from lipdp.mechanisms import Comparison, Mechanism, Mixture, Problem, Settings, compare
from lipdp.mechanisms.distributions import draw
from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.learn_parts import SumSettings, UtilitySettings
from lipdp.mechanisms.worst import KINDS, noisy_query

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


def lumps(parameters: Tensor, n: int) -> Tensor:
    """Datasets of two lumps without any randomness, sorted, from (batch, 6): places, log₁₀ of widths, share, grid.

    Records stand at the quantiles of their lump. A grid of g ≥ 0.5 rounds them to multiples of 1/⌊1 + 20·(2g − 1)⌋.
    """
    a, b, width, other, share, grid = (part[:, None] for part in parameters.unbind(1))
    level = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    in_first = level < share
    inner = torch.where(in_first, level / share.clamp(min=1e-9), (level - share) / (1 - share).clamp(min=1e-9)).clamp(0, 1)
    made = torch.where(in_first, a + 10**width * (inner - 0.5), b + 10**other * (inner - 0.5)).clamp(0, 1)
    steps = torch.floor(1 + 20 * (2 * grid - 1).clamp(min=0))
    return torch.where(grid >= 0.5, (made * steps).round() / steps, made).sort(1).values


def plain_mechanisms(problem: Problem) -> list[Mechanism]:
    """What a textbook offers that assumes nothing: noise on the query, or a choice by rank; answers limited to the possible."""
    if problem.query.kind == "quantile":
        return [IntervalMechanism.plain(problem)]
    return [noisy_query(problem, noise) for noise in KINDS]
