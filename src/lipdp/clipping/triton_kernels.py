"""The Triton kernels behind :mod:`lipdp.clipping.kernels`. Imported only where Triton is installed and used."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def convolution_tiles(
    x,
    delta,
    partial,
    channels,
    height,
    width,
    outputs,
    columns,
    positions,
    stride_h,
    stride_w,
    padding_h,
    padding_w,
    dilation_h,
    dilation_w,
    groups,
    copies,
    tiles_d,
    KH: tl.constexpr,
    KW: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile (P outputs × D taps) of one example's, one group's gradient: the sum of its squares."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    example, group = row // groups, row % groups
    p = (tile // tiles_d) * P + tl.arange(0, P)
    d = (tile % tiles_d) * D + tl.arange(0, D)
    channel = d // (KH * KW)
    tap_h = (d % (KH * KW)) // KW * dilation_h - padding_h
    tap_w = d % KW * dilation_w - padding_w
    plane = height * width
    gradient = tl.zeros((P, D), dtype=tl.float32)
    for copy in range(copies):
        line = ((example * copies + copy) * groups + group).to(tl.int64)
        images = x + line * channels * plane
        cotangents = delta + line * outputs * positions
        for start in range(0, positions, T):
            t = start + tl.arange(0, T)
            inside = t < positions
            a = tl.load(
                cotangents + p[:, None] * positions + t[None, :], mask=(p < outputs)[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)
            # Neighbouring positions are neighbours in memory: they are the fast axis of both tiles.
            i = (t // columns * stride_h)[None, :] + tap_h[:, None]
            j = (t % columns * stride_w)[None, :] + tap_w[:, None]
            read = (i >= 0) & (i < height) & (j >= 0) & (j < width) & inside[None, :] & (channel < channels)[:, None]
            b = tl.load(images + channel[:, None] * plane + i * width + j, mask=read, other=0.0).to(tl.float32)
            gradient = tl.dot(a, tl.trans(b), gradient, input_precision=PRECISION)
    tl.store(partial + row.to(tl.int64) * tl.num_programs(1) + tile, tl.sum(gradient * gradient))


@triton.jit
def gram_tiles(
    delta,
    x,
    partial,
    positions,
    p,
    d,
    tiles,
    T: tl.constexpr,
    K: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile (T × T, on or above the diagonal) of one example's two Gram matrices: the sum of their product, and margins."""
    example = tl.program_id(0).to(tl.int64)
    pair = tl.program_id(1)
    first = pair // tiles
    second = pair % tiles
    if second >= first:
        t = first * T + tl.arange(0, T)
        s = second * T + tl.arange(0, T)
        of_delta = _gram(delta + example * positions * p, positions, p, t, s, T, K, PRECISION)
        of_x = _gram(x + example * positions * d, positions, d, t, s, T, K, PRECISION)
        out = partial + (example * tl.num_programs(1) + pair) * 5
        tl.store(out, tl.sum(of_delta * of_x) * tl.where(first == second, 1.0, 2.0))
        if first == second:
            diagonal = tl.arange(0, T)[:, None] == tl.arange(0, T)[None, :]
            a = tl.sum(tl.where(diagonal, of_delta, 0.0), 1)
            b = tl.sum(tl.where(diagonal, of_x, 0.0), 1)
            tl.store(out + 1, tl.sum(tl.sqrt(a) * tl.sqrt(b)))
            tl.store(out + 2, tl.sum(a))
            tl.store(out + 3, tl.sum(b))
            tl.store(out + 4, tl.max(a))


@triton.jit
def _gram(rows, positions, features, t, s, T: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr):
    result = tl.zeros((T, T), dtype=tl.float32)
    for start in range(0, features, K):
        k = start + tl.arange(0, K)
        known = k < features
        a = tl.load(rows + t[:, None] * features + k[None, :], mask=(t < positions)[:, None] & known[None, :], other=0.0)
        b = tl.load(rows + s[:, None] * features + k[None, :], mask=(s < positions)[:, None] & known[None, :], other=0.0)
        result = tl.dot(a.to(tl.float32), tl.trans(b.to(tl.float32)), result, input_precision=PRECISION)
    return result


@triton.jit
def cotangent_parts(delta, totals, largest, sums, outputs, positions, share, tiny, P: tl.constexpr, T: tl.constexpr):
    """Of one share of an example's positions, δ (outputs × positions): Σ‖δ_t‖², max_t‖δ_t‖², and Σ_t δ_t."""
    example = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    p = tl.arange(0, P)
    rows = delta + example * outputs * positions
    total = tl.zeros((T,), dtype=tl.float32)
    most = tl.zeros((T,), dtype=tl.float32)
    added = tl.zeros((P,), dtype=tl.float32)
    for start in range(part * share, tl.minimum((part + 1) * share, positions), T):
        t = start + tl.arange(0, T)
        inside = (p < outputs)[:, None] & (t < tl.minimum((part + 1) * share, positions))[None, :]
        value = tl.load(rows + p[:, None] * positions + t[None, :], mask=inside, other=0.0).to(tl.float32)
        squares = tl.sum(value * value, 0)
        total += squares
        most = tl.maximum(most, squares)
        added += tl.sum(value, 1)
    place = example * tl.num_programs(1) + part
    tl.store(totals + place, tl.sum(total) + tiny)
    tl.store(largest + place, tl.max(most) + tiny)
    tl.store(sums + place * outputs + p, added, mask=p < outputs)


@triton.jit
def row_squares(x, totals, size, share, tiny, N: tl.constexpr):
    """Σ x² of one share of a row."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    total = tl.zeros((N,), dtype=tl.float32)
    end = tl.minimum((part + 1) * share, size)
    for start in range(part * share, end, N):
        n = start + tl.arange(0, N)
        value = tl.load(x + row * size + n, mask=n < end, other=0.0).to(tl.float32)
        total += value * value
    tl.store(totals + row * tl.num_programs(1) + part, tl.sum(total) + tiny)
