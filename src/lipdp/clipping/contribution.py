"""Per-example gradients in factored form: what they are made of, their norms, and their weighted sums.

Almost every layer's per-example gradient is a sum of outer products, ``g_i = Σ_t δ_it ⊗ x_it``, of what went into the layer
and the cotangent that came back. Kept as the pair (δ, x), its norm and ``Σ_i ν_i g_i`` are computed without ever holding
``batch × parameters`` numbers.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

__all__ = ["Contribution", "Dense", "Disjoint", "Form", "OuterSum", "PositionSum", "Rows", "Scatter", "combine", "gram_margin"]

Form = Literal["auto", "materialise", "gram"]

# Entries that a chunk of materialised per-example gradients may hold; caps the memory of computing norms.
_CHUNK = 2**24


def gram_margin(features: int, positions: int, dtype: torch.dtype) -> float:
    """κu of the Gram form's rounding: it is added as κu·(Σ_t‖δ_t‖‖x_t‖)² to the squared norm.

    The Gram form sums T² products of two dot products; where terms cancel, the computed sum can be far below the true one,
    even negative. Rounding errors of n-term dot products grow as √n·u (their worst case, n·u, needs all errors aligned);
    8 standard deviations of that are added, so the norm is never under-reported.
    """
    return 8 * math.sqrt(features + positions) * float(torch.finfo(dtype).eps) / 2


class Contribution(ABC):
    """The gradients of one parameter, one per example, from one use of it."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Number of examples."""

    @abstractmethod
    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """‖g_i‖² for each example (batch,), never under-reported beyond rounding."""

    @abstractmethod
    def materialise(self) -> torch.Tensor:
        """All g_i, (batch, *shape)."""

    @abstractmethod
    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ_i w_i·g_i, of the parameter's shape."""


