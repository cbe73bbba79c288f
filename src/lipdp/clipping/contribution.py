"""Per-example gradients in factored form: what they are made of, their norms, and their weighted sums.

Almost every layer's per-example gradient is a sum of outer products, ``g_i = Σ_t δ_it ⊗ x_it``, of what went into the layer
and the cotangent that came back. Kept as the pair (δ, x), its norm and ``Σ_i ν_i g_i`` are computed without ever holding
``batch × parameters`` numbers.

The gradient that is measured and the one that is released may be computed by different sums of the same numbers, and where terms
cancel, either can be off by ``γ_n·Σ‖terms‖`` for n terms. Such norms carry that much on top (:meth:`Contribution.rounding`), so
ν_i·g_i as released is never longer than C. For gradients that don't cancel this is some 1e-5 of the norm. Sums over examples are
float64.

How a layer's follow from its input and its output's cotangent is said by a norm rule for its class, one small function::

    @norm_rule(torch.nn.Linear)
    def _linear(layer, inputs, output):
        x = positions(inputs[0])
        def contributions(cotangent):
            return {"weight": OuterSum(positions(cotangent), x, tuple(layer.weight.shape)), …}
        return contributions

It is called in the forward pass; what it returns is called in the backward pass, with the cotangent of the output.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import torch
from torch.nn.utils.parametrize import is_parametrized

from lipdp._numerics import gamma, wide
from lipdp._sums import contract
from lipdp.behaviour import ByClass, entered
from lipdp.clipping.arithmetic import Squares, accumulating, matmuls, squared

Form = Literal["auto", "materialise", "gram", "measure"]


class Contribution(ABC):
    """The gradients of one parameter, one per example, from one use of it."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Number of examples."""

    @abstractmethod
    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """(‖g_i‖ + rounding_i)² for each example (batch,): never under-reported."""

    def squared_norms_as_released(self, form: Form = "auto") -> torch.Tensor:
        """The same for g_i as :meth:`weighted_sum` computes them: no margin where it uses the very numbers that are measured."""
        return self.squared_norms(form)

    @abstractmethod
    def materialise(self) -> torch.Tensor:
        """All g_i, (batch, *shape)."""

    @abstractmethod
    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ_i w_i·g_i, of the parameter's shape, in float64. Every factor must be finite: see :meth:`without`."""

    @abstractmethod
    def rounding(self) -> torch.Tensor:
        """How far a computed g_i can be from the exact one, or from one computed in another order (batch,)."""

    @abstractmethod
    def without(self, dropped: torch.Tensor) -> Contribution:
        """The same with the gradients of the examples ``dropped`` (batch,) replaced by zeros, be they NaN (0·NaN is NaN)."""

    def merged(self, copies: int) -> Contribution:
        """Each run of ``copies`` rows as one example, whose gradient is the sum of theirs."""
        return Dense(self.materialise(), self.rounding()).merged(copies)


def flat(tensor: torch.Tensor, dims: int = 1) -> torch.Tensor:
    """(B, …) → (B, p): all dimensions from ``dims`` on as one; where there is none (a parameter of one number), of size 1."""
    return tensor.flatten(dims) if tensor.ndim > dims else tensor.unsqueeze(-1)


def zeroed(tensor: torch.Tensor, dropped: torch.Tensor) -> torch.Tensor:
    """``tensor`` with zeros in the rows of the dropped examples."""
    return tensor.masked_fill(dropped.reshape(-1, *([1] * (tensor.ndim - 1))), 0)


