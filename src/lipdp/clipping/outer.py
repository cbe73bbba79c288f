"""Sums of outer products: the two forms of their norm, which of them is cheaper, and why the Gram form needs a margin.

With δ (T, p) and x (T, d) of one example, g = δᵀx, and

* *materialise*: ‖δᵀx‖², 2·T·p·d multiplications and p·d numbers held;
* *Gram*: Σ_{t,t'} (δ_t·δ_t')(x_t·x_t'), 2·T²·(p+d) multiplications and 2·T² numbers held.

The Gram form adds up T² products of both signs; in float32 the result can be far below the true one where they cancel, even
negative. Its margin makes up for that.

Several uses of one parameter are one contribution, cross terms included (:func:`combine`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import torch

from lipdp._numerics import HALF, gamma, wide
from lipdp._sums import contract_apart
from lipdp.clipping import kernels
from lipdp.clipping.arithmetic import Squares, accumulating, input_roundoff, matmuls, squared
from lipdp.clipping.contribution import Contribution, Dense, Form, PositionSum, Scatter, runs, zeroed
from lipdp.clipping.kernels import quickest

__all__ = ["Disjoint", "OuterSum", "Rows", "combine", "gram_margin", "kernel_margin", "sum_rounding"]


# Entries that a chunk of materialised per-example gradients, or of Gram matrices, may hold: caps the memory of computing norms.
_CHUNK = 2**24
# What moving one number costs, in multiplications: arithmetic is that much faster than memory.
_TRAFFIC = 16


def gram_margin(features: int, positions: int, dtype: torch.dtype) -> float:
    """κ of the Gram form's rounding: it is added as κ·(Σ_t‖δ_t‖‖x_t‖)² to the squared norm.

    Products of p and of d terms, then sums of T of their products, each off by γ_n of the sizes at most; then in float64.
    """
    return gamma(features + positions + 8, dtype)


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

    def _uses_gram(self, form: Form) -> bool:
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
        short = self.cotangents.shape[1] <= kernels.MOST_POSITIONS
        if short and kernels.available(self.cotangents, self.inputs) and self._uses_gram(form):
            return self._by_kernel()
        return (self.measured(form).sqrt() + self.rounding()).square()

    def _by_kernel(self) -> torch.Tensor:
        """The Gram form in one reading; tensor cores round more, see :func:`kernel_margin`."""
        dtype, positions, p, d = self.cotangents.dtype, self.cotangents.shape[1], self.cotangents.shape[2], self.inputs.shape[2]
        exact = dtype in HALF and self.inputs.dtype in HALF
        found = kernels.gram_sums(self.cotangents, self.inputs, "tf32" if exact else "tf32x3")
        up = 1 + kernel_margin(p + d, dtype) + gamma(kernels.TILE_ROUNDINGS, dtype)
        scale, of_delta, of_x = found.scale * up, found.of_delta * up, found.of_x * up
        margin = kernel_margin(p + d, dtype) + gamma(kernels.TILE_ROUNDINGS, dtype)
        tiny = float(torch.finfo(torch.float32).tiny) * positions
        lost = tiny * (p * of_x + d * of_delta + 1)
        squares = torch.where(found.products < 0, 0.0, found.products) + margin * scale.square() + lost  # NaN stays NaN
        coarse = input_roundoff(self.cotangents, convolution=self.convolution)
        rounding = sum_rounding(of_delta + tiny * p, of_x + tiny * d, positions, dtype, coarse)
        return (squares.sqrt() + rounding).square()

    def measured(self, form: Form = "auto") -> torch.Tensor:
        """‖g_i‖² in one of the forms, without :meth:`rounding`."""
        delta, x = accumulating(self.cotangents, self.inputs)
        exact = self.cotangents.dtype in HALF and self.inputs.dtype in HALF
        if self._uses_gram(form):
            with matmuls(delta.device, tf32=exact):
                return _gram(delta, x, self._of_cotangents.positions, self._of_inputs.positions)
        # Where the sum itself may be computed in TF32, so may its norm: the rounding counts both.
        allowed = input_roundoff(self.cotangents, convolution=self.convolution) > 0
        with matmuls(delta.device, tf32=exact or allowed):
            return _materialised(delta, x)

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
    """In tiles of examples and, for long sequences, of positions; with the margin, and what products can lose by underflow."""
    batch, positions = delta.shape[:2]
    rows = max(1, _CHUNK // max(1, positions * positions))
    columns = max(1, min(positions, _CHUNK // max(1, positions)))
    products = delta.new_zeros(batch, dtype=wide(delta))
    for i in range(0, batch, rows):
        ours, theirs = delta[i : i + rows], x[i : i + rows]
        for t in range(0, positions, columns):
            a = torch.bmm(ours[:, t : t + columns], ours.transpose(1, 2))
            a = a.mul_(torch.bmm(theirs[:, t : t + columns], theirs.transpose(1, 2)))
            products[i : i + rows] += a.sum(2).sum(1, dtype=products.dtype)
    scale = (of_delta.sqrt() * of_x.sqrt()).sum(1)
    margin = gram_margin(delta.shape[2] + x.shape[2], positions, delta.dtype)
    tiny = float(torch.finfo(delta.dtype).tiny) * positions
    lost = tiny * (delta.shape[2] * of_x.sum(1) + x.shape[2] * of_delta.sum(1))
    return products.clamp_min(0) + margin * scale.square() + lost


@dataclass(frozen=True)
class Rows(Contribution):
    """Gradients of the rows ``start:start+count`` of a parameter of ``total`` rows, e.g. the query part of a packed projection."""

    inner: Contribution
    start: int
    count: int
    total: int

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.inner.batch

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """The other rows are zero."""
        return self.inner.squared_norms(form)

    def squared_norms_as_released(self, form: Form = "auto") -> torch.Tensor:
        """The other rows are zero."""
        return self.inner.squared_norms_as_released(form)

    def materialise(self) -> torch.Tensor:
        """Zero in the other rows."""
        part = self.inner.materialise()
        result = part.new_zeros(part.shape[0], self.total, *part.shape[2:])
        result[:, self.start : self.start + self.count] = part
        return result

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Zero in the other rows."""
        part = self.inner.weighted_sum(weights)
        result = part.new_zeros(self.total, *part.shape[1:])
        result[self.start : self.start + self.count] = part
        return result

    def rounding(self) -> torch.Tensor:
        """That of the rows."""
        return self.inner.rounding()

    def without(self, dropped: torch.Tensor) -> Rows:
        """Zeros for the dropped."""
        return replace(self, inner=self.inner.without(dropped))

    def merged(self, copies: int) -> Rows:
        """The same rows."""
        return replace(self, inner=self.inner.merged(copies))


