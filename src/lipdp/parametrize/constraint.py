"""What ``constraint=`` takes. Here: sets of weight matrices, small objects that bring a matrix back into {‖W‖₂ ≤ 1}, certified.

A layer takes one as an argument: ``SpectralLinear(64, 10, constraint=constraint.Spectral())``. The parametrisations of matrices
(:mod:`lipdp.parametrize.maps`) and of whole convolutions (``SpectralConv2d(…, constraint=constraint.AOC())``) have their names here
too.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from lipdp._deferred import holds, is_deferring
from lipdp._numerics import unit_roundoff
from lipdp.bounds.operator_norm import certified_norm
from lipdp.errors import ConfigurationError
from lipdp.parametrize.convolution import CircularFFT
from lipdp.parametrize.maps import Cayley, DifferentiableBjorck, Householder, MatrixExp, Polar
from lipdp.parametrize.orthogonal_conv import AOC, BCOP, SOC

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


# From ‖WᵀW − I‖ ≤ ½, that is singular values within [0.7, 1.23], four iterations lead to 1 ± 1e-5 at the worst.
_BLIND_ITERATIONS = 4


@runtime_checkable
class Constraint(Protocol):
    """Maps any finite matrix (…, rows, columns) to one with ‖W‖₂ ≤ 1 in its own dtype."""

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """The projected matrix, same shape and dtype."""
        ...


def _require_finite(norm: torch.Tensor) -> None:
    if not holds(torch.isfinite(norm)):
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

    The iteration W ← 1.5W − 0.5WWᵀW maps each singular value s to 1.5s − 0.5s³, which lies in [0, 1] for s in [0, √3],
    has the fixed point 1 (approached quadratically) and multiplies small values by 1.5. A matrix that is far from orthogonal
    is scaled to norm 1 first (values near √3 would collapse towards 0). The result ends with the Gram certificate, so
    ‖W‖₂ ≤ 1 whatever the number of iterations. Weights are warm-started: after an optimiser step they are still nearly
    orthogonal, two or three iterations do; what one call leaves undone, the next one continues.

    Attributes:
        iterations: the most iterations of one call.
        tolerance: the iteration that starts from ‖WᵀW − I‖_F ≤ tolerance·√r is the last; it leaves about its square.
    """

    iterations: int = 20
    tolerance: float = 3e-3

    def __post_init__(self) -> None:
        if self.iterations < 0:
            raise ConfigurationError(f"Bjorck iterations must be 0 or more, not {self.iterations}")

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """Björck iterations, then the certificate."""
        with torch.no_grad():
            work = matrix.detach().to(torch.promote_types(matrix.dtype, torch.float32))
            transposed = work.shape[-2] < work.shape[-1]
            if transposed:
                work = work.transpose(-1, -2)
            rank = work.shape[-1]
            eye = torch.eye(rank, dtype=work.dtype, device=work.device)
            close = self.tolerance * rank**0.5
            for iteration in range(self.iterations):
                error = work.transpose(-1, -2) @ work - eye
                distance = torch.linalg.matrix_norm(error).max()
                # ‖WᵀW − I‖ ≤ ½ puts the singular values into [0.7, 1.23]; NaN and inf fail this test too.
                if iteration == 0 and not holds(distance <= 0.5):
                    work = self._scaled(work)
                    error = work.transpose(-1, -2) @ work - eye
                work = work - 0.5 * (work @ error)
                if iteration + 1 == _BLIND_ITERATIONS if is_deferring() else bool(distance <= close):
                    break
            if transposed:
                work = work.transpose(-1, -2)
            # Nearly orthogonal matrices are certified by ‖WᵀW − I‖_F; where that is not known yet, powers would be wasted on them.
            return normalise_certified(work, matrix.dtype, squarings=2 if is_deferring() else 10)

    @staticmethod
    def _scaled(work: torch.Tensor) -> torch.Tensor:
        """``work`` divided by (a bound on) its norm where that exceeds 1.4; in float64, where a huge norm can't overflow."""
        norm = certified_norm(work, squarings=5)
        _require_finite(norm)
        scale = torch.where(norm > 1.4, norm, torch.ones_like(norm))
        return (work.to(torch.float64) / scale[..., None, None]).to(work.dtype)


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
