"""What ``constraint=`` takes. Here: sets of weight matrices, small objects that bring a matrix back into {‖W‖₂ ≤ 1}, certified.

A layer takes one as an argument: ``SpectralLinear(64, 10, constraint=constraint.Spectral())``. The parametrisations of matrices
(:mod:`lipdp.parametrize.maps`) and of whole convolutions (``SpectralConv2d(…, constraint=constraint.AOC())``) have their names here
too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from lipdp._numerics import are_finite, is_deferring, unit_roundoff
from lipdp.bounds.operator_norm import certified_norm
from lipdp.errors import ConfigurationError
from lipdp.parametrize.convolution import AOC, BCOP, SOC, CircularFFT
from lipdp.parametrize.maps import Cayley, DifferentiableBjorck, Householder, MatrixExp, Polar

__all__ = [
    "AOC",
    "BCOP",
    "RKO",
    "SOC",
    "AbsoluteSums",
    "Bjorck",
    "Cayley",
    "CircularFFT",
    "Constraint",
    "DifferentiableBjorck",
    "Frobenius",
    "Householder",
    "MatrixExp",
    "Polar",
    "Spectral",
    "normalise_certified",
    "project_ball",
    "project_box",
    "project_columns",
    "project_rows",
]


# ‖WᵀW − I‖_F up to which a matrix is near enough to begin: squares of singular values of 2.9 at most, 3 with rounding.
_NEAR = 1.9
# Iterations where nobody looks how near it is by then. After a step of training one does.
_BLIND_ITERATIONS = 2
# Rows that are added up in float32 at a time; columns of a block of a Gram matrix; numbers that enter products from which on
# float32 is used on a processor.
_ROWS = 64
_COLUMNS = 128
_LARGE = 2**21
# Part of the weights that a bound on rounding may cost.
_VISIBLE = 4e-3


@runtime_checkable
class Constraint(Protocol):
    """Maps any finite matrix (…, rows, columns) to one with ‖W‖₂ ≤ 1 in its own dtype."""

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """The projected matrix, same shape and dtype."""
        ...


def _require_finite(norm: torch.Tensor) -> None:
    if not are_finite(norm):
        raise ConfigurationError(
            "a constrained weight is not finite: training has diverged. Lower the learning rate; nothing was projected."
        )


def normalise_certified(matrix: torch.Tensor, dtype: torch.dtype, squarings: int = 10) -> torch.Tensor:
    """``matrix`` divided by its certified norm where that exceeds 1, cast to ``dtype``, with ‖W‖₂ ≤ 1 after the cast.

    Rounding each entry by at most a factor 1±u moves the matrix by ‖ΔW‖_F ≤ u‖W‖_F ≤ u√r‖W‖₂, hence the divisor's factor
    (1+√r·u); the division itself is in float64. ``squarings`` is the effort of the certificate, see
    :func:`~lipdp.bounds.operator_norm.certified_norm`; with any number of them it is an upper bound.
    """
    norm = certified_norm(matrix, squarings)
    _require_finite(norm)
    rank = min(matrix.shape[-2:])
    # 2u: a margin for the float64 division and for subnormal entries.
    divisor = norm * (1 + rank**0.5 * unit_roundoff(dtype) + 2 * unit_roundoff(torch.float64))
    divisor = torch.where(divisor > 1, divisor, torch.ones_like(divisor))
    return (matrix.to(torch.float64) / divisor[..., None, None]).to(dtype)


@dataclass(frozen=True)
class Spectral:
    """W ← W / max(1, ‖W‖₂): the nearest point on the segment to 0; singular values keep their ratios."""

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """Divide by the certified norm where it exceeds 1."""
        return normalise_certified(matrix, matrix.dtype)


@dataclass(frozen=True)
class Bjorck:
    """Björck orthogonalisation: all singular values towards 1, so that the layer preserves gradient norms.

    The iteration W ← W − ½WE with E = WᵀW − I maps each singular value s to 1.5s − 0.5s³, which lies in [0, 1] for s in [0, √3],
    has the fixed point 1 (approached quadratically) and multiplies small values by 1.5. So an iteration that starts from ‖W‖₂ ≤ √3
    ends with ‖W‖₂ ≤ 1 but for rounding, which is bounded and divided out (:func:`_iterated`): the iteration is its own certificate,
    and takes two products. A matrix that is far from orthogonal is scaled first. Weights are warm-started: after an optimiser
    step they are still nearly orthogonal, one or two iterations do; what one call leaves undone, the next one continues.

    Attributes:
        iterations: the most iterations of one call; without any, the matrix is divided by a certified norm.
        tolerance: the iteration that starts from ‖WᵀW − I‖_F ≤ tolerance·√r is the last; it leaves about its square.
    """

    iterations: int = 20
    tolerance: float = 1e-2

    def __post_init__(self) -> None:
        if self.iterations < 0:
            raise ConfigurationError(f"Bjorck iterations must be 0 or more, not {self.iterations}")

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """Björck iterations, and what bounds their rounding."""
        if matrix.ndim < 2 or not matrix.is_floating_point():
            raise ConfigurationError(f"a matrix of real numbers is projected, not {tuple(matrix.shape)} of {matrix.dtype}")
        if self.iterations == 0 or matrix.numel() == 0:
            return normalise_certified(matrix, matrix.dtype)
        with torch.no_grad(), torch.autocast(matrix.device.type, enabled=False):  # the caller's may halve the precision
            tall = matrix.detach() if matrix.shape[-2] >= matrix.shape[-1] else matrix.detach().transpose(-1, -2)
            work = tall.to(_working_type(tall))
            close = self.tolerance * work.shape[-1] ** 0.5
            excess: torch.Tensor | float = 0.0
            blind = is_deferring()
            for iteration in range(min(self.iterations, _BLIND_ITERATIONS) if blind else self.iterations):
                error = _gram(work)
                error.diagonal(dim1=-2, dim2=-1).sub_(1.0)
                distance = torch.linalg.matrix_norm(error)
                if blind:
                    if iteration == 0:  # W is finite where its Gram matrix is
                        _require_finite(distance)
                        work, error = _brought_near(work, error, distance)
                elif iteration == 0 and not bool((distance <= _NEAR).all()):  # NaN fails this test too
                    _require_finite(tall.abs().amax())  # in float64 the Gram matrix of a huge one may overflow all the same
                    work = self._scaled(work)
                    error = _gram(work)
                    error.diagonal(dim1=-2, dim2=-1).sub_(1.0)
                    distance = torch.linalg.matrix_norm(error)
                work, excess = _iterated(work, error, distance)
                if not blind and bool((distance <= close).all()):
                    break
            divisor = (1.0 + excess) * _after_rounding(work, matrix.dtype)
            done = (work / divisor).to(matrix.dtype)
            return done if matrix.shape[-2] >= matrix.shape[-1] else done.transpose(-1, -2)

    @staticmethod
    def _scaled(work: torch.Tensor) -> torch.Tensor:
        """``work`` divided by (a bound on) its norm where that exceeds 1.4; in float64, where a huge norm can't overflow."""
        norm = certified_norm(work, squarings=5)
        _require_finite(norm)
        scale = torch.where(norm > 1.4, norm, torch.ones_like(norm))
        return (work.to(torch.float64) / scale[..., None, None]).to(work.dtype)


