"""Adaptive clipping by a private quantile (Andrew et al., 2021), paid for inside the step's own Gaussian mechanism.

With b_i = 1[‖g_i‖ ≤ C], each step also releases ``S = Σ_i (b_i − ½) + N(0, σ_b²)``. One example changes that sum by ½ at most, so
the pair (gradient, S) is one Gaussian mechanism: for a total multiplier z the gradient gets ``z_Δ = (z⁻² − (2σ_b)⁻²)^(-1/2)``.
With k clipping norms there are k counts, and k terms ``(2σ_b)⁻²``.
The accountant is told z, once: the whole run's ε is known before it starts, and nothing is spent beside it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch

from lipdp._checks import positive
from lipdp.errors import ConfigurationError
from lipdp.fields import Count, Probability, Scale, check_fields

__all__ = ["COUNT_SENSITIVITY", "AdaptiveClip", "gradient_multiplier"]

COUNT_SENSITIVITY = 0.5
"""|b_i − ½|: how much one example moves the centred count."""
_FAR = 600.0  # of exponents: exp reaches no further


def gradient_multiplier(total: float, count_noise: float, counts: int = 1) -> float:
    """z_Δ = (z⁻² − k(2σ_b)⁻²)^(-1/2): what is left for the gradient when k counts are released with standard deviation σ_b.

    Larger than ``total``: the gradient must be noised more, since the counts use a part of the budget. Needs 2σ_b > √k·z.

    Args:
        total: z, the noise multiplier of the whole step, which is accounted for.
        count_noise: σ_b, in examples.
        counts: k, one for each clipping norm.
    """
    z, sigma_b = positive("total multiplier", total), positive("count_noise", count_noise)
    least = z * COUNT_SENSITIVITY * math.sqrt(counts)
    if not sigma_b > least:
        raise ConfigurationError(
            f"count_noise={sigma_b:g} leaves nothing for the gradient at a total multiplier of {z:g}: the count alone would use "
            f"more than the budget. Use a count_noise above {least:g}; batch_size/20 is usual."
        )
    return 1 / math.sqrt(z**-2 - counts * (sigma_b / COUNT_SENSITIVITY) ** -2)


@dataclass(frozen=True)
class AdaptiveClip:
    """The clipping norm's update: ``C ← C·exp(−η(b̃ − γ))`` with ``b̃ = S/b + ½``, b the constant expected batch size.

    Attributes:
        quantile: γ, the share of examples that should not be clipped.
        rate: η.
        count_noise: σ_b. By default a :func:`lipdp.plan` takes b/20, or 3z if that is more (then the gradient's noise grows by
            1.4%), times √k for k clipping norms.
        batch_size: b; by default the plan's.
    """

    quantile: Probability = 0.5
    rate: Scale = 0.2
    count_noise: Scale | None = None
    batch_size: Count | None = None

    def __post_init__(self) -> None:
        check_fields(self, "adaptive clipping")

    def completed(self, batch_size: int, multiplier: float, counts: int) -> AdaptiveClip:
        """The same with a plan's batch size, and with σ_b chosen where it was left open."""
        noise = self.count_noise or max(batch_size / 20, 3 * multiplier) * math.sqrt(counts)
        return dataclasses.replace(self, batch_size=batch_size, count_noise=noise)

    def centred_count(self, norms: torch.Tensor, clip: float) -> torch.Tensor:
        """Σ_i (1[‖g_i‖ ≤ C] − ½), to be noised by σ_b."""
        return ((norms <= clip).to(torch.float64) - COUNT_SENSITIVITY).sum()

    def updated(self, clip: float, noised_count: float) -> float:
        """C after one step, from the released S."""
        change = -self.rate * (self.share(noised_count) - self.quantile)
        return clip * math.exp(min(max(change, -_FAR), _FAR))

    def share(self, noised_count: float) -> float:
        """b̃ = S/b + ½, the released estimate of the share that is not clipped."""
        if self.batch_size is None:
            raise ConfigurationError("this AdaptiveClip has no batch_size yet: a plan completes it")
        return noised_count / self.batch_size + COUNT_SENSITIVITY
