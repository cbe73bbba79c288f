"""Sums of outer products: the two forms of their norm, which of them is cheaper, and why the Gram form needs a margin.

With δ (T, p) and x (T, d) of one example, g = δᵀx, and

* *materialise*: ‖δᵀx‖², 2·T·p·d multiplications and p·d numbers held;
* *Gram*: Σ_{t,t'} (δ_t·δ_t')(x_t·x_t'), 2·T²·(p+d) multiplications and 2·T² numbers held.

The Gram form adds up T² products of both signs; in float32 the result can be far below the true one where they cancel, even
negative. Its margin makes up for that. It grows with the sizes of the terms and with the lengths of sums in float32: so products
over many features (the words of a vocabulary) are added up in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from lipdp._numerics import HALF, gamma, wide
from lipdp._sums import contract_apart
from lipdp.clipping import kernels
from lipdp.clipping.arithmetic import Squares, accumulating, input_roundoff, matmuls, squared
from lipdp.clipping.contribution import Contribution, Form, runs, zeroed
from lipdp.clipping.kernels import quickest

# Entries that a chunk of materialised per-example gradients, or of Gram matrices, may hold: caps the memory of computing norms.
_CHUNK = 2**24
# What moving one number costs, in multiplications: arithmetic is that much faster than memory.
_TRAFFIC = 16
# Features that a kernel on a GPU adds up as one sum, at most.
_FEATURES = 8192
# Features whose products are added up at a time elsewhere; positions of a tile on a processor, of which half are computed.
_BLOCK = 512
_TILE = 32


def blocked(features: int) -> int:
    """Through how many roundings, at most, a product over so many features goes: those of a block, and one for each block."""
    return min(features, _BLOCK) + -(-features // _BLOCK)


def products(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a·bᵀ, (B, S, n) and (B, T, n) → (B, S, T), in blocks of features."""
    total = torch.bmm(a[..., :_BLOCK], b[..., :_BLOCK].transpose(1, 2))
    for start in range(_BLOCK, a.shape[2], _BLOCK):
        total += torch.bmm(a[..., start : start + _BLOCK], b[..., start : start + _BLOCK].transpose(1, 2))
    return total


