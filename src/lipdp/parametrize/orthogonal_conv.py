"""Orthogonal convolutions as products of projectors: block convolutions (BCOP) and their strided form (AOC)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import ClassVar

import torch

from lipdp._numerics import unit_roundoff
from lipdp.bounds.operator_norm import conv_norm_fft
from lipdp.errors import ConfigurationError
from lipdp.parametrize.convolution import ConvGeometry, ConvParametrisation, compose
from lipdp.parametrize.maps import Cayley, Parametrisation

__all__ = ["AOC", "BCOP", "SOC"]


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
