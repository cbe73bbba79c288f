"""Certified operator norms: upper bounds on ‖W‖₂ that hold in floating point.

Power iteration approaches ‖W‖₂ from *below* (published code that divides by it reached true norms of 1.03–1.36), so it
can't support a guarantee. Everything here approaches from above.
"""

from __future__ import annotations

import torch

from lipdp.errors import ConfigurationError

__all__ = ["certified_norm", "unit_roundoff"]

# Stop squaring once the certificate is this close to 1: what is left to gain is below the noise of any use.
_CLOSE_ENOUGH = 1e-6


def unit_roundoff(dtype: torch.dtype) -> float:
    """u, the largest relative error of rounding to nearest: half the distance from 1 to the next number."""
    return float(torch.finfo(dtype).eps) / 2


def certified_norm(matrix: torch.Tensor, squarings: int = 10) -> torch.Tensor:
    """An upper bound on ‖W‖₂ of each matrix in ``matrix`` (…, rows, columns), as float64.

    Gram iteration: for A = WᵀW (on the smaller side, r×r) and every j, ‖W‖₂ = ‖A^(2^j)‖₂^(1/2^(j+1)) ≤
    ‖A^(2^j)‖_F^(1/2^(j+1)), loose by at most r^(1/2^(j+2)). Also ‖W‖₂² ≤ 1 + ‖A − I‖_F, which is sharp when W is
    nearly orthogonal, as it is after a projection. The smallest of all these is returned. A is rescaled by ‖A‖_F at every
    squaring (unscaled, the powers over- or underflow).

    Rounding: a computed product of length n is off by at most γ_n|W|ᵀ|W|, so ‖A‖ is under-reported by at most the factor
    (1 − rγ_n); over all squarings the exponents 1/2^j add up to less than 2, hence (1 − 2rγ_n)⁻¹ on the square.
    float64 is used throughout, so TF32 or bf16 settings never reach the certificate.
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
        # Entries near the ends of float32's range have squares that float64 holds, but their powers need this scaling.
        scale = work.abs().amax(dim=(-2, -1), keepdim=True)
        safe = torch.where(scale > 0, scale, torch.ones_like(scale))
        work = work / safe
        gram = work.transpose(-1, -2) @ work
        unscaled = gram * safe.square()
        identity = torch.eye(rank, dtype=torch.float64, device=work.device)
        near_identity = 1.0 + torch.linalg.matrix_norm(unscaled - identity)
        square = near_identity  # the best bound on ‖W‖₂² so far
        log_scale = 2 * torch.log(safe[..., 0, 0])
        exponent = 1.0  # gram = (WᵀW)^(1/exponent) up to exp(log_scale)
        for level in range(squarings + 1):
            frobenius = torch.linalg.matrix_norm(gram)
            positive = torch.where(frobenius > 0, frobenius, torch.ones_like(frobenius))
            bound = torch.exp(log_scale + exponent * torch.log(positive))
            square = torch.minimum(square, torch.where(frobenius > 0, bound, torch.zeros_like(bound)))
            if level == squarings or bool(((square - 1).abs() < _CLOSE_ENOUGH).all()):
                break
            gram = gram / positive[..., None, None]
            log_scale = log_scale + exponent * torch.log(positive)
            gram = gram @ gram
            exponent /= 2
        n = max(rows, rank)
        u = unit_roundoff(torch.float64)
        gamma = n * u / (1 - n * u)
        # 64u covers the logarithms, roots and sums of this function itself.
        return torch.sqrt(square / (1 - 2 * rank * gamma)) * (1 + 64 * u)
