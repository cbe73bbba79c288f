"""The Triton kernel behind :mod:`lipdp._sums_kernel`. Imported only where Triton is installed and used."""

# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["convolution_sums"]


@triton.jit
def convolution_sums(
    x,
    delta,
    partial,
    channels,
    height,
    width,
    outputs,
    reads,
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
    records,
    share,
    tiles_d,
    KH: tl.constexpr,
    KW: tl.constexpr,
    P: tl.constexpr,
    D: tl.constexpr,
    T: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile (P outputs × D taps) of one group's gradient, over one share of the records."""
    row = tl.program_id(0)
    tile = tl.program_id(1)
    part, group = row // groups, row % groups
    p = (tile // tiles_d) * P + tl.arange(0, P)
    d = (tile % tiles_d) * D + tl.arange(0, D)
    channel = d // (KH * KW)
    tap_h = (d % (KH * KW)) // KW * dilation_h - padding_h
    tap_w = d % KW * dilation_w - padding_w
    plane = height * width
    total = tl.zeros((P, D), dtype=tl.float64)
    for record in range(part * share, tl.minimum((part + 1) * share, records)):
        gradient = tl.zeros((P, D), dtype=tl.float32)
        for copy in range(copies):
            line = ((record * copies + copy) * groups + group).to(tl.int64)
            images = x + line * channels * plane
            cotangents = delta + line * outputs * positions
            for start in range(0, positions, T):
                t = start + tl.arange(0, T)
                inside = t < positions
                a = tl.load(
                    cotangents + p[:, None] * positions + t[None, :], mask=(p < outputs)[:, None] & inside[None, :], other=0.0
                )
                i = (t // columns * stride_h)[None, :] + tap_h[:, None]
                j = (t % columns * stride_w)[None, :] + tap_w[:, None]
                read = (i >= 0) & (i < height) & (j >= 0) & (j < width) & inside[None, :] & (channel < channels)[:, None]
                b = tl.load(images + channel[:, None] * plane + i * width + j, mask=read, other=0.0)
                gradient = tl.dot(a, tl.trans(b), gradient, input_precision=PRECISION)
        total += gradient.to(tl.float64)
    out = partial + ((part * groups + group) * outputs + p).to(tl.int64)[:, None] * reads + d[None, :]
    tl.store(out, total, mask=(p < outputs)[:, None] & (d < reads)[None, :])
