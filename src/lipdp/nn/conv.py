"""Convolutions whose operator norm is at most 1, by "reshaped kernel orthogonalisation" (RKO)."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch.nn import functional as F

from lipdp.bounds import Call, Transfer, rule
from lipdp.bounds.rules_weighted import channels_and_spatial, conv_multiplicity, transposed_multiplicity, weighted_transfer
from lipdp.errors import ConfigurationError
from lipdp.nn.linear import checked_bias_norm, checked_constraint, orthogonal_
from lipdp.parametrize import Constrained, Constraint, Parametrisation, Reparametrised
from lipdp.parametrize.constraint import project_ball
from lipdp.parametrize.effective import Map

__all__ = ["SpectralConv1d", "SpectralConv2d", "SpectralConv3d", "SpectralConvTranspose2d"]

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
_NOTE = "RKO: K = Θ/√{m}, so ‖K∗‖ ≤ ‖Θ‖₂ ≤ 1; the true norm may be smaller (lipdp.nn.FourierConv2d keeps that one)"


class _Spectral(Reparametrised, Constrained):
    """What the convolutions share: Θ as one matrix for each group, kept at ‖Θ_g‖₂ ≤ 1, and the bias's ball."""

    weight: Any
    bias: Any
    groups: int
    bias_norm: float
    constraint: Constraint | Parametrisation

    def _start(self, constraint: Constraint | Parametrisation | None) -> None:
        self.constraint = checked_constraint(constraint)
        if isinstance(self.constraint, Parametrisation):
            with torch.no_grad():
                self.weight.copy_(self.constraint.initial(self._matrices()).reshape(self.weight.shape))

    def _matrices(self) -> torch.Tensor:
        """Θ as one matrix per group: (out/groups × in/groups·window), in × out/groups·window where transposed."""
        matrices: torch.Tensor = self.weight.reshape(self.groups, self.weight.shape[0] // self.groups, -1)
        return matrices

    def maps(self) -> dict[str, Map]:
        """π on each group's matrix, where the constraint is a parametrisation; Θ = π(θ) is what Δ speaks of."""
        pi = self.constraint
        if not isinstance(pi, Parametrisation):
            return {}

        def effective(theta: torch.Tensor) -> torch.Tensor:
            return pi.weight(theta.reshape(self.groups, theta.shape[0] // self.groups, -1)).reshape(theta.shape)

        return {"weight": effective}

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
            if not isinstance(self.constraint, Parametrisation):
                self.weight.copy_(self.constraint.project(self._matrices()).reshape(self.weight.shape))
            if self.bias is not None:
                self.bias.copy_(project_ball(self.bias, self.bias_norm))

    def _described(self, arguments: str) -> str:
        bias = f", bias_norm={self.bias_norm:g}" if self.bias is not None else ""
        return f"{arguments}{bias}, constraint={self.constraint}"


class SpectralConv1d(_Spectral, torch.nn.Conv1d):
    """:class:`SpectralConv2d` along one axis."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] | str = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        *,
        bias_norm: float = 0.1,
        constraint: Constraint | Parametrisation | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm = checked_bias_norm(bias_norm)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._start(constraint)
        self.project_()

    def scale(self, length: int) -> float:
        """1/√m for inputs of this size."""
        return 1 / math.sqrt(conv_multiplicity(self, (length,)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve with K = Θ/√m."""
        y: torch.Tensor = self._conv_forward(input, self.effective("weight") * self.scale(input.shape[-1]), self.bias)
        return y

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return self._described(super().extra_repr())  # type: ignore[no-untyped-call]


class SpectralConv2d(_Spectral, torch.nn.Conv2d):
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
        padding_mode: PaddingMode = "zeros",
        *,
        bias_norm: float = 0.1,
        constraint: Constraint | Parametrisation | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm = checked_bias_norm(bias_norm)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._start(constraint)
        self.project_()

    def scale(self, height: int, width: int) -> float:
        """1/√m for images of this size."""
        return 1 / math.sqrt(conv_multiplicity(self, (height, width)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve with K = Θ/√m."""
        y: torch.Tensor = self._conv_forward(
            input, self.effective("weight") * self.scale(input.shape[-2], input.shape[-1]), self.bias
        )
        return y

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return self._described(super().extra_repr())  # type: ignore[no-untyped-call]


class SpectralConv3d(_Spectral, torch.nn.Conv3d):
    """:class:`SpectralConv2d` along three axes."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: int | tuple[int, int, int] | str = 0,
        dilation: int | tuple[int, int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        *,
        bias_norm: float = 0.1,
        constraint: Constraint | Parametrisation | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm = checked_bias_norm(bias_norm)
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._start(constraint)
        self.project_()

    def scale(self, depth: int, height: int, width: int) -> float:
        """1/√m for inputs of this size."""
        return 1 / math.sqrt(conv_multiplicity(self, (depth, height, width)))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve with K = Θ/√m."""
        depth, height, width = input.shape[-3:]
        y: torch.Tensor = self._conv_forward(input, self.effective("weight") * self.scale(depth, height, width), self.bias)
        return y

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return self._described(super().extra_repr())  # type: ignore[no-untyped-call]


@rule(SpectralConv1d, SpectralConv2d, SpectralConv3d)
def _spectral_conv(layer: SpectralConv1d | SpectralConv2d | SpectralConv3d, call: Call) -> Transfer:
    """With K = Θ/√m: ∂L/∂Θ = Σ_p δ_p⊗x^p/√m, of norm ≤ Σ_p‖δ_p‖‖x^p‖/√m ≤ G·√m·X/√m = G·X."""
    x = call.inputs[0]
    m = conv_multiplicity(layer, channels_and_spatial(call, len(layer.kernel_size)))
    return weighted_transfer(
        x,
        call.output_shape,
        gain=1.0,
        weight_factor=x.norm,
        bias=None if layer.bias is None else layer.bias_norm,
        positions=math.prod(call.output_shape[1:]),
        exact=m == 1,
        note=_NOTE.format(m=m),
    )


class SpectralConvTranspose2d(_Spectral, torch.nn.ConvTranspose2d):
    """A transposed 2-D convolution of operator norm ≤ 1: the adjoint of a convolution from its outputs to its inputs.

    The stored Θ has ‖Θ_g‖₂ ≤ 1 read as (in × out·kh·kw), and ``K = Θ/√m`` with the m of that convolution, which is capped by the
    number of *input* positions. Bounds as :class:`SpectralConv2d`; arguments as :class:`torch.nn.ConvTranspose2d`.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int] = 1,
        *,
        bias_norm: float = 0.1,
        constraint: Constraint | Parametrisation | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm = checked_bias_norm(bias_norm)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            device=device,
            dtype=dtype,
        )
        self._start(constraint)
        self.project_()

    def multiplicity(self, height: int, width: int) -> int:
        """m for inputs of this size."""
        arguments = (self.kernel_size, self.stride, self.padding, self.dilation)
        outputs = [
            (n - 1) * s - 2 * int(p) + d * (k - 1) + o + 1
            for n, k, s, p, d, o in zip((height, width), *arguments, self.output_padding, strict=True)
        ]
        return transposed_multiplicity((height, width), outputs, *arguments)  # type: ignore[arg-type]

    def scale(self, height: int, width: int) -> float:
        """1/√m for inputs of this size."""
        return 1 / math.sqrt(self.multiplicity(height, width))

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """Convolve with K = Θ/√m."""
        if output_size is not None:
            raise ConfigurationError("SpectralConvTranspose2d takes no output_size; use output_padding")
        kernel = self.effective("weight") * self.scale(input.shape[-2], input.shape[-1])
        padding, extra = self.padding, self.output_padding
        return F.conv_transpose2d(input, kernel, self.bias, self.stride, padding, extra, self.groups, self.dilation)  # type: ignore[arg-type]

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return self._described(super().extra_repr())  # type: ignore[no-untyped-call]


@rule(SpectralConvTranspose2d)
def _spectral_conv_transpose(layer: SpectralConvTranspose2d, call: Call) -> Transfer:
    """An operator and its adjoint have one norm; ∂L/∂Θ = Σ_p x_p⊗δ^p/√m over input positions p, ≤ X·√m·G/√m."""
    x = call.inputs[0]
    m = layer.multiplicity(*channels_and_spatial(call, 2))
    return weighted_transfer(
        x,
        call.output_shape,
        gain=1.0,
        weight_factor=x.norm,
        bias=None if layer.bias is None else layer.bias_norm,
        positions=math.prod(call.output_shape[1:]),
        exact=m == 1,
        note=_NOTE.format(m=m),
    )
