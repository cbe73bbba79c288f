"""Questions for (ε, δ) or for ρ of zero-concentrated DP: Gaussian noise on all sums at once, one joint choice of all quantiles.

Sums of one kind are a group: z and w·z², z ∈ [−1, 1] the scaled record, for mean, sum, variance and std; the cells of a histogram;
a count. Replacing a record moves a group, in L2, by

    z                  2
    (z, w·z²)          2 as well: for d = |z − z'| its square is d²(1 + w²(z + z')²) ≤ d²(1 + w²(2 − d)²), which is at most 4 where
                       w²d²(2 − d) ≤ 2 + d; d²(2 − d)/(2 + d) is largest at d = √5 − 1, where it is 0.361: w² ≤ 2.77 will do
    cells, a count     √2, 1

and a little more for rounding. Each group is divided by this, so G of them together move by √G, and one Gaussian noise of standard
deviation σ√G is on all of them: σ is that of the whole spending, not of a part of it. A pure mechanism has ε/G for each group, so
its noise grows with G, not with √G.

Quantiles get the share of their number: of ε, or of ρ. The joint choice is an exponential mechanism, whose log ratios of neighbours
lie in an interval of length ε: (ε²/8)-zCDP (Cesar and Rogers 2021), so ρ pays for ε = √(8ρ). A budget charges it as pure ε, which
is never too little.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.mechanisms.problem import Problem, least_of, rounded_down
from lipdp.mechanisms.questions import CONFIDENCE, Answer, Joint, Planned, counts_in, edges_of
from lipdp.mechanisms.spending import Spending, gaussian_event
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.costs import Pure
from lipdp.privacy.noise import noised_on_processor
from lipdp.privacy.randomness import fresh_key

Floats = npt.NDArray[np.float64]
SQUARES = 1.64
"""w: its square is below 2.7, so squares cost nothing beside z."""
_FINE = 2**24  # lattice steps in 1
_MOST = 2**28  # records: their sums are exact, in lattice steps
_ROUNDING = 2.0**-22  # of an entry: one lattice step, and the rounding of sums to float64
_MOMENTS = ("mean", "sum", "variance", "std")


@dataclass(frozen=True)
class _Group:
    """Sums that one record moves together: their number, and by how much at most (L2)."""

    questions: tuple[str, ...]
    entries: int
    l2: float

    @property
    def unit(self) -> float:
        """What they are divided by."""
        return self.l2 + math.sqrt(self.entries) * _ROUNDING


def groups_of(questions: Sequence[str], problem: Problem) -> list[_Group]:
    """The groups that answer these questions (none of them about ranks)."""
    moments = tuple(question for question in questions if question in _MOMENTS)
    squared = any(question in ("variance", "std") for question in moments)
    made = [_Group(moments, 2 if squared else 1, 2.0)] if moments else []
    for question in questions:
        if question not in _MOMENTS:
            single = question.startswith("count")
            made.append(_Group((question,), len(edges_of(question, problem)) - 1, 1.0 if single else math.sqrt(2)))
    return made


def split(spending: Spending, sums: int, quantiles: int) -> tuple[Spending, float | None]:
    """What the sums may cost, and ε of the choice of quantiles, each in proportion to its questions; exactly not more together."""
    if not quantiles:
        return spending, None
    part = Fraction(quantiles, sums + quantiles)
    if spending.rho is not None:
        own = least_of(spending.rho) * part
        epsilon = rounded_down(Fraction(math.sqrt(8 * float(own))) * (1 - Fraction(1, 2**40)))
        return Spending(None, rho=rounded_down(least_of(spending.rho) - own)) if sums else spending, epsilon
    assert spending.epsilon is not None
    epsilon = rounded_down(least_of(spending.epsilon) * part)
    left = rounded_down(least_of(spending.epsilon) - Fraction(epsilon))
    return Spending(left, spending.delta) if sums else spending, epsilon


@dataclass(frozen=True)
class GaussianPlan(Planned):
    """Questions about one column of n records inside bounds, for (ε, δ) or ρ; no data were read for it.

    Attributes:
        spending: of one release of all answers.
        problem: n and the bounds that hold for the data.
        questions: as they were asked, in order.
        joint: how those about ranks are answered; ``None``: there are none.
    """

    spending: Spending
    problem: Problem
    questions: tuple[str, ...]
    joint: Joint | None
    adjacency: ClassVar[Adjacency] = "replace_one"

    def __post_init__(self) -> None:
        """Its parts cost no more than the whole, and are for the plan's own data."""
        ranked = () if self.joint is None else self.joint.questions
        if set(ranked) - set(self.questions) or not self.questions:
            raise ConfigurationError("the parts of a plan are for other questions: make it with plan().")
        if self.joint is not None:
            own = self.problem.n, self.problem.low, self.problem.high
            if (self.joint.problem.n, self.joint.problem.low, self.joint.problem.high) != own:
                raise ConfigurationError("the parts of a plan are for other data: the same n and bounds, which plan() sees to.")
            allowed = split(self.spending, len(self.groups), len(ranked))[1]
            if allowed is None or self.joint.exact_epsilon > Fraction(allowed):
                raise ConfigurationError("the parts of a plan cost more than it may: make it with plan().")
        if self.groups and not math.isfinite(self.std):
            raise ConfigurationError(f"there is no Gaussian noise for {self.spending}: use a larger delta, or leave it out.")

    @cached_property
    def groups(self) -> list[_Group]:
        """What gets Gaussian noise."""
        ranked = () if self.joint is None else self.joint.questions
        return groups_of([question for question in self.questions if question not in ranked], self.problem)

    @cached_property
    def sums(self) -> Spending:
        """What the Gaussian noise may cost."""
        return split(self.spending, len(self.groups), 0 if self.joint is None else len(self.joint.questions))[0]

    @property
    def entries(self) -> int:
        """Numbers that get noise."""
        return sum(group.entries for group in self.groups)

    @cached_property
    def multiplier(self) -> float:
        """σ."""
        return self.sums.multiplier(self.entries)

    @cached_property
    def std(self) -> float:
        """Of the noise on each sum, in units of its group."""
        return self.sums.std(math.sqrt(len(self.groups)) * (1 + 2.0**-50), self.entries)

    def costs(self, paying: Adjacency) -> list[Any]:
        """What a budget for these neighbours is charged."""
        made: list[Any] = [gaussian_event(self.multiplier, paying, self.adjacency)] if self.groups else []
        return made if self.joint is None else [*made, Pure(self.joint.exact_epsilon, self.adjacency)]

    def checked(self, x: Any, clamp: bool) -> Tensor:
        """The data in unit form, or why they are refused."""
        if self.problem.n > _MOST:
            raise ConfigurationError(f"there are {self.problem.n} records: sums of up to 2^28 are exact.")
        return self.problem.dataset(x, clamp)

    def totals(self, t: Tensor) -> Floats:
        """All sums of a unit dataset (1, n), divided by their groups' units: any record moves them by √G at most."""
        made: list[float] = []
        for group in self.groups:
            if group.questions[0] in _MOMENTS:
                z = (2 * t[0] - 1).clamp(-1, 1)
                parts = [z, SQUARES * z * z][: group.entries]
                own = [int((part * _FINE).round().to(torch.int64).sum()) / _FINE for part in parts]
            else:
                own = [float(count) for count in counts_in(t[0], edges_of(group.questions[0], self.problem), self.problem)]
            made += [value / group.unit for value in own]
        return np.array(made)

    def respond(self, t: Tensor) -> list[Answer]:
        """All answers about a unit dataset, in the order of the questions; nothing is charged."""
        answers = {} if self.joint is None else {one.question: one for one in self.joint.respond(t)}
        noisy = noised_on_processor(self.totals(t), self.std, fresh_key()).tolist() if self.groups else []
        start = 0
        for group in self.groups:
            own = [value * group.unit for value in noisy[start : start + group.entries]]
            start += group.entries
            for question in group.questions:
                answers[question] = self._answer(question, group, own)
        return [answers[question] for question in self.questions]

    def describe(self) -> dict[str, Any]:
        """What will be done; all public."""
        own = self.spending
        said = {"epsilon": own.epsilon, "delta": own.delta, "rho": own.rho, "adjacency": self.adjacency}
        noised = {question: self.std * group.unit for group in self.groups for question in group.questions}
        made = {**said, "n": self.problem.n, "bounds": [self.problem.low, self.problem.high], "questions": list(self.questions)}
        return {**made, "gaussian_noise_on_sums": noised, "quantiles": None if self.joint is None else self.joint.describe()}

    def _answer(self, question: str, group: _Group, sums: list[float]) -> Answer:
        """From the noisy sums of its group, with an interval that holds whatever the data are."""
        share = None if self.sums.epsilon is None else self.sums.epsilon / len(self.groups) / len(group.questions)
        if question not in _MOMENTS:
            most, error = float(self.problem.n), self._error(group, 1)
            values = [min(max(value, 0.0), most) for value in sums]
            if question.startswith("histogram"):
                return Answer(question, values, (-error, error), "noise", share)
            low, high = (min(max(sums[0] + off, 0.0), most) for off in (-error, error))
            return Answer(question, values[0], (low, high), "noise", share)
        if question in ("mean", "sum"):
            error = self._error(group, 1)
            low, value, high = (self._mean(sums[0] + off) for off in (-error, 0.0, error))
            times = self.problem.n if question == "sum" else 1
            return Answer(question, times * value, (times * low, times * high), "noise", share)
        error = self._error(group, 2)
        ends = [max(abs(sums[0]) - error, 0.0), abs(sums[0]) + error]
        value = self._spread(question, sums[0], sums[1])
        interval = self._spread(question, ends[1], sums[1] - error), self._spread(question, ends[0], sums[1] + error)
        return Answer(question, value, interval, "noise", share)

    def _error(self, group: _Group, numbers: int) -> float:
        """What the noise on so many sums stays below with 95%."""
        return NormalDist().inv_cdf(1 - (1 - CONFIDENCE) / (2 * numbers)) * self.std * group.unit + 2 * _ROUNDING * self.problem.n

    def _mean(self, total: float) -> float:
        own = self.problem
        return (own.low + own.high) / 2 + own.width / 2 * min(max(total / own.n, -1.0), 1.0)

    def _spread(self, question: str, first: float, second: float) -> float:
        """Variance or std of such sums, in the user's units."""
        n = self.problem.n
        unit = min(max(second / SQUARES / n, 0.0), 1.0) - min(abs(first) / n, 1.0) ** 2
        variance = (self.problem.width / 2) ** 2 * min(max(unit, 0.0), 1.0)
        return variance if question == "variance" else math.sqrt(variance)
