"""Pooling that loses little of the gradient's norm."""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.bounds.rules_modules import as_tuple, channels_and_spatial
from lipdp.bounds.windows import multiplicity
from lipdp.errors import ConfigurationError

__all__ = ["L2NormPool2d", "ScaledAvgPool2d"]

Size = int | tuple[int, int]


class _Pool2d(torch.nn.Module):
    """Window arguments as in torch.nn: the stride is the window's size unless given."""

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__()
        self.kernel_size = as_tuple(kernel_size, 2)
        self.stride = self.kernel_size if stride is None else as_tuple(stride, 2)
        self.padding = as_tuple(padding, 2)
        if min(self.kernel_size) < 1 or min(self.stride) < 1:
            raise ConfigurationError(f"window and stride must be at least 1, not {kernel_size} and {stride}")

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class L2NormPool2d(_Pool2d):
    """``y = √(Σ_window x² + ε)``: the norm of each window.

    Where x ≠ 0 the cotangent is spread along x/‖x‖, of norm 1, so non-overlapping windows preserve its norm. ε > 0 keeps
    the gradient defined at 0.
    """

    def __init__(self, kernel_size: Size, stride: Size | None = None, padding: Size = 0, eps: float = 1e-12) -> None:
        super().__init__(kernel_size, stride, padding)
        if not eps > 0:
            raise ConfigurationError(f"L2NormPool2d eps must be positive (the gradient at 0 needs it), not {eps}")
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Norm of each window."""
        squares = F.avg_pool2d(x.square(), self.kernel_size, self.stride, self.padding, divisor_override=1)
        return (squares + self.eps).sqrt()


@rule(L2NormPool2d)
def _l2_norm_pool(layer: L2NormPool2d, call: Call) -> Transfer:
    """‖y‖² = Σ_p(‖x^p‖² + ε) ≤ mX² + n_out·ε; the Jacobian's row p has norm ≤ 1 and each input is in ≤ m rows: √m."""
    x = call.inputs[0]
    pads = [(p, p) for p in layer.padding]
    m = multiplicity(channels_and_spatial(call, 2), layer.kernel_size, layer.stride, (1, 1), pads, "zeros", call.output_shape[1:])
    norm = math.sqrt(m * x.norm**2 + math.prod(call.output_shape) * layer.eps)
    return Transfer(Bound(norm, call.output_shape), (math.sqrt(m),), exact=m == 1)


class ScaledAvgPool2d(_Pool2d):
    """Average pooling times √window: an orthogonal projection scaled to operator norm 1. Windows must not overlap."""

    def __init__(self, kernel_size: Size, stride: Size | None = None) -> None:
        super().__init__(kernel_size, stride)
        if any(s < k for s, k in zip(self.stride, self.kernel_size, strict=True)):
            raise ConfigurationError(
                f"ScaledAvgPool2d windows overlap (stride {self.stride} below the window {self.kernel_size}), so its norm "
                "would exceed 1. Use a stride of at least the window, or torch.nn.AvgPool2d."
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sum of each window over the root of its size."""
        return F.avg_pool2d(x, self.kernel_size, self.stride) * math.sqrt(math.prod(self.kernel_size))


@rule(ScaledAvgPool2d)
def _scaled_avg_pool(layer: ScaledAvgPool2d, call: Call) -> Transfer:
    """Rows are disjoint and each has norm √(w·(1/√w)²) = 1."""
    return Transfer(Bound(call.inputs[0].norm, call.output_shape))
