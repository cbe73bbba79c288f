"""What is asked: a statistic with its exact sensitivity under replacing one record, on so many records in public bounds, and what
an answer costs that is off.

Inside this package every dataset is in *unit* form: t = (x − lo)/(hi − lo), sorted along the last axis. Both steps are harmless:
the scaling is public, and all queries are symmetric (sorting is non-expansive in L1).

squared:  (q(x) − r)²
quantile: #{i : min(q(x), r) < x_i < max(q(x), r)}, the number of points between the truth and the answer

The numbers of a range that can be an answer are decimals (:class:`Lattice`), counted and drawn in whole numbers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lipdp._checks import discreet, instance, is_number, kind_of, one_of, positive, whole
from lipdp.errors import ConfigurationError, DataError
from lipdp.fields import Range, check_fields

Loss = Literal["squared", "quantile"]


def check_loss(loss: str, query: Query) -> Loss:
    """The loss's name, or why it makes no sense here."""
    if one_of("loss", loss, get_args(Loss)) == "quantile" and query.kind == "variance":
        raise ConfigurationError(
            "loss='quantile' counts data points between truth and answer, but a variance is no point of the data's axis. "
            "Use loss='squared' for the variance."
        )
    return loss  # type: ignore[return-value]


def response_loss(loss: Loss, t: Tensor, truth: Tensor, answer: Tensor) -> Tensor:
    """L(x, q(x), r) for sorted unit datasets (batch, n), truths (batch,) and answers (batch, R), as (batch, R)."""
    q = truth[:, None]
    if loss == "squared":
        return (answer - q) ** 2
    low, high = torch.minimum(q, answer).contiguous(), torch.maximum(q, answer).contiguous()
    data = t.contiguous()
    inside = torch.searchsorted(data, high) - torch.searchsorted(data, low, right=True)
    return inside.clamp(min=0).to(t.dtype)


def with_ends(t: Tensor) -> Tensor:
    """Sorted unit datasets with 0 before and 1 behind, (batch, n + 2)."""
    batch = t.shape[0]
    return torch.cat([t.new_zeros(batch, 1), t, t.new_ones(batch, 1)], 1)


def rank_between(ends: Tensor, value: Tensor) -> Tensor:
    """How many points lie below each value, interpolated between neighbouring points; from :func:`with_ends`."""
    n = ends.shape[1] - 2
    inside = value.detach().clamp(0, 1).contiguous()
    place = (torch.searchsorted(ends, inside, right=True) - 1).clamp(0, n)
    left, right = ends.gather(1, place), ends.gather(1, place + 1)
    # Outside of [0, 1] the slope continues, so that a stray answer is drawn back in.
    part = (value - left) / (right - left).clamp(min=1e-6)
    inner = place + part
    outside = torch.where(value < 0, value * n, n + (value - 1) * n)
    return torch.where((value < 0) | (value > 1), outside, inner)


