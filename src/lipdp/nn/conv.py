"""Convolutions whose operator norm is at most 1."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch

from lipdp.bounds import Call, Transfer, rule
from lipdp.bounds.rules_modules import channels_and_spatial, conv_multiplicity, weighted_transfer
from lipdp.nn.linear import checked_bias_norm, orthogonal_
from lipdp.parametrize import Bjorck, Constrained, Constraint
from lipdp.parametrize.constraint import project_ball

__all__ = ["SpectralConv2d"]


class SpectralConv2d(Constrained, torch.nn.Conv2d):
    """A 2-D convolution of operator norm ≤ 1 by "reshaped kernel orthogonalisation" (RKO).

    The stored parameter Θ has ‖Θ_g‖₂ ≤ 1 for each group g, read as the matrix (out × in·kh·kw); the kernel that convolves
    is ``K = Θ/√m``. m is the largest number of (output position, tap) pairs that read one input element, padding copies
    counted, so that ``‖y‖² = Σ_p‖K x^p‖² ≤ (1/m)·Σ_p‖x^p‖² ≤ ‖x‖²``. (The usual factor 1/√(kh·kw), or one slightly above
    it "for border effects", is either loose or false.)

    Bounds, on an output of T = H·W positions: ``X_out = X + √T·bias_norm``, ``G_in = G``, ``Δ_Θ = G·X``, ``Δ_b = √T·G``.

    Arguments are those of :class:`torch.nn.Conv2d`, and ``bias_norm`` and ``constraint`` as in
    :class:`~lipdp.nn.SpectralLinear`.
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
        padding_mode: Literal["zeros", "reflect", "replicate", "circular"] = "zeros",
        *,
        bias_norm: float = 0.1,
        constraint: Constraint | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm = checked_bias_norm(bias_norm)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self.constraint: Constraint = Bjorck() if constraint is None else constraint
        self.project_()

    def _matrices(self) -> torch.Tensor:
        """Θ as one (out/groups × in/groups·kh·kw) matrix per group."""
        return self.weight.reshape(self.groups, self.out_channels // self.groups, -1)

    def reset_parameters(self) -> None:
        """Random (semi-)orthogonal matrices and a zero bias."""
        with torch.no_grad():
            for matrix in self._matrices():
                orthogonal_(matrix)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def project_(self) -> None:
        """Back to ‖Θ_g‖₂ ≤ 1 and ‖b‖₂ ≤ bias_norm."""
        with torch.no_grad():
            self.weight.copy_(self.constraint.project(self._matrices()).reshape(self.weight.shape))
            if self.bias is not None:
                self.bias.copy_(project_ball(self.bias, self.bias_norm))

    def scale(self, height: int, width: int) -> float:
        """1/√m for images of this size."""
        return 1 / math.sqrt(conv_multiplicity(self, (height, width)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve with K = Θ/√m."""
        y: torch.Tensor = self._conv_forward(input, self.weight * self.scale(input.shape[-2], input.shape[-1]), self.bias)
        return y

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        bias = f", bias_norm={self.bias_norm:g}" if self.bias is not None else ""
        arguments: str = super().extra_repr()  # type: ignore[no-untyped-call]
        return f"{arguments}{bias}, constraint={self.constraint}"


@rule(SpectralConv2d)
def _spectral_conv(layer: SpectralConv2d, call: Call) -> Transfer:
    """With K = Θ/√m: ∂L/∂Θ = Σ_p δ_p⊗x^p/√m, of norm ≤ Σ_p‖δ_p‖‖x^p‖/√m ≤ G·√m·X/√m = G·X."""
    x = call.inputs[0]
    channels_and_spatial(call, 2)
    return weighted_transfer(
        x,
        call.output_shape,
        gain=1.0,
        weight_factor=x.norm,
        bias=None if layer.bias is None else layer.bias_norm,
        positions=math.prod(call.output_shape[1:]),
        exact=False,
    )
