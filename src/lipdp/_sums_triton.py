"""The Triton kernel behind :mod:`lipdp._sums_kernel`. Imported only where Triton is installed and used."""

# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["add_up", "convolution_sums"]


@triton.jit
def convolution_sums(
    x,
    delta,
    partial,
    x_row,
    x_channel,
    x_line,
    x_pixel,
    delta_row,
    delta_channel,
    delta_line,
    delta_pixel,
    height,
    width,
    stride_h,
    stride_w,
    padding_h,
    padding_w,
    dilation_h,
    dilation_w,
    groups,
    rows,
    together,
    tiles,
    tiles_d,
    CHANNELS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    POSITIONS: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    SWAPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile (P outputs × D reads) of one group's gradient, over ``together`` rows, in float32.

    Reads are numbered with the channel as the fast axis: it is the one that lies side by side in channels-last memory.
    """
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    part, group = number // groups, number % groups
    p = (tile // tiles_d) * P + tl.arange(0, P)
    d = (tile % tiles_d) * D + tl.arange(0, D)
    channel, tap = d % CHANNELS, d // CHANNELS
    tap_h = tap // KW * dilation_h - padding_h
    tap_w = tap % KW * dilation_w - padding_w
    is_tap = tap < KH * KW
    images = x + (group * CHANNELS + channel).to(tl.int64) * x_channel
    cotangents = delta + (group * OUTPUTS + p).to(tl.int64) * delta_channel
    first = part * together
    count = tl.minimum(rows - first, together) * POSITIONS
    if SWAPPED:  # noqa: SIM108
        gradient = tl.zeros((D, P), dtype=tl.float32)
    else:
        gradient = tl.zeros((P, D), dtype=tl.float32)
    for start in range(0, count, T):
        k = start + tl.arange(0, T)
        inside = k < count
        row, t = (first + k // POSITIONS).to(tl.int64), k % POSITIONS
        line, column = t // COLUMNS, t % COLUMNS
        at = row * delta_row + line * delta_line + column * delta_pixel
        a = tl.load(cotangents[None, :] + at[:, None], mask=(p < OUTPUTS)[None, :] & inside[:, None], other=0.0)
        i = (line * stride_h)[:, None] + tap_h[None, :]
        j = (column * stride_w)[:, None] + tap_w[None, :]
        read = (i >= 0) & (i < height) & (j >= 0) & (j < width) & inside[:, None] & is_tap[None, :]
        b = tl.load(images[None, :] + (row * x_row)[:, None] + i * x_line + j * x_pixel, mask=read, other=0.0)
        if SWAPPED:
            gradient = tl.dot(tl.trans(b), a, gradient, input_precision=PRECISION)
        else:
            gradient = tl.dot(tl.trans(a), b, gradient, input_precision=PRECISION)
    if SWAPPED:
        gradient = tl.trans(gradient)
    reads = CHANNELS * KH * KW
    out = partial + ((part * groups + group) * OUTPUTS + p).to(tl.int64)[:, None] * reads + d[None, :]
    tl.store(out, gradient, mask=(p < OUTPUTS)[:, None] & (d < reads)[None, :])


@triton.jit
def add_up(partial, total, parts, size, N: tl.constexpr, K: tl.constexpr):
    """Adds Σ over the first axis of (parts, size) to the total, in float64; each program for N entries, K parts at a time."""
    n = tl.program_id(0) * N + tl.arange(0, N)
    entries = tl.load(total + n, mask=n < size, other=0.0)
    for start in range(0, parts, K):
        k = start + tl.arange(0, K)
        read = (k < parts)[:, None] & (n < size)[None, :]
        values = tl.load(partial + k[:, None].to(tl.int64) * size + n[None, :], mask=read, other=0.0)
        entries += tl.sum(values.to(tl.float64), 0)
    tl.store(total + n, entries, mask=n < size)
