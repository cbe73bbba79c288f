"""Gradients of dense layers and of convolutions' kernels on a GPU: a few records at a time in float32, all of them in float64.

Where every record is added up by itself, it never leaves the registers: sums in float64 lie beside it, and what is written is one
sum for some hundred programs. (Written record by record, as a batched matrix product does, gradients took two thirds of the time of
a clipped step of BERT.) Tensor cores read TF32 numbers with positions side by side only, so factors are turned first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from lipdp._kernels import Kernels, power_of_two


class Tiles(NamedTuple):
    """Sides of the largest tile (outputs × reads), what it is summed over at a time, warps, stages; the tile turned or not."""

    outputs: int
    reads: int
    positions: int
    warps: int
    stages: int
    swapped: bool


# Measured on an H200. Two warps keep the compiler from instructions that want both factors with positions side by side.
_TILES, _NARROW = Tiles(64, 128, 16, 2, 4, False), Tiles(64, 32, 64, 4, 3, True)
# Every record by itself, positions side by side.
_APART, _NARROW_APART = Tiles(64, 64, 32, 4, 3, True), Tiles(32, 32, 32, 1, 3, True)
_FEW = 32  # reads of a narrow product
# Entries that a program of the last sum adds up, and parts at a time.
_ENTRIES, _PARTS = 32, 32
_AT_ONCE = 2**25  # numbers of all parts that lie in memory at a time
_AT_ONCE_TURNED = 2**26  # and of both factors, turned
_PROGRAMS = 1056  # that are started, about, where each adds up many records: eight for each multiprocessor of an H200
_SIDE, _PLACES, _TURNED = 128, 32, 32  # of a tile of outer products, what it is summed over at a time, of a tile that is turned


def _right(device: torch.device) -> bool:
    """Every kernel against torch's arithmetic, on a few numbers."""
    generator = torch.Generator(device).manual_seed(0)
    x, delta = (torch.randn(5, size, 6, 7, device=device, generator=generator) for size in (4, 6))
    computed = convolution_sums(delta, x, (6, 2, 3, 3), (1, 1), (1, 1), (1, 1), 2, 3, precision="tf32x3")
    expected = torch.ops.aten.convolution_backward(
        delta.double(),
        x.double(),
        x.new_zeros(6, 2, 3, 3, dtype=torch.float64),
        None,
        [1, 1],
        [1, 1],
        [1, 1],
        False,
        [0, 0],
        2,
        [False, True, False],
    )[1]
    same = torch.allclose(computed, expected, rtol=1e-4, atol=1e-3)
    apart = convolution_sums(delta, x, (6, 2, 3, 3), (1, 1), (1, 1), (1, 1), 2, 1, apart=True, precision="tf32x3")
    same &= torch.allclose(apart, expected, rtol=1e-4, atol=1e-3)
    a, b = delta.flatten(2).transpose(1, 2), x.flatten(2).transpose(1, 2)
    weights = torch.linspace(0.5, 1.5, 5, device=device)
    products = torch.einsum("i,itp,itd->pd", weights.double(), a.double(), b.double())
    return same and torch.allclose(outer_sums(a, b, weights, "tf32x3"), products, rtol=1e-4, atol=1e-3)


_KERNELS = Kernels("lipdp._sums_triton", "sums", _right, least=8)


