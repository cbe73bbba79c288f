"""Several uses of one parameter are one contribution, cross terms included: ‖Σ_k g_k‖, never √Σ‖g_k‖².

Uses of a kind stay factored (:func:`combine`), and so do the two unlike ones that language models have: a table of words that is
read, and is the last layer, too (:class:`Tied`). Record by record, such gradients are as large as the table: 154 MB each for GPT-2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from lipdp._numerics import gamma, wide
from lipdp.clipping.arithmetic import accumulating, matmuls, squared
from lipdp.clipping.contribution import Contribution, Dense, Form, PositionSum, Scatter
from lipdp.clipping.outer import OuterSum, blocked, products

# Entries of products of positions with words that are held at a time.
_AT_ONCE = 2**24


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


@dataclass(frozen=True)
class Tied(Contribution):
    """A table of words that is read, and is a dense layer, too: ``g_i = Σ_t δ_t ⊗ x_t + Σ_s e_(v_s) ⊗ ε_s``.

    Its squared norm is that of both and twice their product, Σ_(t,s) δ_t[v_s]·(x_t·ε_s): nothing of it is as large as the table.

    Attributes:
        layer: δ and x, of the use as a layer.
        table: v and ε, of the use as a table.
    """

    layer: OuterSum
    table: Scatter

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.layer.batch

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """With the rounding of adding up the table's cotangents, too."""
        return (self.squared_norms_as_released(form).sqrt() + self.table.rounding()).square()

    def squared_norms_as_released(self, form: Form = "auto") -> torch.Tensor:
        """Of the exact sum of the layer's, with its rounding; and of the table's as they are weighted."""
        if not self.layer.uses_gram(form):
            return self._held.squared_norms(form)
        of_layer, rounding = self.layer.gram()
        of_both = of_layer + self.table.squared_norms_as_released() + 2 * self._product()
        return (of_both.clamp_min(0).sqrt() + rounding).square()

    def _product(self) -> torch.Tensor:
        """At least ⟨Σ_t δ_t ⊗ x_t, Σ_s e_(v_s) ⊗ ε_s⟩ (B,): the product as computed, and all that it may be off by.

        In float32 there are products of d terms and sums of S, each off by γ_n·Σ_(t,s)|δ_t[v_s]|‖x_t‖‖ε_s‖ at most for n roundings;
        and a product below the smallest normal number may come out as 0.
        """
        tokens, table = self.table.by_token
        delta, x = self.layer.cotangents, accumulating(self.layer.inputs)[0]
        length, words, dtype = delta.shape[1], tokens.shape[1], wide(table)
        of_x, of_table = (squared(part, (2,)).sqrt() for part in (x, table))
        rows = max(1, _AT_ONCE // max(1, length * words))
        side = max(1, min(length, _AT_ONCE // max(1, words)))
        n = blocked(x.shape[2]) + words + 8
        margin, tiny = gamma(n, table.dtype), float(torch.finfo(table.dtype).tiny)
        total = table.new_zeros(self.batch, dtype=dtype)
        for i in range(0, self.batch, rows):
            part = slice(i, i + rows)
            for t in range(0, length, side):
                here = (part, slice(t, t + side))
                read = tokens[part, None].long().expand(-1, x[here].shape[1], -1)
                of_words = accumulating(delta[here].gather(2, read))[0]
                with matmuls(table.device, tf32=False):
                    both = products(x[here], table[part])
                total[part] += both.mul_(of_words).sum(2).sum(1, dtype=dtype)
                sizes = of_words.abs().to(dtype)
                total[part] += margin * (of_x[here] * (sizes @ of_table[part, :, None])[..., 0]).sum(1)
                total[part] += tiny * (x.shape[2] * sizes.sum((1, 2)) + sizes[0].numel())
        return total

    @property
    def _held(self) -> Dense:
        return Dense(self.materialise(), self.rounding())

    def materialise(self) -> torch.Tensor:
        """Both."""
        return self.layer.materialise() + self.table.materialise()

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Of each."""
        return self.table.add_weighted(weights, self.layer.weighted_sum(weights))

    def rounding(self) -> torch.Tensor:
        """Of both."""
        return self.layer.rounding() + self.table.rounding()

    def without(self, dropped: torch.Tensor) -> Tied:
        """Zeros for the dropped."""
        return Tied(self.layer.without(dropped), self.table.without(dropped))

    def merged(self, copies: int) -> Tied:
        """Of each."""
        return Tied(self.layer.merged(copies), self.table.merged(copies))


def combine(parts: Sequence[Contribution]) -> Contribution:
    """Σ over the uses.

    Sums of outer products, of positions and of scatters stay factored: their positions are laid side by side. Unlike kinds are
    materialised, but for those of :class:`Tied`.
    """
    if len(parts) == 1:
        return parts[0]
    layers = [part for part in parts if isinstance(part, OuterSum)]
    if len(layers) == len(parts):
        return _one_layer(layers)
    sums = [part for part in parts if isinstance(part, PositionSum)]
    if len(sums) == len(parts):
        return PositionSum(torch.cat([part.cotangents for part in sums], 1), sums[0].shape)
    tables = [part for part in parts if isinstance(part, Scatter)]
    if len(tables) == len(parts):
        return _one_table(tables)
    if layers and tables and len(layers) + len(tables) == len(parts):
        layer, table = _one_layer(layers), _one_table(tables)
        if layer.shape == (table.rows, table.cotangents.shape[2]):
            return Tied(layer, table)
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


def _one_layer(parts: Sequence[OuterSum]) -> OuterSum:
    if len(parts) == 1:
        return parts[0]
    cotangents, inputs = torch.cat([part.cotangents for part in parts], 1), torch.cat([part.inputs for part in parts], 1)
    return OuterSum(cotangents, inputs, parts[0].shape, any(part.convolution for part in parts))


def _one_table(parts: Sequence[Scatter]) -> Scatter:
    if len(parts) == 1:
        return parts[0]
    tokens = torch.cat([part.tokens.long() for part in parts], 1)
    return Scatter(tokens, torch.cat([part.cotangents for part in parts], 1), parts[0].rows)


def _same_or_apart(rows: Sequence[Rows]) -> bool:
    """Whether any two ranges are equal or disjoint: else entries would be shared between parts that are thought apart."""
    ranges = sorted({(row.start, row.start + row.count) for row in rows})
    return all(end <= start for (_, end), (start, _) in pairwise(ranges))
