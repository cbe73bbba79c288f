"""The statistics that a mechanism answers, with their exact sensitivities under replacing one record.

Inside this package every dataset is in *unit* form: t = (x − lo)/(hi − lo), sorted along the last axis. Both steps are
harmless: the scaling is public, and all queries are symmetric (sorting is non-expansive in L1).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated, Any, Literal

from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Range, check_fields

__all__ = ["Query", "parse_query"]


@dataclass(frozen=True)
class Query:
    """One statistic of n points of [0, 1]: ``mean``, ``variance`` (÷ n) or ``quantile`` of level ``p``.

    The p-quantile of sorted points x_1 ≤ … ≤ x_n is (x_k + x_{k+1})/2 where k = np is whole, and x_⌈np⌉ elsewhere; the
    median is p = ½ and "p10" is p = 0.1.

    Sensitivities on [0, 1]: mean 1/n; variance (n−1)/n² (from one point away from n−1 equal ones to none); quantile ½ for
    the midpoint, 1 elsewhere. Proof for the midpoint: replacing a point shifts the order by at most one place, so the answer
    moves by at most (x_{k+2} − x_k)/2 or (x_{k+1} − x_{k−1})/2 ≤ ½; half the points at 0 and half at 1 reach it.
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
        if text in ("mean", "variance"):
            made = Query(text)  # type: ignore[arg-type]
        elif text == "median":
            made = Query("quantile")
        elif percent or level:
            made = Query("quantile", Fraction(percent[1]) / 100 if percent else Fraction(level[1] if level else "0"))
        else:
            raise ConfigurationError(
                f"query {query!r} is unknown: choose 'mean', 'variance', 'median', 'p10' (any percentile) or 'quantile:0.25'."
            )
    return made
