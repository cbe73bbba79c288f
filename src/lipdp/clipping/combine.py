"""Several uses of one parameter as one contribution, cross terms included."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from lipdp.clipping.contribution import Contribution, Dense, Form, PositionSum, Scatter
from lipdp.clipping.outer import OuterSum

__all__ = ["Disjoint", "Rows", "combine"]


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
