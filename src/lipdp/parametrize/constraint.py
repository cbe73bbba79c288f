"""Constraint sets for weight matrices: small objects that bring a matrix back into {‖W‖₂ ≤ 1}, certified.

A layer takes one as an argument: ``SpectralLinear(64, 10, constraint=constraint.Spectral())``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from lipdp.bounds.operator_norm import certified_norm, unit_roundoff
from lipdp.errors import ConfigurationError

__all__ = ["Bjorck", "Constraint", "Spectral", "normalise_certified", "project_ball"]


@runtime_checkable
class Constraint(Protocol):
    """Maps any finite matrix (…, rows, columns) to one with ‖W‖₂ ≤ 1 in its own dtype."""

    def project(self, matrix: torch.Tensor) -> torch.Tensor:
        """The projected matrix, same shape and dtype."""
        ...


def _require_finite(norm: torch.Tensor) -> None:
    if not bool(torch.isfinite(norm).all()):
        raise ConfigurationError(
            "a constrained weight is not finite: training has diverged. Lower the learning rate; nothing was projected."
        )


def normalise_certified(matrix: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``matrix`` divided by its certified norm where that exceeds 1, cast to ``dtype``, with ‖W‖₂ ≤ 1 after the cast.

    Rounding each entry by at most a factor 1±u moves the matrix by ‖ΔW‖_F ≤ u‖W‖_F ≤ u√r‖W‖₂, hence the divisor's factor
    (1+√r·u); the division itself is in float64.
    """
    norm = certified_norm(matrix)
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
                distance = float(torch.linalg.matrix_norm(error).max())
                # ‖WᵀW − I‖ ≤ ½ puts the singular values into [0.7, 1.23]; NaN and inf fail this test too.
                if iteration == 0 and not distance <= 0.5:
                    work = self._scaled(work)
                    error = work.transpose(-1, -2) @ work - eye
                work = work - 0.5 * (work @ error)
                if distance <= close:
                    break
            if transposed:
                work = work.transpose(-1, -2)
            return normalise_certified(work, matrix.dtype)

    @staticmethod
    def _scaled(work: torch.Tensor) -> torch.Tensor:
        """``work`` divided by (a bound on) its norm where that exceeds 1.4; in float64, where a huge norm can't overflow."""
        norm = certified_norm(work, squarings=5)
        _require_finite(norm)
        scale = torch.where(norm > 1.4, norm, torch.ones_like(norm))
        return (work.to(torch.float64) / scale[..., None, None]).to(work.dtype)


def project_ball(vector: torch.Tensor, radius: float) -> torch.Tensor:
    """``vector`` scaled into the ball ‖v‖₂ ≤ radius, holding after the cast back to its own dtype."""
    with torch.no_grad():
        wide = vector.detach().to(torch.float64)
        norm = torch.linalg.vector_norm(wide)
        _require_finite(norm)
        # The norm's own rounding in float64 is below n·2u; the cast moves each entry by at most a factor 1+u.
        margin = 1 + unit_roundoff(vector.dtype) + 2 * wide.numel() * unit_roundoff(torch.float64)
        scale = torch.where(norm * margin > radius, radius / (norm * margin), torch.ones_like(norm))
        return (wide * scale).to(vector.dtype)
