"""How much noise each group gets in a step, from the bounds that hold in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lipdp.privacy import AdaptiveClip, Allocation, allocate, effective_multiplier, gradient_multiplier
from lipdp.privacy.adaptive import COUNT_SENSITIVITY

__all__ = ["NoiseSettings"]


@dataclass(frozen=True)
class NoiseSettings:
    """What turns bounds into noise: the same for planning and for every step.

    Attributes:
        multiplier: σ of the whole step, at factor 1.
        slack: factor on the noise for rounding.
        allocation: how it is divided.
        weights: for ``allocation="weights"``.
        adaptive: of clipping norms that follow a quantile: their counts take a part of the step's budget.
        counts: how many such counts there are.
    """

    multiplier: float
    slack: float
    allocation: Allocation
    weights: Mapping[str, float] | None = None
    adaptive: AdaptiveClip | None = None
    counts: int = 0

    @property
    def count_noise(self) -> float:
        """σ_b at factor 1; 0 where nothing is counted."""
        return self.adaptive.count_noise or 0.0 if self.adaptive is not None and self.counts else 0.0

    def stds(self, bounds: Mapping[str, float], sizes: Mapping[str, int], factor: float = 1.0) -> dict[str, float]:
        """Noise of each group in a step with the multiplier ``factor``·σ, whose groups have these bounds."""
        sigma = self.multiplier
        if self.count_noise:
            sigma = gradient_multiplier(sigma, self.count_noise, self.counts)
        weights = None if self.weights is None else {name: self.weights[name] for name in bounds}
        found = allocate(bounds, sizes, sigma * factor, self.allocation, weights)
        return {name: std * self.slack for name, std in found.items()}

    def real_multiplier(self, bounds: Mapping[str, float], stds: Mapping[str, float], factor: float = 1.0) -> float:
        """The multiplier that a step with these bounds and this noise has, counts included: what the accountant must be told."""
        grown = effective_multiplier({name: bound * self.slack for name, bound in bounds.items()}, stds)
        if not self.count_noise:
            return grown
        return 1 / math.sqrt(grown**-2 + self.counts * (COUNT_SENSITIVITY / (self.count_noise * factor)) ** 2)
