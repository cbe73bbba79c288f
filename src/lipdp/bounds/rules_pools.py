"""Rules of pools, as modules and functions: max, average, adaptive.

And of interpolation: a linear map that is a product of one matrix for each axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.nn import functional as F

from lipdp._numerics import unit_roundoff
from lipdp.bounds.calculus import Bound, Call, Transfer, rule, rule_for_both, rule_for_function, times
from lipdp.bounds.operator_norm import (
    adaptive_windows,
    as_tuple,
    average_gain,
    certified_norm,
    has_empty_window,
    multiplicity,
    windows_gain,
)
from lipdp.bounds.rules_weighted import channels_and_spatial

Size = int | Sequence[int]


@dataclass(frozen=True)
class _Window:
    kernel: Size
    stride: Size | None
    padding: Size = 0
    dilation: Size = 1

    def on(self, axes: int) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        stride = self.kernel if self.stride is None or self.stride == () else self.stride
        kernel, padding, dilation = (as_tuple(value, axes) for value in (self.kernel, self.padding, self.dilation))
        return kernel, as_tuple(stride, axes), padding, dilation


def _max_pool(axes: int, call: Call, window: _Window, return_indices: bool) -> Transfer:
    """Each output copies one input, and an input is copied at most m times: ‖y‖² ≤ m‖x‖², and so for cotangents."""
    if return_indices:
        raise call.refuse("return_indices=True is not supported")
    x, outputs = call.inputs[0], call.output_shape[1:]
    spatial = channels_and_spatial(call, axes)
    kernel, stride, padding, dilation = window.on(axes)
    if has_empty_window(spatial, kernel, stride, dilation, padding, outputs):
        raise call.refuse("some window covers padding only and answers −∞. Use less padding, or ceil_mode=False.")
    root = math.sqrt(multiplicity(spatial, kernel, stride, dilation, [(p, p) for p in padding], "zeros", outputs))
    return Transfer(Bound(root * x.norm, call.output_shape, max_abs=x.max_abs), (root,), exact=root == 1)


def _avg_pool(axes: int, call: Call, window: _Window, include_pad: bool, divisor: int | None) -> Transfer:
    x, outputs = call.inputs[0], call.output_shape[1:]
    spatial = channels_and_spatial(call, axes)
    kernel, stride, padding, _ = window.on(axes)
    gain = average_gain(spatial, kernel, stride, padding, outputs, include_pad, divisor)
    peak = x.max_abs if divisor is None else math.inf
    return Transfer(Bound(times(gain, x.norm), call.output_shape, max_abs=peak), (gain,), exact=False)


def _adaptive(axes: int, call: Call, average: bool) -> Transfer:
    """As the pools above, with torch's own windows: they may overlap, and have different sizes."""
    if len(call.output_shapes) != 1:
        raise call.refuse("return_indices=True is not supported")
    x, outputs = call.inputs[0], call.output_shape[1:]
    spatial = channels_and_spatial(call, axes)
    windows = [adaptive_windows(n, o) for n, o in zip(spatial, outputs, strict=True)]
    gain = math.sqrt(math.prod(windows_gain(w, n, average) for w, n in zip(windows, spatial, strict=True)))
    even = all(n % o == 0 for n, o in zip(spatial, outputs, strict=True))
    return Transfer(Bound(times(gain, x.norm), call.output_shape, max_abs=x.max_abs), (gain,), exact=even)


def _register(axes: int) -> None:
    @rule(getattr(torch.nn, f"MaxPool{axes}d"))
    def _max_module(module: Any, call: Call) -> Transfer:
        window = _Window(module.kernel_size, module.stride, module.padding, module.dilation)
        return _max_pool(axes, call, window, module.return_indices)

    @rule_for_function(getattr(F, f"max_pool{axes}d"), getattr(torch, f"max_pool{axes}d"))
    def _max_function(call: Call) -> Transfer:
        window = _Window(
            call.argument(1, "kernel_size"),
            call.argument(2, "stride"),
            call.argument(3, "padding", 0),
            call.argument(4, "dilation", 1),
        )
        return _max_pool(axes, call, window, bool(call.kwargs.get("return_indices", False)) or len(call.output_shapes) != 1)

    @rule(getattr(torch.nn, f"AvgPool{axes}d"))
    def _avg_module(module: Any, call: Call) -> Transfer:
        window = _Window(module.kernel_size, module.stride, module.padding)
        return _avg_pool(axes, call, window, module.count_include_pad, getattr(module, "divisor_override", None))

    @rule_for_function(getattr(F, f"avg_pool{axes}d"))
    def _avg_function(call: Call) -> Transfer:
        window = _Window(call.argument(1, "kernel_size"), call.argument(2, "stride"), call.argument(3, "padding", 0))
        divisor = None if axes == 1 else call.argument(6, "divisor_override")
        return _avg_pool(axes, call, window, bool(call.argument(5, "count_include_pad", True)), divisor)

    @rule_for_both([getattr(torch.nn, f"AdaptiveAvgPool{axes}d")], [getattr(F, f"adaptive_avg_pool{axes}d")])
    def _adaptive_avg(call: Call) -> Transfer:
        return _adaptive(axes, call, average=True)

    @rule_for_both([getattr(torch.nn, f"AdaptiveMaxPool{axes}d")], [getattr(F, f"adaptive_max_pool{axes}d")])
    def _adaptive_max(call: Call) -> Transfer:
        return _adaptive(axes, call, average=False)


