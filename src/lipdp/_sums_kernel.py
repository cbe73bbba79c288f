"""The gradient of a convolution's kernel on a GPU: a few records at a time in float32, in registers, all of them in float64."""

from __future__ import annotations

import importlib.util
import math
import warnings
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from lipdp.errors import LipdpNotice

__all__ = ["Tiles", "available", "convolution_sums"]


class Tiles(NamedTuple):
    """Sides of the largest tile (outputs × reads), what it is summed over at a time, warps, stages; the tile turned or not."""

    outputs: int
    reads: int
    positions: int
    warps: int
    stages: int
    swapped: bool


# Measured on an H200. Two warps keep the compiler from instructions that want both factors with positions side by side.
_TILES, _NARROW = Tiles(64, 128, 32, 2, 3, False), Tiles(64, 32, 32, 4, 3, True)
_FEW = 32  # reads of a narrow product
# Entries that a program of the last sum adds up, and parts at a time.
_ENTRIES, _PARTS = 128, 16
_AT_ONCE = 2**25  # numbers of all parts that lie in memory at a time
_tried: dict[torch.device, bool] = {}


@cache
def _triton() -> Any:
    """The compiled kernel's module; None where Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    from lipdp import _sums_triton

    return _sums_triton


def available(*tensors: torch.Tensor) -> bool:
    """Whether the kernel can be used on these tensors: in float32, on an NVIDIA GPU that knows TF32."""
    if not all(t.device.type == "cuda" and t.dtype == torch.float32 for t in tensors):
        return False
    device = tensors[0].device
    if device not in _tried:
        if torch.cuda.is_current_stream_capturing():
            return False
        capable = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8
        _tried[device] = capable and _triton() is not None and _works(device)
    return _tried[device]


def _works(device: torch.device) -> bool:
    """A trial once per device against torch's arithmetic: what does not compile here, or computes something else, is not used."""
    try:
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
        trouble = "" if torch.allclose(computed, expected, rtol=1e-4, atol=1e-3) else "it does not compute what it should"
    except Exception as error:  # a compiler that is missing or does not fit
        trouble = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if trouble:
        warnings.warn(f"the Triton kernel for sums is not used on {device}, torch does it: {trouble}", LipdpNotice, stacklevel=2)
    return not trouble


def _power(value: int, least: int, most: int) -> int:
    """The power of two that holds ``value``, within limits."""
    return max(least, min(most, 1 << (max(value, 1) - 1).bit_length()))


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
    precision: str | None = None,
    tiles: Tiles | None = None,
) -> torch.Tensor:
    """Σ_i Σ_t δ_it ⊗ patch_it of a convolution of one or two axes; ``together`` rows are added up in float32. In float64."""
    more = 2 - len(stride)
    ones, none = (1,) * more, (0,) * more
    x = x.reshape(*x.shape[:2], *ones, *x.shape[2:])
    delta = delta.reshape(*delta.shape[:2], *ones, *delta.shape[2:])
    kernel = (*ones, *shape[2:])
    outputs, channels, reads = delta.shape[1] // groups, x.shape[1] // groups, math.prod(shape[1:])
    tiles = tiles or (_NARROW if reads <= _FEW else _TILES)
    tile_p, tile_d = _power(outputs, 16, tiles.outputs), _power(reads, 16, tiles.reads)
    tiles_p, tiles_d = -(-outputs // tile_p), -(-reads // tile_d)
    size = groups * outputs * reads
    at_once = together * max(1, _AT_ONCE // max(1, size))  # rows whose parts lie in memory at a time
    total = torch.zeros(groups * outputs, reads, dtype=torch.float64, device=x.device)
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]
        for start in range(0, len(x), at_once):
            rows = min(at_once, len(x) - start)
            parts = -(-rows // together)
            partial = torch.empty(parts, size, dtype=torch.float32, device=x.device)
            _triton().convolution_sums[(parts * groups * tiles_p * tiles_d,)](
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
                together,
                tiles_p * tiles_d,
                tiles_d,
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
                PRECISION=precision or ("tf32" if torch.backends.cudnn.allow_tf32 else "tf32x3"),
                num_warps=tiles.warps,
                num_stages=tiles.stages,
            )
            _triton().add_up[(-(-size // _ENTRIES),)](partial, total, parts, size, N=_ENTRIES, K=_PARTS)
    by_tap = total.reshape(shape[0], *kernel, channels)  # reads are numbered tap by tap
    return by_tap.movedim(-1, 1).reshape(tuple(shape))