def runs(tensor: torch.Tensor, copies: int) -> torch.Tensor:
    """(rows, T, …) → (rows/copies, copies·T, …): the positions of a run of rows, one after the other."""
    return tensor.reshape(tensor.shape[0] // copies, copies * tensor.shape[1], *tensor.shape[2:])


def weighted(weights: torch.Tensor, gradients: torch.Tensor) -> torch.Tensor:
    """Σ_i w_i g_i, in float32 proper and then in float64: what was measured is what is added up."""
    with matmuls(gradients.device, tf32=False):
        return contract(weights.to(gradients.dtype)[:, None], flat(gradients)).reshape(gradients.shape[1:])


def _sum_rounding(squares: torch.Tensor, positions: int, dtype: torch.dtype) -> torch.Tensor:
    """2γ_T·√T·‖terms‖_F ≥ 2γ_T·Σ_t‖terms_t‖, from Σ_t‖terms_t‖²: a sum over T positions, as measured and as released."""
    return 2 * gamma(positions, dtype) * math.sqrt(positions) * squares.sqrt() if positions > 1 else torch.zeros_like(squares)


@dataclass(frozen=True)
class PositionSum(Contribution):
    """``g_i = Σ_t δ_it``: biases. δ: (B, T, p).

    Attributes:
        cotangents: δ.
        shape: of one g_i: p numbers in the parameter's shape.
        squares: of the cotangents, if others need them too; computed here if not given.
    """

    cotangents: torch.Tensor
    shape: tuple[int, ...]
    squares: Squares | None = None

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.cotangents.shape[0]

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """Of the sums, which are small."""
        if self.cotangents.shape[1] == 1:
            return self._squares.total
        return (self.squared_norms_as_released().sqrt() + self.rounding()).square()

    def squared_norms_as_released(self, form: Form = "auto") -> torch.Tensor:
        """Of the sums, which are what is weighted."""
        return squared(flat(self._sums), (1,))

    def materialise(self) -> torch.Tensor:
        """The sums over positions."""
        return self._sums

    @cached_property
    def _sums(self) -> torch.Tensor:
        # Needed for the norm and for the weighted sum, and as small as the parameter: read the cotangents once.
        return self._squares.sums.reshape(-1, *self.shape)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ_i w_i Σ_t δ_it."""
        return weighted(weights, self._sums)

    def rounding(self) -> torch.Tensor:
        """Of a sum over the positions."""
        return _sum_rounding(self._squares.total, self.cotangents.shape[1], self.cotangents.dtype)

    @cached_property
    def _squares(self) -> Squares:
        return Squares(self.cotangents) if self.squares is None else self.squares

    def without(self, dropped: torch.Tensor) -> PositionSum:
        """Zero cotangents."""
        return PositionSum(zeroed(self.cotangents, dropped), self.shape)

    def merged(self, copies: int) -> Contribution:
        """A sum over the positions of all copies; of the rows' sums, where laying them side by side would take a copy."""
        if not self.cotangents.is_contiguous():
            return super().merged(copies)
        return PositionSum(runs(self.cotangents, copies), self.shape)


@dataclass(frozen=True)
class Dense(Contribution):
    """Gradients that are small enough to hold: (B, *shape); ``slack`` (B,) is how far they may be off by rounding.

    Attributes:
        gradients: g_i along the first dimension.
        slack: as above; ``None``: they are taken as exact.
    """

    gradients: torch.Tensor
    slack: torch.Tensor | None = None

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.gradients.shape[0]

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """Directly."""
        return (squared(flat(self.materialise()), (1,)).sqrt() + self.rounding()).square()

    def squared_norms_as_released(self, form: Form = "auto") -> torch.Tensor:
        """Of the gradients, which are what is weighted."""
        return squared(flat(self.materialise()), (1,))

    def materialise(self) -> torch.Tensor:
        """As they are."""
        return accumulating(self.gradients)[0]

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """Σ_i w_i g_i."""
        return weighted(weights, self.materialise())

    def rounding(self) -> torch.Tensor:
        """As given."""
        return self.gradients.new_zeros(self.batch, dtype=wide(self.gradients)) if self.slack is None else self.slack

    def without(self, dropped: torch.Tensor) -> Dense:
        """Zero gradients."""
        slack = None if self.slack is None else zeroed(self.slack, dropped)
        return Dense(zeroed(self.gradients, dropped), slack)

    def merged(self, copies: int) -> Dense:
        """The sums, with the rounding of adding up on top of what each had."""
        gradients = self.materialise()
        rows = gradients.reshape(-1, copies, *gradients.shape[1:])
        added = _sum_rounding(squared(flat(rows, 2), (1, 2)), copies, rows.dtype)
        return Dense(rows.sum(1), added + self.rounding().reshape(-1, copies).sum(1))


def summed(terms: torch.Tensor, shape: tuple[int, ...]) -> Dense:
    """``g_i = Σ_t terms_it`` of (B, T, p), held as its sum: for layers whose parameters are as small as one position."""
    (terms,) = accumulating(terms)
    return Dense(terms.sum(1).reshape(-1, *shape))


@dataclass(frozen=True)
class Scatter(Contribution):
    """``g_i[v] = Σ_{t: token_it = v} δ_it``: embeddings. tokens: (B, T), δ: (B, T, d), 0 where a token has no gradient.

    Attributes:
        tokens: which row of the table each position has read.
        cotangents: δ.
        rows: of the embedding's table.
    """

    tokens: torch.Tensor
    cotangents: torch.Tensor
    rows: int

    @property
    def batch(self) -> int:
        """Number of examples."""
        return self.tokens.shape[0]

    @cached_property
    def by_token(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The distinct tokens of each example, sorted, and the sums of their cotangents: (B, T) and (B, T, d); 0 for the rest.

        So nothing is vocabulary-sized, and what is measured is what is released.
        """
        (delta,) = accumulating(self.cotangents)
        order = self.tokens.argsort(dim=1, stable=True)
        tokens = self.tokens.gather(1, order)
        new = torch.ones_like(tokens, dtype=torch.long)
        new[:, 1:] = (tokens[:, 1:] != tokens[:, :-1]).long()
        slot = new.cumsum(1) - 1  # which distinct token of its example each position belongs to
        sums = torch.zeros_like(delta)
        sums.scatter_add_(1, slot[..., None].expand_as(delta), delta.gather(1, order[..., None].expand_as(delta)))
        return torch.zeros_like(tokens).scatter_(1, slot, tokens), sums

    def squared_norms(self, form: Form = "auto") -> torch.Tensor:
        """Cotangents of equal tokens are added up first, so nothing cancels."""
        return (self.squared_norms_as_released().sqrt() + self.rounding()).square()

    def squared_norms_as_released(self, form: Form = "auto") -> torch.Tensor:
        """Of the sums, which are what is weighted."""
        return squared(self.by_token[1], (1, 2))

    def materialise(self) -> torch.Tensor:
        """(B, rows, d)."""
        (delta,) = accumulating(self.cotangents)
        result = delta.new_zeros(self.batch, self.rows, delta.shape[2])
        return result.scatter_add_(1, self.tokens.long()[..., None].expand_as(delta), delta)

    def weighted_sum(self, weights: torch.Tensor) -> torch.Tensor:
        """One scatter-add over batch and tokens, in float64."""
        shape = self.rows, self.cotangents.shape[2]
        return self.add_weighted(weights, self.cotangents.new_zeros(shape, dtype=wide(self.cotangents)))

    def add_weighted(self, weights: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        """The same added to a total, in its place."""
        tokens, sums = self.by_token
        scaled = sums.to(total.dtype) * weights.to(total.dtype)[:, None, None]
        return total.index_add_(0, tokens.flatten(), scaled.flatten(0, 1))

    def rounding(self) -> torch.Tensor:
        """Of a sum over the positions, as if all tokens were the same."""
        (delta,) = accumulating(self.cotangents)
        return _sum_rounding(squared(delta, (1, 2)), delta.shape[1], delta.dtype)

    def without(self, dropped: torch.Tensor) -> Scatter:
        """Zero cotangents."""
        return replace(self, cotangents=zeroed(self.cotangents, dropped))

    def merged(self, copies: int) -> Scatter:
        """Tokens of all copies."""
        return replace(self, tokens=runs(self.tokens, copies), cotangents=runs(self.cotangents, copies))


Contributions = Callable[[torch.Tensor], Mapping[str, Contribution]]
NormRule = Callable[[Any, tuple[Any, ...], torch.Tensor], Contributions]
Refusal = Callable[[Any], str | None]
R = TypeVar("R", bound=NormRule)

_rules: ByClass[NormRule] = ByClass()
_refusals: dict[type[torch.nn.Module], Refusal] = {}
_at_once: set[NormRule] = set()


WatchedForward = Callable[[Any, str], Callable[..., Any]]
_watched_forwards: ByClass[WatchedForward] = ByClass()


def watched_forward(*classes: type[torch.nn.Module]) -> Callable[[WatchedForward], WatchedForward]:
    """Register a factory of forwards that can be watched for these classes (and for subclasses that compute the same).

    It is called with the :class:`lipdp.clipping.record.Recording` and the layer's name.
    """

    return entered(_watched_forwards, *classes)


def find_watched_forward(module: torch.nn.Module) -> WatchedForward | None:
    """The factory for a module with trainable parameters of its own, if its class has one."""
    return _watched_forwards.find(module) if any(p.requires_grad for p in module.parameters(recurse=False)) else None


def norm_rule(*classes: type[torch.nn.Module], at_once: bool = False) -> Callable[[R], R]:
    """Register the decorated function as the norm rule of these classes (and of subclasses with the same forward).

    With ``at_once`` the contributions hold neither input nor cotangent, only sums as small as the parameters: they are made as soon
    as the backward pass has the cotangent, and both are let go.
    """

    def enter(function: R) -> R:
        if at_once:
            _at_once.add(function)
        return entered(_rules, *classes)(function)

    return enter


def refuse(*classes: type[torch.nn.Module]) -> Callable[[Refusal], Refusal]:
    """Register a function that says why an instance of these classes can't be trained by clipping (None: it can)."""

    return entered(_refusals, *classes)


def find_norm_rule(module: torch.nn.Module) -> NormRule | None:
    """The rule of the module's class, or of the nearest base class that computes the same, see :mod:`lipdp.behaviour`."""
    return None if is_parametrized(module) else _rules.find(module)


# Whether a rule's contributions are made during the backward pass, see :func:`norm_rule`.
is_at_once = _at_once.__contains__


def find_refusal(module: torch.nn.Module) -> str | None:
    """Why the module can't be used, if it can't."""
    for cls in type(module).__mro__:
        if cls in _refusals:
            return _refusals[cls](module)
    return None
