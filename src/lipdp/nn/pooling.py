"""Pooling that loses little of the gradient's norm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional as F

from lipdp._pairs import Pooling, Stage, available, sorted_pool, stage
from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.bounds.calculus import has_rule
from lipdp.bounds.operator_norm import as_tuple, multiplicity
from lipdp.bounds.rules_weighted import channels_and_spatial
from lipdp.errors import ConfigurationError, DataError
from lipdp.export import Site, lowering
from lipdp.twins import Decision, Where, twin

Size = int | Sequence[int]


class _Pool(torch.nn.Module):
    """Window arguments as in torch.nn: the stride is the window's size unless given."""

    axes: int

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__()
        self.kernel_size = as_tuple(kernel_size, self.axes)
        self.stride = self.kernel_size if stride is None else as_tuple(stride, self.axes)
        self.padding = as_tuple(padding, self.axes)
        if min(self.kernel_size) < 1 or min(self.stride) < 1:
            raise ConfigurationError(f"window and stride must be at least 1, not {kernel_size} and {stride}")

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


def _checked_eps(name: str, eps: float) -> float:
    if not eps > 0:
        raise ConfigurationError(f"{name} eps must be positive (the gradient at 0 needs it), not {eps}")
    return float(eps)


class L2NormPool2d(_Pool):
    """``y = √(Σ_window x² + ε)``: the norm of each window.

    Where x ≠ 0 the cotangent is spread along x/‖x‖, of norm 1, so non-overlapping windows preserve its norm. ε > 0 keeps
    the gradient defined at 0.

    Args:
        kernel_size: height and width of a window, or one number for both.
        stride: steps between windows, the window's size by default. Where m windows share a pixel, bounds grow by √m.
        padding: zeros put around the image at each side.
        eps: ε, positive; no output is below √ε.
    """

    axes = 2

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, eps: float = 1e-12) -> None:
        super().__init__(kernel_size, stride, padding)
        self.eps = _checked_eps("L2NormPool2d", eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm of each window."""
        alone = self.stride == self.kernel_size and not any(self.padding)
        if alone and x.ndim == 4 and not torch.is_grad_enabled() and available(x):
            return sorted_pool(x, sort=False, pool=Pooling(self.kernel_size[0], self.kernel_size[1], self.eps))
        squares = F.avg_pool2d(x.square(), self.kernel_size, self.stride, self.padding, divisor_override=1)
        return (squares + self.eps).sqrt()


class L2NormPool1d(_Pool):
    """:class:`L2NormPool2d` along one axis.

    Args:
        kernel_size: length of a window.
        stride: steps between windows, the window's length by default. Smaller ones overlap, which makes bounds larger.
        padding: zeros put at both ends.
        eps: ε, positive; no output is below √ε.
    """

    axes = 1

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, eps: float = 1e-12) -> None:
        super().__init__(kernel_size, stride, padding)
        self.eps = _checked_eps("L2NormPool1d", eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm of each window: a pool of windows (1, k) over images of one row."""
        window, stride, padding = (1, *self.kernel_size), (1, *self.stride), (0, *self.padding)
        squares = F.avg_pool2d(x.square().unsqueeze(-2), window, stride, padding, divisor_override=1)
        return (squares + self.eps).sqrt().squeeze(-2)


@rule(L2NormPool1d, L2NormPool2d)
def _l2_norm_pool(layer: L2NormPool1d | L2NormPool2d, call: Call) -> Transfer:
    """‖y‖² = Σ_p(‖x^p‖² + ε) ≤ mX² + n_out·ε; the Jacobian's row p has norm ≤ 1 and each input is in ≤ m rows: √m."""
    x, ones = call.inputs[0], (1,) * layer.axes
    spatial, pads = channels_and_spatial(call, layer.axes), [(p, p) for p in layer.padding]
    m = multiplicity(spatial, layer.kernel_size, layer.stride, ones, pads, "zeros", call.output_shape[1:])
    norm = math.sqrt(m * x.norm**2 + math.prod(call.output_shape) * layer.eps)
    return Transfer(Bound(norm, call.output_shape), (math.sqrt(m),), exact=m == 1)


@stage(L2NormPool2d)
def _windows(layer: L2NormPool2d) -> Stage | None:
    """Windows that lie side by side."""
    if layer.stride != layer.kernel_size or any(layer.padding):
        return None
    height, width = layer.kernel_size
    return Stage(pool=Pooling(height, width, layer.eps))


class GlobalL2NormPool(torch.nn.Module):
    """``√(Σx² + ε)`` over all places of each channel: (channels, …) to (channels,).

    Args:
        eps: ε, positive: keeps the gradient defined where a channel is 0; no output is below √ε.
    """

    def __init__(self, eps: float = 1e-12) -> None:
        super().__init__()
        self.eps = _checked_eps("GlobalL2NormPool", eps)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm of each channel."""
        if isinstance(x, torch.Tensor) and x.ndim < 3:
            raise DataError(f"GlobalL2NormPool needs channels and places behind the batch, got a tensor of shape {tuple(x.shape)}")
        return (x.square().flatten(2).sum(dim=2) + self.eps).sqrt()

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"eps={self.eps:g}"


@rule(GlobalL2NormPool)
def _global_l2_norm_pool(layer: GlobalL2NormPool, call: Call) -> Transfer:
    """One window for each channel, disjoint: √(X² + channels·ε), gain 1."""
    x = call.inputs[0]
    return Transfer(Bound(math.sqrt(x.norm**2 + x.shape[0] * layer.eps), call.output_shape))


class _ScaledPool(_Pool):
    """Average pooling times √window: an orthogonal projection scaled to operator norm 1. Windows must not overlap."""

    def __init__(self, kernel_size: Size, stride: Size | None = None) -> None:
        super().__init__(kernel_size, stride)
        if any(s < k for s, k in zip(self.stride, self.kernel_size, strict=True)):
            raise ConfigurationError(
                f"{type(self).__name__} windows overlap (stride {self.stride} below the window {self.kernel_size}), so its norm "
                f"would exceed 1. Use a stride of at least the window, or torch.nn.AvgPool{self.axes}d."
            )


class ScaledAvgPool1d(_ScaledPool):
    """Average pooling times √window along one axis: operator norm 1. Windows must not overlap.

    Args:
        kernel_size: length w of a window; outputs are averages times √w.
        stride: steps between windows, at least the window's length, which is the default.
    """

    axes = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of each window over the root of its size."""
        return F.avg_pool1d(x, self.kernel_size, self.stride) * math.sqrt(math.prod(self.kernel_size))


class ScaledAvgPool2d(_ScaledPool):
    """Average pooling times √window: an orthogonal projection scaled to operator norm 1. Windows must not overlap.

    Args:
        kernel_size: height and width of a window of w pixels, or one number for both; outputs are averages times √w.
        stride: steps between windows, at least the window's size, which is the default.
    """

    axes = 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of each window over the root of its size."""
        return F.avg_pool2d(x, self.kernel_size, self.stride) * math.sqrt(math.prod(self.kernel_size))


@rule(ScaledAvgPool1d, ScaledAvgPool2d)
def _scaled_avg_pool(layer: ScaledAvgPool1d | ScaledAvgPool2d, call: Call) -> Transfer:
    """Rows are disjoint and each has norm √(w·(1/√w)²) = 1."""
    channels_and_spatial(call, layer.axes)
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


class ScaledAdaptiveAvgPool2d(torch.nn.Module):
    """Adaptive average pooling times √window, operator norm 1: for output sizes that divide the image's.

    Args:
        output_size: height and width of the output, or one number for both; each divides the image's side.
    """

    def __init__(self, output_size: Size = 1) -> None:
        super().__init__()
        self.output_size = as_tuple(output_size, 2)
        if min(self.output_size) < 1:
            raise ConfigurationError(f"output_size must be at least 1, not {output_size}")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of each window over the root of its size."""
        height, width = self.output_size
        if isinstance(x, torch.Tensor) and (x.ndim != 4 or x.shape[-2] % height or x.shape[-1] % width):
            raise DataError(
                f"ScaledAdaptiveAvgPool2d({self.output_size}) needs images whose sides are multiples of it, got {tuple(x.shape)}"
            )
        window: float = x.shape[-2] * x.shape[-1] / (height * width)
        y: torch.Tensor = F.adaptive_avg_pool2d(x, (height, width)) * window**0.5
        return y

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"output_size={self.output_size}"


@rule(ScaledAdaptiveAvgPool2d)
def _scaled_adaptive(layer: ScaledAdaptiveAvgPool2d, call: Call) -> Transfer:
    """Disjoint windows, each row of norm 1, as for the scaled average pool."""
    channels_and_spatial(call, 2)
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))


