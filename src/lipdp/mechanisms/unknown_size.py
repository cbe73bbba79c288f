"""The same questions where how many records there are is private too: neighbours differ by one record that is there or not.

A count of all records gets noise first (sensitivity 1) and stands for n in everything else, which is post-processing or a choice
with public targets. With z ∈ [−1, 1] the scaled record, mean = Σz ÷ n and variance = Σz² ÷ n − mean² come from noisy sums, each of
sensitivity 1; a sum of the records themselves has max(|low|, |high|); a histogram's counts move by 1 in all. Quantiles are one
joint choice (:mod:`lipdp.mechanisms.joint`), which for such neighbours is twice as steep. ε is split evenly among what is noised,
each quantile question counting as one; what several questions need is noised once.

For (ε, δ) or ρ all sums get one Gaussian noise: a record moves each of G of them (of a histogram, one cell) by 1 at most, so all
by √G in L2, where pure noise grows with G. Quantiles have a share of ε or ρ, as in :mod:`lipdp.mechanisms.gaussian`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from lipdp._texts import brief
from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.gaussian import split
from lipdp.mechanisms.joint import JointQuantiles
from lipdp.mechanisms.noise import release_noise
from lipdp.mechanisms.problem import Problem, as_numbers, check_step, least_of, rounded_down
from lipdp.mechanisms.questions import (
    CONFIDENCE,
    Answer,
    Planned,
    combined,
    counts_in,
    edges_of,
    laplace_error,
    levels_of,
    normalised,
)
from lipdp.mechanisms.spending import Spending, gaussian_event
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.costs import Pure
from lipdp.privacy.noise import noised_on_processor
from lipdp.privacy.randomness import fresh_key

_FINE = 2**30  # lattice steps in 1
_NEEDS = {
    "count": ("count",),
    "sum": ("sum",),
    "mean": ("count", "z"),
    "variance": ("count", "z", "z2"),
    "std": ("count", "z", "z2"),
}
_SUMS = ("count", "z", "z2", "sum")
_MOST = 2**30  # records
_MOST_RANKED = 2**26  # records that a choice of quantiles is made for
_ROUNDING = 2.0**-20  # of 1: by how much more a record may move a sum, for its lattice and for float64


@dataclass(frozen=True)
class _Noisy:
    """A released number, and the scale of the Laplace noise on it, in whole steps, or the standard deviation of Gaussian noise."""

    value: float
    scale: float
    step: float | None

    def error(self, confidence: float) -> float:
        """What the noise stays below with this chance."""
        if self.step is None:
            return NormalDist().inv_cdf((1 + confidence) / 2) * self.scale
        return self.step * laplace_error(self.scale / self.step, 1.0, confidence)

    def ends(self, confidence: float) -> tuple[float, float]:
        """What holds the exact number with this chance."""
        error = self.error(confidence)
        return self.value - error, self.value + error


@dataclass(frozen=True)
class OpenPlan(Planned):
    """Questions about one column of a private number of records inside bounds; no data were read for it.

    Attributes:
        epsilon: of one release of all answers (add or remove one record); None where ρ is given.
        low: lower bound of every possible record.
        high: upper bound.
        questions: those of :func:`~lipdp.mechanisms.plan`, and ``"count"``: how many records there are.
        step: as in :func:`~lipdp.mechanisms.plan`.
        delta: above 0, Gaussian noise is used where it is less than Laplace noise for ε alone; else no δ is spent.
        rho: ρ of zero-concentrated DP, instead of ε.
    """

    epsilon: float | None
    low: float
    high: float
    questions: tuple[str, ...]
    step: float | None = None
    delta: float = 0.0
    rho: float | None = None
    adjacency: ClassVar[Adjacency] = "add_remove"

    def __post_init__(self) -> None:
        """All questions make sense, and none is asked twice."""
        object.__setattr__(self, "questions", tuple(normalised(self.questions)))
        _ = self._spending, self._problem  # refuse what is none
        for question in self.questions:
            if question.partition(":")[0] in ("histogram", "count") and question != "count":
                edges_of(question, self._problem)
            elif question not in _NEEDS:
                levels_of(question, 2, self._problem.epsilon)  # refuses what is unknown
        check_step(self.step, self.low, self.high)
        if not self._weights:
            raise ConfigurationError("give one or more questions.")
        if self._by_noise is None and self.rho is not None:
            raise ConfigurationError(f"there is no Gaussian noise for rho {brief(self.rho)} and these questions: use a larger one.")
        if self._ranked:
            self._joint(_MOST_RANKED)  # refuses what can't be chosen before anything is paid, however many records there are

    @property
    def _spending(self) -> Spending:
        return Spending(self.epsilon, self.delta, self.rho)

    @property
    def _problem(self) -> Problem:
        """For its bounds and ε; its n means nothing."""
        return Problem.of("mean", 1.0 if self.epsilon is None else self.epsilon, 2, (self.low, self.high))

    @property
    def _ranked(self) -> list[str]:
        return [q for q in self.questions if q not in _NEEDS and q.partition(":")[0] not in ("histogram", "count")]

    @cached_property
    def _weights(self) -> dict[str, int]:
        """What is noised, and how many questions each stands for."""
        weights: dict[str, int] = {}
        for question in self.questions:
            needs = ("count", "quantiles") if question in self._ranked else _NEEDS.get(question, (question,))
            weights |= dict.fromkeys(needs, 1)
        if self._ranked:
            weights["quantiles"] = len(self._ranked)
        return weights

    @cached_property
    def shares(self) -> dict[str, float]:
        """ε of each thing that is noised for pure ε: their sum is not above ε. With Gaussian noise, that of the quantiles."""
        if self._by_noise is not None:
            return {} if self._by_noise.quantiles is None else {"quantiles": self._by_noise.quantiles}
        assert self.epsilon is not None
        whole = least_of(self.epsilon) / sum(self._weights.values())
        return {what: rounded_down(weight * whole) for what, weight in self._weights.items()}

    @cached_property
    def _by_noise(self) -> _Gaussian | None:
        """How Gaussian noise is used, if it is: for ρ, and for δ where it is less than Laplace noise."""
        names, spending = [what for what in self._weights if what != "quantiles"], self._spending
        if self.rho is None and not self.delta:
            return None
        sizes = [len(edges_of(what, self._problem)) - 1 if what not in _SUMS else 1 for what in names]
        own, epsilon = split(spending, len(names), len(self._ranked))
        std = own.std(math.sqrt(len(names)) * (1 + _ROUNDING), sum(sizes))
        if not math.isfinite(std):
            return None
        if self.rho is None and std >= math.sqrt(2) * sum(self._weights.values()) / float(least_of(self._problem.epsilon)):
            return None
        return _Gaussian(dict(zip(names, sizes, strict=True)), own.multiplier(sum(sizes)), std, own.epsilon, epsilon)

    def costs(self, paying: Adjacency) -> list[Any]:
        """What a budget is charged."""
        if self._by_noise is None:
            assert self.epsilon is not None
            return [Pure(self.epsilon, self.adjacency)]
        made = [gaussian_event(self._by_noise.multiplier, paying, self.adjacency)]
        return made if self._by_noise.quantiles is None else [*made, Pure(self._by_noise.quantiles, self.adjacency)]

    def checked(self, x: Any, clamp: bool) -> Tensor:
        """The data as they are, in the user's units, or why they are refused; none at all is a dataset too."""
        data = as_numbers(x)
        most = _MOST_RANKED if self._ranked else _MOST
        if data.ndim != 1 or len(data) > most:
            raise DataError(f"the dataset has shape {tuple(data.shape)}: give (records,), a number for each, {most} at most.")
        if len(data) < 2:  # a problem is about two records or more
            filled = torch.full((2 - len(data),), self.low, dtype=torch.float64)
            return self.checked(torch.cat([data, filled]), clamp)[: len(data)]
        problem = Problem.of("mean", self._problem.epsilon, len(data), (self.low, self.high))
        problem.dataset(data, clamp)
        return data.clamp(self.low, self.high)

    def respond(self, x: Tensor) -> list[Answer]:
        """All answers; nothing is charged."""
        totals = {what: self._total(x, what) for what in self._weights if what != "quantiles"}
        numbers = self._noised(totals)
        noisy = {what: own[0] for what, own in numbers.items() if what in _SUMS}
        size = max(round(noisy["count"].value), 1) if "count" in noisy else 1
        answers = {one.question: one for one in self._by_rank(x, size)} if self._ranked else {}
        for question in self.questions:
            if question in _NEEDS:
                answers[question] = self._by_sums(question, noisy)
            elif question not in answers:
                answers[question] = self._by_counts(question, numbers[question])
        return [answers[question] for question in self.questions]

    def describe(self) -> dict[str, Any]:
        """What will be done; all public."""
        own: dict[str, Any] = {"epsilon": self.epsilon, "delta": 0.0 if self._by_noise is None else self.delta, "rho": self.rho}
        own |= {"adjacency": self.adjacency, "bounds": [self.low, self.high], "questions": list(self.questions)}
        if self._by_noise is None:
            return {**own, "noised": dict(self.shares)}
        return {**own, "gaussian_noise_on_sums": self._by_noise.std, "noised": [*self._by_noise.sizes, *self.shares]}

    def _total(self, x: Tensor, what: str) -> _Total:
        """Σ of 1, z, z² or x, or a histogram's cells: each record is rounded to a lattice, so that sums are exact."""
        half, middle = (self.high - self.low) / 2, (self.high + self.low) / 2
        if what == "count":
            return _Total([len(x)], 1, 1.0)
        if what not in _SUMS:
            problem = self._problem
            return _Total(counts_in((x - self.low) / problem.width, edges_of(what, problem), problem), 1, 1.0)
        largest = max(abs(self.low), abs(self.high)) if what == "sum" else 1.0
        z = (x / largest if what == "sum" else (x - middle) / half).clamp(-1, 1)
        places = ((z * z if what == "z2" else z) * _FINE).round().to(torch.int64)
        return _Total([int(places.sum())], _FINE, largest / _FINE)

    def _noised(self, totals: dict[str, _Total]) -> dict[str, list[_Noisy]]:
        """All of them with noise; a record moves each of ``totals`` by ``most`` steps at most."""
        if self._by_noise is None:
            return {
                what: [
                    _Noisy(released * own.unit, own.most * own.unit / self.shares[what], own.unit)
                    for released in release_noise("laplace", own.steps, own.most, least_of(self.shares[what]))
                ]
                for what, own in totals.items()
            }
        if not totals:
            return {}
        std, flat = (
            self._by_noise.std,
            np.array([step / own.most for own in totals.values() for step in own.steps], dtype=np.float64),
        )
        drawn = iter(noised_on_processor(flat, std, fresh_key()).tolist())
        return {
            what: [_Noisy(next(drawn) * own.most * own.unit, std * own.most * own.unit, None) for _ in own.steps]
            for what, own in totals.items()
        }

    def _by_sums(self, question: str, noisy: dict[str, _Noisy]) -> Answer:
        epsilon = self._share(_NEEDS[question])
        if question in ("count", "sum"):
            own = noisy[question]
            least = 0.0 if question == "count" else -math.inf
            low, high = own.ends(CONFIDENCE)
            return Answer(question, max(own.value, least), (max(low, least), max(high, least)), "noise", epsilon)
        value = self._moment(question, *(noisy[what].value for what in _NEEDS[question]))
        each = 1 - (1 - CONFIDENCE) / len(_NEEDS[question])
        ends = [noisy[what].ends(each) for what in _NEEDS[question]]
        tried = [self._moment(question, *corner) for corner in [*_corners(ends), *_between(ends)]]
        return Answer(question, value, (min(tried), max(tried)), "noise", epsilon)

    def _share(self, needs: Sequence[str]) -> float | None:
        """ε of what a question needs, as if it were split evenly where one noise is on all; None for ρ."""
        if self._by_noise is None:
            return sum(self.shares[what] for what in needs)
        return None if self._by_noise.epsilon is None else self._by_noise.epsilon * len(needs) / len(self._by_noise.sizes)

    def _moment(self, question: str, count: float, first: float, second: float = 0.0) -> float:
        """Mean, variance or std of such sums, in the user's units."""
        half, middle, size = (self.high - self.low) / 2, (self.high + self.low) / 2, max(count, 1.0)
        mean = min(max(first / size, -1.0), 1.0)
        if question == "mean":
            return middle + half * mean
        variance = half**2 * max(min(max(second / size, 0.0), 1.0) - mean**2, 0.0)
        return variance if question == "variance" else math.sqrt(variance)

    def _levels(self, size: int) -> list[tuple[Fraction, ...]]:
        """Of each question about ranks, for so many records."""
        return [levels_of(question, size, self.shares["quantiles"]) or () for question in self._ranked]

    def _joint(self, size: int) -> JointQuantiles:
        levels = tuple(sorted({level for own in self._levels(size) for level in own}))
        spent = self.shares["quantiles"]
        return JointQuantiles(levels, spent, min(size, _MOST_RANKED), self.low, self.high, "add_remove", self.step)

    def _by_rank(self, x: Tensor, size: int) -> Iterator[Answer]:
        joint = self._joint(size)
        asked = [tuple(joint.levels.index(level) for level in own) for own in self._levels(size)]
        for question, value in zip(self._ranked, combined(joint.respond(x), asked), strict=True):
            yield Answer(question, value, None, "none", joint.epsilon / len(asked))

    def _by_counts(self, question: str, noisy: list[_Noisy]) -> Answer:
        values, error, spent = [max(own.value, 0.0) for own in noisy], noisy[0].error(CONFIDENCE), self._share((question,))
        if question.startswith("histogram"):
            return Answer(question, values, (-error, error), "noise", spent)
        return Answer(question, values[0], (max(values[0] - error, 0.0), values[0] + error), "noise", spent)


