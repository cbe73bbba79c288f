"""Orthogonal convolutions as products of projectors: block convolutions (BCOP) and their strided form (AOC)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from lipdp.parametrize.convolution import ConvGeometry, ConvParametrisation, compose
from lipdp.parametrize.maps import Cayley, Parametrisation

__all__ = ["AOC", "BCOP"]


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
    """Block convolution orthogonal parametrisation: :class:`AOC` at stride 1, the form it is known by."""

    def check(self, geometry: ConvGeometry) -> None:
        """Stride 1 only."""
        super().check(geometry)
        if max(geometry.stride) > 1:
            raise self.refuse("it has no strides. Use AOC(), or lipdp.nn.InvertibleDownsampling in front of it.")
