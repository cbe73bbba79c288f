"""Norms of per-example gradients that are never written to memory: two small Triton kernels for CUDA.

By torch's own operations, the norm of a convolution's gradient costs its patches (k² times the input) and the gradient itself, each
written and read once; the Gram form costs two T×T matrices. Here both live in registers: a tile of ``Σ_t δ_t ⊗ patch_t``, or of
the two Gram matrices, is computed by tensor cores, squared (or multiplied), added up, and forgotten.

Products are in TF32 where that is allowed or exact, else in three TF32 products that make up one of float32 ("3xTF32").

Which of several ways to the same number is quickest is measured, once per shape (:func:`quickest`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from functools import wraps
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch

from lipdp._kernels import Kernels, power_of_two

F = TypeVar("F", bound=Callable[..., Any])
Precision = Literal["tf32", "tf32x3"]


class Tiles(NamedTuple):
    """Sides of the largest tile (of outputs × taps, or positions × positions), what it is summed over at a time, warps, stages."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# Measured by benchmarks/speed/clipping_kernels.py.
_CONVOLUTION = Tiles(128, 64, 32, 8, 3)
_LONG_CONVOLUTION = Tiles(128, 128, 32, 8, 3)
_GRAM = Tiles(64, 64, 32, 4, 3)
# Outputs of a layer that cotangent_sums holds at a time; positions whose pairs of Gram tiles a launch can number; numbers of a
# tile; programs that keep a GPU busy.
MOST_OUTPUTS = 512
MOST_POSITIONS = 8192
_TILE = 4096
_BUSY = 512
_TINY = float(torch.finfo(torch.float32).tiny)
TILE_ROUNDINGS = 128 * 128 + 2  # squares of the largest tile


def _right(device: torch.device) -> bool:
    """Every kernel against torch's arithmetic, on a few numbers."""
    generator = torch.Generator(device).manual_seed(0)
    x, delta = (torch.randn(2, size, 5, 7, device=device, generator=generator) for size in (3, 20))
    tiles = convolution_norms(x, delta, (3, 3), (1, 1), (1, 1), (1, 1), 1, 1, "tf32x3")
    windows = torch.nn.functional.unfold(x, 3, padding=1).double()
    of_patches = torch.bmm(delta.flatten(2).double(), windows.transpose(1, 2)).square().sum((1, 2))
    sums, of_x = cotangent_sums(delta.flatten(2)), row_squares(x.flatten(1))[0]
    a, b = delta.flatten(2).transpose(1, 2), x.flatten(2).transpose(1, 2)
    of_outer = torch.bmm(a.double().transpose(1, 2), b.double()).square().sum((1, 2))
    pairs = (
        (tiles.sum(1), of_patches),
        (sums.total, delta.double().square().sum((1, 2, 3))),
        (sums.largest, delta.double().square().sum(1).flatten(1).amax(1)),
        (sums.sums, delta.double().sum((2, 3))),
        (of_x, x.double().square().sum((1, 2, 3))),
        (gram_sums(a, b, "tf32x3").products, of_outer),
    )
    return all(torch.allclose(found.double(), expected, rtol=1e-3, atol=1e-4) for found, expected in pairs)


_KERNELS = Kernels("lipdp.clipping.triton_kernels", "norms", _right, least=8)


def available(*tensors: torch.Tensor) -> bool:
    """Whether the kernels can be used on these tensors: in single or half precision, on an NVIDIA GPU that knows TF32."""
    types = (torch.float32, torch.float16, torch.bfloat16)
    return all(t.device.type == "cuda" and t.dtype in types for t in tensors) and _KERNELS.on(tensors[0].device)


