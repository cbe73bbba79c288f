"""The same questions where how many records there are is private too: neighbours differ by one record that is there or not.

A count of all records gets noise first (sensitivity 1) and stands for n in everything else, which is post-processing or a choice
with public targets. With z ∈ [−1, 1] the scaled record, mean = Σz ÷ n and variance = Σz² ÷ n − mean² come from noisy sums, each of
sensitivity 1; a sum of the records themselves has max(|low|, |high|); a histogram's counts move by 1 in all. Quantiles are one
joint choice (:mod:`lipdp.mechanisms.joint`), which for such neighbours is twice as steep. ε is split evenly among what is noised,
each quantile question counting as one; what several questions need is noised once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.intervals import check_step
from lipdp.mechanisms.joint import JointQuantiles
from lipdp.mechanisms.noise import release_noise
from lipdp.mechanisms.problem import Problem, as_numbers, least_of, rounded_down
from lipdp.mechanisms.questions import (
    CONFIDENCE,
    Answer,
    combined,
    counts_in,
    edges_of,
    laplace_error,
    levels_of,
    normalised,
)
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.costs import Pure

__all__ = ["OpenPlan"]

_FINE = 2**30  # lattice steps in 1
_NEEDS = {
    "count": ("count",),
    "sum": ("sum",),
    "mean": ("count", "z"),
    "variance": ("count", "z", "z2"),
    "std": ("count", "z", "z2"),
}
_MOST = 2**30  # records


@dataclass(frozen=True)
class _Noisy:
    """A released number, and the scale of the Laplace noise on it."""

    value: float
    scale: float

    def ends(self, confidence: float) -> tuple[float, float]:
        """What holds the exact number with this chance."""
        error = laplace_error(self.scale, 1.0, confidence)
        return self.value - error, self.value + error


@dataclass(frozen=True)
class OpenPlan:
    """Questions about one column of a private number of records inside bounds; no data were read for it.

    Attributes:
        epsilon: of one release of all answers (pure, add or remove one record).
        low: lower bound of every possible record.
        high: upper bound.
        questions: those of :func:`~lipdp.mechanisms.plan`, and ``"count"``: how many records there are.
        step: as in :func:`~lipdp.mechanisms.plan`.
    """

    epsilon: float
    low: float
    high: float
    questions: tuple[str, ...]
    step: float | None = None
    adjacency: ClassVar[Adjacency] = "add_remove"

    def __post_init__(self) -> None:
        """All questions make sense, and none is asked twice."""
        object.__setattr__(self, "questions", tuple(normalised(self.questions)))
        for question in self.questions:
            if question.partition(":")[0] in ("histogram", "count") and question != "count":
                edges_of(question, self._problem)
            elif question not in _NEEDS:
                levels_of(question, 2, self.epsilon)  # refuses what is unknown
        check_step(self.step, self.low, self.high)
        if not self.shares:
            raise ConfigurationError("give one or more questions.")

    @property
    def _problem(self) -> Problem:
        """For its bounds and ε; its n means nothing."""
        return Problem.of("mean", self.epsilon, 2, (self.low, self.high))

    @property
    def _ranked(self) -> list[str]:
        return [q for q in self.questions if q not in _NEEDS and q.partition(":")[0] not in ("histogram", "count")]

    @cached_property
    def shares(self) -> dict[str, float]:
        """ε of each thing that is noised: their sum is not above ε."""
        weights: dict[str, int] = {}
        for question in self.questions:
            needs = ("count", "quantiles") if question in self._ranked else _NEEDS.get(question, (question,))
            weights |= dict.fromkeys(needs, 1)
        if self._ranked:
            weights["quantiles"] = len(self._ranked)
        whole = least_of(self.epsilon) / sum(weights.values())
        return {what: rounded_down(weight * whole) for what, weight in weights.items()}

    def costs(self, paying: Adjacency) -> list[Any]:
        """What a budget is charged."""
        return [Pure(self.epsilon, self.adjacency)]

    def checked(self, x: Any, clamp: bool) -> Tensor:
        """The data as they are, in the user's units, or why they are refused; none at all is a dataset too."""
        data = as_numbers(x)
        if data.ndim != 1 or len(data) > _MOST:
            raise DataError(f"the dataset has shape {tuple(data.shape)}: give (records,), a number for each.")
        if len(data) < 2:  # a problem is about two records or more
            return self.checked(torch.cat([data, torch.full((2,), self.low, dtype=torch.float64)]), clamp)[: len(data)]
        problem = Problem.of("mean", self.epsilon, len(data), (self.low, self.high))
        problem.dataset(data, clamp)
        return data.clamp(self.low, self.high)

    def respond(self, x: Tensor) -> list[Answer]:
        """All answers; nothing is charged."""
        noisy = {what: self._sum(x, what) for what in self.shares if what in ("count", "z", "z2", "sum")}
        size = max(round(noisy["count"].value), 1) if "count" in noisy else 1
        answers = {one.question: one for one in self._by_rank(x, size)} if self._ranked else {}
        for question in self.questions:
            if question in _NEEDS:
                answers[question] = self._by_sums(question, noisy)
            elif question not in answers:
                answers[question] = self._by_counts(x, question)
        return [answers[question] for question in self.questions]

    def describe(self) -> dict[str, Any]:
        """What will be done; all public."""
        own = {"epsilon": self.epsilon, "delta": 0.0, "adjacency": self.adjacency, "bounds": [self.low, self.high]}
        return {**own, "questions": list(self.questions), "noised": dict(self.shares)}

    def _sum(self, x: Tensor, what: str) -> _Noisy:
        """Σ of 1, z, z² or x with Laplace noise: each record is rounded to a lattice, so that sums are exact."""
        half, middle = (self.high - self.low) / 2, (self.high + self.low) / 2
        if what == "count":
            most, steps, unit = 1, len(x), 1.0
        else:
            largest = max(abs(self.low), abs(self.high)) if what == "sum" else 1.0
            z = (x / largest if what == "sum" else (x - middle) / half).clamp(-1, 1)
            places = ((z * z if what == "z2" else z) * _FINE).round().to(torch.int64)
            most, steps, unit = _FINE, int(places.sum()), largest / _FINE
        (released,) = release_noise("laplace", [steps], most, least_of(self.shares[what]))
        return _Noisy(released * unit, most * unit / self.shares[what])

    def _by_sums(self, question: str, noisy: dict[str, _Noisy]) -> Answer:
        epsilon = sum(self.shares[what] for what in _NEEDS[question])
        if question in ("count", "sum"):
            own = noisy[question]
            least = 0.0 if question == "count" else -math.inf
            low, high = own.ends(CONFIDENCE)
            return Answer(question, max(own.value, least), (max(low, least), max(high, least)), "noise", epsilon)
        value = self._moment(question, *(noisy[what].value for what in _NEEDS[question]))
        each = 1 - (1 - CONFIDENCE) / len(_NEEDS[question])
        tried = [self._moment(question, *corner) for corner in _corners([noisy[what].ends(each) for what in _NEEDS[question]])]
        return Answer(question, value, (min(tried), max(tried)), "noise", epsilon)

    def _moment(self, question: str, count: float, first: float, second: float = 0.0) -> float:
        """Mean, variance or std of such sums, in the user's units."""
        half, middle, size = (self.high - self.low) / 2, (self.high + self.low) / 2, max(count, 1.0)
        mean = min(max(first / size, -1.0), 1.0)
        if question == "mean":
            return middle + half * mean
        variance = half**2 * max(min(max(second / size, 0.0), 1.0) - mean**2, 0.0)
        return variance if question == "variance" else math.sqrt(variance)

    def _by_rank(self, x: Tensor, size: int) -> Iterator[Answer]:
        spent = self.shares["quantiles"]
        ranked = {question: levels_of(question, size, spent) or () for question in self._ranked}
        levels: Sequence[Fraction] = sorted({level for own in ranked.values() for level in own})
        joint = JointQuantiles(tuple(levels), spent, min(size, 2**26), self.low, self.high, "add_remove", self.step)
        asked = [tuple(levels.index(level) for level in own) for own in ranked.values()]
        for question, value in zip(ranked, combined(joint.respond(x), asked), strict=True):
            yield Answer(question, value, None, "none", spent / len(ranked))

    def _by_counts(self, x: Tensor, question: str) -> Answer:
        problem = self._problem
        counts = counts_in((x - self.low) / problem.width, edges_of(question, problem), problem)
        noisy = release_noise("laplace", counts, 1, least_of(self.shares[question]))
        values, error = [float(max(count, 0)) for count in noisy], laplace_error(1, self.shares[question])
        if question.startswith("histogram"):
            return Answer(question, values, (-error, error), "noise", self.shares[question])
        return Answer(question, values[0], (max(values[0] - error, 0.0), values[0] + error), "noise", self.shares[question])


def _corners(ends: Sequence[tuple[float, float]]) -> Iterator[tuple[float, ...]]:
    """All combinations of the ends, and of the middle of the mean's: a variance is largest where the mean is 0."""
    if not ends:
        yield ()
        return
    for rest in _corners(ends[1:]):
        low, high = ends[0]
        yield (low, *rest)
        yield (high, *rest)
        if low < 0 < high:
            yield (0.0, *rest)