@dataclass(frozen=True)
class Disjoint(Contribution):
    """Parts that never touch the same entries: their squared norms add up."""

    parts: tuple[Contribution, ...]

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.parts[0].batch

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """Σ over the parts."""
        return torch.stack([part.squared_norms(form) for part in self.parts]).sum(0)

    def squared_norms_as_released(self, form: Form = "auto") -> torch.Tensor:
        """Σ over the parts."""
        return torch.stack([part.squared_norms_as_released(form) for part in self.parts]).sum(0)

    def materialise(self) -> torch.Tensor:
        """Σ over the parts."""
        return torch.stack([part.materialise() for part in self.parts]).sum(0)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ over the parts."""
        return torch.stack([part.weighted_sum(weights) for part in self.parts]).sum(0)

    def rounding(self) -> torch.Tensor:
        """Σ over the parts."""
        return torch.stack([part.rounding() for part in self.parts]).sum(0)

    def without(self, dropped: torch.Tensor) -> Disjoint:
        """Zeros for the dropped."""
        return Disjoint(tuple(part.without(dropped) for part in self.parts))

    def merged(self, copies: int) -> Disjoint:
        """Part by part."""
        return Disjoint(tuple(part.merged(copies) for part in self.parts))


def combine(parts: Sequence[Contribution]) -> Contribution:
    """Σ over the uses, cross terms included: ‖Σ_k g_k‖, never √Σ‖g_k‖², which is too small by up to √k.

    Sums of outer products, of positions and of scatters stay factored: their positions are laid side by side. Unlike kinds are
    materialised.
    """
    if len(parts) == 1:
        return parts[0]
    outer = [part for part in parts if isinstance(part, OuterSum)]
    if len(outer) == len(parts):
        cotangents, inputs = torch.cat([part.cotangents for part in outer], 1), torch.cat([part.inputs for part in outer], 1)
        return OuterSum(cotangents, inputs, outer[0].shape, any(part.convolution for part in outer))
    sums = [part for part in parts if isinstance(part, PositionSum)]
    if len(sums) == len(parts):
        return PositionSum(torch.cat([part.cotangents for part in sums], 1), sums[0].shape)
    scattered = [part for part in parts if isinstance(part, Scatter)]
    if len(scattered) == len(parts):
        tokens = torch.cat([part.tokens.long() for part in scattered], 1)
        return Scatter(tokens, torch.cat([part.cotangents for part in scattered], 1), scattered[0].rows)
    rows = [part for part in parts if isinstance(part, Rows)]
    if len(rows) == len(parts) and _same_or_apart(rows):
        by_start: dict[int, list[Rows]] = {}
        for row in rows:
            by_start.setdefault(row.start, []).append(row)
        return Disjoint(tuple(replace(found[0], inner=combine([row.inner for row in found])) for found in by_start.values()))
    total, slack = parts[0].materialise(), parts[0].rounding()
    for part in parts[1:]:
        total, slack = total + part.materialise(), slack + part.rounding()
    return Dense(total, slack)


def _same_or_apart(rows: Sequence[Rows]) -> bool:
    """Whether any two ranges are equal or disjoint: else entries would be shared between parts that are thought apart."""
    ranges = sorted({(row.start, row.start + row.count) for row in rows})
    return all(end <= start for (_, end), (start, _) in pairwise(ranges))
