"""How much noise each group gets in a step, from the bounds that hold in it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from lipdp.errors import ConfigurationError
from lipdp.privacy import AdaptiveClip, Allocation, allocate, effective_multiplier, gradient_multiplier
from lipdp.privacy.adaptive import COUNT_SENSITIVITY
from lipdp.privacy.noise import GRID_LOSS, grid_factor

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
        for_grid = grid_factor(sigma * factor, _noised(bounds, sizes))
        if math.isinf(for_grid):
            raise ConfigurationError(
                f"a noise multiplier of {sigma * factor:.3g} on {_noised(bounds, sizes):,} numbers is more than the noise's grid "
                "is fine enough for. Use less noise."
            )
        return {name: std * self.slack * for_grid for name, std in found.items()}

    def real_multiplier(
        self, bounds: Mapping[str, float], sizes: Mapping[str, int], stds: Mapping[str, float], factor: float = 1.0
    ) -> float:
        """The multiplier that a step with these bounds and this noise has, its counts and the rounding of sums to the noise's grid
        included: what the accountant must be told. (Counts are whole halves: they lie on the grid.)
        """
        grown = effective_multiplier({name: bound * self.slack for name, bound in bounds.items()}, stds)
        if 0 < grown < math.inf:
            grown = 1 / (1 / grown + GRID_LOSS * math.sqrt(_noised(bounds, sizes)))
        if not self.count_noise:
            return grown
        return 1 / math.sqrt(grown**-2 + self.counts * (COUNT_SENSITIVITY / (self.count_noise * factor)) ** 2)


def _noised(bounds: Mapping[str, float], sizes: Mapping[str, int]) -> int:
    """How many numbers get noise."""
    return sum(size for name, size in sizes.items() if bounds[name] > 0)
