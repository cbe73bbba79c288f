"""Certified norms of convolutions from their Fourier transform: the true norm, instead of the bound by counting.

The convolution of an infinite image with K has the norm sup_ω‖K̂(ω)‖₂, K̂(ω) = Σ_a K[a]·exp(−i⟨a, ω⟩). Zero padding, strides
and dilations only compress it, so that is an upper bound for them; and for circular padding whose outputs are distinct.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from lipdp.bounds.operator_norm import certified_norm, unit_roundoff
from lipdp.errors import ConfigurationError

__all__ = ["conv_norm_fft", "grid_factor", "grid_for", "tighter_norm"]

_BUDGET = 3e9  # multiplications for one squaring of the Gram iteration, above which counting has to do


def grid_factor(kernel: Sequence[int], grid: Sequence[int]) -> float:
    """Π 1/cos(π(k−1)/(2n)): how much the supremum can exceed the maximum over the grid.

    Along one axis Re(e^{iφ}uᴴK̂v), its centre frequency taken out, is a trigonometric polynomial of degree (k−1)/2; at a
    distance d ≤ π/n from its maximum M it is still at least M·cos(d(k−1)/2).
    """
    return math.prod(1 / math.cos(math.pi * (k - 1) / (2 * n)) for k, n in zip(kernel, grid, strict=True))


def conv_norm_fft(kernel: torch.Tensor, grid: int | Sequence[int] = 32, groups: int = 1) -> float:
    """An upper bound on the operator norm of the convolution with ``kernel`` (out, in/groups, *window) on any image.

    The largest certified ‖K̂(ω)‖₂ over a grid of frequencies, times :func:`grid_factor`. In float64; the rounding of the
    transform (relative to √N‖K‖_F over N frequencies, by Parseval) is added before the norm is used.

    Args:
        kernel: as stored by torch (for a transposed convolution (in, out/groups, *window): its adjoint has the same norm).
        grid: number of frequencies along each axis, at least the window's size. 32 costs 1% for a window of 3×3.
        groups: as in torch.
    """
    window = tuple(kernel.shape[2:])
    axes = len(window)
    sizes = (grid,) * axes if isinstance(grid, int) else tuple(grid)
    if axes < 1 or len(sizes) != axes or any(n < k or n < 1 for n, k in zip(sizes, window, strict=True)):
        raise ConfigurationError(
            f"the frequency grid {sizes} must have one size for each axis of the window {window}, and be at least as large: a "
            "smaller transform drops taps silently"
        )
    with torch.no_grad():
        work = kernel.detach().to(torch.float64)
        if not bool(torch.isfinite(work).all()):
            return math.inf
        work = work.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
        symbol = torch.fft.rfftn(work, s=sizes, dim=tuple(range(-axes, 0)))  # K̂(−ω) is the conjugate: half the grid
        matrices = symbol.flatten(3).movedim(3, 0)
        real = torch.cat(
            (torch.cat((matrices.real, -matrices.imag), dim=-1), torch.cat((matrices.imag, matrices.real), dim=-1)), dim=-2
        )  # the same norm as the complex matrix
        largest = float(certified_norm(real).max())
        count = math.prod(sizes)
        u = unit_roundoff(torch.float64)
        rounding = 16 * (math.log2(max(2, count)) + 2) * u * math.sqrt(count) * float(torch.linalg.vector_norm(work))
    return (largest + rounding) * grid_factor(window, sizes) * (1 + 16 * u)


def grid_for(kernel: torch.Tensor, groups: int = 1, grid: int = 32) -> int:
    """The grid that is worth its time for this kernel (finer for larger windows), or 0 where counting is as good."""
    window = tuple(kernel.shape[2:])
    if not window or math.prod(window) == 1:
        return 0
    grid = max(grid, 4 * max(window)) if len(window) < 3 else max(8, 2 * max(window))
    rows, columns = 2 * kernel.shape[0] // groups, 2 * kernel.shape[1]
    work = groups * grid ** len(window) / 2 * min(rows, columns) ** 2 * max(rows, columns)
    while work > _BUDGET and grid > 2 * max(window):
        grid, work = grid // 2, work / 2 ** len(window)
    return grid if work <= _BUDGET else 0


def tighter_norm(kernel: torch.Tensor, groups: int, counted: float, note: str) -> tuple[float, str]:
    """The smaller of a counted bound and the Fourier bound, with a note that says which."""
    grid = grid_for(kernel, groups)
    found = conv_norm_fft(kernel, grid, groups)
    if found >= counted:
        return counted, f"{note} (the Fourier bound is {found / counted if counted else 1:.2f} times it)"
    slack = grid_factor(tuple(kernel.shape[2:]), (grid,) * (kernel.ndim - 2))
    return found, f"Fourier norm on {grid} frequencies an axis, within {slack:.3f} of the supremum; counting: {counted:.4g}"
