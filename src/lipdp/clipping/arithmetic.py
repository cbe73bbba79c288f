"""How coarsely numbers are rounded, and how to keep that from making a norm too small.

Four things would let a norm be under-reported without a sound: a half-precision product (autocast stays active inside a
training step, also around norms), TF32 products on a GPU, squares that underflow, and long sums, which are off by up to γ_n for n
terms. All are dealt with here. Squared norms are float64, and never too small.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch

from lipdp._numerics import HALF, gamma, wide
from lipdp.clipping import kernels

_TF32 = 2.0**-11
_HALF, _dtype = frozenset(HALF), operator.attrgetter("dtype")
# Squares that are added up in float32.
_SHORT = 1024


def accumulating(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Half-precision factors promoted to float32: norms and sums are never computed in half precision."""
    return tensors if _HALF.isdisjoint(map(_dtype, tensors)) else tuple(t.float() if t.dtype in HALF else t for t in tensors)


def input_roundoff(tensor: torch.Tensor, *, convolution: bool = False) -> float:
    """Rounding of a product's *inputs*: 2⁻¹¹ where the GPU may use TF32, else none."""
    if tensor.device.type != "cuda" or tensor.dtype == torch.float64:
        return 0.0
    allowed = torch.backends.cudnn.allow_tf32 if convolution else torch.backends.cuda.matmul.allow_tf32
    return _TF32 if allowed else 0.0


def matmuls(device: torch.device, *, tf32: bool) -> AbstractContextManager[None]:
    """Matrix products of norms: in float32 proper; or in TF32, where that is exact (half-precision numbers fit) or counted."""
    return _matmuls(tf32) if device.type == "cuda" else nullcontext()


@contextmanager
def _matmuls(tf32: bool) -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def squared(tensor: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    """Σ t² over ``dims``, in float64: at least what it is, with the most that rounding and underflow can have lost.

    A square below the smallest normal number may come out as 0: each term loses at most that number. It only matters where
    the result is multiplied by something huge, and there it does: cotangents of 1e-23 times inputs of 1e19.
    """
    if len(dims) == tensor.ndim - 1 and 0 not in dims and tensor.is_contiguous():
        tensor, dims = tensor.flatten(1), (1,)
        if tensor.numel() and kernels.available(tensor):
            found, length = kernels.row_squares(tensor)
            return found.to(wide(tensor)) * (1 + gamma(length, tensor.dtype)) + _lost(tensor, dims)
    lost = _lost(tensor, dims)
    *outer, last = dims
    length = tensor.shape[last]
    if length > _SHORT and last == tensor.ndim - 1:
        # Short sums in float32, which vector_norm adds up without writing a copy; then in float64.
        whole = length // _SHORT * _SHORT
        parts = torch.linalg.vector_norm(tensor[..., :whole].reshape(*tensor.shape[:-1], -1, _SHORT), dim=-1)
        rest = torch.linalg.vector_norm(tensor[..., whole:], dim=-1, keepdim=True)
        norms, dims, length = torch.cat([parts, rest], -1), (*outer, last), _SHORT
    elif outer:
        norms, dims = torch.linalg.vector_norm(tensor, dim=last, keepdim=True), (*outer, last)
    else:
        norms, dims = torch.linalg.vector_norm(tensor, dim=last), ()
    # A norm as it comes is off by γ_(n+3)/2, its square by γ_(n+4).
    squares = norms.to(wide(norms)).square_()
    return (squares.sum(dims) if dims else squares).mul_(1 + gamma(length + 8, tensor.dtype)).add_(lost)


def _lost(tensor: torch.Tensor, dims: tuple[int, ...]) -> float:
    return math.prod(map(tensor.shape.__getitem__, dims)) * torch.finfo(tensor.dtype).tiny


@dataclass(frozen=True)
class Squares:
    """‖t_i‖² of a tensor (B, T, p) by example and by position, and its sums: read when asked for, once for all who need it."""

    tensor: torch.Tensor
    planes: torch.Tensor | None = None  # the same numbers as (B, p, T), where that is how they lie in memory

    @cached_property
    def _at_once(self) -> kernels.CotangentSums | None:
        planes = self.planes
        if planes is None or not planes.is_contiguous() or not planes.numel() or planes.shape[1] > kernels.MOST_OUTPUTS:
            return None
        return kernels.cotangent_sums(planes) if kernels.available(planes) else None

    @cached_property
    def positions(self) -> torch.Tensor:
        """Σ over the last dimension (B, T)."""
        return squared(accumulating(self.tensor)[0], (2,))

    @cached_property
    def total(self) -> torch.Tensor:
        """Σ over all but the examples (B,)."""
        if self._at_once is not None:
            return self._rounded_up(self._at_once.total)
        if "positions" in vars(self):
            return self.positions.sum(1)
        return squared(accumulating(self.tensor)[0], (1, 2))

    @cached_property
    def largest(self) -> torch.Tensor:
        """The largest position's (B,)."""
        return self.positions.amax(1) if self._at_once is None else self._rounded_up(self._at_once.largest)

    def _rounded_up(self, found: torch.Tensor) -> torch.Tensor:
        assert self._at_once is not None
        return found.to(wide(found)) * (1 + gamma(self._at_once.roundings, torch.float32))

    @cached_property
    def sums(self) -> torch.Tensor:
        """Σ over the positions (B, p), of the numbers themselves."""
        return accumulating(self.tensor)[0].sum(1) if self._at_once is None else self._at_once.sums
