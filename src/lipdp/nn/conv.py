"""Convolutions whose operator norm is at most 1: by their reshaped kernel (RKO), or as orthogonal convolutions (AOC …)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch.nn import functional as F

from lipdp._checks import positive
from lipdp.bounds import Call, Transfer, rule, times
from lipdp.bounds.operator_norm import is_contraction, multiplicity, padding_sides
from lipdp.bounds.rules_weighted import channels_and_spatial, transposed_multiplicity, weighted_transfer
from lipdp.clipping.contribution import Contributions, norm_rule, refuse
from lipdp.clipping.rules_conv import convolution
from lipdp.errors import ConfigurationError
from lipdp.export import Site, lowering, placed
from lipdp.nn.linear import BallBias, checked_constraint, orthogonal_, reparametrised_refusal, weighted_twin
from lipdp.parametrize import Constraint, ConvGeometry, ConvParametrisation, Parametrisation, Reparametrised
from lipdp.parametrize.maps import Map
from lipdp.twins import Decision, Where, twin

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
AnyConstraint = Constraint | Parametrisation | ConvParametrisation
_RKO = "RKO: K = Θ/√{m}, so ‖K∗‖ ≤ ‖Θ‖₂ ≤ 1; Δ = G·X"


class _Spectral(Reparametrised, BallBias):
    """What all of them share: the kernel's constraint, the bias's ball, K from Θ, the rule."""

    weight: Any
    kernel_size: tuple[int, ...]
    stride: tuple[int, ...]
    padding: Any
    dilation: tuple[int, ...]
    groups: int
    padding_mode: Any
    transposed: bool
    in_channels: int
    out_channels: int
    constraint: AnyConstraint

    @property
    def geometry(self) -> ConvGeometry:
        """What a parametrisation of the whole convolution has to know of this layer."""
        pads = tuple(padding_sides(self.padding, self.kernel_size, self.dilation))
        channels = self.out_channels // self.groups, self.in_channels // self.groups
        rows, columns = reversed(channels) if self.transposed else channels
        return ConvGeometry(
            rows, columns, self.kernel_size, self.stride, self.dilation, pads, self.groups, self.padding_mode, self.transposed
        )

    def _matrices(self, weight: torch.Tensor) -> torch.Tensor:
        """Θ as one matrix per group: (out/groups × in/groups·window), in × out/groups·window where transposed."""
        return weight.reshape(self.groups, weight.shape[0] // self.groups, -1)

    def reset_parameters(self) -> None:
        """Random orthogonal matrices, or what the parametrisation starts from, and a zero bias."""
        pi = self.constraint
        with torch.no_grad():
            if isinstance(pi, ConvParametrisation):
                pi.check(self.geometry)
                theta = pi.initial(self.geometry).to(self.weight)
                if theta.shape != self.weight.shape:  # torch has made a kernel: θ takes its place
                    self.weight = torch.nn.Parameter(theta)
                self.weight.copy_(theta)
            else:
                for matrix in self._matrices(self.weight):
                    orthogonal_(matrix)
                if isinstance(pi, Parametrisation):
                    self.weight.copy_(pi.initial(self._matrices(self.weight)).reshape(self.weight.shape))
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def maps(self) -> dict[str, Map]:
        """π, where the constraint is a parametrisation; W = π(θ) is what Δ speaks of."""
        pi = self.constraint
        if isinstance(pi, ConvParametrisation):
            return {"weight": lambda theta: pi.weight(theta, self.geometry)}
        if isinstance(pi, Parametrisation):
            return {"weight": lambda theta: pi.weight(self._matrices(theta)).reshape(theta.shape)}
        return {}

    def project_(self) -> None:
        """Back to ‖Θ_g‖₂ ≤ 1 and ‖b‖₂ ≤ bias_norm."""
        with torch.no_grad():
            if isinstance(self.constraint, Constraint):
                self.weight.copy_(self.constraint.project(self._matrices(self.weight)).reshape(self.weight.shape))
            if self.bias is not None:
                self.project_bias_()

    def is_inside(self) -> bool:
        """Whether ‖Θ_g‖₂ ≤ 1 by a certificate, and the bias is in its ball; a reparametrised kernel only has to be finite."""
        if isinstance(self.constraint, Constraint):
            fine = is_contraction(self._matrices(self.weight))
        else:
            fine = bool(torch.isfinite(self.weight).all())
        return fine and self.is_bias_inside()

    def multiplicity(self, *spatial: int) -> int:
        """m for inputs of this size: how often one of their elements is read."""
        pi, geometry = self.constraint, self.geometry
        if isinstance(pi, ConvParametrisation):
            return pi.multiplicity(geometry, spatial)
        return multiplicity(spatial, geometry.kernel, geometry.stride, geometry.dilation, geometry.pads, geometry.mode)

    def scale(self, *spatial: int) -> float:
        """K = scale·W for inputs of this size: 1/√m, or 1 where W is the kernel itself."""
        if isinstance(self.constraint, ConvParametrisation) and not self.constraint.scaled:
            return 1.0
        return 1 / math.sqrt(self.multiplicity(*spatial))

    def _kernel(self, spatial: Sequence[int]) -> torch.Tensor:
        weight, scale = self.effective("weight"), self.scale(*spatial)
        return weight if scale == 1.0 else weight * scale

    def extra_repr(self) -> str:
        """Arguments, as in torch.nn."""
        return f"{super().extra_repr()}{self.bias_repr()}, constraint={self.constraint}"  # type: ignore[misc]

    def transfer(self, call: Call) -> Transfer:
        """The layer's row in the calculus.

        ∂L/∂W = scale·Σ_p δ_p⊗x^p, of norm ≤ scale·Σ_p‖δ_p‖‖x^p‖ ≤ scale·√m·G·X: G·X where K = W/√m, √m·G·X for a stored kernel.
        (Transposed: the sum runs over input positions, Σ_p x_p⊗δ^p, and m is that of the adjoint.) ‖K∗‖ ≤ 1 by the constraint.
        """
        x, spatial = call.inputs[0], channels_and_spatial(call, len(self.kernel_size))
        m, scale, pi = self.multiplicity(*spatial), self.scale(*spatial), self.constraint
        note, sizes, exact = _RKO.format(m=m), {}, m == 1
        if isinstance(pi, ConvParametrisation):
            geometry, outputs = self.geometry, call.output_shape[1:]
            why = pi.refusal(geometry, spatial, outputs)
            if why is not None:
                raise call.refuse(why)
            note = f"{type(pi).__name__}: {pi.note}, ‖K∗‖ ≤ 1 certified; Δ = {'' if pi.scaled else f'√{m}·'}G·X"
            exact = exact or geometry.mode == "circular"  # every pixel is read equally often: a constant image reaches √m
            sizes = {"weight": geometry.groups * geometry.rows * geometry.columns * math.prod(pi.window(geometry))}
        transfer = weighted_transfer(
            x,
            call.output_shape,
            gain=1.0,
            weight_factor=times(scale * math.sqrt(m), x.norm),
            bias=self.bias_bound,
            positions=math.prod(call.output_shape[1:]),
            exact=exact,
            note=note,
        )
        return dataclasses.replace(transfer, sizes=sizes)


class _SpectralConv(_Spectral):
    """A convolution along any number of axes; the classes below only say how many."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        *,
        bias_norm: float = 0.1,
        constraint: AnyConstraint | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm, self.constraint = positive("bias_norm", bias_norm), checked_constraint(constraint, convolution=True)
        super().__init__(  # type: ignore[call-arg]
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self.project_()

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Convolve with K."""
        axes = len(self.kernel_size)
        kernel = self._kernel([input.shape[axis - axes] for axis in range(axes)])
        if isinstance(self.constraint, ConvParametrisation):
            return self.constraint.convolve(input, kernel, self.bias, self.geometry)
        y: torch.Tensor = self._conv_forward(input, kernel, self.bias)  # type: ignore[attr-defined]
        return y


class SpectralConv1d(_SpectralConv, torch.nn.Conv1d):
    """:class:`SpectralConv2d` along one axis.

    Args:
        in_channels: channels that come in, a multiple of ``groups``.
        out_channels: channels that go out, a multiple of ``groups``.
        kernel_size: length of the window.
        stride: steps between windows; larger ones overlap less, which makes m smaller.
        padding: what is added at each side, a number; or "same" (at stride 1), "valid" for none.
        dilation: distance between the taps of a window.
        groups: parts that the channels are split into, each with a Θ_g of its own.
        bias: whether to add a bias, one number for each channel that goes out.
        padding_mode: "zeros", "circular", "reflect" or "replicate"; of orthogonal ones the first two, of CircularFFT the second.
        bias_norm: radius of the ball that the bias is kept in; √T times it enters the activations' bound.
        constraint: how ‖Θ_g‖₂ ≤ 1 is kept, as in SpectralLinear; or an orthogonal convolution in its place, such as ``AOC()``.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """


class SpectralConv2d(_SpectralConv, torch.nn.Conv2d):
    """A 2-D convolution of operator norm ≤ 1.

    By default "reshaped kernel orthogonalisation" (RKO): the stored Θ has ‖Θ_g‖₂ ≤ 1 for each group g, read as the matrix
    (out × in·kh·kw); the kernel that convolves is ``K = Θ/√m``. m is the largest number of (output position, tap) pairs that
    read one input element, padding copies counted, so that ``‖y‖² = Σ_p‖K x^p‖² ≤ (1/m)·Σ_p‖x^p‖² ≤ ‖x‖²``. (The usual factor
    1/√(kh·kw), or one slightly above it "for border effects", is either loose or false.)

    Bounds, on an output of T = H·W positions: ``X_out = X + √T·bias_norm``, ``G_in = G``, ``Δ_Θ = G·X``, ``Δ_b = √T·G``.

    Orthogonal convolutions keep more of the gradient: ``constraint=constraint.AOC()`` (any stride), ``BCOP()``, ``SOC()``,
    ``CircularFFT(size)``. W is then the kernel itself, with ``Δ_W = √m·G·X`` (CircularFFT: ``G·X``, W = √(H·W)·K).

    Arguments are those of :class:`torch.nn.Conv2d`, and two more.

    Args:
        in_channels: channels that come in, a multiple of ``groups``.
        out_channels: channels that go out, a multiple of ``groups``.
        kernel_size: height and width of the window, or one number for both.
        stride: steps between windows; larger ones overlap less, which makes m smaller.
        padding: what is added at each side, a number or one for each axis; or "same" (at stride 1), "valid" for none.
        dilation: distance between the taps of a window.
        groups: parts that the channels are split into, each with a Θ_g of its own.
        bias: whether to add a bias, one number for each channel that goes out.
        padding_mode: "zeros", "circular", "reflect" or "replicate"; of orthogonal ones the first two, of CircularFFT the second.
        bias_norm: radius of the ball that the bias is kept in; √T times it enters the activations' bound.
        constraint: how ‖Θ_g‖₂ ≤ 1 is kept, as in SpectralLinear; or an orthogonal convolution in its place, such as ``AOC()``.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """


class SpectralConv3d(_SpectralConv, torch.nn.Conv3d):
    """:class:`SpectralConv2d` along three axes.

    Args:
        in_channels: channels that come in, a multiple of ``groups``.
        out_channels: channels that go out, a multiple of ``groups``.
        kernel_size: sides of the window along the three axes, or one number for all.
        stride: steps between windows; larger ones overlap less, which makes m smaller.
        padding: what is added at each side, a number or one for each axis; or "same" (at stride 1), "valid" for none.
        dilation: distance between the taps of a window.
        groups: parts that the channels are split into, each with a Θ_g of its own.
        bias: whether to add a bias, one number for each channel that goes out.
        padding_mode: "zeros", "circular", "reflect" or "replicate"; of orthogonal ones the first two, of CircularFFT the second.
        bias_norm: radius of the ball that the bias is kept in; √T times it enters the activations' bound.
        constraint: how ‖Θ_g‖₂ ≤ 1 is kept, as in SpectralLinear; or an orthogonal convolution in its place, such as ``AOC()``.
        device: as in torch.nn.
        dtype: as in torch.nn.
    """


class SpectralConvTranspose2d(_Spectral, torch.nn.ConvTranspose2d):
    """A transposed 2-D convolution of operator norm ≤ 1: the adjoint of a convolution from its outputs to its inputs.

    The stored Θ has ‖Θ_g‖₂ ≤ 1 read as (in × out·kh·kw), and ``K = Θ/√m`` with the m of that convolution, which is capped by the
    number of *input* positions. Bounds as :class:`SpectralConv2d`; arguments as :class:`torch.nn.ConvTranspose2d`. Of the
    orthogonal convolutions, AOC and BCOP have this form.

    Args:
        in_channels: channels that come in, a multiple of ``groups``.
        out_channels: channels that go out, a multiple of ``groups``.
        kernel_size: height and width of the window, or one number for both.
        stride: steps, in the output, between the windows that two neighbouring inputs write to.
        padding: pixels that are left off at each side of the output.
        output_padding: pixels added to the output's far sides, to choose among the sizes that a stride leaves open.
        groups: parts that the channels are split into, each with a Θ_g of its own.
        bias: whether to add a bias, one number for each channel that goes out.
        dilation: distance between the taps of a window.
        bias_norm: radius of the ball that the bias is kept in; √T times it enters the activations' bound.
        constraint: how ‖Θ_g‖₂ ≤ 1 is kept, as in :class:`~lipdp.nn.SpectralLinear`; or ``AOC()``, ``BCOP()``.
        device: as in torch.nn.
        dtype: as in torch.nn.
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
        constraint: AnyConstraint | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.bias_norm, self.constraint = positive("bias_norm", bias_norm), checked_constraint(constraint, convolution=True)
        sizes = (kernel_size, stride, padding, output_padding)
        super().__init__(in_channels, out_channels, *sizes, groups, bias, dilation, device=device, dtype=dtype)
        self.project_()

    def multiplicity(self, *spatial: int) -> int:
        """m of the adjoint, for inputs of this size."""
        arguments = (self.kernel_size, self.stride, self.padding, self.dilation)
        outputs = [
            (n - 1) * s - 2 * int(p) + d * (k - 1) + o + 1
            for n, k, s, p, d, o in zip(spatial, *arguments, self.output_padding, strict=True)
        ]
        return transposed_multiplicity(spatial, outputs, *arguments)

    def forward(self, input: torch.Tensor, output_size: list[int] | None = None) -> torch.Tensor:
        """Convolve with K."""
        if output_size is not None:
            raise ConfigurationError("SpectralConvTranspose2d takes no output_size; use output_padding")
        kernel = self._kernel((input.shape[-2], input.shape[-1]))
        padding, extra = self.padding, self.output_padding
        return F.conv_transpose2d(input, kernel, self.bias, self.stride, padding, extra, self.groups, self.dilation)


@rule(SpectralConv1d, SpectralConv2d, SpectralConv3d, SpectralConvTranspose2d, rounds="counted")
def _spectral_conv(layer: _Spectral, call: Call) -> Transfer:
    """See ``transfer``."""
    return layer.transfer(call)


refuse(SpectralConv1d, SpectralConv2d, SpectralConv3d, SpectralConvTranspose2d)(reparametrised_refusal)


@norm_rule(SpectralConv1d, SpectralConv2d, SpectralConv3d)
def _contributions(layer: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> Contributions:
    """The stored parameter is Θ = √m·K, so its gradient is the kernel's over √m."""
    return convolution(layer, inputs, layer.scale(*inputs[0].shape[2:]))


_PLAIN: tuple[type[torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d], ...] = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d)


def _arguments(module: Any) -> dict[str, Any]:
    """What torch's convolution of the same form is made with."""
    names = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
    own = "output_padding" if module.transposed else "padding_mode"
    return {name: getattr(module, name) for name in (*names, own)} | {"bias": module.bias is not None}


def plain_conv(layer: Any, **changes: Any) -> torch.nn.Module:
    """torch's convolution of the same arguments, but for those given, without weights."""
    return _PLAIN[len(layer.kernel_size) - 1](**{**_arguments(layer), **changes}, device="meta")


@lowering(SpectralConv1d, SpectralConv2d, SpectralConv3d)
def _plain(layer: SpectralConv1d | SpectralConv2d | SpectralConv3d, site: Site) -> torch.nn.Module:
    """The kernel that convolves: K = Θ/√m with the m of this input size, or the orthogonal convolution's own."""
    scale = layer.scale(*site.shape[-len(layer.kernel_size) :])
    if not isinstance(layer.constraint, ConvParametrisation):
        return placed(plain_conv(layer), layer, scale)
    sides = layer.constraint.pads(layer.geometry)
    even = all(left == right for left, right in sides)
    padding = tuple(left for left, _ in sides) if even else "same"
    plain = plain_conv(layer, kernel_size=layer.constraint.window(layer.geometry), padding=padding)
    return placed(plain, layer, scale if layer.constraint.scaled else None)


@lowering(SpectralConvTranspose2d)
def _plain_transpose(layer: SpectralConvTranspose2d, site: Site) -> torch.nn.Module:
    plain = torch.nn.ConvTranspose2d(**_arguments(layer), device="meta")
    return placed(plain, layer, layer.scale(site.shape[-2], site.shape[-1]))


@twin(*_PLAIN)
def _twin_of_conv(module: torch.nn.Conv1d | torch.nn.Conv2d | torch.nn.Conv3d, where: Where) -> Decision:
    kind = (SpectralConv1d, SpectralConv2d, SpectralConv3d)[len(module.kernel_size) - 1]
    new = kind(**_arguments(module), device=module.weight.device, dtype=module.weight.dtype)
    return weighted_twin(new, module, where)


@twin(torch.nn.ConvTranspose2d)
def _twin_of_conv_transpose(module: torch.nn.ConvTranspose2d, where: Where) -> Decision:
    new = SpectralConvTranspose2d(**_arguments(module), device=module.weight.device, dtype=module.weight.dtype)
    with torch.no_grad():
        output = new(module.weight.new_zeros(1, *where.shape)).shape[1:]
    if tuple(output) != where.output:
        return Decision("not converted", module, "it is called with output_size=: use output_padding instead")
    return weighted_twin(new, module, where)
