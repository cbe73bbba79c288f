"""A convolution kept at its true operator norm, by its Fourier transform."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from lipdp._checks import positive
from lipdp._numerics import unit_roundoff
from lipdp.bounds import Call, Transfer, conv_norm_fft, rule, times
from lipdp.bounds.operator_norm import grid_factor, grid_for
from lipdp.bounds.rules_weighted import channels_and_spatial, conv_multiplicity, weighted_transfer
from lipdp.errors import ConfigurationError
from lipdp.export import Site, lowering, placed
from lipdp.nn.conv import plain_conv
from lipdp.nn.linear import BallBias, orthogonal_


class FourierConv2d(BallBias, torch.nn.Conv2d):
    """A 2-D convolution whose *stored* kernel K has sup_ω‖K̂(ω)‖₂ ≤ 1: its true norm on large images, not the RKO bound.

    RKO keeps √m·‖K‖₂ ≤ 1, which can be far above the true norm, so its kernels are smaller than they need be. Here K is
    divided by the certified :func:`lipdp.bounds.conv_norm_fft` where that exceeds 1. The price: the gradient is taken at K
    itself, so ``Δ_K = √m·G·X``. Other bounds as :class:`~lipdp.nn.SpectralConv2d`.

    Args:
        in_channels: channels that come in, a multiple of ``groups``.
        out_channels: channels that go out, a multiple of ``groups``.
        kernel_size: height and width of the window, or one number for both.
        stride: steps between windows; larger ones overlap less, which makes m, and so Δ_K, smaller.
        padding: what is added at each side; or "same" (at stride 1), "valid" for none.
        dilation: distance between the taps of a window.
        groups: parts that the channels are split into; the norm is that of the steepest part.
        bias: whether to add a bias, one number for each channel that goes out.
        padding_mode: "zeros" or "circular": copies of border pixels can make the norm larger.
        bias_norm: radius of the ball that the bias is kept in; √T times it enters the activations' bound.
        grid: frequencies along each axis; more are tighter (the bound is within 1/cos²(π(k−1)/(2·grid)) of the truth).
            By default 32, fewer for very many channels.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] | str = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: Literal["zeros", "circular"] = "zeros",
        *,
        bias_norm: float = 0.1,
        grid: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm = positive("bias_norm", bias_norm)
        if padding_mode not in ("zeros", "circular"):
            raise ConfigurationError(f"FourierConv2d has a bound for zero and circular padding, not for {padding_mode!r}")
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        largest = max(self.kernel_size)
        self.grid = (grid_for(self.weight, groups) or 2 * largest) if grid is None else grid
        if self.grid < largest:
            raise ConfigurationError(f"grid={grid} is below the window's size {largest}: it would drop taps")
        self.project_()

    def reset_parameters(self) -> None:
        """Random orthogonal matrices (whose convolution has a norm of at least 1: projection scales it to 1) and a zero bias."""
        with torch.no_grad():
            for matrix in self.weight.reshape(self.groups, self.out_channels // self.groups, -1):
                orthogonal_(matrix)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def project_(self) -> None:
        """Back to sup_ω‖K̂(ω)‖₂ ≤ 1 and ‖b‖₂ ≤ bias_norm.

        Rounding K's entries by 1±u moves K̂(ω) by at most u·Σ_taps‖K[a]‖_F ≤ u·√taps·‖K‖_F, which is added before dividing.
        """
        with torch.no_grad():
            wide = self.weight.detach().to(torch.float64)
            norm = conv_norm_fft(wide, self.grid, self.groups)
            if not math.isfinite(norm):
                raise ConfigurationError("a constrained kernel is not finite: training has diverged. Lower the learning rate.")
            taps = math.prod(self.kernel_size)
            norm += 2 * unit_roundoff(self.weight.dtype) * math.sqrt(taps) * float(torch.linalg.vector_norm(wide))
            if norm > 1:
                self.weight.copy_((wide / norm).to(self.weight.dtype))
            if self.bias is not None:
                self.project_bias_()

    def is_inside(self) -> bool:
        """Whether sup_ω‖K̂(ω)‖₂ ≤ 1 by the certificate, and the bias is in its ball."""
        norm = conv_norm_fft(self.weight.detach().to(torch.float64), self.grid, self.groups)
        return norm <= 1 and self.is_bias_inside()

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        arguments: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{arguments}{self.bias_repr()}, grid={self.grid}"


@rule(FourierConv2d)
def _fourier_conv(layer: FourierConv2d, call: Call) -> Transfer:
    """Zero padding, strides and dilation compress the infinite convolution, of norm sup‖K̂‖ ≤ 1.

    Circular padding samples its spectrum where output positions are distinct modulo the image. Stored kernel: Δ_K = √m·G·X.
    """
    x = call.inputs[0]
    spatial = channels_and_spatial(call, 2)
    if layer.padding_mode == "circular":
        last = [(out - 1) * s for out, s in zip(call.output_shape[1:], layer.stride, strict=True)]
        if any(position >= n for position, n in zip(last, spatial, strict=True)):
            raise call.refuse("with circular padding, outputs beyond one turn of the image repeat others. Use less padding.")
    m = conv_multiplicity(layer, spatial)
    factor = grid_factor(layer.kernel_size, (layer.grid, layer.grid))
    return weighted_transfer(
        x,
        call.output_shape,
        gain=1.0,
        weight_factor=times(math.sqrt(m), x.norm),
        bias=layer.bias_bound,
        positions=math.prod(call.output_shape[1:]),
        exact=False,
        note=f"Fourier norm on {layer.grid} frequencies an axis: within a factor {factor:.3f} of the true norm on large images",
    )


@lowering(FourierConv2d)
def _plain(layer: FourierConv2d, site: Site) -> torch.nn.Module:
    """The stored kernel convolves as it is."""
    return placed(plain_conv(layer), layer)
