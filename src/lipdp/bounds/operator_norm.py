"""Certified operator norms: upper bounds on ‖W‖₂ that hold in floating point.

Power iteration approaches ‖W‖₂ from *below* (published code that divides by it reached true norms of 1.03–1.36), so it
can't support a guarantee. Everything here approaches from above.
"""

from __future__ import annotations

import math

import torch

from lipdp._deferred import is_deferring
from lipdp._numerics import unit_roundoff
from lipdp.errors import ConfigurationError

__all__ = ["certified_norm", "is_contraction"]

# Stop squaring once the certificate of ‖W‖₂² is this close to 1: dividing by its root costs 0.005% of the weights at most.
_CLOSE_ENOUGH = 1e-4


def is_contraction(matrix: torch.Tensor) -> bool:
    """Whether ‖W‖₂ ≤ 1 for every matrix in ``matrix``, certainly: as many squarings as that takes, until no more help."""
    return bool((certified_norm(matrix, 32, until_one=True) <= 1).all())


def certified_norm(matrix: torch.Tensor, squarings: int = 10, *, until_one: bool = False) -> torch.Tensor:
    """An upper bound on ‖W‖₂ of each matrix in ``matrix`` (…, rows, columns), as float64.

    Gram iteration: for A = WᵀW (on the smaller side, r×r) and every j, ‖W‖₂ = ‖A^(2^j)‖₂^(1/2^(j+1)) ≤
    ‖A^(2^j)‖_F^(1/2^(j+1)), loose by at most r^(1/2^(j+2)). Also ‖W‖₂² ≤ 1 + ‖A − I‖_F, which is sharp when W is
    nearly orthogonal, as it is after a projection. The smallest of all these is returned. A is rescaled by ‖A‖_F at every
    squaring (unscaled, the powers over- or underflow).

    Rounding: a computed product of length n is off by at most γ_n|W|ᵀ|W|, so ‖A‖ is under-reported by at most the factor
    (1 − rγ_n); over all squarings the exponents 1/2^j add up to less than 2, hence (1 − 2rγ_n)⁻¹ on the square.
    float64 is used throughout, so TF32 or bf16 settings never reach the certificate.

    It ends when the bound is close to 1; with ``until_one`` only when it is not above 1.
    """
    if matrix.ndim < 2:
        raise ConfigurationError(f"an operator norm needs a matrix, not a tensor of shape {tuple(matrix.shape)}")
    with torch.no_grad():
        work = matrix.detach().to(torch.float64)
        if work.numel() == 0:
            return work.new_zeros(work.shape[:-2])
        if work.shape[-1] > work.shape[-2]:
            work = work.transpose(-1, -2)
        rows, rank = work.shape[-2], work.shape[-1]
        # Powers of very large or small entries would leave float64's range. A power of two scales without rounding, and is
        # kept out of the logarithms below, whose absolute error would grow with it.
        largest = work.abs().amax(dim=(-2, -1), keepdim=True)
        scale = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent.clamp(-1000, 1000))
        work = work / scale
        gram = work.transpose(-1, -2) @ work
        scale = scale[..., 0, 0]
        identity = torch.eye(rank, dtype=torch.float64, device=work.device)
        square = scale.clamp(max=1e150).square()[..., None, None]  # clamped where 1 + ‖A − I‖_F is of no use anyway
        best = torch.sqrt(1.0 + torch.linalg.matrix_norm(gram * square - identity))
        best = torch.where(scale > 1e150, torch.inf, best)
        n = max(rows, rank)
        u = unit_roundoff(torch.float64)
        gamma = n * u / (1 - n * u)
        # 64u covers the logarithms, roots and sums of this function itself.
        rounding = (1 + 64 * u) / math.sqrt(1 - 2 * rank * gamma)
        log_scale = torch.zeros_like(scale)
        exponent = 1.0  # gram = (WᵀW/scale²)^(1/exponent) up to exp(log_scale)
        for level in range(squarings + 1):
            frobenius = torch.linalg.matrix_norm(gram)
            positive = torch.where(frobenius == 0, torch.ones_like(frobenius), frobenius)  # NaN stays NaN
            bound = scale * torch.exp((log_scale + exponent * torch.log(positive)) / 2)
            best = torch.minimum(best, torch.where(frobenius == 0, torch.zeros_like(bound), bound))
            if level == squarings:
                break
            if not is_deferring() and bool((best * rounding <= 1 if until_one else (best - 1).abs() < _CLOSE_ENOUGH).all()):
                break
            gram = gram / positive[..., None, None]
            log_scale = log_scale + exponent * torch.log(positive)
            gram = gram @ gram
            exponent /= 2
        return best * rounding