class InvertibleDownsampling(torch.nn.PixelUnshuffle):
    """Blocks of factor×factor pixels become channels: half the size, nothing lost, ℓ = 1.

    Args:
        downscale_factor: side of the blocks, which divides the image's; channels become its square times as many.
    """


class InvertibleUpsampling(torch.nn.PixelShuffle):
    """The inverse of :class:`InvertibleDownsampling`.

    Args:
        upscale_factor: how many times longer each side becomes; its square divides the number of channels.
    """


@lowering(L2NormPool2d)
def _plain_l2_norm_pool(layer: L2NormPool2d, site: Site) -> torch.Tensor:
    squares = F.avg_pool2d(torch.square(site.x), layer.kernel_size, layer.stride, layer.padding, divisor_override=1)
    return torch.sqrt(squares + layer.eps)


@lowering(ScaledAvgPool2d)
def _plain_scaled_avg_pool(layer: ScaledAvgPool2d, site: Site) -> torch.Tensor:
    return F.avg_pool2d(site.x, layer.kernel_size, layer.stride) * math.sqrt(math.prod(layer.kernel_size))


@twin(torch.nn.MaxPool2d)
def _twin_of_max_pool(module: torch.nn.MaxPool2d, where: Where) -> Decision:
    if module.return_indices:
        return Decision("not converted", module, "return_indices=True has no bound")
    if module.ceil_mode or as_tuple(module.dilation, 2) != (1, 1):
        return Decision("kept", module, "L2NormPool2d has no ceil_mode and no dilation")
    kernel, stride, padding = (as_tuple(v, 2) for v in (module.kernel_size, module.stride, module.padding))
    overlap = math.prod(math.ceil(k / s) for k, s in zip(kernel, stride, strict=True))
    note = f"windows overlap: bounds grow by up to {math.sqrt(overlap):.3g} here; a stride of the window's size costs nothing"
    pool = L2NormPool2d(kernel, stride, padding)
    return Decision("replaced", pool, note if overlap > 1 else "")