def _working_type(tall: torch.Tensor) -> torch.dtype:
    """float64, in which rounding is nothing; float32 for large matrices on a processor, where float64 takes twice the time.

    Not for those so large that the bound on its rounding would shorten weights visibly, and not where a product of float32 may be
    computed more coarsely (``torch.set_float32_matmul_precision``).
    """
    rows, rank = int(tall.shape[-2]), int(tall.shape[-1])
    if tall.device.type != "cpu" or tall.dtype == torch.float64 or rows * rank**2 <= _LARGE or is_deferring():
        return torch.float64
    loose = (_ROWS + rows / _ROWS) * rank * unit_roundoff(torch.float32) > _VISIBLE
    return torch.float64 if loose or not _multiplies_in_float32() else torch.float32


def _multiplies_in_float32() -> bool:
    """Whether products of float32 on a processor are those of float32."""
    settings = [torch.backends, getattr(torch.backends, "mkldnn", None), getattr(torch.backends.mkldnn, "matmul", None)]
    finer = all(getattr(place, "fp32_precision", "none") in ("none", "ieee") for place in settings)
    return finer and torch.get_float32_matmul_precision() == "highest"


def _gram(work: torch.Tensor) -> torch.Tensor:
    """WᵀW. On a processor one half of it: what lies below the blocks on the diagonal is what lies above them."""
    rank = int(work.shape[-1])
    if work.device.type != "cpu" or rank < 2 * _COLUMNS:
        return _product_of_columns(work, work)
    total = work.new_empty(*work.shape[:-2], rank, rank)
    for start in range(0, rank, _COLUMNS):
        behind = start + _COLUMNS
        total[..., start:behind, start:] = _product_of_columns(work[..., start:behind], work[..., start:])
        total[..., behind:, start:behind] = total[..., start:behind, behind:].transpose(-1, -2)
    return total