def available(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can be used on these tensors: in float32, on an NVIDIA GPU that knows TF32."""
    return all(t.device.type == "cuda" and t.dtype == torch.float32 for t in tensors) and _KERNELS.on(tensors[0].device)


def convolution_sums(
    delta: torch.Tensor,
    x: torch.Tensor,
    shape: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    together: int,
    *,
    apart: bool = False,
    precision: str | None = None,
) -> torch.Tensor:
    """Σ_i Σ_t δ_it ⊗ patch_it of a convolution of one or two axes; ``together`` rows at most are added up in float32. In float64.

    ``apart``: the rows that are added up together are one record, so they are many; else a few in all.
    """
    more = 2 - len(stride)
    ones, none = (1,) * more, (0,) * more
    if apart:
        x, delta = x.contiguous(), delta.contiguous()
    x = x.reshape(*x.shape[:2], *ones, *x.shape[2:])
    delta = delta.reshape(*delta.shape[:2], *ones, *delta.shape[2:])
    kernel = (*ones, *shape[2:])
    outputs, channels, reads = delta.shape[1] // groups, x.shape[1] // groups, math.prod(shape[1:])
    wide, narrow = (_APART, _NARROW_APART) if apart else (_TILES, _NARROW)
    tiles = narrow if reads <= _FEW else wide
    tile_p, tile_d = power_of_two(outputs, 16, tiles.outputs), power_of_two(reads, 16, tiles.reads)
    tiles_p, tiles_d = -(-outputs // tile_p), -(-reads // tile_d)
    size = groups * outputs * reads
    each = _share(-(-len(x) // together), groups * tiles_p * tiles_d) * together if apart else together
    at_once = len(x) if apart else together * max(1, _AT_ONCE // max(1, size))  # rows whose parts lie in memory at a time
    total = torch.zeros(size, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        for start in range(0, len(x), at_once):
            rows = min(at_once, len(x) - start)
            parts = -(-rows // each)
            partial = torch.empty(parts, size, dtype=torch.float64 if apart else torch.float32, device=x.device)
            _KERNELS.module.convolution_sums[(parts * groups * tiles_p * tiles_d,)](
                x[start:],
                delta[start:],
                partial,
                *x.stride(),
                *delta.stride(),
                x.shape[2],
                x.shape[3],
                *(*ones, *stride),
                *(*none, *(padding or (0,) * len(stride))),
                *(*ones, *dilation),
                groups,
                rows,
                each,
                tiles_p * tiles_d,
                tiles_d,
                TOGETHER=together,
                CHANNELS=channels,
                OUTPUTS=outputs,
                COLUMNS=delta.shape[3],
                POSITIONS=delta.shape[2] * delta.shape[3],
                KH=kernel[0],
                KW=kernel[1],
                P=tile_p,
                D=tile_d,
                T=tiles.positions,
                SWAPPED=tiles.swapped,
                WIDE=apart,
                PRECISION=precision or ("tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"),
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
            _add_up(partial, total)
    by_tap = total.reshape(shape[0], *kernel, channels)  # reads are numbered tap by tap
    return by_tap.movedim(-1, 1).reshape(tuple(shape))


def _share(units: int, tiles: int) -> int:
    """How many units of rows a program adds up, by shapes alone: that many programs are enough for a GPU."""
    return -(-units // max(1, min(units, _PROGRAMS // tiles)))


def _add_up(partial: torch.Tensor, total: torch.Tensor) -> None:
    """Adds all parts to the total, in float64."""
    parts, size = len(partial), total.numel()
    _KERNELS.module.add_up[(-(-size // _ENTRIES),)](partial, total, parts, size, N=_ENTRIES, K=_PARTS, num_warps=1)


def outer_sums(a: torch.Tensor, b: torch.Tensor, weights: torch.Tensor | None = None, precision: str | None = None) -> torch.Tensor:
    """Σ_i w_i·Σ_t a_it ⊗ b_it, (B, T, p) and (B, T, d) → (p, d): every record by itself in float32, all of them in float64."""
    rows, places, p, d = *a.shape, b.shape[2]
    weights = None if weights is None else weights.contiguous()  # the kernel takes them one after another
    total = torch.zeros(p, d, dtype=torch.float64, device=a.device)
    tile_p, tile_d = power_of_two(p, 16, _SIDE), power_of_two(d, 16, _SIDE)
    tiles_p, tiles_d = -(-p // tile_p), -(-d // tile_d)
    at_once = max(1, _AT_ONCE_TURNED // max(1, places * (p + d)))
    at_once = -(-rows // max(1, -(-rows // at_once)))
    of_a = weights if p <= d else None  # the smaller factor is weighted
    of_b = None if p <= d else weights
    with torch.cuda.device_of(a):  # type: ignore[no-untyped-call]
        for start in range(0, rows, at_once):
            part = slice(start, start + at_once)
            one, other = (
                _turned(a[part], None if of_a is None else of_a[part]),
                _turned(b[part], None if of_b is None else of_b[part]),
            )
            count = len(one)
            each = _share(count, 2 * tiles_p * tiles_d)  # large tiles: half as many programs
            partial = torch.empty(-(-count // each), p, d, dtype=torch.float64, device=a.device)
            _KERNELS.module.outer_sums[(len(partial) * tiles_p * tiles_d,)](
                one,
                other,
                partial,
                count,
                each,
                places,
                p,
                d,
                tiles_p * tiles_d,
                tiles_d,
                P=tile_p,
                D=tile_d,
                T=_PLACES,
                PRECISION=precision or ("tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"),
                num_warps=8 if tile_p * tile_d == _SIDE**2 else 4,
                num_stages=3,
            )
            _add_up(partial, total)
    return total


def _turned(x: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """(B, T, p) → (B, p, T), contiguous, each row times its weight."""
    rows, places, entries = x.shape
    if weights is None and x.transpose(1, 2).is_contiguous():
        return x.transpose(1, 2)
    out = torch.empty(rows, entries, places, dtype=x.dtype, device=x.device)
    grid = (rows, -(-places // _TURNED), -(-entries // _TURNED))
    _KERNELS.module.turn[grid](
        x, x if weights is None else weights, out, *x.stride(), places, entries, WEIGHTED=weights is not None, N=_TURNED
    )
    return out
