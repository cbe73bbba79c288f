"""Per-channel mean and variance, released once, by one Gaussian mechanism over the whole dataset.

For a record x of C channels at T positions, clipped to ‖x‖₂ ≤ R, let m1_c be the mean over positions of x_c, and m2_c that of x_c².
The query is the pair of sums Σ_i m1(x_i), Σ_i m2(x_i). With s = ‖x‖²/T ≤ R²/T:

- ‖m1‖² = Σ_c (mean_t x_ct)² ≤ Σ_c mean_t x_ct² = s, by Jensen, so ‖m1‖ ≤ A = R/√T;
- ‖m2‖₂ ≤ ‖m2‖₁ = s, so ‖m2‖ ≤ B = R²/T.

Both are reached at once, by a record with one constant channel of value R/√T. With noise of std s₁ on the first sum and s₂ on the
second, the pair is one Gaussian mechanism of multiplier z = (A²/s₁² + B²/s₂²)^(-1/2): for a share w of the budget on the mean,
s₁ = zA/√w and s₂ = zB/√(1−w). The total relative error C·(s₁²/A² + s₂²/B²) = C·z²·(1/w + 1/(1−w)) is least for w = ½.
For w = 1 the second sum is not released at all, and s₁ = zA.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lipdp._checks import is_number, positive, whole
from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy.budget import AnyBudget, charge
from lipdp.privacy.mechanism import add_noise
from lipdp.privacy.noise import grid_factor
from lipdp.privacy.randomness import Stream
from lipdp.privacy.runs import Release

# Norms are computed in float64, off by at most (entries)·2⁻⁵³ of themselves; the noise carries this much on top.
_SLACK = 1 + 1e-9


@dataclass(frozen=True)
class Moments:
    """What was released; everything here may be published.

    Attributes:
        mean: (C,), float64.
        variance: (C,), float64, at least the floor; ``None`` where only means were released.
        mean_noise: standard deviation of the noise in each entry of ``mean``.
        variance_noise: that of the noise in the second moment, before the square of the mean is subtracted; ∞ without it.
    """

    mean: Tensor
    variance: Tensor | None
    mean_noise: float
    variance_noise: float

    @property
    def std(self) -> Tensor | None:
        """√variance."""
        return None if self.variance is None else self.variance.sqrt()


def moment_sensitivities(radius: float, positions: int) -> tuple[float, float]:
    """(A, B): what one record of ``positions`` positions in the ball of ``radius`` adds to the two sums at most."""
    r, count = positive("radius", radius), whole("positions", positions)
    return r / math.sqrt(count), r**2 / count


def moment_stds(
    radius: float, positions: int, multiplier: float, mean_share: float = 0.5, channels: int = 1
) -> tuple[float, float]:
    """(s₁, s₂): the noise on the two sums that makes the pair one Gaussian mechanism of this multiplier; s₂ = ∞ for share 1.

    The rounding of ``channels`` sums each to the noise's grid is in it.
    """
    if not (is_number(mean_share) and 0 < mean_share <= 1):
        raise ConfigurationError(f"mean_share is {mean_share!r}: the mean's share of the budget, above 0 and at most 1.")
    first, second = moment_sensitivities(radius, positions)
    z = positive("multiplier", multiplier) * _SLACK
    z *= grid_factor(z, 2 * whole("channels", channels))
    if math.isinf(z):
        raise ConfigurationError(
            f"multiplier={multiplier:g} is more noise than its grid is fine enough for, with {channels} channels."
        )
    return z * first / math.sqrt(mean_share), z * second / math.sqrt(1 - mean_share) if mean_share < 1 else math.inf


def moment_sums(
    batches: Iterable[Tensor],
    radius: float,
    *,
    copies: bool = False,
    device: torch.device | str | None = None,
    squares: bool = True,
) -> tuple[Tensor, Tensor, int]:
    """Σ_i m1(x_i) and Σ_i m2(x_i), both (C,) in float64, *not noised*, and the number of positions.

    Records are clipped to the ball; one that is not finite is left out. With ``copies`` a record is (K, C, *positions), and its
    m1 and m2 are the means of its copies', each clipped: no longer than one copy's. Without ``squares`` the second sum
    stays 0.
    """
    r = positive("radius", radius)
    sums: tuple[Tensor, Tensor] | None = None
    shape: tuple[int, ...] = ()
    for batch in batches:
        x = batch.detach().to(device=device)
        x = x if x.is_floating_point() else x.double()
        if x.ndim < (3 if copies else 2):
            raise DataError(
                f"statistics need batches (batch, {'copies, ' if copies else ''}channels, *positions), not {tuple(x.shape)}"
            )
        if sums is None:
            shape = tuple(x.shape[1:])
            if math.prod(shape) == 0:
                raise DataError(f"examples of shape {shape} hold no numbers, so they have no statistics")
            channels = shape[1 if copies else 0]
            sums = x.new_zeros(channels, dtype=torch.float64), x.new_zeros(channels, dtype=torch.float64)
        if tuple(x.shape[1:]) != shape:
            raise DataError(f"a batch has examples of shape {tuple(x.shape[1:])}, the first one had {shape}")
        first, second = _moments(x, r, copies, squares)
        sums[0].add_(first)
        sums[1].add_(second)
    if sums is None:
        raise DataError("no batch was given: the number of channels is not known. A batch of no records, (0, C, …), will do.")
    return *sums, math.prod(shape[2 if copies else 1 :])


def _moments(x: Tensor, radius: float, copies: bool, squares: bool) -> tuple[Tensor, Tensor]:
    """Σ_i m1 and Σ_i m2 of a batch; zeros in place of the second unless ``squares``."""
    x = x if copies else x.unsqueeze(1)
    records, count, channels = x.shape[:3]
    x = x.reshape(records * count, channels * math.prod(x.shape[3:]))
    unit = x.new_ones((), dtype=torch.float64)
    if x.dtype == torch.float64:
        # Squares of very large or very small entries leave float64's range; those of narrower types do not.
        largest = x.abs().amax(dim=1)
        unit = largest.where(largest > 0, 1.0)
        x = x / unit[:, None]
    x = x.double()
    norms = torch.linalg.vector_norm(x, dim=1)
    finite = torch.isfinite(norms * unit).reshape(records, count).all(1).repeat_interleave(count)
    if not bool(finite.all()):
        x, norms, unit = x[finite], norms[finite], unit[finite] if unit.ndim else unit
    # Of x·c_i with c_i = R/max(‖x_i‖, R), the sum over rows is one product with the vector of factors.
    factors = unit * (radius / (norms * unit).clamp_min(radius)) / count
    first = (factors @ x).reshape(channels, -1).mean(1)
    second = (factors.square() * count @ x.square()).reshape(channels, -1).mean(1) if squares else torch.zeros_like(first)
    return first, second


def private_moments(
    batches: Iterable[Tensor],
    *,
    radius: float,
    multiplier: float,
    dataset_size: int,
    generator: Stream,
    device: torch.device | str | None = None,
    mean_share: float = 0.5,
    variance_floor: float | None = None,
    copies: bool = False,
    budget: AnyBudget = None,
) -> Moments:
    """Mean and variance of each channel over the whole dataset: one Gaussian mechanism of noise multiplier ``multiplier``.

    Account for it as one Gaussian release *without* subsampling, at this multiplier, together with training's. The multiplier is
    that of add/remove neighbours; an accountant for replace-one doubles the sensitivity itself.

    Args:
        batches: tensors (batch, C, *positions) that hold every record once (features: no positions).
        radius: R, a public number; records are clipped to it.
        multiplier: z.
        dataset_size: N, a public constant: what the sums are divided by, never the number of records seen.
        generator: of the noise: ``lipdp.privacy.Stream()`` has a fresh secret key.
        device: where to sum; by default where the batches are.
        mean_share: w, the mean's share of the budget; 1: only means are released.
        variance_floor: least variance that is returned; by default the noise of the second moment, for a variance below its own
            noise is not known.
        copies: whether batches are (batch, K, C, *positions), each record with its K augmented copies.
        budget: the account of the data, charged before noise is drawn; the engine's own releases are paid for by its plan.
    """
    count = whole("dataset_size", dataset_size)
    # Constants first: a wrong one is an error before data are read.
    moment_stds(radius, 1, multiplier, mean_share)
    if variance_floor is not None:
        positive("variance_floor", variance_floor)
    first, second, positions = moment_sums(batches, radius, copies=copies, device=device, squares=mean_share < 1)
    largest_mean, largest_square = moment_sensitivities(radius, positions)
    mean_std, square_std = moment_stds(radius, positions, multiplier, mean_share, len(first))
    sums, stds = {"mean": first, "square": second}, {"mean": mean_std, "square": square_std}
    released = [name for name, std in stds.items() if math.isfinite(std)]
    charge(budget, Release("statistics", "gaussian", multiplier), "statistics of channels")
    noised = add_noise({name: sums[name] for name in released}, {name: stds[name] for name in released}, generator)
    # From here on it is post-processing. Clamping to what a record can have only brings the answers closer to the truth.
    mean = (noised["mean"] / count).clamp(-largest_mean, largest_mean)
    if "square" not in noised:
        return Moments(mean, None, mean_std / count, math.inf)
    square = (noised["square"] / count).clamp(0, largest_square)
    floor = square_std / count if variance_floor is None else float(variance_floor)
    return Moments(mean, (square - mean.square()).clamp_min(floor), mean_std / count, square_std / count)