def _accumulating(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Half-precision factors promoted to float32: norms and sums are never computed in half precision."""
    return tuple(t.float() if t.dtype in (torch.float16, torch.bfloat16) else t for t in tensors)


def _weighted(weights: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    return (weights.to(gradients.dtype) @ gradients.flatten(1)).reshape(gradients.shape[1:])


@dataclass(frozen=True)
class OuterSum(Contribution):
    """``g_i = Σ_t δ_it ⊗ x_it``: dense layers, and convolutions by their patches. δ: (B, T, p), x: (B, T, d)."""

    cotangents: torch.Tensor
    inputs: torch.Tensor
    shape: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.cotangents.shape[0]

    @property
    def prefers_gram(self) -> bool:
        """Whether T²(p+d) multiplications are fewer than T·p·d, with a bias for the form that holds less."""
        positions, p, d = self.cotangents.shape[1], self.cotangents.shape[2], self.inputs.shape[2]
        return positions * (p + d) <= p * d

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """‖δ‖²‖x‖² for one position; else the Gram form Σ_{t,t'}(δ_t·δ_t')(x_t·x_t') or the materialised one, the cheaper."""
        delta, x = _accumulating(self.cotangents, self.inputs)
        if delta.shape[1] == 1:
            return delta.square().sum((1, 2)) * x.square().sum((1, 2))
        if form == "gram" or (form == "auto" and self.prefers_gram):
            return _gram(delta, x)
        rows = max(1, _CHUNK // (delta.shape[2] * x.shape[2]))
        parts = [
            torch.bmm(delta[i : i + rows].transpose(1, 2), x[i : i + rows]).square().sum((1, 2)) for i in range(0, self.batch, rows)
        ]
        return torch.cat(parts) if parts else delta.new_zeros(0)

    def materialise(self) -> torch.Tensor:
        """All the outer products, summed over positions."""
        delta, x = _accumulating(self.cotangents, self.inputs)
        return torch.bmm(delta.transpose(1, 2), x).reshape(-1, *self.shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """One matrix product over batch and positions."""
        delta, x = _accumulating(self.cotangents, self.inputs)
        weighted = delta * weights[:, None, None]
        return (weighted.flatten(0, 1).T @ x.flatten(0, 1)).reshape(self.shape)


def _gram(delta: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    products = (torch.bmm(delta, delta.transpose(1, 2)) * torch.bmm(x, x.transpose(1, 2))).sum((1, 2))
    scale = (delta.square().sum(2).sqrt() * x.square().sum(2).sqrt()).sum(1)
    margin = gram_margin(max(delta.shape[2], x.shape[2]), delta.shape[1], delta.dtype)
    return products.clamp_min(0) + margin * scale.square()


@dataclass(frozen=True)
class PositionSum(Contribution):
    """``g_i = Σ_t δ_it``: biases. δ: (B, T, p)."""

    cotangents: torch.Tensor
    shape: tuple[int, ...]

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.cotangents.shape[0]

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """Of the sums, which are small."""
        return self.materialise().flatten(1).square().sum(1)

    def materialise(self) -> torch.Tensor:
        """The sums over positions."""
        (delta,) = _accumulating(self.cotangents)
        return delta.sum(1).reshape(-1, *self.shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ_i w_i Σ_t δ_it."""
        return _weighted(weights, self.materialise())


@dataclass(frozen=True)
class Dense(Contribution):
    """Gradients that are small enough to hold: (B, *shape)."""

    gradients: torch.Tensor

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.gradients.shape[0]

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """Directly."""
        return self.materialise().flatten(1).square().sum(1)

    def materialise(self) -> torch.Tensor:
        """As they are."""
        return _accumulating(self.gradients)[0]

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ_i w_i g_i."""
        return _weighted(weights, self.materialise())


@dataclass(frozen=True)
class Scatter(Contribution):
    """``g_i[v] = Σ_{t: token_it = v} δ_it``: embeddings. tokens: (B, T), δ: (B, T, d), 0 where a token has no gradient."""

    tokens: torch.Tensor
    cotangents: torch.Tensor
    rows: int

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.tokens.shape[0]

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """Cotangents of equal tokens are added up first (sorted by token), so nothing cancels and nothing is vocabulary-sized."""
        (delta,) = _accumulating(self.cotangents)
        order = self.tokens.argsort(dim=1, stable=True)
        tokens = self.tokens.gather(1, order)
        new = torch.ones_like(tokens)
        new[:, 1:] = (tokens[:, 1:] != tokens[:, :-1]).to(new.dtype)
        slot = new.cumsum(1) - 1  # which distinct token of its example each position belongs to
        sums = torch.zeros_like(delta)
        sums.scatter_add_(1, slot[..., None].expand_as(delta), delta.gather(1, order[..., None].expand_as(delta)))
        return sums.square().sum((1, 2))

    def materialise(self) -> torch.Tensor:
        """(B, rows, d)."""
        (delta,) = _accumulating(self.cotangents)
        result = delta.new_zeros(self.batch, self.rows, delta.shape[2])
        return result.scatter_add_(1, self.tokens[..., None].expand_as(delta), delta)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """One scatter-add over batch and positions."""
        (delta,) = _accumulating(self.cotangents)
        weighted = (delta * weights[:, None, None]).flatten(0, 1)
        return delta.new_zeros(self.rows, delta.shape[2]).index_add_(0, self.tokens.flatten(), weighted)


def combine(parts: Sequence[Contribution]) -> Contribution:
    """Several uses of one parameter (shared modules, tied weights) as one contribution, cross terms included.

    Sums of outer products, of positions and of scatters stay factored: their positions are laid side by side. Unlike kinds are
    materialised.
    """
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, OuterSum) for part in parts):
        outer: list[OuterSum] = [part for part in parts if isinstance(part, OuterSum)]
        return OuterSum(
            torch.cat([part.cotangents for part in outer], 1), torch.cat([part.inputs for part in outer], 1), outer[0].shape
        )
    if all(isinstance(part, PositionSum) for part in parts):
        sums: list[PositionSum] = [part for part in parts if isinstance(part, PositionSum)]
        return PositionSum(torch.cat([part.cotangents for part in sums], 1), sums[0].shape)
    if all(isinstance(part, Scatter) for part in parts):
        scattered: list[Scatter] = [part for part in parts if isinstance(part, Scatter)]
        tokens, cotangents = ([getattr(part, name) for part in scattered] for name in ("tokens", "cotangents"))
        return Scatter(torch.cat(tokens, 1), torch.cat(cotangents, 1), scattered[0].rows)
    if all(isinstance(part, Rows) for part in parts):
        by_start: dict[int, list[Contribution]] = {}
        rows = [part for part in parts if isinstance(part, Rows)]
        for row in rows:
            by_start.setdefault(row.start, []).append(row.inner)
        return Disjoint(tuple(Rows(combine(found), start, rows[0].total) for start, found in by_start.items()))
    total = parts[0].materialise()
    for part in parts[1:]:
        total = total + part.materialise()
    return Dense(total)


@dataclass(frozen=True)
class Rows(Contribution):
    """Gradients of the rows ``start:start+…`` of a parameter of ``total`` rows, e.g. the query part of a packed projection."""

    inner: Contribution
    start: int
    total: int

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.inner.batch

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """The other rows are zero."""
        return self.inner.squared_norms(form)

    def materialise(self) -> torch.Tensor:
        """Zero in the other rows."""
        part = self.inner.materialise()
        result = part.new_zeros(part.shape[0], self.total, *part.shape[2:])
        result[:, self.start : self.start + part.shape[1]] = part
        return result

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Zero in the other rows."""
        part = self.inner.weighted_sum(weights)
        result = part.new_zeros(self.total, *part.shape[1:])
        result[self.start : self.start + part.shape[0]] = part
        return result


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

    def materialise(self) -> torch.Tensor:
        """Σ over the parts."""
        return torch.stack([part.materialise() for part in self.parts]).sum(0)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ over the parts."""
        return torch.stack([part.weighted_sum(weights) for part in self.parts]).sum(0)
