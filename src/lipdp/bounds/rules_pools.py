"""Rules of pools, as modules and functions: max, average, adaptive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from lipdp.bounds.bound import Bound, Transfer, times
from lipdp.bounds.registry import Call, rule, rule_for_function
from lipdp.bounds.rules_weighted import channels_and_spatial
from lipdp.bounds.windows import adaptive_windows, as_tuple, average_gain, has_empty_window, multiplicity, windows_gain

__all__: list[str] = []

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

    @rule(getattr(torch.nn, f"AdaptiveAvgPool{axes}d"))
    def _adaptive_avg_module(module: Any, call: Call) -> Transfer:
        return _adaptive(axes, call, average=True)

    @rule_for_function(getattr(F, f"adaptive_avg_pool{axes}d"))
    def _adaptive_avg_function(call: Call) -> Transfer:
        return _adaptive(axes, call, average=True)

    @rule(getattr(torch.nn, f"AdaptiveMaxPool{axes}d"))
    def _adaptive_max_module(module: Any, call: Call) -> Transfer:
        return _adaptive(axes, call, average=False)

    @rule_for_function(getattr(F, f"adaptive_max_pool{axes}d"))
    def _adaptive_max_function(call: Call) -> Transfer:
        return _adaptive(axes, call, average=False)


for _axes in (1, 2, 3):
    _register(_axes)
