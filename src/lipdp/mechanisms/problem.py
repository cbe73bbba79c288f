"""What is asked: the query, the budget, the size and range of the data, and the loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any

import torch
from torch import Tensor

from lipdp._checks import is_number, positive, whole
from lipdp.errors import ConfigurationError, DataError
from lipdp.fields import Range, check_fields
from lipdp.mechanisms.losses import Loss, check_loss
from lipdp.mechanisms.queries import Query, parse_query

__all__ = ["Problem"]


@dataclass(frozen=True)
class Problem:
    """A query on n records of [lo, hi], to be answered with pure ε-differential privacy for replacing one record."""

    query: Query
    epsilon: Annotated[float, Range(least=1e-10, most=1e10)]
    n: Annotated[int, Range(least=2)]
    low: Annotated[float, Range(least=-1e60, most=1e60)]
    high: Annotated[float, Range(least=-1e60, most=1e60)]
    loss: Loss

    def __post_init__(self) -> None:
        check_fields(self, "a mechanism's problem")
        check_loss(self.loss, self.query)
        if not self.high - self.low >= 1e-60:
            raise ConfigurationError(f"bounds is ({self.low!r}, {self.high!r}): the lower one first, and 1e-60 apart at least")

    @classmethod
    def of(cls, query: str | Query, epsilon: float, n: int, bounds: Sequence[float], loss: str = "squared") -> Problem:
        """The checked problem."""
        parsed = parse_query(query)
        size = whole("n", n, least=2)
        try:
            low, high = bounds
        except (TypeError, ValueError):
            raise ConfigurationError(f"bounds is {bounds!r}: give the public range of the data as (lo, hi).") from None
        if not (is_number(low) and is_number(high) and low < high and math.isfinite(high - low)):
            raise ConfigurationError(
                f"bounds is ({low!r}, {high!r}): two finite numbers, the lower one first. They have to be known without "
                "looking at the data, e.g. from the meaning of the column."
            )
        return cls(parsed, positive("epsilon", epsilon), size, float(low), float(high), check_loss(loss, parsed))

    @property
    def width(self) -> float:
        """c = hi − lo."""
        return self.high - self.low

    @property
    def scale(self) -> float:
        """Query units per unit-interval answer: c, or c² for the variance."""
        return self.width**self.query.power

    @property
    def loss_scale(self) -> float:
        """Loss in the user's units per unit-interval loss."""
        return self.scale**2 if self.loss == "squared" else 1.0

    @property
    def exact_epsilon(self) -> Fraction:
        """ε as the rational number that the float is."""
        return Fraction(self.epsilon)

    def rank(self) -> float:
        """np."""
        return self.query.rank(self.n)

    def resized(self, n: int) -> Problem:
        """The same for another public size."""
        return replace(self, n=whole("n", n, least=2))

    def unit(self, x: Tensor) -> Tensor:
        """Datasets (…, n) in the user's units, as sorted unit datasets in float64."""
        return ((x.to(torch.float64) - self.low) / self.width).clamp(0, 1).sort(-1).values

    def answer(self, value: Tensor) -> Tensor:
        """Unit answers, in the user's units."""
        return value * self.scale if self.query.power == 2 else self.low + value * self.scale

    def dataset(self, x: Any, clamp: bool = False) -> Tensor:
        """One dataset of the user's, checked, as (1, n) in unit form; nothing is released here.

        Values outside of the bounds are refused, since the guarantee is about data inside of them; ``clamp=True`` moves
        them to the nearest bound, which is done record by record and keeps the guarantee. The refusal itself tells something
        about the data: it is for whoever holds them, not to be published.
        """
        try:
            data = torch.as_tensor(x, dtype=torch.float64).detach().cpu()
        except (TypeError, ValueError, RuntimeError) as error:
            raise DataError(f"the dataset can't be read as numbers ({error}): give a tensor, array or list of {self.n}.") from None
        if data.ndim != 1 or data.shape[0] != self.n:
            raise DataError(
                f"the dataset has shape {tuple(data.shape)}, the mechanism is for ({self.n},): its sensitivity and noise are set "
                f"for n = {self.n} records. Learn one for your size, or take mechanism.for_size(n) (n is public)."
            )
        if bool(torch.isnan(data).any()):
            raise DataError(
                f"the dataset has {int(torch.isnan(data).sum())} NaN: a missing value has no place on the axis. Fill them in "
                "before (record by record, without looking at the others), or drop them and use the mechanism for that size."
            )
        slack = 1e-6 * self.width  # a float32 at the bound is not meant to be outside of it
        outside = int(((data < self.low - slack) | (data > self.high + slack)).sum())
        if outside and not clamp:
            raise DataError(
                f"{outside} of {self.n} values lie outside of the bounds [{self.low:g}, {self.high:g}]: the sensitivity would not "
                "hold. Use bounds that are true of every possible record, or clamp=True to move values to the nearest bound."
            )
        return self.unit(data.clamp(self.low, self.high))[None]

    def state(self) -> dict[str, Any]:
        """As plain values."""
        own = {"epsilon": self.epsilon, "n": self.n, "low": self.low, "high": self.high, "loss": self.loss}
        return {"query": self.query.state(), **own}
