"""Counting how windows (convolutions, pools) read their input: the overlap multiplicity m of theory, exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

__all__ = [
    "adaptive_windows",
    "as_tuple",
    "average_gain",
    "has_empty_window",
    "multiplicity",
    "output_length",
    "padding_sides",
    "same_padding",
    "windows_gain",
]


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