@twin(torch.nn.AvgPool2d)
def _twin_of_avg_pool(module: torch.nn.AvgPool2d, where: Where) -> Decision:
    kernel, stride, padding = (as_tuple(v, 2) for v in (module.kernel_size, module.stride, module.padding))
    if module.ceil_mode or any(padding) or any(s < k for k, s in zip(kernel, stride, strict=True)):
        return Decision("kept", module, "ScaledAvgPool2d needs windows that do not overlap, without padding")
    return Decision("replaced", ScaledAvgPool2d(kernel, stride), "times √window")


@twin(torch.nn.AdaptiveAvgPool2d, torch.nn.AdaptiveMaxPool2d)
def _twin_of_adaptive_pool(module: torch.nn.AdaptiveAvgPool2d | torch.nn.AdaptiveMaxPool2d, where: Where) -> Decision:
    if where.shape == where.output:
        return Decision("removed", None, f"images already have the size {where.output[1:]}")
    if any(size % out for size, out in zip(where.shape[1:], where.output[1:], strict=True)):
        note = f"images of {where.shape[1:]} do not divide into {where.output[1:]} windows"
        return Decision("kept" if has_rule(module) else "not converted", module, note)
    height, width = (size // out for size, out in zip(where.shape[1:], where.output[1:], strict=True))
    if isinstance(module, torch.nn.AdaptiveAvgPool2d):
        return Decision("replaced", ScaledAvgPool2d((height, width)), "times √window")
    if module.return_indices:
        return Decision("not converted", module, "return_indices=True has no bound")
    return Decision("replaced", L2NormPool2d((height, width)))
