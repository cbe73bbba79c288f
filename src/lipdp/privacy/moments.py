"""Per-channel mean and variance, released once, by one Gaussian mechanism over the whole dataset.

For a record x of C channels at T positions, clipped to ‖x‖₂ ≤ R, let m1_c be the mean over positions of x_c, and m2_c that of x_c².
The query is the pair of sums Σ_i m1(x_i), Σ_i m2(x_i). With s = ‖x‖²/T ≤ R²/T:

- ‖m1‖² = Σ_c (mean_t x_ct)² ≤ Σ_c mean_t x_ct² = s, by Jensen, so ‖m1‖ ≤ A = R/√T;
- ‖m2‖₂ ≤ ‖m2‖₁ = s, so ‖m2‖ ≤ B = R²/T.

Both are reached at once, by a record with one constant channel of value R/√T. With noise of std s₁ on the first sum and s₂ on the
second, the pair is one Gaussian mechanism of multiplier z = (A²/s₁² + B²/s₂²)^(-1/2): for a share w of the budget on the mean,
s₁ = zA/√w and s₂ = zB/√(1−w). The total relative error C·(s₁²/A² + s₂²/B²) = C·z²·(1/w + 1/(1−w)) is least for w = ½.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy._checks import is_number, positive, whole
from lipdp.privacy.mechanism import add_noise

__all__ = ["Moments", "moment_sensitivities", "moment_stds", "moment_sums", "private_moments"]

# Norms are computed in float64, off by at most (entries)·2⁻⁵³ of themselves; the noise carries this much on top.
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Moments:
    """What was released; everything here may be published.

    Attributes:
        mean: (C,), float64.
        variance: (C,), float64, at least the floor.
        mean_noise: standard deviation of the noise in each entry of ``mean``.
        variance_noise: that of the noise in the second moment, before the square of the mean is subtracted.
    """

    mean: Tensor
    variance: Tensor
    mean_noise: float
    variance_noise: float

    @property
    def std(self) -> Tensor:
        """√variance."""
        return self.variance.sqrt()


def moment_sensitivities(radius: float, positions: int) -> tuple[float, float]:
    """(A, B): what one record of ``positions`` positions in the ball of ``radius`` adds to the two sums at most."""
    r, count = positive("radius", radius), whole("positions", positions)
    return r / math.sqrt(count), r**2 / count


def moment_stds(radius: float, positions: int, multiplier: float, mean_share: float = 0.5) -> tuple[float, float]:
    """(s₁, s₂): the noise on the two sums that makes the pair one Gaussian mechanism of this multiplier."""
    if not (is_number(mean_share) and 0 < mean_share < 1):
        raise ConfigurationError(f"mean_share is {mean_share!r}: the mean's share of the budget, strictly between 0 and 1.")
    first, second = moment_sensitivities(radius, positions)
    z = positive("multiplier", multiplier) * _SLACK
    return z * first / math.sqrt(mean_share), z * second / math.sqrt(1 - mean_share)


def moment_sums(
    batches: Iterable[Tensor], radius: float, *, copies: bool = False, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor, int]:
    """Σ_i m1(x_i) and Σ_i m2(x_i), both (C,) in float64, *not noised*, and the number of positions.

    Records are clipped to the ball; one that is not finite is left out. With ``copies`` a record is (K, C, *positions), and its
    m1 and m2 are the means of its copies', each clipped: no longer than one copy's.
    """
    r = positive("radius", radius)
    sums: tuple[Tensor, Tensor] | None = None
    shape: tuple[int, ...] = ()
    for batch in batches:
        x = batch.detach().to(device=device, dtype=torch.float64)
        if x.ndim < (3 if copies else 2):
            raise DataError(
                f"statistics need batches (batch, {'copies, ' if copies else ''}channels, *positions), not {tuple(x.shape)}"
            )
        if sums is None:
            shape = tuple(x.shape[1:])
            if math.prod(shape) == 0:
                raise DataError(f"examples of shape {shape} hold no numbers, so they have no statistics")
            channels = shape[1 if copies else 0]
            sums = x.new_zeros(channels), x.new_zeros(channels)
        if tuple(x.shape[1:]) != shape:
            raise DataError(f"a batch has examples of shape {tuple(x.shape[1:])}, the first one had {shape}")
        first, second = _moments(x, r, copies)
        sums[0].add_(first)
        sums[1].add_(second)
    if sums is None:
        raise DataError("no batch was given: the number of channels is not known. A batch of no records, (0, C, …), will do.")
    return *sums, math.prod(shape[2 if copies else 1 :])


def _moments(x: Tensor, radius: float, copies: bool) -> tuple[Tensor, Tensor]:
    x = x if copies else x.unsqueeze(1)
    x = x.reshape(*x.shape[:3], math.prod(x.shape[3:]))
    # Dividing by the largest entry first: squares of very large or very small entries leave float64's range.
    largest = x.abs().amax(dim=(2, 3), keepdim=True)
    scaled = x / largest.where(largest > 0, 1.0)
    norms = torch.linalg.vector_norm(scaled, dim=(2, 3), keepdim=True) * largest
    x = x * (radius / norms.clamp_min(radius))
    finite = torch.isfinite(x).all(dim=(1, 2, 3), keepdim=True)
    x = torch.where(finite, x, torch.zeros_like(x))
    return x.mean(dim=(1, 3)).sum(0), x.square().mean(dim=(1, 3)).sum(0)


def private_moments(
    batches: Iterable[Tensor],
    *,
    radius: float,
    multiplier: float,
    dataset_size: int,
    generator: torch.Generator,
    device: torch.device | str | None = None,
    mean_share: float = 0.5,
    variance_floor: float | None = None,
    copies: bool = False,
) -> Moments:
    """Mean and variance of each channel over the whole dataset: one Gaussian mechanism of noise multiplier ``multiplier``.

    Account for it as one Gaussian release *without* subsampling, at this multiplier, together with training's. The multiplier is
    that of add/remove neighbours; an accountant for replace-one doubles the sensitivity itself.

    Args:
        batches: tensors (batch, C, *positions) that hold every record once (features: no positions).
        radius: R, a public number; records are clipped to it.
        multiplier: z.
        dataset_size: N, a public constant: what the sums are divided by, never the number of records seen.
        generator: of the noise, on ``device``.
        device: where to sum; by default where the batches are.
        mean_share: w, the mean's share of the budget.
        variance_floor: least variance that is returned; by default the noise of the second moment, for a variance below its own
            noise is not known.
        copies: whether batches are (batch, K, C, *positions), each record with its K augmented copies.
    """
    count = whole("dataset_size", dataset_size)
    # Constants first: a wrong one is an error before data are read.
    moment_stds(radius, 1, multiplier, mean_share)
    if variance_floor is not None:
        positive("variance_floor", variance_floor)
    first, second, positions = moment_sums(batches, radius, copies=copies, device=device)
    largest_mean, largest_square = moment_sensitivities(radius, positions)
    stds = dict(zip(("mean", "square"), moment_stds(radius, positions, multiplier, mean_share), strict=True))
    noised = add_noise({"mean": first, "square": second}, stds, generator)
    # From here on it is post-processing. Clamping to what a record can have only brings the answers closer to the truth.
    mean = (noised["mean"] / count).clamp(-largest_mean, largest_mean)
    square = (noised["square"] / count).clamp(0, largest_square)
    noise = stds["mean"] / count, stds["square"] / count
    floor = noise[1] if variance_floor is None else float(variance_floor)
    return Moments(mean, (square - mean.square()).clamp_min(floor), *noise)