def _where_the_data_are(function: F) -> F:
    """Triton launches on the current device; that must be the first argument's."""

    @wraps(function)
    def call(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.cuda.device_of(first):  # type: ignore[no-untyped-call]
            return function(first, *args, **kwargs)

    return cast(F, call)


@_where_the_data_are
def convolution_norms(
    x: torch.Tensor,
    delta: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
    copies: int,
    precision: Precision,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Numbers (B, tiles) whose sum is ‖Σ_t δ_t ⊗ patch_t‖² of each example, over its ``copies`` rows.

    Each went through at most :data:`TILE_ROUNDINGS` roundings.

    x: (B·copies, in, H, W), δ: (B·copies, out, H', W'). Kernel, stride, padding and dilation have two numbers each.
    """
    x, delta = x.contiguous(), delta.contiguous()
    examples, outputs, reads = len(x) // copies, delta.shape[1] // groups, x.shape[1] // groups * kernel[0] * kernel[1]
    positions = delta.shape[2] * delta.shape[3]
    if tiles is None:
        tiles = _LONG_CONVOLUTION if outputs >= 128 and positions >= 128 else _CONVOLUTION
    tile_p, tile_d = power_of_two(outputs, 16, tiles.rows), power_of_two(reads, 16, tiles.columns)
    tiles_p, tiles_d = -(-outputs // tile_p), -(-reads // tile_d)
    partial = torch.empty(examples * groups, tiles_p * tiles_d, dtype=torch.float32, device=x.device)
    _KERNELS.module.convolution_tiles[(examples * groups, tiles_p * tiles_d)](
        x,
        delta,
        partial,
        x.shape[1] // groups,
        x.shape[2],
        x.shape[3],
        outputs,
        delta.shape[3],
        positions,
        *stride,
        *padding,
        *dilation,
        groups,
        copies,
        tiles_d,
        KH=kernel[0],
        KW=kernel[1],
        P=tile_p,
        D=tile_d,
        T=tiles.inner,
        PRECISION=precision,
        num_warps=tiles.warps if tile_p * tile_d >= tiles.rows * tiles.columns else 4,
        num_stages=tiles.stages,
    )
    return partial.reshape(examples, -1)


class GramSums(NamedTuple):
    """Of each example (B,): Σ_{t,t'} (δ_t·δ_t')(x_t·x_t'), Σ_t ‖δ_t‖‖x_t‖, Σ_t ‖δ_t‖², Σ_t ‖x_t‖², max_t ‖δ_t‖²."""

    products: torch.Tensor
    scale: torch.Tensor
    of_delta: torch.Tensor
    of_x: torch.Tensor
    largest: torch.Tensor


@_where_the_data_are
def gram_tiles(delta: torch.Tensor, x: torch.Tensor, precision: Precision, tiles: Tiles = _GRAM) -> torch.Tensor:
    """(B, tiles, 5), whose sums over the tiles (the maximum of the last) are :class:`GramSums`; nothing T×T is written.

    Sums of a tile's products went through at most :data:`TILE_ROUNDINGS` roundings.
    """
    delta, x = delta.contiguous(), x.contiguous()
    batch, positions = delta.shape[:2]
    tile = power_of_two(positions, 16, tiles.rows)
    count = -(-positions // tile)
    pairs = count * count  # those below the diagonal stay zero
    partial = torch.zeros(batch, pairs, 5, dtype=torch.float32, device=x.device)
    _KERNELS.module.gram_tiles[(batch, pairs)](
        delta,
        x,
        partial,
        positions,
        delta.shape[2],
        x.shape[2],
        count,
        T=tile,
        K=tiles.inner,
        PRECISION=precision,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return partial


def gram_sums(delta: torch.Tensor, x: torch.Tensor, precision: Precision, tiles: Tiles = _GRAM) -> GramSums:
    """The Gram form and what its margins need, in one reading of δ (B, T, p) and x (B, T, d)."""
    partial = gram_tiles(delta, x, precision, tiles).double()
    products, scale, of_delta, of_x = partial[..., :4].sum(1).unbind(1)
    return GramSums(products, scale, of_delta, of_x, partial[..., 4].amax(1))


class CotangentSums(NamedTuple):
    """Of each example: Σ_t ‖δ_t‖² (B,), max_t ‖δ_t‖² (B,), Σ_t δ_t (B, outputs); and how many roundings they went through."""

    total: torch.Tensor
    largest: torch.Tensor
    sums: torch.Tensor
    roundings: int


def _shares(rows: int, size: int, least: int) -> tuple[int, int]:
    """Into how many parts, of what size, to cut rows of ``size`` numbers so that the GPU has enough to do."""
    parts = max(1, min(_BUSY // max(rows, 1), size // least))
    share = -(-size // parts)
    return -(-size // share), share


@_where_the_data_are
def cotangent_sums(delta: torch.Tensor) -> CotangentSums:
    """In one reading of δ (B, outputs, positions), contiguous, of at most :data:`MOST_OUTPUTS` outputs."""
    batch, outputs, positions = delta.shape
    rows = power_of_two(outputs, 16, MOST_OUTPUTS)
    inner = max(16, _TILE // rows)
    parts, share = _shares(batch, positions, inner)
    totals, largest = (torch.empty(batch, parts, dtype=torch.float32, device=delta.device) for _ in range(2))
    sums = torch.empty(batch, parts, outputs, dtype=torch.float32, device=delta.device)
    _KERNELS.module.cotangent_parts[(batch, parts)](
        delta, totals, largest, sums, outputs, positions, share, _TINY * outputs * share, P=rows, T=inner, num_warps=4
    )
    roundings = rows + -(-share // inner) + inner + parts + 2
    if parts == 1:
        return CotangentSums(totals[:, 0], largest[:, 0], sums[:, 0], roundings)
    return CotangentSums(totals.sum(1), largest.amax(1), sums.sum(1), roundings)


@_where_the_data_are
def row_squares(x: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Σ x² of each row of a contiguous (B, n), with what squares can lose by underflow: (B,). And through how many roundings."""
    batch, size = x.shape
    inner = power_of_two(size, 64, 4096)
    parts, share = _shares(batch, size, inner)
    totals = torch.empty(batch, parts, dtype=torch.float32, device=x.device)
    _KERNELS.module.row_squares[(batch, parts)](x, totals, size, share, _TINY * share, N=inner, num_warps=4)
    return totals[:, 0] if parts == 1 else totals.sum(1), inner + -(-share // inner) + parts + 2


_choices: dict[Hashable, str] = {}
_REPEATS = 3


def quickest(key: Hashable, candidates: Mapping[str, Callable[[], object]], untimed: str, device: torch.device) -> str:
    """The name of the quickest candidate for ``key``, timed on the first call and remembered for this process.

    Where nothing can be timed (in a CUDA graph, in a compiled function) the answer is ``untimed``, and nothing is remembered.
    """
    known = _choices.get(key)
    if known is not None:
        return known
    if torch.compiler.is_compiling() or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
        return untimed
    times = {name: _best_time(function, device) for name, function in candidates.items()}
    _choices[key] = min(times, key=times.__getitem__)
    return _choices[key]


def choices() -> dict[Hashable, str]:
    """What was measured so far in this process."""
    return dict(_choices)


def forget_choices() -> None:
    """Measure again from here on."""
    _choices.clear()


def _best_time(function: Callable[[], object], device: torch.device) -> float:
    function()  # allocations, kernels being loaded
    best = float("inf")
    for _ in range(_REPEATS):
        _wait(device)
        start = time.perf_counter()
        function()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