@dataclass(frozen=True)
class _Total:
    """Sums in whole steps of ``unit``; a record moves one of them by ``most`` steps at most, and no other."""

    steps: list[int]
    most: int
    unit: float


@dataclass(frozen=True)
class _Gaussian:
    """Names and sizes of what gets noise, σ, the noise's standard deviation on each number, ε of the noise and of the quantiles."""

    sizes: dict[str, int]
    multiplier: float
    std: float
    epsilon: float | None
    quantiles: float | None


def _corners(ends: Sequence[tuple[float, float]]) -> Iterator[tuple[float, ...]]:
    """All combinations of the ends, and of 0 where it is between: a variance is largest where the mean is 0."""
    if not ends:
        yield ()
        return
    for rest in _corners(ends[1:]):
        low, high = ends[0]
        yield (low, *rest)
        yield (high, *rest)
        if low < 0 < high:
            yield (0.0, *rest)


def _between(ends: Sequence[tuple[float, float]]) -> Iterator[tuple[float, ...]]:
    """Where a variance is largest for a count inside of its ends: min(S/n, 1) − (F/n)² rises up to n = S or 2F²/S, whichever is
    more, and falls from there on.
    """
    if len(ends) < 3:
        return
    (fewest, most), first, (_, second) = ends
    least = 0.0 if first[0] < 0 < first[1] else min(map(abs, first))
    if second > 0 and fewest < (best := max(second, 2 * least**2 / second)) < most:
        yield best, least, second
