"""Adaptive clipping by a private quantile (Andrew et al., 2021), paid for inside the step's own Gaussian mechanism.

With b_i = 1[‖g_i‖ ≤ C], each step also releases ``S = Σ_i (b_i − ½) + N(0, σ_b²)``. One example changes that sum by ½ at most, so
the pair (gradient, S) is one Gaussian mechanism: for a total multiplier z the gradient gets ``z_Δ = (z⁻² − (2σ_b)⁻²)^(-1/2)``.
The accountant is told z, once: the whole run's ε is known before it starts, and nothing is spent beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lipdp.errors import ConfigurationError
from lipdp.privacy._checks import positive

__all__ = ["COUNT_SENSITIVITY", "AdaptiveClip", "gradient_multiplier"]

COUNT_SENSITIVITY = 0.5
"""|b_i − ½|: how much one example moves the centred count."""


def gradient_multiplier(total: float, count_noise: float) -> float:
    """z_Δ = (z⁻² − (2σ_b)⁻²)^(-1/2): what is left for the gradient when S is released with standard deviation σ_b.

    Larger than ``total``: the gradient must be noised more, since the count uses a part of the budget. Needs 2σ_b > z.
    """
    z, sigma_b = positive("total multiplier", total), positive("count_noise", count_noise)
    if not sigma_b / COUNT_SENSITIVITY > z:
        raise ConfigurationError(
            f"count_noise={sigma_b:g} leaves nothing for the gradient at a total multiplier of {z:g}: the count alone would use "
            f"more than the budget. Use a count_noise above {z * COUNT_SENSITIVITY:g}; batch_size/20 is usual."
        )
    return 1 / math.sqrt(z**-2 - (sigma_b / COUNT_SENSITIVITY) ** -2)


@dataclass(frozen=True)
class AdaptiveClip:
    """The clipping norm's update: ``C ← C·exp(−η(b̃ − γ))`` with ``b̃ = S/b + ½``, b the constant expected batch size.

    Attributes:
        quantile: γ, the share of examples that should not be clipped.
        rate: η.
        count_noise: σ_b.
        batch_size: b.
    """

    quantile: float
    rate: float
    count_noise: float
    batch_size: int

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise ConfigurationError(f"quantile must lie between 0 and 1, not {self.quantile!r}")
        positive("rate", self.rate)
        positive("count_noise", self.count_noise)
        positive("batch_size", self.batch_size)

    def centred_count(self, norms: torch.Tensor, clip: float) -> torch.Tensor:
        """Σ_i (1[‖g_i‖ ≤ C] − ½), to be noised by σ_b."""
        return ((norms <= clip).to(torch.float64) - COUNT_SENSITIVITY).sum()

    def updated(self, clip: float, noised_count: float) -> float:
        """C after one step, from the released S."""
        share = noised_count / self.batch_size + 0.5
        return clip * math.exp(-self.rate * (share - self.quantile))