@dataclass(frozen=True)
class Query:
    """One statistic of n points of [0, 1]: ``mean``, ``variance`` (÷ n) or ``quantile`` of level ``p``.

    The p-quantile of sorted points x_1 ≤ … ≤ x_n is (x_k + x_{k+1})/2 where k = np is whole, and x_⌈np⌉ elsewhere; the
    median is p = ½ and "p10" is p = 0.1.

    Sensitivities on [0, 1]: mean 1/n; variance (n−1)/n² (from one point away from n−1 equal ones to none); quantile ½ for
    the midpoint, 1 elsewhere. Proof for the midpoint: replacing a point shifts the order by at most one place, so the answer
    moves by at most (x_{k+2} − x_k)/2 or (x_{k+1} − x_{k−1})/2 ≤ ½; half the points at 0 and half at 1 reach it.

    Attributes:
        kind: "mean", "variance" or "quantile".
        p: the level of a quantile, from 0 to 1, as an exact fraction; other kinds have no use for it.
    """

    kind: Literal["mean", "variance", "quantile"]
    p: Annotated[Fraction, Range(least=0, most=1)] = Fraction(1, 2)

    def __post_init__(self) -> None:
        check_fields(self, "a query")

    @property
    def name(self) -> str:
        """How it is written."""
        if self.kind != "quantile":
            return self.kind
        return "median" if self.p == Fraction(1, 2) else f"p{float(self.p * 100):g}"

    @property
    def power(self) -> int:
        """By which power of hi − lo the answer scales: 2 for the variance (which does not shift), else 1."""
        return 2 if self.kind == "variance" else 1

    def rank(self, n: int) -> float:
        """np: how many points lie below the answer."""
        return float(self.p * n)

    def __call__(self, t: Tensor) -> Tensor:
        """The answers for sorted datasets (batch, n), as (batch,)."""
        if self.kind == "mean":
            return t.mean(-1)
        if self.kind == "variance":
            return t.var(-1, correction=0)
        low, high = self._places(t.shape[-1])
        return (t[..., low] + t[..., high]) / 2

    def sensitivity(self, n: int) -> Fraction:
        """The exact global sensitivity for n points of [0, 1]."""
        if self.kind == "mean":
            return Fraction(1, n)
        if self.kind == "variance":
            return Fraction(n - 1, n * n)
        low, high = self._places(n)
        return Fraction(1, 1 + high - low)

    def state(self) -> dict[str, Any]:
        """As plain values."""
        return {"kind": self.kind, "p": str(self.p)}

    def _places(self, n: int) -> tuple[int, int]:
        """Zero-based places of the two order statistics that are averaged."""
        k = self.p * n
        if k.denominator == 1 and 0 < k < n:
            return int(k) - 1, int(k)
        place = min(max(-((-k.numerator) // k.denominator), 1), n) - 1
        return place, place


def parse_query(query: str | Query) -> Query:
    """``"mean"``, ``"variance"``, ``"median"``, ``"p10"``, ``"quantile:0.25"`` or a :class:`Query`."""
    if isinstance(query, Query):
        made = query
    else:
        text = str(query).strip().lower()
        percent = re.fullmatch(r"p(\d+(?:\.\d+)?)", text)
        level = re.fullmatch(r"quantile:(\d*\.?\d+(?:e-?\d+)?)", text)
        if max(float(percent[1]) if percent else 0.0, 100 * float(level[1]) if level else 0.0) > 100:
            raise ConfigurationError(f"query {query!r}: percentiles are from p0 to p100, quantiles from quantile:0 to quantile:1.")
        if text in ("mean", "variance"):
            made = Query(text)  # type: ignore[arg-type]
        elif text == "median":
            made = Query("quantile")
        elif percent or level:
            made = Query("quantile", Fraction(percent[1]) / 100 if percent else Fraction(level[1] if level else "0"))
        else:
            raise ConfigurationError(
                f"query {query!r} is unknown: choose 'mean', 'variance', 'median', 'p10' (any percentile) or 'quantile:0.25'; "
                "`lipdp mechanism answer` and lipdp.mechanisms.answer know 'sum', 'std', 'iqr', 'min', 'max', 'count:18,65' and "
                "'histogram:0,18,65' as well."
            )
    return made


@dataclass(frozen=True)
class Problem:
    """A query on n records of [lo, hi], to be answered with pure ε-differential privacy for replacing one record.

    Attributes:
        query: the statistic.
        epsilon: ε of one answer.
        n: number of records, public, at least 2.
        low: lo, true of every possible record, in the user's units.
        high: hi, likewise; at least 1e-60 above lo.
        loss: "squared", or "quantile" (number of points between truth and answer; not for a variance).
    """

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
        """What the noise is set for: see :func:`least_of`."""
        return least_of(self.epsilon)

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

    @discreet
    def dataset(self, x: Any, clamp: bool = False) -> Tensor:
        """One dataset of the user's, checked, as (1, n) in unit form; nothing is released here.

        Values outside of the bounds are refused, since the guarantee is about data inside of them; ``clamp=True`` moves
        them to the nearest bound, which is done record by record and keeps the guarantee. The refusal itself tells something
        about the data: it is for whoever holds them, not to be published.
        """
        instance(
            "clamp", clamp, (bool, np.bool_), "whether values outside of the bounds are moved to the nearest one, True or False"
        )
        data = as_numbers(x)
        if data.ndim > 1:
            raise DataError(
                f"the dataset has shape {tuple(data.shape)}: one column is asked for, table['age'] or table[:, 0]. Several: "
                "lipdp.mechanisms.learn_columns, or release_moments for means and covariances."
            )
        if data.ndim != 1 or data.shape[0] != self.n:
            raise DataError(
                f"the dataset has shape {tuple(data.shape)}, the mechanism is for ({self.n},): its sensitivity and noise are set "
                f"for n = {self.n} records. Learn one for your size, or take mechanism.for_size(n) (n is public)."
            )
        if bool(torch.isnan(data).any()):
            raise DataError(
                "the dataset has a NaN: a missing value has no place on the axis. Fill them in "
                "before (record by record, without looking at the others), or drop them and use the mechanism for that size."
            )
        slack = 1e-6 * self.width  # a float32 at the bound is not meant to be outside of it
        outside = bool(((data < self.low - slack) | (data > self.high + slack)).any())
        if outside and not clamp:
            raise DataError(
                f"values lie outside of the bounds [{self.low:g}, {self.high:g}]: the sensitivity would not "
                "hold. Use bounds that are true of every possible record, or clamp=True (--clamp) to move "
                "values to the nearest bound."
            )
        return self.unit(data.clamp(self.low, self.high))[None]

    def state(self) -> dict[str, Any]:
        """As plain values."""
        own = {"epsilon": self.epsilon, "n": self.n, "low": self.low, "high": self.high, "loss": self.loss}
        return {"query": self.query.state(), **own}


def each_bounds(bounds: Any) -> list[tuple[float, float]]:
    """(lo, hi) of each of some columns; whether they are good ones, a problem says."""
    try:
        pairs = [(low, high) for low, high in bounds]
    except (TypeError, ValueError, RuntimeError):
        pairs = []
    if not pairs or not all(is_number(end) for pair in pairs for end in pair):
        raise ConfigurationError(f"bounds is {bounds!r}: give one (lo, hi) for each column, in their order.")
    return [(float(low), float(high)) for low, high in pairs]


def least_of(epsilon: float) -> Fraction:
    """ε as the float is, or as the decimal that a person wrote and a budget charges (0.1 is below its float), whichever is less."""
    return min(Fraction(epsilon), Fraction(repr(float(epsilon))))


def share_of(epsilon: float, count: int) -> float:
    """ε/count, rounded down: so many of them are not above ε, as exact numbers."""
    return rounded_down(least_of(positive("epsilon", epsilon)) / whole("count", count))


def rounded_down(value: Fraction) -> float:
    """The largest float that is not above."""
    nearest = float(value)
    return nearest if Fraction(nearest) <= value else math.nextafter(nearest, -math.inf)


@discreet
def as_numbers(x: Any) -> Tensor:
    """A user's data as float64 on the processor; what is no number, or hides some, is refused. NaN and infinity pass."""
    advice = "give a tensor, array or list of real numbers."
    if isinstance(x, Tensor):
        if x.is_complex():
            raise DataError(f"the dataset holds complex numbers: {advice}")
        return x.detach().to("cpu", torch.float64)
    if isinstance(x, np.ma.MaskedArray) and bool(np.ma.getmaskarray(x).any()):
        raise DataError("the dataset is a masked array: its hidden values would count as they are. Fill them in, or drop them.")
    try:
        data = np.asarray(x)
        if data.dtype.kind == "O" and data.ndim:  # numbers beyond 64 bits, tensors, or no numbers at all
            data = np.array([_number(value) for value in data.reshape(-1)]).reshape(data.shape)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # without their texts: they show the value
        raise DataError(f"the dataset ({kind_of(x)}) can't be read as numbers: {advice}") from None
    if data.dtype.kind not in "biuf":
        raise DataError(f"the dataset can't be read as numbers (it holds {data.dtype}): {advice}")
    return torch.tensor(data.astype(np.float64))


def _number(value: Any) -> float:
    if isinstance(value, str | bytes | complex):
        raise TypeError(f"{type(value).__name__} is no real number")
    return float(value)


Step = Annotated[float, Range(above=0)]

COPIES = 2**80
"""Of all candidates together, before tilts."""
_MILLION = 6  # decimal digits of the range in its finest step


def check_step(step: float | None, low: float, high: float) -> None:
    """Refuse a step that leaves fewer than two numbers of a range, or more than 10⁷."""
    if step is not None and not (is_number(step) and 0 < step <= high - low <= 1e7 * step):
        raise ConfigurationError(f"step is {step!r}: above 0, at most the range {high - low:g}, at least 10^-7 of it; e.g. 1.")


@dataclass(frozen=True)
class Lattice:
    """The candidates: whole numbers ``first`` … ``last`` of steps above ``origin``, in the user's units."""

    origin: float
    step: Fraction
    first: int
    last: int

    @classmethod
    def of(cls, low: float, high: float) -> Lattice:
        """The decimal lattice of a range."""
        digits = math.floor(math.log10(high - low)) - _MILLION
        step = Fraction(10) ** digits
        # Far from 0 the multiples of a fine step are no floats: there, they are counted from the low end.
        origin = 0.0 if max(abs(low), abs(high)) / step < 2**50 else low
        # As decimals: 0.7 is meant to be a multiple of 0.1, whatever the float is.
        ends = [(Fraction(repr(end)) - Fraction(repr(origin))) / step for end in (low, high)]
        return cls(origin, step, math.ceil(ends[0]), math.floor(ends[1]))

    @classmethod
    def of_steps(cls, low: float, high: float, step: float) -> Lattice:
        """low, low + step, … up to high: for columns of which it is public that they hold no other numbers."""
        size = Fraction(repr(float(step)))
        return cls(low, size, 0, (Fraction(repr(high)) - Fraction(repr(low))) // size)

    @property
    def each(self) -> int:
        """Copies of a candidate."""
        return COPIES // (self.last - self.first + 1)

    def value(self, place: int) -> float:
        """A candidate in the user's units, as the decimal that it is."""
        return float(place * self.step + Fraction(repr(self.origin)))

    def places(self, x: Tensor) -> Tensor:
        """Each record's nearest candidate, int64: record by record, so neighbours stay neighbours."""
        return ((x - self.origin) / float(self.step)).round().to(torch.int64).clamp(self.first, self.last)

    def values(self, places: Tensor) -> Tensor:
        """Candidates in the user's units."""
        return places.to(torch.float64) * float(self.step) + self.origin
