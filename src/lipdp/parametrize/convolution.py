"""Parametrisations of whole convolutions: θ of any shape ↦ a kernel W whose convolution has operator norm at most 1.

A matrix constraint (Björck, Cayley …) serves a convolution through its reshaped kernel: K = Θ/√m has norm ≤ ‖Θ‖₂ ≤ 1, but even an
orthogonal Θ gives a convolution that loses most of the gradient in some directions ("RKO"). The maps here give kernels whose
*convolution* is orthogonal. As for matrices (:mod:`lipdp.parametrize.maps`) autograd stops at W, and the noised gradient
is pulled back."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from lipdp._numerics import unit_roundoff
from lipdp.bounds.operator_norm import conv_norm_circular, conv_norm_gram
from lipdp.bounds.windows import multiplicity, same_padding
from lipdp.errors import ConfigurationError, DataError
from lipdp.parametrize.maps import cayley

__all__ = ["CircularFFT", "ConvGeometry", "ConvParametrisation", "compose"]


_CONVOLUTIONS: dict[int, Any] = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass(frozen=True)
class ConvGeometry:
    """What a parametrisation has to know of a layer.

    Attributes:
        rows: output channels of one group's kernel (input channels where the layer is transposed: it is then the adjoint of
            the convolution that the kernel stands for).
        columns: input channels of one group's kernel.
        kernel: the layer's kernel_size.
        stride: as in torch.
        dilation: as in torch.
        pads: (left, right) for each axis.
        groups: as in torch.
        mode: padding_mode.
        transposed: whether the layer is a transposed convolution.
    """

    rows: int
    columns: int
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]
    groups: int
    mode: str
    transposed: bool = False

    @property
    def axes(self) -> int:
        """Number of spatial axes."""
        return len(self.kernel)


def compose(outer: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
    """The kernel of "first ``inner``, then ``outer``", of (…, rows, middle, *window) and (…, middle, columns, *window).

    y(p) = Σ_b O_b Σ_a I_a x(p+a+b), so its taps are Σ_{a+b=c} O_b·I_a: a window of the two sizes' sum less 1.
    """
    axes = outer.ndim - 3
    middle = inner.reshape(*inner.shape[:2], -1)
    total: torch.Tensor | None = None
    matrices = outer.flatten(3).unbind(-1)
    for matrix, tap in zip(matrices, itertools.product(*map(range, outer.shape[3:])), strict=True):
        part = (matrix @ middle).reshape(outer.shape[0], outer.shape[1], *inner.shape[2:])
        sides = [(t, size - 1 - t) for t, size in zip(tap, outer.shape[3:], strict=True)]
        padded = F.pad(part, [side for axis in range(axes - 1, -1, -1) for side in sides[axis]])
        total = padded if total is None else total + padded
    assert total is not None
    return total


class ConvParametrisation(ABC):
    """A map from one tensor θ, whose shape it chooses, to a kernel W.

    The layer convolves with K = W, or with K = W/√m where ``scaled``; ‖K∗‖ ≤ 1 is certified in floating point: K is divided by
    an upper bound of its norm where that exceeds 1 (the divisor is a constant for the gradient).
    """

    scaled: ClassVar[bool] = False
    note: ClassVar[str] = "exactly orthogonal but for borders"

    @abstractmethod
    def check(self, geometry: ConvGeometry) -> None:
        """Raise :class:`ConfigurationError` for a layer that this map can't serve."""

    @abstractmethod
    def initial(self, geometry: ConvGeometry) -> torch.Tensor:
        """θ to begin with, in float64."""

    @abstractmethod
    def kernel(self, theta: torch.Tensor, geometry: ConvGeometry) -> torch.Tensor:
        """W of a float64 θ, (groups·rows, columns, *window), not yet certified."""

    def window(self, geometry: ConvGeometry) -> tuple[int, ...]:
        """The window that convolves; it may be larger than the layer's ``kernel_size``."""
        return geometry.kernel

    def pads(self, geometry: ConvGeometry) -> tuple[tuple[int, int], ...]:
        """Padding of that window that keeps the layer's output size."""
        return geometry.pads

    def multiplicity(self, geometry: ConvGeometry, spatial: Sequence[int]) -> int:
        """m: how often the window reads one input element at most (:func:`lipdp.bounds.windows.multiplicity`)."""
        window, pads = self.window(geometry), self.pads(geometry)
        return multiplicity(spatial, window, geometry.stride, geometry.dilation, pads, geometry.mode)

    def norm(self, kernel: torch.Tensor, geometry: ConvGeometry) -> float:
        """A certified upper bound on ‖K∗‖ on every image that :meth:`refusal` admits."""
        return conv_norm_gram(kernel, geometry.groups, geometry.stride)

    def weight(self, theta: torch.Tensor, geometry: ConvGeometry) -> torch.Tensor:
        """W = π(θ), differentiable in θ, in θ's own dtype, with ‖K∗‖ ≤ 1 after the cast.

        Rounding K's entries by 1±u moves K̂(ω) = Σ_a K_a·e^{−i⟨a,ω⟩} by at most u·Σ_a‖K_a‖_F ≤ u·√taps·‖K‖_F; 4u cover the cast,
        the scaling of K = W/√m and what is second order.
        """
        kernel = self.kernel(theta.to(torch.float64), geometry)
        with torch.no_grad():
            used = kernel.detach() / (math.sqrt(math.prod(kernel.shape[2:])) if self.scaled else 1.0)
            norm = self.norm(used, geometry)
            if not math.isfinite(norm):
                raise ConfigurationError(
                    f"{self} gives a kernel that is not finite: training has diverged. Lower the learning rate."
                )
            taps = math.prod(kernel.shape[2:])
            norm += 4 * unit_roundoff(theta.dtype) * math.sqrt(taps) * float(torch.linalg.vector_norm(used))
        result: torch.Tensor = (kernel / max(1.0, norm)).to(theta.dtype)
        return result

    def refusal(self, geometry: ConvGeometry, spatial: Sequence[int], outputs: Sequence[int]) -> str | None:
        """Why the norm is not proved for images of this size, if it is not.

        Zero padding (and a transposed convolution, an adjoint) compresses the infinite convolution. Circular padding samples its
        spectrum if strides fit into the image and outputs are distinct modulo it.
        """
        if geometry.mode != "circular":
            return None
        for size, count, s in zip(spatial, outputs, geometry.stride, strict=True):
            if size % s or count * s > size:
                return (
                    f"with circular padding, images of {tuple(spatial)} must be multiples of the stride {geometry.stride}, and "
                    f"outputs ({tuple(outputs)}) must not go beyond one turn of the image. Use padding that keeps n/stride outputs."
                )
        return None

    def convolve(self, x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, geometry: ConvGeometry) -> torch.Tensor:
        """y = K∗x + b with the padding of :meth:`pads`."""
        pads = self.pads(geometry)
        padding = tuple(left for left, _ in pads)
        if geometry.mode != "zeros" or any(left != right for left, right in pads):  # torch's convolutions only pad evenly by zeros
            sides = [side for pair in reversed(pads) for side in pair]
            x = F.pad(x, sides, mode="constant" if geometry.mode == "zeros" else geometry.mode)
            padding = (0,) * geometry.axes
        convolution = _CONVOLUTIONS[geometry.axes]
        y: torch.Tensor = convolution(x, kernel, bias, geometry.stride, padding, geometry.dilation, geometry.groups)
        return y

    def refuse(self, why: str) -> ConfigurationError:
        """The error of :meth:`check`."""
        return ConfigurationError(f"constraint {self} can't serve this convolution: {why}")

    def check_padding(self, geometry: ConvGeometry) -> None:
        """Padding that copies pixels at the border lengthens images, so nothing bounds the norm by 1."""
        if geometry.mode not in ("zeros", "circular"):
            raise self.refuse(
                f"padding_mode={geometry.mode!r} copies border pixels, so the norm may exceed 1. Use 'zeros' or 'circular', or a "
                "constraint of the reshaped kernel (lipdp.parametrize.Bjorck(), the default)."
            )


