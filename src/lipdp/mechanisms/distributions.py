"""Distributions over datasets: what is publicly believed before the data are seen. Mechanisms are trained on draws from one.

A wrong belief costs accuracy, never privacy: the guarantee holds for every dataset inside the bounds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.problem import Problem

__all__ = ["Belief", "Distribution", "Mixture", "Resampled", "as_distribution", "draw"]

Distribution = Callable[[int, int, torch.Generator], Tensor]
"""``distribution(count, n, generator)`` returns a tensor (count, n) of datasets inside the bounds, in the user's units."""
Belief = Any
"""A :data:`Distribution`; a frozen distribution of scipy's; or public data, as an array (values,) or (datasets, values)."""


@dataclass(frozen=True)
class Mixture:
    """A hierarchical mixture of truncated Gaussians on [low, high], new parameters for every dataset.

    With c = high − low: μ_j ~ U[low, high], σ_j ~ U[0.03c, 0.25c], weights ~ Dirichlet(1, …, 1), ``components`` of them;
    on [0, 10] this is μ ~ U[0, 10], σ ~ U[0.3, 2.5]. Truncation is by inverse CDF, so no draw is rejected.

    Attributes:
        components: Gaussians of one dataset, at least 1.
        low: the lower end of the column, in its own units.
        high: its upper end.
        spread: the least and the largest σ_j, as parts of the width c; the default is the one above.
    """

    components: int = 4
    low: float = 0.0
    high: float = 1.0
    spread: tuple[float, float] = (0.03, 0.25)

    def __post_init__(self) -> None:
        if self.components < 1 or not self.low < self.high or not 0 < self.spread[0] <= self.spread[1]:
            raise ConfigurationError(
                f"{self!r} is no mixture: at least one component, low < high, and a spread (least, most) above 0, as parts of "
                "the width."
            )

    def __call__(self, count: int, n: int, generator: torch.Generator) -> Tensor:
        """``count`` datasets of n points."""

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, dtype=torch.float64, generator=generator)

        k, (least, most) = self.components, self.spread
        means, stds = uniform(count, k), least + (most - least) * uniform(count, k)
        weights = -torch.log(uniform(count, k).clamp(min=1e-300))
        ends = (weights / weights.sum(1, keepdim=True)).cumsum(1)
        which = (uniform(count, n, 1) > ends[:, None, :-1]).sum(-1)
        mean, std = means.gather(1, which), stds.gather(1, which)
        below, above = ndtr(-mean / std), ndtr((1 - mean) / std)
        points: Tensor = mean + std * ndtri(below + (above - below) * uniform(count, n))
        return self.low + (self.high - self.low) * points.clamp(0, 1)


@dataclass(frozen=True)
class Resampled:
    """Datasets drawn, with replacement, from public data (datasets, values): each from one of its rows, moved into the bounds."""

    data: Tensor
    low: float
    high: float

    def __call__(self, count: int, n: int, generator: torch.Generator) -> Tensor:
        """``count`` datasets of n points."""
        rows = torch.randint(self.data.shape[0], (count, 1), generator=generator)
        places = torch.randint(self.data.shape[1], (count, n), generator=generator)
        return self.data[rows, places].clamp(self.low, self.high)


@dataclass(frozen=True)
class _Frozen:
    """Independent records of a frozen distribution of scipy's, moved into the bounds."""

    law: Any
    low: float
    high: float

    def __call__(self, count: int, n: int, generator: torch.Generator) -> Tensor:
        seed = int(torch.randint(2**31, (1,), generator=generator))
        drawn = self.law.rvs(size=(count, n), random_state=seed)
        return torch.as_tensor(drawn, dtype=torch.float64).clamp(self.low, self.high)


def as_distribution(belief: Belief, low: float, high: float) -> Distribution:
    """What a belief says, as a distribution over datasets; public data and scipy's distributions are moved into the bounds."""
    if callable(getattr(belief, "rvs", None)):
        return _Frozen(belief, low, high)
    if callable(belief):
        return belief  # type: ignore[no-any-return]
    try:
        data = torch.as_tensor(belief, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        data = torch.zeros(0)
    if data.ndim not in (1, 2) or data.numel() < 2 or not bool(torch.isfinite(data).all()):
        raise ConfigurationError(
            f"the belief is a {type(belief).__name__} that can't be read: give a callable distribution(count, n, generator) that "
            "returns (count, n) datasets, a frozen distribution of scipy's, or public data as an array of finite numbers."
        )
    return Resampled(data.reshape(-1, data.shape[-1]), low, high)


def draw(distribution: Distribution, problem: Problem, count: int, seed: int) -> Tensor:
    """``count`` datasets in unit form, or an error that says what is wrong with the distribution."""
    name = getattr(distribution, "__name__", type(distribution).__name__)
    made = distribution(count, problem.n, torch.Generator().manual_seed(seed))
    if not isinstance(made, Tensor) or tuple(made.shape) != (count, problem.n) or made.is_complex():
        what = f"a tensor of shape {tuple(made.shape)}" if isinstance(made, Tensor) else f"a {type(made).__name__}"
        raise DataError(
            f"the distribution {name!r} returned {what} where ({count}, {problem.n}) was asked for: it is called as "
            "distribution(count, n, generator) and returns one dataset of n values in each row."
        )
    made = made.to(torch.float64)
    if not bool(((made >= problem.low) & (made <= problem.high)).all()):
        raise DataError(
            f"the distribution {name!r} draws values that are not in the bounds [{problem.low:g}, {problem.high:g}] (or NaN): "
            "clamp or truncate its draws, so that it is a belief about data that can occur."
        )
    return problem.unit(made)
