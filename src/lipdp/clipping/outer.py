"""Sums of outer products: the two forms of their norm, which of them is cheaper, and why the Gram form needs a margin.

With δ (T, p) and x (T, d) of one example, g = δᵀx, and

* *materialise*: ‖δᵀx‖², 2·T·p·d multiplications and p·d numbers held;
* *Gram*: Σ_{t,t'} (δ_t·δ_t')(x_t·x_t'), 2·T²·(p+d) multiplications and 2·T² numbers held.

The Gram form adds up T² products of both signs; in float32 the result can be far below the true one where they cancel, even
negative. Its margin makes up for that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lipdp.clipping.arithmetic import HALF, accumulating, input_roundoff, matmuls, squared, unit_roundoff
from lipdp.clipping.autotune import quickest
from lipdp.clipping.contribution import Contribution, Form, zeroed

__all__ = ["OuterSum", "gram_margin"]

# Entries that a chunk of materialised per-example gradients, or of Gram matrices, may hold: caps the memory of computing norms.
_CHUNK = 2**24
# What moving one number costs, in multiplications: arithmetic is that much faster than memory.
_TRAFFIC = 16


def gram_margin(features: int, positions: int, dtype: torch.dtype) -> float:
    """κu of the Gram form's rounding: it is added as κu·(Σ_t‖δ_t‖‖x_t‖)² to the squared norm.

    Rounding errors of n-term dot products grow as √n·u (their worst case, n·u, needs all errors aligned); 8 standard deviations
    of that are added, so the norm is never under-reported.
    """
    return 8 * math.sqrt(features + positions) * unit_roundoff(dtype)


@dataclass(frozen=True)
class OuterSum(Contribution):
    """``g_i = Σ_t δ_it ⊗ x_it``: dense layers, and convolutions by their patches. δ: (B, T, p), x: (B, T, d)."""

    cotangents: torch.Tensor
    inputs: torch.Tensor
    shape: tuple[int, ...]
    convolution: bool = False  # whether the weighted sum will be computed by a convolution (which may use TF32 on its own)
    at_most: torch.Tensor | None = None  # ‖x‖_F² or more (B,), where that is known without reading x again

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
        delta, x = accumulating(self.cotangents, self.inputs)
        if delta.shape[1] == 1:
            return (squared(delta, (1, 2)) * squared(x, (1, 2))) * (1 + 4 * self._input_roundoff()) ** 2
        halves = self.cotangents.dtype in HALF and self.inputs.dtype in HALF
        gram = self._uses_gram(form)
        with matmuls(delta.device, exact_in_tf32=halves):
            found = _gram(delta, x) if gram else _materialised(delta, x)
        return (found.sqrt() + self.rounding()).square()

    def materialise(self) -> torch.Tensor:
        """All the outer products, summed over positions."""
        delta, x = accumulating(self.cotangents, self.inputs)
        return torch.bmm(delta.transpose(1, 2), x).reshape(-1, *self.shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """One matrix product over batch and positions."""
        delta, x = accumulating(self.cotangents, self.inputs)
        weighted = delta * weights.to(delta.dtype)[:, None, None]
        return (weighted.flatten(0, 1).T @ x.flatten(0, 1)).reshape(self.shape)

    def _input_roundoff(self) -> float:
        return input_roundoff(self.cotangents, convolution=self.convolution)

    def rounding(self) -> torch.Tensor:
        """2u·√T·‖δ‖_F‖x‖_F for T-term sums; with TF32 also 4·2⁻¹¹·max_t‖δ_t‖·‖x‖_F for rounded factors."""
        delta, x = accumulating(self.cotangents, self.inputs)
        of_positions = squared(delta, (2,))
        of_x = (squared(x, (1, 2)) if self.at_most is None else self.at_most).sqrt()
        sums = 2 * unit_roundoff(delta.dtype) * math.sqrt(delta.shape[1]) * of_positions.sum(1).sqrt() * of_x
        coarse = self._input_roundoff()
        if coarse and delta.shape[1]:
            sums = sums + 4 * coarse * of_positions.amax(1).sqrt() * of_x
        return sums

    def without(self, dropped: torch.Tensor) -> OuterSum:
        """Zeros in both factors."""
        cotangents, inputs = zeroed(self.cotangents, dropped), zeroed(self.inputs, dropped)
        return OuterSum(cotangents, inputs, self.shape, self.convolution)


def _materialised(delta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    rows = max(1, _CHUNK // max(1, delta.shape[2] * x.shape[2]))
    parts = [
        torch.linalg.vector_norm(torch.bmm(delta[i : i + rows].transpose(1, 2), x[i : i + rows]), dim=(1, 2)).square()
        for i in range(0, len(delta), rows)
    ]
    return torch.cat(parts) if parts else delta.new_zeros(0)


def _gram(delta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """In tiles of examples and, for long sequences, of positions; with the margin, and what products can lose by underflow."""
    batch, positions = delta.shape[:2]
    rows = max(1, _CHUNK // max(1, positions * positions))
    columns = max(1, min(positions, _CHUNK // max(1, positions)))
    products = delta.new_zeros(batch)
    for i in range(0, batch, rows):
        ours, theirs = delta[i : i + rows], x[i : i + rows]
        for t in range(0, positions, columns):
            a = torch.bmm(ours[:, t : t + columns], ours.transpose(1, 2))
            products[i : i + rows] += (a * torch.bmm(theirs[:, t : t + columns], theirs.transpose(1, 2))).sum((1, 2))
    of_delta, of_x = squared(delta, (2,)), squared(x, (2,))
    scale = (of_delta.sqrt() * of_x.sqrt()).sum(1)
    margin = gram_margin(max(delta.shape[2], x.shape[2]), positions, delta.dtype)
    tiny = float(torch.finfo(delta.dtype).tiny) * positions
    lost = tiny * (delta.shape[2] * of_x.sum(1) + x.shape[2] * of_delta.sum(1))
    return products.clamp_min(0) + margin * scale.square() + lost
