"""The Triton kernels behind :mod:`lipdp._sums_kernel`. Imported only where Triton is installed and used."""

# mypy: ignore-errors

import triton
import triton.language as tl


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
    each,
    tiles,
    tiles_d,
    TOGETHER: tl.constexpr,
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
    WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile (P outputs × D reads) of one group's gradient over ``each`` rows.

    WIDE: T positions are added up in float32, which never belong to more than ``TOGETHER`` rows, and everything else in float64.
    Else ``each`` is ``TOGETHER``, and all of it is added up in float32. Reads are numbered with the channel as the fast axis: it is
    the one that lies side by side in channels-last memory.
    """
    number, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    part, group = number // groups, number % groups
    p = (tile // tiles_d) * P + tl.arange(0, P)
    d = (tile % tiles_d) * D + tl.arange(0, D)
    channel, tap = d % CHANNELS, d // CHANNELS
    tap_h = tap // KW * dilation_h - padding_h
    tap_w = tap % KW * dilation_w - padding_w
    is_tap = tap < KH * KW
    bit = tl.where(is_tap, tl.full((D,), 1, tl.int32) << tap % 32, 0)
    images = x + ((group * CHANNELS + channel).to(tl.int64) * x_channel + tap_h * x_line + tap_w * x_pixel)
    cotangents = delta + (group * OUTPUTS + p).to(tl.int64) * delta_channel
    first = part * each
    here = tl.minimum(rows - first, each)
    UNIT: tl.constexpr = (TOGETHER * POSITIONS + T - 1) // T * T
    KIND: tl.constexpr = tl.float64 if WIDE else tl.float32
    if SWAPPED:  # noqa: SIM108
        gradient = tl.zeros((D, P), dtype=KIND)
    else:
        gradient = tl.zeros((P, D), dtype=KIND)
    for start in range(0, (here + TOGETHER - 1) // TOGETHER * UNIT, T):
        k = start % UNIT + tl.arange(0, T)
        before = start // UNIT * TOGETHER
        inside = k < tl.minimum(here - before, TOGETHER) * POSITIONS
        row, t = (first + before + k // POSITIONS).to(tl.int64), k % POSITIONS
        line, column = t // COLUMNS, t % COLUMNS
        at = row * delta_row + line * delta_line + column * delta_pixel
        if OUTPUTS % P == 0:
            a = tl.load(cotangents[None, :] + at[:, None], mask=inside[:, None], other=0.0)
        else:
            a = tl.load(cotangents[None, :] + at[:, None], mask=(p < OUTPUTS)[None, :] & inside[:, None], other=0.0)
        i, j = line * stride_h, column * stride_w
        if KH * KW < 32:  # which taps of a position lie inside of the image, as the bits of one number: one comparison a read
            across = tl.zeros((T,), dtype=tl.int32)
            for w in tl.static_range(KW):
                at_w = j + (w * dilation_w - padding_w)
                across |= tl.where((at_w >= 0) & (at_w < width), tl.full((T,), 1, tl.int32) << w, 0)
            taps = tl.zeros((T,), dtype=tl.int32)
            for h in tl.static_range(KH):
                at_h = i + (h * dilation_h - padding_h)
                taps |= tl.where(inside & (at_h >= 0) & (at_h < height), across << h * KW, 0)
            read = (taps[:, None] & bit[None, :]) != 0
        else:
            at_h, at_w = i[:, None] + tap_h[None, :], j[:, None] + tap_w[None, :]
            read = (at_h >= 0) & (at_h < height) & (at_w >= 0) & (at_w < width) & inside[:, None] & is_tap[None, :]
        b = tl.load(images[None, :] + (row * x_row + i * x_line + j * x_pixel)[:, None], mask=read, other=0.0)
        if WIDE and SWAPPED:
            gradient += tl.dot(tl.trans(b), a, input_precision=PRECISION).to(tl.float64)
        elif WIDE:
            gradient += tl.dot(tl.trans(a), b, input_precision=PRECISION).to(tl.float64)
        elif SWAPPED:
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


@triton.jit
def turn(x, weights, out, row, place, entry, places, entries, WEIGHTED: tl.constexpr, N: tl.constexpr):
    """(rows, places, entries) → (rows, entries, places), each row times its weight: one tile of N × N of one row."""
    number = tl.program_id(0).to(tl.int64)
    t = tl.program_id(1) * N + tl.arange(0, N)
    e = tl.program_id(2) * N + tl.arange(0, N)
    inside = (t < places)[:, None] & (e < entries)[None, :]
    values = tl.load(x + number * row + t[:, None].to(tl.int64) * place + e[None, :].to(tl.int64) * entry, mask=inside, other=0.0)
    if WEIGHTED:
        values = values * tl.load(weights + number)
    at = (number * entries + e[:, None].to(tl.int64)) * places + t[None, :]
    tl.store(out + at, tl.trans(values), mask=(e < entries)[:, None] & (t < places)[None, :])


@triton.jit
def outer_sums(
    a,
    b,
    partial,
    rows,
    each,
    places,
    p_size,
    d_size,
    tiles,
    tiles_d,
    P: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile (P × D) of Σ_i a_i·b_iᵀ over ``each`` rows: every row by itself in float32, all of them in float64.

    a: (rows, p, places), b: (rows, d, places), with places side by side in memory: what tensor cores read as it is.
    """
    part, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    p = (tile // tiles_d) * P + tl.arange(0, P)
    d = (tile % tiles_d) * D + tl.arange(0, D)
    first = part * each
    at_p, at_d = p.to(tl.int64) * places, d.to(tl.int64) * places
    total = tl.zeros((P, D), dtype=tl.float64)
    for number in range(0, tl.minimum(rows - first, each)):
        row = (first + number).to(tl.int64)
        of_a = a + row * p_size * places + at_p
        of_b = b + row * d_size * places + at_d
        gradient = tl.zeros((P, D), dtype=tl.float32)
        for start in range(0, places, T):
            t = start + tl.arange(0, T)
            one = tl.load(of_a[:, None] + t[None, :], mask=(p < p_size)[:, None] & (t < places)[None, :], other=0.0)
            other = tl.load(of_b[:, None] + t[None, :], mask=(d < d_size)[:, None] & (t < places)[None, :], other=0.0)
            gradient = tl.dot(one, tl.trans(other), gradient, input_precision=PRECISION)
        total += gradient.to(tl.float64)
    out = partial + (part * p_size + p).to(tl.int64)[:, None] * d_size + d[None, :]
    tl.store(out, total, mask=(p < p_size)[:, None] & (d < d_size)[None, :])
