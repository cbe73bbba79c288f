"""The Triton kernels behind :mod:`lipdp._pairs`. Imported only where Triton is installed and used."""

# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _places(channels, height, width, rows, columns, count, KH: tl.constexpr, KW: tl.constexpr, P: tl.constexpr, C: tl.constexpr):
    """Where a block of output pixels × channels lies: in the input (a window's first pixel), in the output, and what is inside."""
    pixel = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    image, rest = pixel // (rows * columns), pixel % (rows * columns)
    corner = (image * height + rest // columns * KH) * width + rest % columns * KW
    inside = (pixel < count)[:, None] & (channel < channels)[None, :]
    return corner[:, None] * channels + channel[None, :], pixel[:, None] * channels + channel[None, :], inside


@triton.jit
def forward(
    x,
    bias,
    y,
    channels,
    height,
    width,
    rows,
    columns,
    count,
    eps,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SORT: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
):
    """Each pixel of every window is read once: its pairs are sorted, their squares added up; the roots are written."""
    first, out, inside = _places(channels, height, width, rows, columns, count, KH, KW, P, C)
    if BIAS:
        channel = tl.program_id(1) * C + tl.arange(0, C)
        shift = tl.load(bias + channel, mask=channel < channels, other=0.0)[None, :]
    total = tl.zeros((P, C), dtype=y.dtype.element_ty)
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            value = tl.load(x + first + (i * width + j) * channels, mask=inside, other=0.0)
            if BIAS:
                value += shift
            if SORT:
                a, b = tl.split(tl.reshape(value, (P, C // 2, 2)))
                larger = a >= b
                value = tl.reshape(tl.join(tl.where(larger, a, b), tl.where(larger, b, a)), (P, C))
            if NORM:
                total += value * value
            else:
                total = value
    if NORM:
        if y.dtype.element_ty == tl.float32:  # noqa: SIM108
            total = tl.sqrt_rn(total + eps)
        else:
            total = tl.sqrt(total + eps)
    tl.store(y + out, total, mask=inside)


@triton.jit
def backward(
    x,
    bias,
    y,
    cotangent,
    passed,
    channels,
    height,
    width,
    rows,
    columns,
    count,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SORT: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
):
    """(g/y)·x, routed to whichever of a pair was larger; 0 where y = 0. The order of pairs is found again from the input."""
    first, out, inside = _places(channels, height, width, rows, columns, count, KH, KW, P, C)
    if BIAS:
        channel = tl.program_id(1) * C + tl.arange(0, C)
        shift = tl.load(bias + channel, mask=channel < channels, other=0.0)[None, :]
    g = tl.load(cotangent + out, mask=inside, other=0.0)
    if NORM:
        norm = tl.load(y + out, mask=inside, other=1.0)
        g = tl.where(norm == 0, 0.0, g / tl.where(norm == 0, 1.0, norm))
    if SORT:
        of_larger, of_smaller = tl.split(tl.reshape(g, (P, C // 2, 2)))
    for i in tl.static_range(KH):
        for j in tl.static_range(KW):
            at = first + (i * width + j) * channels
            value = tl.load(x + at, mask=inside, other=0.0)
            if BIAS:
                value += shift
            if SORT:
                a, b = tl.split(tl.reshape(value, (P, C // 2, 2)))
                larger = a >= b
                back = tl.reshape(tl.join(tl.where(larger, of_larger, of_smaller), tl.where(larger, of_smaller, of_larger)), (P, C))
            else:
                back = g
            if NORM:
                back = back * value
            tl.store(passed + at, back, mask=inside)
