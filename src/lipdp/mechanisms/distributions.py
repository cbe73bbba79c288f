"""Distributions over datasets: what is publicly believed before the data are seen. Mechanisms are trained on draws from one.

A wrong belief costs accuracy, never privacy: the guarantee holds for every dataset inside the bounds.

A :class:`World` draws columns as they are: discrete, full of zeros, at the edges, narrow, heavy-tailed, in lumps; for beliefs, and
to attack mechanisms with. Every dataset has a kind and parameters of its own; all kinds are in unit form, [0, 1].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.special import ndtr, ndtri

from lipdp.errors import ConfigurationError, DataError
from lipdp.fields import Count, check_fields
from lipdp.mechanisms.problem import Problem

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

    components: Count = 4
    low: float = 0.0
    high: float = 1.0
    spread: tuple[float, float] = (0.03, 0.25)

    def __post_init__(self) -> None:
        check_fields(self, "a mixture")
        if not self.low < self.high or not 0 < self.spread[0] <= self.spread[1]:
            raise ConfigurationError(
                f"{self!r} is no mixture: low < high, and a spread (least, most) above 0, as parts of the width."
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


_LEVELS = (2, 3, 5, 6, 11, 21, 101)  # a rating's or a count's possible values, both ends among them


@dataclass(frozen=True)
class _Draw:
    """Random numbers for (count, n) datasets."""

    count: int
    n: int
    generator: torch.Generator

    def each(self, low: float = 0.0, high: float = 1.0) -> Tensor:
        """One number for each dataset, (count, 1)."""
        return low + (high - low) * torch.rand(self.count, 1, dtype=torch.float64, generator=self.generator)

    def all(self) -> Tensor:
        """Uniform records, (count, n)."""
        return torch.rand(self.count, self.n, dtype=torch.float64, generator=self.generator)

    def normal(self) -> Tensor:
        """Standard normal records."""
        return torch.randn(self.count, self.n, dtype=torch.float64, generator=self.generator)

    def levels(self) -> Tensor:
        """How many values a discrete column has, less one; (count, 1)."""
        which = torch.randint(len(_LEVELS), (self.count, 1), generator=self.generator)
        return torch.tensor(_LEVELS, dtype=torch.float64)[which] - 1


def _constant(d: _Draw) -> Tensor:
    """All records alike, at a round place or anywhere."""
    place, levels = d.each(), d.levels()
    return torch.where(d.each() < 0.7, (place * levels).round() / levels, place).expand(d.count, d.n)


def _narrow(d: _Draw) -> Tensor:
    return d.each() + 10 ** d.each(-4.0, -1.3) * d.normal()


def _zeros(d: _Draw) -> Tensor:
    """A share of zeros (or of ones), the rest with an exponential tail."""
    rest = -torch.log1p(-d.all()) * 10 ** d.each(-2.5, -0.5)
    made = torch.where(d.all() < d.each(0.2, 0.99), 0.0, rest.clamp(max=1.0))
    return torch.where(d.each() < 0.8, made, 1 - made)


def _ratings(d: _Draw) -> Tensor:
    """Few values, with shares that differ."""
    levels = d.levels().clamp(max=10)
    return (
        d.all() ** torch.exp(1.5 * torch.randn(d.count, 1, dtype=torch.float64, generator=d.generator)) * levels
    ).round() / levels


def _counts(d: _Draw) -> Tensor:
    """Whole numbers, from a bell or a tail."""
    levels = d.levels().clamp(min=10)
    bell, tail = d.each() + 10 ** d.each(-2.0, -0.7) * d.normal(), -torch.log1p(-d.all()) * 10 ** d.each(-2.0, -0.5)
    return (torch.where(d.each() < 0.5, bell, tail).clamp(0, 1) * levels).round() / levels


def _edges(d: _Draw) -> Tensor:
    """Everything at the two ends, or a part of it."""
    ends = (d.all() < d.each()).to(torch.float64)
    return torch.where(d.all() < 1 - d.each() ** 2, ends, d.all())


def _tails(d: _Draw) -> Tensor:
    """Log-normal: most records near one end, a few far away."""
    made = torch.exp(d.normal() * d.each(0.5, 2.0)) * 10 ** d.each(-3.0, -0.7)
    return torch.where(d.each() < 0.8, made, 1 - made)


def _bells(d: _Draw) -> Tensor:
    components = 1 + int(torch.randint(4, (1,), generator=d.generator))
    return Mixture(components)(d.count, d.n, d.generator)


def _two(d: _Draw) -> Tensor:
    """Two lumps, of any width."""
    second = d.all() < d.each()
    place = torch.where(second, d.each(), d.each())
    return place + torch.where(second, 10 ** d.each(-4.0, -0.8), 10 ** d.each(-4.0, -0.8)) * d.normal()


KINDS: dict[str, Callable[[_Draw], Tensor]] = {
    "constant": _constant,
    "narrow": _narrow,
    "many zeros": _zeros,
    "ratings": _ratings,
    "counts": _counts,
    "edges": _edges,
    "heavy tail": _tails,
    "bells": _bells,
    "two lumps": _two,
}


@dataclass(frozen=True)
class World:
    """A belief for a column of which nothing is known but its range: each dataset is of one of nine kinds (:data:`KINDS`).

    Attributes:
        low: the lower end of the column, in its own units.
        high: its upper end.
        kinds: those that occur, in equal shares.
    """

    low: float = 0.0
    high: float = 1.0
    kinds: tuple[str, ...] = tuple(KINDS)

    def __post_init__(self) -> None:
        check_fields(self, "a world")
        if not self.low < self.high or not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ConfigurationError(f"{self!r} is no world: low < high, and kinds out of {', '.join(KINDS)}.")

    def __call__(self, count: int, n: int, generator: torch.Generator) -> Tensor:
        """``count`` datasets of n records, the kinds in turn."""
        parts = [len(range(place, count, len(self.kinds))) for place in range(len(self.kinds))]
        made = [KINDS[kind](_Draw(size, n, generator)) for kind, size in zip(self.kinds, parts, strict=True) if size]
        order = torch.randperm(count, generator=generator)
        return self.low + (self.high - self.low) * torch.cat(made)[order].clamp(0, 1)


@dataclass(frozen=True)
class Everyday:
    """The default belief of robust mechanisms: half of the datasets from four Gaussians, half from a :class:`World`.

    Attributes:
        low: the lower end of the column, in its own units.
        high: its upper end.
    """

    low: float = 0.0
    high: float = 1.0

    def __post_init__(self) -> None:
        World(self.low, self.high)  # refuses what is no range

    def __call__(self, count: int, n: int, generator: torch.Generator) -> Tensor:
        """``count`` datasets of n records."""
        half = count // 2
        parts = [Mixture(4, self.low, self.high)(half, n, generator), World(self.low, self.high)(count - half, n, generator)]
        return torch.cat(parts)[torch.randperm(count, generator=generator)]
