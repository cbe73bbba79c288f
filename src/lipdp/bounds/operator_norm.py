"""Certified operator norms: upper bounds on ‖W‖₂ that hold in floating point.

Power iteration approaches ‖W‖₂ from *below* (published code that divides by it reached true norms of 1.03–1.36), so it
can't support a guarantee. Everything here approaches from above.

Of convolutions, from their Fourier transform: the true norm, instead of the bound by counting. The convolution of an infinite image
with K has the norm sup_ω‖K̂(ω)‖₂, K̂(ω) = Σ_a K[a]·exp(−i⟨a, ω⟩). Zero padding, strides and dilations only compress it, so that is
an upper bound for them; and for circular padding whose outputs are distinct.

And by counting how windows (of convolutions, of pools) read their input: the overlap multiplicity m of theory, exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from lipdp._numerics import is_deferring, unit_roundoff
from lipdp.errors import ConfigurationError

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

    Args:
        matrix: one or many, of any dtype; NaN in an entry makes that matrix's bound NaN.
        squarings: the most that are done, products of r×r matrices; each halves the logarithm of what the bound may be loose by.
        until_one: end before that only where the bound is at most 1: for a yes-or-no question.
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


_BUDGET = 3e9  # multiplications for one squaring of the Gram iteration, above which counting has to do


def grid_factor(kernel: Sequence[int], grid: Sequence[int]) -> float:
    """Π 1/cos(π(k−1)/(2n)): how much the supremum can exceed the maximum over the grid.

    Along one axis Re(e^{iφ}uᴴK̂v), its centre frequency taken out, is a trigonometric polynomial of degree (k−1)/2; at a
    distance d ≤ π/n from its maximum M it is still at least M·cos(d(k−1)/2).
    """
    return math.prod(1 / math.cos(math.pi * (k - 1) / (2 * n)) for k, n in zip(kernel, grid, strict=True))


def _grouped(kernel: torch.Tensor, groups: int, stride: Sequence[int]) -> torch.Tensor:
    """A kernel (out, in/groups, *window) as (groups, rows, columns, *window) of the same convolution at stride 1, in float64.

    A convolution of stride s reads its input in blocks of s: the pixels of a block become channels ("polyphase"), and the window
    counts blocks. Blocks are disjoint, so this only renames the input's entries.
    """
    work = kernel.detach().to(torch.float64)
    work = work.reshape(groups, kernel.shape[0] // groups, *kernel.shape[1:])
    for axis, s in enumerate(stride):
        if s > 1:
            dim = 3 + axis
            missing = -work.shape[dim] % s
            sides = [0, 0] * (work.ndim - 1 - dim) + [0, missing]
            work = torch.unflatten(torch.nn.functional.pad(work, sides), dim, (-1, s)).movedim(dim + 1, 3).flatten(2, 3)
    return work


def _strides(stride: int | Sequence[int], axes: int) -> tuple[int, ...]:
    return (stride,) * axes if isinstance(stride, int) else tuple(stride)


def _real(matrices: torch.Tensor) -> torch.Tensor:
    """Real matrices with the same norms as complex ones."""
    top, bottom = (matrices.real, -matrices.imag), (matrices.imag, matrices.real)
    return torch.cat((torch.cat(top, dim=-1), torch.cat(bottom, dim=-1)), dim=-2)


def _sampled(work: torch.Tensor, sizes: Sequence[int], squarings: int = 10) -> float:
    """The largest ‖K̂(ω)‖₂ over a grid of frequencies, certified, of a kernel (groups, rows, columns, *window).

    In float64; the rounding of the transform (relative to √N‖K‖_F over N frequencies, by Parseval) is added.
    """
    axes = len(sizes)
    symbol = torch.fft.rfftn(work, s=tuple(sizes), dim=tuple(range(-axes, 0)))  # K̂(−ω) is the conjugate: half the grid
    largest = float(certified_norm(_real(symbol.flatten(3).movedim(3, 0)), squarings).max())
    return largest + _transform_error(sizes) * math.sqrt(math.prod(sizes)) * float(torch.linalg.vector_norm(work))


def _transform_error(sizes: Sequence[int]) -> float:
    """Relative error of a float64 transform of this many points: u for each of log₂N stages, with a margin."""
    return 16 * (math.log2(max(2, math.prod(sizes))) + 2) * unit_roundoff(torch.float64)


def conv_norm_fft(
    kernel: torch.Tensor,
    grid: int | Sequence[int] | None = None,
    groups: int = 1,
    stride: int | Sequence[int] = 1,
    squarings: int = 10,
) -> float:
    """An upper bound on the operator norm of the convolution with ``kernel`` (out, in/groups, *window) on any image.

    The largest certified ‖K̂(ω)‖₂ over a grid of frequencies, times :func:`grid_factor`.

    Args:
        kernel: as stored by torch (for a transposed convolution (in, out/groups, *window): its adjoint has the same norm).
        grid: number of frequencies along each axis, at least the window's size. 32 costs 1% for a window of 3×3. By default
            enough for a few percent.
        groups: as in torch.
        stride: as in torch, for a bound of the strided convolution (which 1 bounds too, less tightly). Not with dilation.
        squarings: as in :func:`~lipdp.bounds.certified_norm`; fewer are faster and looser.
    """
    axes = kernel.ndim - 2
    if not bool(torch.isfinite(kernel).all()):
        return math.inf
    with torch.no_grad():
        work = _grouped(kernel, groups, _strides(stride, axes))
        window = tuple(work.shape[3:])
        if grid is None:
            grid = max(32, 4 * max(window, default=1)) if axes < 3 else max(8, 2 * max(window))
        sizes = (grid,) * axes if isinstance(grid, int) else tuple(grid)
        if axes < 1 or len(sizes) != axes or any(n < k or n < 1 for n, k in zip(sizes, window, strict=True)):
            raise ConfigurationError(
                f"the frequency grid {sizes} must have one size for each axis of the window {window}, and be at least as large: a "
                "smaller transform drops taps silently"
            )
        return _sampled(work, sizes, squarings) * grid_factor(window, sizes) * (1 + 16 * unit_roundoff(torch.float64))


def conv_norm_gram(kernel: torch.Tensor, groups: int = 1, stride: int | Sequence[int] = 1) -> float:
    """An upper bound on the norm of a convolution, sharp where it is nearly orthogonal.

    With S(ω) = K̂K̂ᴴ (on the side of fewer channels) and any number β, ‖K∗‖² = sup‖S(ω)‖₂ ≤ β + sup‖S(ω) − βI‖₂. The difference is a
    trigonometric polynomial of window 2k−1, so its supremum is at most its maximum over a grid times :func:`grid_factor`: here the
    factor multiplies a *departure* from orthogonality, which is about 0, instead of a norm of about 1. First β = 1 on the smallest
    grid; where that leaves more than 0.005%, β is the middle of the spectrum that a finer grid shows. Arguments as
    :func:`conv_norm_fft`.
    """
    axes = kernel.ndim - 2
    if not bool(torch.isfinite(kernel).all()):
        return math.inf
    with torch.no_grad():
        work = _grouped(kernel, groups, _strides(stride, axes))
        if work.shape[1] > work.shape[2]:
            work = work.transpose(1, 2)
        window = tuple(work.shape[3:])
        sizes = tuple(2 * k - 1 for k in window)
        symbol, rounding = _gram_symbol(work, sizes)
        eye = torch.eye(work.shape[1], dtype=symbol.dtype, device=work.device)
        distance = float(torch.linalg.matrix_norm(symbol - eye).max()) + rounding
        square = 1 + grid_factor(sizes, sizes) * distance
        if square > 1 + 1e-4:
            finer = tuple(1 if k == 1 else (4 if axes < 3 else 3) * k for k in window)
            symbol, rounding = _gram_symbol(work, finer)
            spectrum = torch.linalg.eigvalsh(symbol)
            middle = float(spectrum.max() + spectrum.min()) / 2
            distance = float(certified_norm(_real(symbol - middle * eye), squarings=3).max()) + rounding
            square = min(square, middle + grid_factor(sizes, finer) * distance)
    return math.sqrt(square) * (1 + 16 * unit_roundoff(torch.float64))


def _gram_symbol(work: torch.Tensor, sizes: Sequence[int]) -> tuple[torch.Tensor, float]:
    """K̂K̂ᴴ at each frequency of a grid, (groups, frequencies, rows, rows), and a bound on its rounding.

    The transform is off by η√N‖K‖_F over all N frequencies and |K̂(ω)| ≤ √taps·‖K‖_F, so the product is off by 2η√(N·taps)‖K‖_F²,
    and by γ√(N·taps)‖K‖_F² more from multiplying.
    """
    symbol = torch.fft.rfftn(work, s=tuple(sizes), dim=tuple(range(-len(sizes), 0))).flatten(3).movedim(3, 1)
    gamma = 8 * work.shape[2] * unit_roundoff(torch.float64)
    spread = math.sqrt(math.prod(sizes) * math.prod(work.shape[3:])) * float(work.square().sum())
    return symbol @ symbol.mH, (4 * _transform_error(sizes) + gamma) * spread


def conv_norm_circular(kernel: torch.Tensor, size: Sequence[int], groups: int = 1) -> float:
    """The norm of a circular convolution of stride 1 on images of this size: the largest ‖K̂(ω)‖₂ over the image's own frequencies.

    Certified from above, and exact but for rounding. Taps beyond the image wrap around, as circular padding makes them do.
    """
    if not bool(torch.isfinite(kernel).all()):
        return math.inf
    with torch.no_grad():
        work = _grouped(kernel, groups, [1] * len(size))
        for axis, n in enumerate(size):
            dim = 3 + axis
            sides = [0, 0] * (work.ndim - 1 - dim) + [0, -work.shape[dim] % n]
            work = torch.unflatten(torch.nn.functional.pad(work, sides), dim, (-1, n)).sum(dim)
        return _sampled(work, size) * (1 + 16 * unit_roundoff(torch.float64))


def affordable(kernel: torch.Tensor, groups: int, frequencies: int) -> bool:
    """Whether certifying this many frequencies is worth its time."""
    rows, columns = 2 * kernel.shape[0] // groups, 2 * kernel.shape[1]
    return groups * frequencies / 2 * min(rows, columns) ** 2 * max(rows, columns) <= _BUDGET


def grid_for(kernel: torch.Tensor, groups: int = 1, grid: int = 32) -> int:
    """The grid that is worth its time for this kernel (finer for larger windows), or 0 where counting is as good."""
    window = tuple(kernel.shape[2:])
    if not window or math.prod(window) == 1:
        return 0
    grid = max(grid, 4 * max(window)) if len(window) < 3 else max(8, 2 * max(window))
    while not affordable(kernel, groups, grid ** len(window)) and grid > 2 * max(window):
        grid //= 2
    return grid if affordable(kernel, groups, grid ** len(window)) else 0


def tighter_norm(
    kernel: torch.Tensor, groups: int, counted: float, note: str, stride: int | Sequence[int] = 1
) -> tuple[float, str]:
    """The smallest of a counted bound, the Fourier bound and the Gram bound, with a note that says which."""
    grid = grid_for(kernel, groups)
    near, fourier = conv_norm_gram(kernel, groups, stride), conv_norm_fft(kernel, grid, groups, stride)
    if near < min(fourier, counted):
        return near, f"norm by the Gram bound of the convolution, sharp where it is orthogonal; counting: {counted:.4g}"
    if fourier >= counted:
        return counted, f"{note} (the Fourier bound is {fourier / counted if counted else 1:.2f} times it)"
    slack = grid_factor(tuple(kernel.shape[2:]), (grid,) * (kernel.ndim - 2))
    return fourier, f"Fourier norm on {grid} frequencies an axis, within {slack:.3f} of the supremum; counting: {counted:.4g}"


def as_tuple(value: int | Sequence[int], length: int) -> tuple[int, ...]:
    """One number per axis."""
    if isinstance(value, int):
        return (value,) * length
    return tuple(value) * length if len(value) == 1 else tuple(value)


def adaptive_windows(size: int, outputs: int) -> list[tuple[int, int]]:
    """torch's windows of an adaptive pool along one axis: [⌊i·n/o⌋, ⌈(i+1)·n/o⌉), which may overlap."""
    return [(i * size // outputs, -(-(i + 1) * size // outputs)) for i in range(outputs)]


def windows_gain(windows: Sequence[tuple[int, int]], size: int, average: bool) -> float:
    """max_i Σ_{p∋i} w_p, w_p = 1/|p| for averages (their squared norm, by Cauchy–Schwarz) and 1 for maxima, on one axis."""
    sums = [0.0] * size
    for start, end in windows:
        for i in range(start, end):
            sums[i] += 1 / (end - start) if average else 1.0
    return max(sums, default=0.0)


def output_length(size: int, kernel: int, stride: int, dilation: int, left: int, right: int) -> int:
    """Number of output positions of a window along one axis (floor mode)."""
    return (size + left + right - dilation * (kernel - 1) - 1) // stride + 1


def same_padding(kernel: int, dilation: int) -> tuple[int, int]:
    """Left and right padding of torch's ``padding="same"``: the odd one goes to the right."""
    total = dilation * (kernel - 1)
    return total // 2, total - total // 2


def padding_sides(padding: int | Sequence[int] | str, kernel: Sequence[int], dilation: Sequence[int]) -> list[tuple[int, int]]:
    """torch's argument ``padding`` as (left, right) for each axis."""
    if isinstance(padding, str):
        return [same_padding(k, d) if padding == "same" else (0, 0) for k, d in zip(kernel, dilation, strict=True)]
    return [(p, p) for p in as_tuple(padding, len(kernel))]


def _source(position: int, size: int, mode: str) -> int | None:
    """Which input element stands at ``position`` of the padded axis (None: a zero)."""
    if 0 <= position < size:
        return position
    if mode == "zeros":
        return None
    if mode == "circular":
        return position % size
    if mode == "replicate":
        return min(max(position, 0), size - 1)
    if mode == "reflect":
        period = 2 * (size - 1)
        folded = position % period if period else 0
        return folded if folded < size else period - folded
    raise ValueError(f"unknown padding mode {mode!r}")


@lru_cache(maxsize=4096)
def _axis_multiplicity(size: int, kernel: int, stride: int, dilation: int, left: int, right: int, mode: str, outputs: int) -> int:
    counts = [0] * size
    for output in range(outputs):
        for tap in range(kernel):
            source = _source(output * stride + tap * dilation - left, size, mode)
            if source is not None:
                counts[source] += 1
    return max(counts, default=0)


def multiplicity(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[tuple[int, int]],
    mode: str = "zeros",
    outputs: Sequence[int] | None = None,
) -> int:
    """m: the largest number of (output position, tap) pairs that read one input element, padding copies counted.

    With x^p the window at output position p, ``Σ_p ‖x^p‖² ≤ m‖x‖²``, because each input element appears in at most m of
    the terms. Windows are products of intervals, so the count is the product of the counts along the axes.
    It is counted rather than computed from a formula: the formula ``min(⌈k/(s/gcd(s, dilation))⌉, outputs)`` holds for
    zero padding only.
    """
    total = 1
    for axis, size in enumerate(sizes):
        left, right = padding[axis]
        count = output_length(size, kernel[axis], stride[axis], dilation[axis], left, right) if outputs is None else outputs[axis]
        total *= _axis_multiplicity(size, kernel[axis], stride[axis], dilation[axis], left, right, mode, count)
    # An image that no window reads (possible with large strides) still has the operator norm 0 <= √1.
    return max(total, 1)


def _window_lengths(size: int, kernel: int, stride: int, left: int, right: int, outputs: int, include_pad: bool) -> list[int]:
    """torch's divisor of each pooling window along one axis."""
    lengths = []
    for output in range(outputs):
        start = output * stride - left
        # With ceil_mode the last window may pass the padded end: torch cuts it there, also when padding counts.
        end = min(start + kernel, size + right)
        inside = max(0, min(end, size) - max(start, 0))
        lengths.append(end - start if include_pad else inside)
    return lengths


def has_empty_window(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    outputs: Sequence[int],
) -> bool:
    """Whether some window reads padding only (a max pool then answers −∞)."""
    for axis, size in enumerate(sizes):
        for output in range(outputs[axis]):
            start = output * stride[axis] - padding[axis]
            if not any(0 <= start + tap * dilation[axis] < size for tap in range(kernel[axis])):
                return True
    return False


def average_gain(
    sizes: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    outputs: Sequence[int],
    include_pad: bool = True,
    divisor: int | None = None,
) -> float:
    """ℓ = √(max_i Σ_{p∋i} 1/d_p) of an average pool whose window p is divided by d_p.

    By Cauchy–Schwarz ‖y‖² = Σ_p (Σ_{i∈p} x_i/d_p)² ≤ Σ_p (|p|/d_p²) Σ_{i∈p} x_i², and |p| ≤ d_p. With an explicit
    divisor d the factor |p|/d² replaces 1/d_p.
    """
    worst = 1.0
    for axis, size in enumerate(sizes):
        arguments = (size, kernel[axis], stride[axis], padding[axis], padding[axis], outputs[axis])
        divisors = _window_lengths(*arguments, include_pad)
        inside = _window_lengths(*arguments, False)
        sums = [0.0] * size
        for output in range(outputs[axis]):
            start = output * stride[axis] - padding[axis]
            if inside[output] == 0:
                continue
            weight = float(inside[output]) if divisor is not None else inside[output] / divisors[output] ** 2
            for i in range(max(start, 0), min(start + kernel[axis], size)):
                sums[i] += weight
        worst *= max(sums, default=0.0)
    return math.sqrt(worst) / (divisor if divisor is not None else 1)
