"""Orthogonal convolutions on one image size, by the Fourier transform of the whole image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from lipdp.bounds.fourier import conv_norm_circular
from lipdp.bounds.windows import same_padding
from lipdp.errors import ConfigurationError, DataError
from lipdp.parametrize.convolution import ConvGeometry, ConvParametrisation
from lipdp.parametrize.maps import cayley

__all__ = ["CircularFFT"]


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
