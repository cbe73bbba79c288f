"""Parametrisations of whole convolutions: θ of any shape ↦ a kernel W whose convolution has operator norm at most 1.

A matrix constraint (Björck, Cayley …) serves a convolution through its reshaped kernel: K = Θ/√m has norm ≤ ‖Θ‖₂ ≤ 1, but even an
orthogonal Θ gives a convolution that loses most of the gradient in some directions ("RKO"). The maps here give kernels whose
*convolution* is orthogonal. As for matrices (:mod:`lipdp.parametrize.maps`) autograd stops at W, and the noised gradient is pulled
back. They are transforms of circular convolutions, and products of projectors: block convolutions (BCOP) and their strided form
(AOC).
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch.nn import functional as F

from lipdp._numerics import unit_roundoff
from lipdp.bounds.operator_norm import conv_norm_circular, conv_norm_fft, conv_norm_gram, multiplicity, same_padding
from lipdp.errors import ConfigurationError, DataError
from lipdp.parametrize.maps import Cayley, Parametrisation, cayley

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
        """m: how often the window reads one input element at most (:func:`lipdp.bounds.operator_norm.multiplicity`)."""
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


@dataclass(frozen=True)
class AOC(ConvParametrisation):
    """Adaptive orthogonal convolution: W = R ∗ F_t ∗ … ∗ F_1, for any stride up to the kernel's size.

    Each F_i has two taps along one axis, P and I − P with P = UUᵀ an orthogonal projector. Its symbol P + e^{−iω}(I − P) is
    unitary at every frequency ω, so F_i is an orthogonal convolution, and so is the product. R takes non-overlapping s×s blocks
    (stride s) through one matrix with orthonormal rows or columns: an orthogonal map again. k − s factors for each axis and R give
    a kernel of size k. Groups, dilation (at stride 1) and transposed convolutions (adjoints) follow.

    Under circular padding W is orthogonal exactly: an isometry where out ≥ in·s², its adjoint an isometry (gradients keep
    their norm) where out ≤ in·s². Under zero padding it is a compression of such a map: norm ≤ 1, smaller at the border.

    θ holds, for each group, the U's and R's matrix one after the other, each through ``matrix``. Δ = √m·G·X (a stored kernel).

    Attributes:
        matrix: the map that gives U and R; exact ones (Cayley, MatrixExp, Householder) make W exactly orthogonal.
    """

    matrix: Parametrisation = field(default_factory=Cayley)

    def check(self, geometry: ConvGeometry) -> None:
        """Any stride up to the kernel; dilation at stride 1."""
        self.check_padding(geometry)
        if any(k < s for k, s in zip(geometry.kernel, geometry.stride, strict=True)):
            raise self.refuse(
                f"a stride {geometry.stride} above the kernel's size {geometry.kernel} skips pixels. Use a larger kernel or a "
                "smaller stride."
            )
        if max(geometry.dilation) > 1 and max(geometry.stride) > 1:
            raise self.refuse("dilation and stride together leave gaps that no orthogonal kernel can fill. Use one of the two.")

    def initial(self, geometry: ConvGeometry) -> torch.Tensor:
        """Random projectors and a random orthogonal R."""
        parts = []
        for rows, columns in self._parts(geometry):
            drawn = torch.empty(geometry.groups, rows, columns, dtype=torch.float64)
            for matrix in drawn:
                torch.nn.init.orthogonal_(matrix)
            parts.append(self.matrix.initial(drawn).reshape(geometry.groups, -1))
        return torch.cat(parts, dim=1)

    def kernel(self, theta: torch.Tensor, geometry: ConvGeometry) -> torch.Tensor:
        """The product of the factors, from the input's side."""
        sizes = [rows * columns for rows, columns in self._parts(geometry)]
        matrices = [
            self.matrix.frame(part.reshape(geometry.groups, rows, columns))
            for part, (rows, columns) in zip(torch.split(theta, sizes, dim=1), self._parts(geometry), strict=True)
        ]
        middle = self._middle(geometry)
        eye = torch.eye(middle, dtype=theta.dtype, device=theta.device)
        ones = (1,) * geometry.axes
        first = eye[:, : geometry.columns].reshape(1, middle, geometry.columns, *ones)
        result = first.expand(geometry.groups, *first.shape[1:])
        frames = iter(matrices)
        for axis, rank in self._factors(geometry):
            frame = next(frames) if rank else theta.new_zeros(geometry.groups, middle, 0)
            projector = frame @ frame.transpose(-1, -2)
            pair = torch.stack((projector, eye - projector), dim=-1)
            window = tuple(2 if a == axis else 1 for a in range(geometry.axes))
            result = compose(pair.reshape(geometry.groups, middle, middle, *window), result)
        blocks = matrices[-1].reshape(geometry.groups, geometry.rows, middle, *geometry.stride)
        result = compose(blocks, result)
        return result.reshape(geometry.groups * geometry.rows, geometry.columns, *geometry.kernel)

    def _middle(self, geometry: ConvGeometry) -> int:
        """Channels between the factors and R: as many as keep both of them orthogonal in the same direction."""
        return max(geometry.columns, geometry.rows // math.prod(geometry.stride))

    def _factors(self, geometry: ConvGeometry) -> Iterator[tuple[int, int]]:
        """(axis, rank of P) of each factor. Ranks alternate around half the channels, so that odd numbers stay centred."""
        middle = self._middle(geometry)
        counts = [k - s for k, s in zip(geometry.kernel, geometry.stride, strict=True)]
        for turn in range(max(counts)):
            for axis, count in enumerate(counts):
                if turn < count:
                    yield axis, (middle + turn % 2) // 2

    def _parts(self, geometry: ConvGeometry) -> list[tuple[int, int]]:
        """Shapes of the matrices in θ: the U's (none for a projector of rank 0), then R."""
        middle = self._middle(geometry)
        frames = [(middle, rank) for _, rank in self._factors(geometry) if rank]
        return [*frames, (geometry.rows, middle * math.prod(geometry.stride))]


@dataclass(frozen=True)
class BCOP(AOC):
    """Block convolution orthogonal parametrisation: :class:`AOC` at stride 1, the form it is known by.

    Attributes:
        matrix: the map that gives U and R, as in :class:`AOC`.
    """

    def check(self, geometry: ConvGeometry) -> None:
        """Stride 1 only."""
        super().check(geometry)
        if max(geometry.stride) > 1:
            raise self.refuse("it has no strides. Use AOC(), or lipdp.nn.InvertibleDownsampling in front of it.")


@dataclass(frozen=True)
class SOC(ConvParametrisation):
    """Skew orthogonal convolution: W = Σ_{j≤t} L^{∗j}/j! with the skew-symmetric kernel L_a = M_a − M_{−a}ᵀ.

    The symbol of L is skew-Hermitian at every frequency, so exp(L) is an orthogonal convolution. L is divided by its certified norm
    where that exceeds 1. The series is cut after t terms: a singular value becomes |Σ_{j≤t}(iλ)ʲ/j!| with |λ| ≤ 1, which lies in
    [0.97, 1] for t=3, [0.993, 1] for t=4, [1, 1.001] for t=5 (and W is divided by its certified norm where that exceeds 1).

    The terms are composed into *one* kernel, of size t·(k−1)+1 along each axis (9 for k=3 and t=4): the layer is one
    convolution with one zero padding, and what is noised is that kernel, so Δ = √m·G·X counts its window. That is the price of
    this form; :class:`~lipdp.parametrize.AOC` has the layer's own window. Where in ≠ out, channels of the larger number are cut.

    Attributes:
        terms: t, at least 3.
    """

    terms: int = 4

    note: ClassVar[str] = "orthogonal up to a truncated series"

    def __post_init__(self) -> None:
        if self.terms < 3:
            raise ConfigurationError(f"SOC terms must be 3 or more, not {self.terms}: a shorter series is far from orthogonal")

    def check(self, geometry: ConvGeometry) -> None:
        """Odd windows, stride 1."""
        self.check_padding(geometry)
        if geometry.transposed or max(geometry.stride) > 1:
            raise self.refuse("it has no strides and no transposed form. Use AOC(), or InvertibleDownsampling in front of it.")
        if not all(k % 2 for k in geometry.kernel):
            raise self.refuse(f"a skew-symmetric kernel has a middle tap: kernel_size must be odd, not {geometry.kernel}.")

    def window(self, geometry: ConvGeometry) -> tuple[int, ...]:
        """t·(k−1)+1 along each axis."""
        return tuple(self.terms * (k - 1) + 1 for k in geometry.kernel)

    def pads(self, geometry: ConvGeometry) -> tuple[tuple[int, int], ...]:
        """The window grows evenly on both sides."""
        grown = zip(geometry.pads, geometry.kernel, self.window(geometry), geometry.dilation, strict=True)
        return tuple((left + (w - k) // 2 * d, right + (w - k) // 2 * d) for (left, right), k, w, d in grown)

    def initial(self, geometry: ConvGeometry) -> torch.Tensor:
        """Normal entries that give L a norm of about 1."""
        channels = max(geometry.rows, geometry.columns)
        theta = torch.randn(geometry.groups, channels, channels, *geometry.kernel, dtype=torch.float64)
        return theta * (0.5 / math.sqrt(channels * math.prod(geometry.kernel)))

    def kernel(self, theta: torch.Tensor, geometry: ConvGeometry) -> torch.Tensor:
        """The series, term by term."""
        taps = tuple(range(3, theta.ndim))
        skew = theta - theta.transpose(1, 2).flip(taps)
        channels = theta.shape[1]
        flat = skew.detach().reshape(geometry.groups * channels, channels, *geometry.kernel)
        # A looser bound than could be had turns the layer a little less at most; it is asked for at every step.
        grid = tuple(1 if k == 1 else 3 * k for k in geometry.kernel)
        norm = conv_norm_fft(flat, grid, geometry.groups, squarings=4)
        if not math.isfinite(norm):
            raise ConfigurationError(f"{self}: its parameter is not finite: training has diverged. Lower the learning rate.")
        skew = skew / max(1.0, norm)
        eye = torch.eye(channels, dtype=theta.dtype, device=theta.device)
        first = eye.reshape(1, channels, channels, *[1] * geometry.axes)
        term = first.expand(geometry.groups, *first.shape[1:])
        window = self.window(geometry)
        total = _centred(term, window)
        for j in range(1, self.terms + 1):
            term = compose(skew, term) / j
            total = total + _centred(term, window)
        kept = total[:, : geometry.rows, : geometry.columns]
        return kept.reshape(geometry.groups * geometry.rows, geometry.columns, *window)

    def norm(self, kernel: torch.Tensor, geometry: ConvGeometry) -> float:
        """max |Σ_{j≤t}(iλ)ʲ/j!| over |λ| ≤ 1, for K̂ = p(L̂) with L̂ skew-Hermitian of norm ≤ 1; and the rounding of the series.

        In the norm Σ_a‖·_a‖_F, which bounds sup‖·̂(ω)‖ and is submultiplicative, L has at most R = √(taps·channels). Each product is
        off by γ_n times its factors' norms, n = channels·taps, so the terms by j·γ_n·Rʲ/j!.
        """
        if not bool(torch.isfinite(kernel).all()):
            return math.inf
        size = max(geometry.rows, geometry.columns) * math.prod(geometry.kernel)
        gamma = 4 * (size + self.terms) * unit_roundoff(torch.float64)
        radius = math.sqrt(size)
        rounding = sum(gamma * (j + 1) * radius**j / math.factorial(j) for j in range(self.terms + 1))
        return _series_norm(self.terms) + rounding


@lru_cache
def _series_norm(terms: int) -> float:
    """An upper bound on |p(iλ)|, p(z) = Σ_{j≤t} zʲ/j!, over |λ| ≤ 1.

    |p(iλ)|² is a polynomial q in s = λ²; between the points of a grid of step h it rises by at most ½h·Σ_j j|q_j|.
    """
    real = [(-1) ** (j // 2) / math.factorial(j) if j % 2 == 0 else 0.0 for j in range(terms + 1)]
    imaginary = [(-1) ** (j // 2) / math.factorial(j) if j % 2 else 0.0 for j in range(terms + 1)]
    squares = [
        sum(part[i] * part[n - i] for part in (real, imaginary) for i in range(n + 1) if max(i, n - i) <= terms)
        for n in range(2 * terms + 1)
    ]
    coefficients = squares[::2]
    steps = 2000
    largest = max(sum(c * (i / steps) ** j for j, c in enumerate(coefficients)) for i in range(steps + 1))
    slope = sum(j * abs(c) for j, c in enumerate(coefficients))
    return math.sqrt(largest + slope / (2 * steps)) * (1 + 1e-14)


def _centred(kernel: torch.Tensor, window: tuple[int, ...]) -> torch.Tensor:
    """``kernel`` in the middle of a larger window."""
    sides = [(w - k) // 2 for k, w in zip(kernel.shape[3:], window, strict=True)]
    return torch.nn.functional.pad(kernel, [side for s in reversed(sides) for side in (s, s)])