for _axes in (1, 2, 3):
    _register(_axes)


_LINEAR = {"linear", "bilinear", "trilinear"}
# How far weights are off, in units of u·size, for places that are off by u·size: the slope of linear and of cubic weights.
_SLOPES = {**dict.fromkeys(_LINEAR, 8), "bicubic": 64}


def _axis_matrix(size: int, out: int, scale: float | None, mode: str, align: bool | None, dtype: torch.dtype) -> torch.Tensor:
    """The matrix that interpolates one axis, from the images of its basis vectors."""
    basis = torch.eye(size, dtype=dtype)[:, None]
    if mode == "bicubic":  # torch has it for two axes only: the other one has one pixel, which keeps its value
        arguments: dict[str, Any] = {"size": (out, 1)} if scale is None else {"scale_factor": (scale, 1.0)}
        return F.interpolate(basis[..., None], mode=mode, align_corners=align, **arguments)[:, 0, :, 0].T.double()
    arguments = {"size": out} if scale is None else {"scale_factor": scale}
    one = "linear" if mode in _LINEAR else mode
    return F.interpolate(basis, mode=one, align_corners=align, **arguments)[:, 0].T.double()


@lru_cache(maxsize=1024)
def _axis_norms(size: int, out: int, scale: float | None, mode: str, align: bool | None) -> tuple[float, float]:
    """‖U‖₂ ≤ √(‖U‖₁‖U‖∞), and ‖U‖∞, of the matrix that interpolates one axis.

    torch computes places in float32 or float64, by the model's dtype, which decides ties of "nearest": the larger norm counts.
    """
    worst, largest = 0.0, 0.0
    for dtype in (torch.float32, torch.float64):
        matrix = _axis_matrix(size, out, scale, mode, align, dtype)
        if matrix.shape[0] != out:  # never seen; a matrix of another size would bound another map
            return math.inf, math.inf
        rows, columns = float(matrix.abs().sum(1).max()), float(matrix.abs().sum(0).max())
        worst = max(worst, min(float(certified_norm(matrix)), math.sqrt(rows * columns)))
        largest = max(largest, rows)
    # Weights are functions of differences of places, computed in the model's own dtype: off by u·size times their slope.
    margin = 1 + _SLOPES.get(mode, 0) * max(size, out) * unit_roundoff(torch.float32)
    return worst * margin, largest * margin


def _interpolate(call: Call, scale: Any, mode: str, align: bool | None, recompute: Any, antialias: bool) -> Transfer:
    """The Kronecker product of the axes' matrices has the product of their norms; nearest ×s: √s for each axis."""
    x = call.inputs[0]
    axes = len(x.shape) - 1
    if axes not in (1, 2, 3) or antialias or mode not in {"nearest", "nearest-exact", "area", "bicubic", *_LINEAR}:
        raise call.refuse(
            "only (channels, …) examples and the modes nearest, nearest-exact, area, (bi-, tri-)linear and bicubic, "
            "without antialias, are supported"
        )
    scales: Sequence[float | None] = [None] * axes
    if scale is not None and not recompute:
        scales = list(scale) if isinstance(scale, tuple | list) else [float(scale)] * axes
    align = align if mode in _SLOPES else None
    sizes = zip(x.shape[1:], call.output_shape[1:], scales, strict=True)
    norms = [_axis_norms(n, out, None if s is None else float(s), mode, align) for n, out, s in sizes]
    gain = math.prod(norm for norm, _ in norms)
    # Other weights than cubic ones are convex combinations: no entry is larger than before.
    peak = times(x.max_abs, *(largest for _, largest in norms)) if mode == "bicubic" else x.max_abs
    return Transfer(Bound(times(gain, x.norm), call.output_shape, max_abs=peak), (gain,), exact=mode == "nearest")


@rule(torch.nn.Upsample, torch.nn.UpsamplingNearest2d, torch.nn.UpsamplingBilinear2d)
def _upsample(module: torch.nn.Upsample, call: Call) -> Transfer:
    recompute = getattr(module, "recompute_scale_factor", None)
    return _interpolate(call, module.scale_factor, module.mode, module.align_corners, recompute, antialias=False)


@rule_for_function(F.interpolate)
def _interpolate_function(call: Call) -> Transfer:
    return _interpolate(
        call,
        call.argument(2, "scale_factor"),
        call.argument(3, "mode", "nearest"),
        call.argument(4, "align_corners"),
        call.argument(5, "recompute_scale_factor"),
        bool(call.argument(6, "antialias", False)),
    )
