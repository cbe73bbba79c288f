"""What the calculus says of one tensor, and what one operation does to it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Bound", "Shape", "Transfer", "times"]

Shape = tuple[int, ...]


def times(*factors: float) -> float:
    """Product of bounds in [0, ∞] where 0·∞ = ∞: the only reading of an unknown product that can't under-report."""
    if any(math.isinf(factor) for factor in factors):
        return math.inf
    return math.prod(factors)


@dataclass(frozen=True)
class Bound:
    """An activation: its shape without the batch dimension, and X ≥ ‖activation of one example‖₂ over the whole tensor.

    ``norm`` may be ``math.inf``: an unbounded activation is legal as long as no parameter's Δ comes out infinite.

    Two finer bounds are optional (∞: nothing is known), for rules that can use them: attention, gates, token means. A rule
    that does not know them leaves them out, which is always right.

    Attributes:
        norm: X, made smaller where the finer bounds imply less: ``X ≤ √rows·row_norm`` and ``X ≤ √n·max_abs``.
        shape: without the batch dimension.
        row_norm: bound on the norm of each row, the vectors along the last dimension (tokens).
        max_abs: bound on the absolute value of each entry.
    """

    norm: float
    shape: Shape
    row_norm: float = math.inf
    max_abs: float = math.inf

    def __post_init__(self) -> None:
        for value in (self.norm, self.row_norm, self.max_abs):
            if not value >= 0:  # also catches NaN
                raise ValueError(f"a bound on a norm is a number in [0, inf], not {value}")
        finer = min(times(math.sqrt(self.rows), self.row_norm), times(math.sqrt(self.size), self.max_abs))
        if finer < self.norm:
            object.__setattr__(self, "norm", finer)

    @property
    def rows(self) -> int:
        """Number of vectors along the last dimension."""
        return math.prod(self.shape[:-1])

    @property
    def row(self) -> float:
        """The least bound on the norm of one row that is known."""
        length = self.shape[-1] if self.shape else 1
        return min(self.norm, self.row_norm, times(math.sqrt(length), self.max_abs))

    @property
    def peak(self) -> float:
        """The least bound on one entry that is known."""
        return min(self.row, self.max_abs)

    @property
    def size(self) -> int:
        """Scalars per example, n."""
        return math.prod(self.shape)

    def positions(self, feature_dims: int = 1) -> int:
        """Positions T that share a parameter acting on the last ``feature_dims`` dimensions (a dense layer's tokens)."""
        return math.prod(self.shape[: len(self.shape) - feature_dims])


@dataclass(frozen=True)
class Transfer:
    """What one operation does to bounds: one row of the table "backpropagation for bounds".

    With G the bound on the cotangent of the output, input i receives the cotangent ``min(gains[i]·G, clip)`` and
    parameter p has the per-example gradient bound ``Δ_p = parameters[p]·G``. All of it is data, so that a rule can be
    printed, compared and tested without running anything.

    Attributes:
        output: bound on the output, or one per output for an operation that splits a tensor into disjoint parts; the
            cotangents of such parts combine to ``√(ΣG_i²)``.
        gains: for each tensor input in order of appearance, a bound on the norm of the operation's transposed Jacobian.
        parameters: name of the parameter → factor of G in its Δ. Every trainable parameter of a module must be named.
        clip: bound enforced on the cotangent going back (:class:`lipdp.nn.ClipGradient`).
        normalises: every cotangent but 0 is brought to the norm ``clip``, also those that were shorter.
        exact: whether some input, weights and cotangent reach the bound. Tests hold exact rules to 99%.
        why_infinite: for a rule with an infinite value, the reason, for the error message.
        note: which bound was used where there is a choice, and how tight it is.
        sizes: for a parameter whose *effective weight* is bounded and noised in its place (a reparametrised layer), the
            number of that weight's entries.
    """

    output: Bound | tuple[Bound, ...]
    gains: Sequence[float] = (1.0,)
    parameters: Mapping[str, float] = field(default_factory=dict)
    clip: float = math.inf
    normalises: bool = False
    exact: bool = True
    why_infinite: str = ""
    note: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