@dataclass(frozen=True)
class OuterSum(Contribution):
    """``g_i = Σ_t δ_it ⊗ x_it``: dense layers, and convolutions by their patches. δ: (B, T, p), x: (B, T, d).

    Attributes:
        cotangents: δ, of the layer's outputs.
        inputs: x, what went into the layer.
        shape: of one g_i: p·d numbers in the parameter's shape.
        convolution: whether the weighted sum will be computed by a convolution (which may use TF32 on its own).
        squares: of the cotangents, if others need them too.
    """

    cotangents: torch.Tensor
    inputs: torch.Tensor
    shape: tuple[int, ...]
    convolution: bool = False
    squares: Squares | None = None

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.cotangents.shape[0]

    @property
    def costs(self) -> tuple[float, float]:
        """Modelled cost of (materialise, Gram) per example: multiplications, and numbers written and read again."""
        t, p, d = self.cotangents.shape[1], self.cotangents.shape[2], self.inputs.shape[2]
        return 2.0 * t * p * d + _TRAFFIC * 2.0 * p * d, 2.0 * t * t * (p + d) + _TRAFFIC * 4.0 * t * t

    @property
    def prefers_gram(self) -> bool:
        """Whether the cost model finds the Gram form cheaper; materialising is more exact and wins a tie."""
        materialise, gram = self.costs
        return gram < materialise

    def uses_gram(self, form: Form) -> bool:
        """Whether this form is the Gram form here; "measure": timed once."""
        if form != "measure":
            return form == "gram" or (form == "auto" and self.prefers_gram)
        t, p, d = self.cotangents.shape[1], self.cotangents.shape[2], self.inputs.shape[2]
        few = OuterSum(self.cotangents[:64], self.inputs[:64], self.shape, self.convolution)
        choice = quickest(
            ("outer", str(self.cotangents.device), str(self.cotangents.dtype), t, p, d),
            {"gram": lambda: few.squared_norms("gram"), "materialise": lambda: few.squared_norms("materialise")},
            "gram" if self.prefers_gram else "materialise",
            self.cotangents.device,
        )
        return choice == "gram"

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """‖δ‖²‖x‖² for one position; else the Gram form or the materialised one, the cheaper."""
        if self.cotangents.shape[1] == 1:
            coarse = input_roundoff(self.cotangents, convolution=self.convolution)
            return (self._of_cotangents.total * self._of_inputs.total) * (1 + 4 * coarse) ** 2
        squares, rounding = self.gram() if self.uses_gram(form) else (self._materialised(), self.rounding())
        return (squares.sqrt() + rounding).square()

    def measured(self, form: Form = "auto") -> torch.Tensor:
        """‖g_i‖² in one of the forms, without :meth:`rounding`, by torch's own operations."""
        return self._gram_by_torch() if self.uses_gram(form) else self._materialised()

    def gram(self) -> tuple[torch.Tensor, torch.Tensor]:
        """At least ‖g_i‖² of the exact g_i, by the Gram form; and :meth:`rounding`. On a GPU in one reading.

        Not where positions are too many for a launch; nor where features are many (the words of a vocabulary): they are one sum
        there, whose margin would be seen.
        """
        dtype, positions, p, d = self.cotangents.dtype, self.cotangents.shape[1], self.cotangents.shape[2], self.inputs.shape[2]
        few = positions <= kernels.MOST_POSITIONS and max(p, d) <= _FEATURES
        if not few or not kernels.available(self.cotangents, self.inputs):
            return self._gram_by_torch(), self.rounding()
        found = kernels.gram_sums(self.cotangents, self.inputs, "tf32" if self._are_half else "tf32x3")
        # Tensor cores round more, see kernel_margin.
        margin = kernel_margin(p + d, dtype) + gamma(kernels.TILE_ROUNDINGS, dtype)
        scale, of_delta, of_x = (part * (1 + margin) for part in (found.scale, found.of_delta, found.of_x))
        tiny = float(torch.finfo(torch.float32).tiny) * positions
        lost = tiny * (p * of_x + d * of_delta + 1)
        squares = torch.where(found.products < 0, 0.0, found.products) + margin * scale.square() + lost  # NaN stays NaN
        coarse = input_roundoff(self.cotangents, convolution=self.convolution)
        return squares, sum_rounding(of_delta + tiny * p, of_x + tiny * d, positions, dtype, coarse)

    def _gram_by_torch(self) -> torch.Tensor:
        delta, x = accumulating(self.cotangents, self.inputs)
        with matmuls(delta.device, tf32=False):  # tensor cores would round more than the margin says
            return _gram(delta, x, self._of_cotangents.positions, self._of_inputs.positions)

    def _materialised(self) -> torch.Tensor:
        delta, x = accumulating(self.cotangents, self.inputs)
        # Where the sum itself may be computed in TF32, so may its norm: the rounding counts both.
        allowed = input_roundoff(self.cotangents, convolution=self.convolution) > 0
        with matmuls(delta.device, tf32=self._are_half or allowed):
            return _materialised(delta, x)

    @property
    def _are_half(self) -> bool:
        """Whether TF32 is exact: half-precision numbers fit."""
        return self.cotangents.dtype in HALF and self.inputs.dtype in HALF

    @cached_property
    def _of_cotangents(self) -> Squares:
        return Squares(self.cotangents) if self.squares is None else self.squares

    @cached_property
    def _of_inputs(self) -> Squares:
        return Squares(self.inputs)

    def materialise(self) -> torch.Tensor:
        """All the outer products, summed over positions."""
        delta, x = accumulating(self.cotangents, self.inputs)
        return torch.bmm(delta.transpose(1, 2), x).reshape(-1, *self.shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Matrix products over positions; the smaller factor is weighted."""
        return contract_apart(self.cotangents, self.inputs, weights).reshape(self.shape)

    def rounding(self) -> torch.Tensor:
        """See :func:`sum_rounding`."""
        coarse = input_roundoff(self.cotangents, convolution=self.convolution)
        positions = self.cotangents.shape[1]
        return sum_rounding(self._of_cotangents.total, self._of_inputs.total, positions, self.cotangents.dtype, coarse)

    def without(self, dropped: torch.Tensor) -> OuterSum:
        """Zeros in both factors."""
        cotangents, inputs = zeroed(self.cotangents, dropped), zeroed(self.inputs, dropped)
        return OuterSum(cotangents, inputs, self.shape, self.convolution)

    def merged(self, copies: int) -> OuterSum:
        """A sum over the positions of all copies."""
        return OuterSum(runs(self.cotangents, copies), runs(self.inputs, copies), self.shape, self.convolution)


def kernel_margin(terms: int, dtype: torch.dtype) -> float:
    """Tensor cores cut off instead of rounding, at least once for every eight terms, and three products stand for one."""
    return 4 * gamma(terms + 8, dtype)


def sum_margin(positions: int, dtype: torch.dtype, device: torch.device) -> float:
    """2·γ_T: what T-term sums in two orders can differ by, of Σ_t‖δ_t‖‖x_t‖ ≤ ‖δ‖_F‖x‖_F; on a GPU tensor cores release one."""
    once = gamma(positions + 1, dtype)
    return once + (kernel_margin(positions, dtype) if device.type == "cuda" else once)


def sum_rounding(of_delta: torch.Tensor, of_x: torch.Tensor, positions: int, dtype: torch.dtype, coarse: float) -> torch.Tensor:
    """2·γ_T·‖δ‖_F‖x‖_F for T-term sums, as measured and as released; with TF32 also 2·4·2⁻¹¹·‖δ‖_F‖x‖_F. All (B,), from squares.

    On a GPU the released one has tensor cores' rounding (:func:`sum_margin`).


    Factors cut off to TF32, (1+e)δ_t ⊗ (1+e')x_t with |e|, |e'| ≤ 2⁻¹⁰, are off by Σ_t(e+e')δ_t⊗x_t, at most 2·2⁻¹⁰·‖δ‖_F‖x‖_F.
    """
    return (sum_margin(positions, dtype, of_delta.device) + 8 * coarse) * (of_delta * of_x).sqrt()


def _materialised(delta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = max(1, _CHUNK // max(1, delta.shape[2] * x.shape[2]))
    parts = [squared(torch.bmm(delta[i : i + rows].transpose(1, 2), x[i : i + rows]), (1, 2)) for i in range(0, len(delta), rows)]
    return torch.cat(parts) if parts else delta.new_zeros(0, dtype=wide(delta))


def _gram(delta: torch.Tensor, x: torch.Tensor, of_delta: torch.Tensor, of_x: torch.Tensor) -> torch.Tensor:
    """In tiles of examples and of positions; with the margin, and what products can lose by underflow.

    Both matrices are symmetric: of a tile's rows, what stands left of the diagonal is not computed, and what stands right of it
    counts twice.
    The margin is κ·(Σ_t‖δ_t‖‖x_t‖)²: products of p and of d terms, then sums of T of their products, each off by γ_n of the sizes
    at most for n roundings; then in float64.
    """
    batch, positions = delta.shape[:2]
    rows = max(1, _CHUNK // max(1, positions * positions))
    side = max(1, min(_TILE if delta.device.type == "cpu" else positions, _CHUNK // max(1, positions)))
    total = delta.new_zeros(batch, dtype=wide(delta))
    for i in range(0, batch, rows):
        ours, theirs, sums = delta[i : i + rows], x[i : i + rows], total[i : i + rows]
        for t in range(0, positions, side):
            tile = products(ours[:, t : t + side], ours[:, t:]).mul_(products(theirs[:, t : t + side], theirs[:, t:]))
            sums += tile[..., :side].sum(2).sum(1, dtype=total.dtype)
            if t + side < positions:
                sums += 2 * tile[..., side:].sum(2).sum(1, dtype=total.dtype)
    scale = (of_delta.sqrt() * of_x.sqrt()).sum(1)
    margin = gamma(blocked(delta.shape[2]) + blocked(x.shape[2]) + positions + 8, delta.dtype)
    tiny = float(torch.finfo(delta.dtype).tiny) * positions
    lost = tiny * (delta.shape[2] * of_x.sum(1) + x.shape[2] * of_delta.sum(1))
    return total.clamp_min(0) + margin * scale.square() + lost