def _product_of_columns(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """AᵀB; in float32 by blocks of rows, so that rounding grows with the blocks and not with the rows."""
    if left.dtype == torch.float64:
        return left.transpose(-1, -2) @ right
    total = left[..., :_ROWS, :].transpose(-1, -2) @ right[..., :_ROWS, :]
    for start in range(_ROWS, left.shape[-2], _ROWS):
        rows = slice(start, start + _ROWS)
        total += left[..., rows, :].transpose(-1, -2) @ right[..., rows, :]
    return total


def _brought_near(work: torch.Tensor, error: torch.Tensor, distance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same divided by √(1 + ‖E‖_F) ≥ ‖W‖₂ where that is far above 1, without asking; E with it."""
    square = torch.where(distance > _NEAR, 1.0 + distance, torch.ones_like(distance))[..., None, None]
    scaled = error / square
    scaled.diagonal(dim1=-2, dim2=-1).add_((1.0 / square - 1.0)[..., 0])
    return work / square.sqrt(), scaled


def _iterated(work: torch.Tensor, error: torch.Tensor, distance: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | float]:
    """W − ½WE, and by how much its norm can exceed 1, given ‖W‖₂ ≤ √3.

    With γ_k = k·u/(1 − k·u): computed sums of k products are off by γ_k·|W|ᵀ|W| entry by entry, so Ê = E + η with ‖η‖₂ ≤
    γ_k·q, q = min(‖W‖_F², ‖W‖₁‖W‖_∞) ≥ ‖|W|‖₂², and by u‖Ê‖_F for the diagonal. The product WÊ is off by γ_r·‖W‖_F·‖Ê‖_F, the
    difference by u·‖W‖_F at most. As W(I − ½E) has norm ≤ 1, the result has norm ≤ 1 + ½√3·‖η‖ + ½γ_r‖W‖_F‖Ê‖_F + 1.01·u·√r.
    In float64 the same with ‖W‖_F² ≤ 3r and ‖Ê‖_F ≤ 2√r, and twice that for the scaling of W and E.
    """
    rows, rank = work.shape[-2:]
    u = unit_roundoff(work.dtype)
    if work.ndim == 2 and work.dtype == torch.float64:  # in one kernel: the slack below has room for a sum that starts from W
        following = torch.addmm(work, work, error, alpha=-0.5)
    else:
        following = torch.sub(work, work @ error, alpha=0.5)
    if work.dtype == torch.float64:
        k = max(rows, rank) + 8
        gamma = k * u / (1 - k * u)
        return following, 2 * (3 * gamma * rank + 4 * gamma * rank + 2 * u * rank**0.5)
    k = min(rows, _ROWS) + -(-rows // _ROWS) + 1
    gamma, of_product = k * u / (1 - k * u), rank * u / (1 - rank * u)
    sizes = work.abs()
    square = work.square().sum((-2, -1)) * (1 + 1e-3)  # sums of float32: their own rounding is far below that
    spread = torch.minimum(square, sizes.sum(-1).amax(-1) * sizes.sum(-2).amax(-1) * (1 + 1e-3))
    off = gamma * spread + 2 * u * distance
    excess = 0.87 * off + 0.51 * of_product * square.sqrt() * distance + 1.02 * u * rank**0.5
    return following, excess[..., None, None]


def _after_rounding(work: torch.Tensor, dtype: torch.dtype) -> float:
    """What the division and the cast can add: each moves W by u‖W‖_F ≤ u√r‖W‖₂ at most.

    The last term is what :func:`~lipdp.bounds.operator_norm.is_contraction` is loose by: what is made has to be found inside by it.
    """
    rows, rank = int(work.shape[-2]), int(work.shape[-1])
    u = unit_roundoff(work.dtype)
    measured = (2 * rows * rank + 256) * unit_roundoff(torch.float64) + (1 + math.log(rank)) * 2.0**-32
    return 1.0 + 1.01 * math.sqrt(rank) * (unit_roundoff(dtype) + u) + 8 * u + measured


@dataclass(frozen=True)
class RKO:
    """Reshaped kernel orthogonalisation, by name: what a convolution makes of a constraint on matrices, K = Θ/√m.

    ‖K∗‖ ≤ ‖Θ‖₂ ≤ 1 with Θ the kernel read as a matrix (out × in·window). Orthogonal convolutions (AOC …) keep more of the gradient.

    Attributes:
        matrix: the projection of Θ. The default constraint of convolutions is ``RKO(Bjorck())``, or just ``Bjorck()``.
    """

    matrix: Constraint = field(default_factory=Bjorck)

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """Project Θ."""
        return self.matrix.project(matrix)


def project_ball(vector: torch.Tensor, radius: float) -> torch.Tensor:
    """``vector`` scaled into the ball ‖v‖₂ ≤ radius, holding after the cast back to its own dtype."""
    with torch.no_grad():
        wide = vector.detach().to(torch.float64)
        norm = torch.linalg.vector_norm(wide)
        _require_finite(norm)
        return (wide * _factor(norm, radius, wide.numel(), vector.dtype)).to(vector.dtype)


def _factor(norm: torch.Tensor, radius: float, length: int, dtype: torch.dtype) -> torch.Tensor:
    """What brings sums of ``length`` numbers down to ``radius``, after a cast too; exactly 1 for what is inside already.

    The norm's own rounding in float64 is below a factor 1 + 2nu; the cast moves each entry by at most a factor 1 + u, and what is
    made has to be found inside when it is measured again: so it stays another 2nu (and some for the division) below.
    """
    measured = 1 + 2 * length * unit_roundoff(torch.float64)
    margin = (1 + unit_roundoff(dtype)) * measured * (measured + 8 * unit_roundoff(torch.float64))
    return torch.where(norm * measured > radius, radius / (norm * margin), torch.ones_like(norm))


def project_box(vector: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """``vector`` clamped entry by entry into [low, high], holding after the limits are rounded to its dtype."""
    with torch.no_grad():
        _require_finite(vector)
        edges = torch.tensor([low, high], dtype=torch.float64)
        inside = edges.to(vector.dtype)
        towards = torch.tensor([high, low], dtype=vector.dtype)
        wide = inside.to(torch.float64)
        outside = torch.stack((wide[0] < edges[0], wide[1] > edges[1]))
        inside = torch.where(outside, torch.nextafter(inside.float(), towards.float()).to(vector.dtype), inside)
        return vector.detach().clamp(*inside.tolist())


def _scaled_vectors(matrix: torch.Tensor, norms: torch.Tensor, radius: float, dim: int) -> torch.Tensor:
    """Vectors along ``dim`` scaled to at most ``radius``."""
    _require_finite(norms)
    return (matrix.to(torch.float64) * _factor(norms, radius, matrix.shape[dim], matrix.dtype)).to(matrix.dtype)


def project_rows(matrix: torch.Tensor, radius: float) -> torch.Tensor:
    """Every row scaled into the ball ‖row‖₂ ≤ radius."""
    with torch.no_grad():
        norms = torch.linalg.vector_norm(matrix.detach().to(torch.float64), dim=-1, keepdim=True)
        return _scaled_vectors(matrix.detach(), norms, radius, -1)


def project_columns(matrix: torch.Tensor, radius: float = 1.0) -> torch.Tensor:
    """Every column scaled to ‖column‖₁ ≤ radius, so that ‖W‖₁→₁ ≤ radius."""
    with torch.no_grad():
        norms = matrix.detach().to(torch.float64).abs().sum(dim=-2, keepdim=True)
        return _scaled_vectors(matrix.detach(), norms, radius, -2)


@dataclass(frozen=True)
class Frobenius:
    """W ← W / max(1, ‖W‖_F): ‖W‖₂ ≤ ‖W‖_F ≤ 1. Cheap, and loose for matrices of high rank."""

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """Scale each matrix into the Frobenius ball."""
        with torch.no_grad():
            flat = matrix.detach().reshape(*matrix.shape[:-2], 1, -1)
            return project_rows(flat, 1.0).reshape(matrix.shape)


@dataclass(frozen=True)
class AbsoluteSums:
    """W ← W / max(1, ‖W‖₁, ‖W‖∞): the largest absolute sums of columns and rows are at most 1.

    Then W is 1-Lipschitz in L1 and in L∞, and in L2 too: ‖W‖₂ ≤ √(‖W‖₁‖W‖∞) ≤ 1.
    """

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """Scale each matrix by its largest absolute sum."""
        with torch.no_grad():
            wide = matrix.detach().to(torch.float64).abs()
            sums = torch.maximum(wide.sum(dim=-2).amax(dim=-1), wide.sum(dim=-1).amax(dim=-1))[..., None, None]
            _require_finite(sums)
            factor = _factor(sums, 1.0, max(matrix.shape[-2:]), matrix.dtype)
            return (matrix.detach().to(torch.float64) * factor).to(matrix.dtype)