@dataclass(frozen=True)
class CircularFFT(ConvParametrisation):
    """An orthogonal circular convolution: the Cayley transform of the kernel's matrix at every frequency of one image size.

    θ is an ordinary kernel; θ̂(ω) its transform on the n×n grid of the image; Ŵ(ω) = cayley(θ̂(ω)) is unitary, and the layer computes
    ŷ(ω) = Ŵ(ω)x̂(ω): exactly orthogonal. In space its kernel K covers the whole image.

    What is noised is W = √N·K with N = n² pixels, that is, Ŵ in the *unitary* Fourier basis. Its gradient is δ̂(ω)⊗x̂(ω)* at
    each frequency, so by Parseval ‖∂L/∂W‖² = Σ_ω‖δ̂(ω)‖²‖x̂(ω)‖² ≤ ‖δ‖²‖x‖²: Δ = G·X, reached by waves of one frequency. (In
    units of K that is √N·G·X, the rule of a stored kernel with m = N: the same noise.) The noise lives in N·out·in entries, more
    than any other constraint's.

    Attributes:
        size: the image's size, n or (height, width); the layer needs padding="same", padding_mode="circular" and stride 1.
    """

    size: int | tuple[int, ...]

    scaled: ClassVar[bool] = True
    note: ClassVar[str] = "orthogonal on this image size (circular, by FFT)"

    def check(self, geometry: ConvGeometry) -> None:
        """One image size, kept by circular padding."""
        if geometry.transposed or max(geometry.stride) > 1 or max(geometry.dilation) > 1:
            raise self.refuse("it has no stride, no dilation and no transposed form. Use AOC().")
        same = tuple(same_padding(k, 1) for k in geometry.kernel)
        if geometry.mode != "circular" or geometry.pads != same:
            raise self.refuse("it is a circular convolution: give the layer padding='same' and padding_mode='circular'.")
        if any(n < k for n, k in zip(self.window(geometry), geometry.kernel, strict=True)):
            raise self.refuse(f"images of size {self.size} are smaller than the kernel {geometry.kernel}.")

    def window(self, geometry: ConvGeometry) -> tuple[int, ...]:
        """The whole image."""
        sizes = (self.size,) * geometry.axes if isinstance(self.size, int) else tuple(self.size)
        if len(sizes) != geometry.axes or min(sizes) < 1:
            raise ConfigurationError(
                f"CircularFFT size must be one number or {geometry.axes} of them, at least 1, not {self.size!r}"
            )
        return sizes

    def pads(self, geometry: ConvGeometry) -> tuple[tuple[int, int], ...]:
        """What keeps the image's size."""
        return tuple(same_padding(n, 1) for n in self.window(geometry))

    def initial(self, geometry: ConvGeometry) -> torch.Tensor:
        """Small normal entries, and a random orthogonal matrix at the middle tap."""
        theta = torch.randn(geometry.groups * geometry.rows, geometry.columns, *geometry.kernel, dtype=torch.float64)
        theta *= 0.1 / math.sqrt(geometry.columns * math.prod(geometry.kernel))
        middle = tuple(left for left, _ in geometry.pads)
        for group in torch.split(theta, geometry.rows):
            drawn = torch.empty(geometry.rows, geometry.columns, dtype=torch.float64)
            group[(..., *middle)] += torch.nn.init.orthogonal_(drawn)  # type: ignore[index]
        return theta

    def kernel(self, theta: torch.Tensor, geometry: ConvGeometry) -> torch.Tensor:
        """Place θ around displacement 0, transform, Cayley, transform back."""
        window, axes = self.window(geometry), tuple(range(-geometry.axes, 0))
        room = [(n - k) for n, k in zip(window, geometry.kernel, strict=True)]
        placed = torch.nn.functional.pad(theta, [side for r in reversed(room) for side in (0, r)])
        placed = placed.roll([-left for left, _ in geometry.pads], axes)
        symbol = torch.fft.rfftn(placed, dim=axes)
        half = symbol.shape[2:]
        matrices = symbol.reshape(geometry.groups, geometry.rows, geometry.columns, -1).movedim(-1, 1)
        tall = geometry.rows >= geometry.columns
        unitary = cayley(matrices) if tall else cayley(matrices.mT).mT
        back = unitary.movedim(1, -1).reshape(*symbol.shape[:2], *half)
        kernel = torch.fft.irfftn(back, s=window, dim=axes).roll([left for left, _ in self.pads(geometry)], axes)
        result: torch.Tensor = kernel * math.sqrt(math.prod(window))
        return result

    def norm(self, kernel: torch.Tensor, geometry: ConvGeometry) -> float:
        """On one image size the norm is the largest of the frequencies' own: no grid to interpolate."""
        return conv_norm_circular(kernel, self.window(geometry), geometry.groups)

    def refusal(self, geometry: ConvGeometry, spatial: Sequence[int], outputs: Sequence[int]) -> str | None:
        """Its own image size only."""
        if tuple(spatial) != self.window(geometry):
            return f"CircularFFT({self.size}) is made for images of {self.window(geometry)}, and gets {tuple(spatial)}."
        return None

    def convolve(self, x: torch.Tensor, kernel: torch.Tensor, bias: torch.Tensor | None, geometry: ConvGeometry) -> torch.Tensor:
        """y(p) = Σ_d K_d·x(p+d) is conj(K̂)·x̂ at every frequency."""
        window, axes = self.window(geometry), tuple(range(-geometry.axes, 0))
        if tuple(x.shape[-geometry.axes :]) != window:
            raise DataError(
                f"a layer with CircularFFT({self.size}) needs images of {window}, not {tuple(x.shape[-geometry.axes :])}"
            )
        if x.dtype not in (torch.float32, torch.float64):
            return super().convolve(x, kernel, bias, geometry)  # torch has no transform of less
        moved = kernel.roll([-left for left, _ in self.pads(geometry)], axes)
        symbol = torch.fft.rfftn(moved, dim=axes)
        spectrum = torch.fft.rfftn(x, dim=axes)
        half, batch = spectrum.shape[-geometry.axes :], x.shape[0]
        left = symbol.reshape(geometry.groups, geometry.rows, geometry.columns, -1).permute(0, 3, 1, 2).conj()
        right = spectrum.reshape(batch, geometry.groups, geometry.columns, -1).permute(1, 3, 2, 0)
        product = (left @ right).permute(3, 0, 2, 1).reshape(batch, -1, *half)
        y: torch.Tensor = torch.fft.irfftn(product, s=window, dim=axes)
        return y if bias is None else y + bias.reshape(-1, *[1] * geometry.axes)
