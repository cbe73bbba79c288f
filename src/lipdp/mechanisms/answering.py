"""Questions as people ask them: planned before data are read, paid for once, released with an interval.

Several questions share ε. sum = n·mean has one release with the mean, std = √variance with the variance. Where several quantiles
are needed (iqr = p75 − p25, min and max = the ⌈6/ε⌉-th value from that end: nearer to it, noise would rather leave the data than
find their end), one joint choice answers all of them from all of their shares (:mod:`lipdp.mechanisms.joint`), in order. A
histogram noises its counts: replacing a record changes two of them by one, an L1 sensitivity of 2; a single count moves by 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar, get_args

import numpy as np
import torch
from torch import Tensor

from lipdp._checks import one_of
from lipdp._texts import brief
from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.distributions import Belief, Distribution, Everyday, as_distribution, draw
from lipdp.mechanisms.gaussian import GaussianPlan, groups_of, split
from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.joint import JointQuantiles
from lipdp.mechanisms.learning import Settings, learn, settings_or
from lipdp.mechanisms.mechanism import Mechanism, SelectionMechanism
from lipdp.mechanisms.problem import Lattice, Problem, Query, check_step, least_of, rounded_down, share_of
from lipdp.mechanisms.questions import (
    CONFIDENCE,
    Answer,
    Counts,
    Joint,
    Planned,
    Single,
    combined,
    edges_of,
    levels_of,
    normalised,
    query_of,
)
from lipdp.mechanisms.spending import Spending
from lipdp.mechanisms.unknown_size import OpenPlan
from lipdp.mechanisms.utilities import RankUtility
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.budget import AnyBudget
from lipdp.privacy.costs import Pure

_LEAST_JOINT = 1e-3  # ε of a joint choice: for less, each quantile is chosen alone
_SIMULATED = 200  # releases about public draws, for an interval that a belief gives


@dataclass(frozen=True)
class Plan(Planned):
    """Questions about one column of n records inside bounds, and how they will be answered; no data were read for it.

    Attributes:
        epsilon: of one release of all answers (pure, replace-one).
        problem: n and the bounds that hold for the data.
        parts: how they are answered, a question each, or several quantiles together.
        questions: as they were asked, in order.
    """

    epsilon: float
    problem: Problem
    parts: tuple[Single | Joint | Counts, ...]
    questions: tuple[str, ...]
    adjacency: ClassVar[Adjacency] = "replace_one"

    def __post_init__(self) -> None:
        """Its parts cost no more than ε together, and are for the plan's own data."""
        if not self.parts or sum(part.exact_epsilon for part in self.parts) > least_of(self.epsilon):
            raise ConfigurationError(f"the parts of a plan cost more than its epsilon {brief(self.epsilon)}: make it with plan().")
        own = self.problem.n, self.problem.low, self.problem.high
        if any((part.problem.n, part.problem.low, part.problem.high) != own for part in self.parts):
            raise ConfigurationError("the parts of a plan are for other data: the same n and bounds, which plan() sees to.")

    def costs(self, paying: Adjacency) -> list[Any]:
        """What a budget is charged."""
        return [Pure(self.epsilon, self.adjacency)]

    def checked(self, x: Any, clamp: bool) -> Tensor:
        """The data in unit form, or why they are refused."""
        return self.problem.dataset(x, clamp)

    def respond(self, t: Tensor) -> list[Answer]:
        """All answers about a unit dataset, in the order of the questions; nothing is charged."""
        answers = {one.question: one for part in self.parts for one in part.respond(t)}
        return [answers[question] for question in self.questions]

    def describe(self) -> dict[str, Any]:
        """What will be done; all public."""
        own = {"n": self.problem.n, "bounds": [self.problem.low, self.problem.high]}
        return {
            "epsilon": self.epsilon,
            "delta": 0.0,
            "adjacency": "replace_one",
            **own,
            "questions": [p.describe() for p in self.parts],
        }


def plan(
    questions: str | Sequence[str],
    epsilon: float | None,
    n: int,
    bounds: Sequence[float],
    distribution: Belief | None = None,
    *,
    delta: float = 0.0,
    rho: float | None = None,
    robustness: float | None = 0.25,
    settings: Settings | None = None,
    seed: int = 0,
    step: float | None = None,
) -> Plan | GaussianPlan:
    """How to answer questions about a column with ε in all.

    Args:
        questions: ``"mean"``, ``"sum"``, ``"variance"``, ``"std"``, ``"median"``, ``"p25"``, ``"iqr"``, ``"min"``, ``"max"``,
            ``"histogram:0,18,65,120"`` (edges of its cells), ``"count:18,65"`` (records of [18, 65)), or several of these.
            Different quantiles come back in order.
        epsilon: of all answers together; ``None`` where ``rho`` is given.
        n: the number of records, public.
        bounds: (lo, hi) that hold for every possible record.
        delta: δ of all answers together. Above 0, Gaussian noise is used where it is less than that of pure ε, which it is for many
            questions: else no δ is spent.
        rho: ρ of zero-concentrated DP for all answers together, instead of ε: Gaussian noise (:mod:`lipdp.mechanisms.gaussian`).
        distribution: as in :func:`~lipdp.mechanisms.learn`, and so are ``robustness``, ``settings`` and ``seed``.
        step: where it is public that every record is lo, lo + step, …, e.g. 1 for whole numbers: quantiles are chosen among these.
    """
    asked, spending = normalised(questions), Spending(epsilon, delta, rho)
    problem = Problem.of("mean", 1.0 if epsilon is None else epsilon, n, bounds)
    belief = as_distribution(distribution, problem.low, problem.high) if distribution is not None else None
    work = settings_or(Settings(robust=800), settings)
    everyday: Distribution = belief or Everyday(problem.low, problem.high)
    check_step(step, problem.low, problem.high)
    if step is not None:
        everyday = _in_steps(everyday, Lattice.of_steps(problem.low, problem.high, step))

    shares = len({query_of(question) for question in asked})
    if epsilon is None or delta:
        noised = _gaussian(asked, spending, problem, everyday, seed, step)
        if noised is not None and (epsilon is None or _is_less(noised, shares)):
            return noised
    assert epsilon is not None
    share = share_of(epsilon, shares)

    def find(query: str | Query) -> Mechanism:
        if step is not None and isinstance(query, Query):
            return _among_steps(replace(problem, query=query, epsilon=share), step)
        return learn(query, share, n, bounds, belief, robustness=robustness, settings=work, seed=seed)

    ranked = {question: levels for question in asked if (levels := levels_of(question, n, epsilon)) is not None}
    together = len({level for levels in ranked.values() for level in levels}) > 1
    alone: dict[str, tuple[str, ...]] = {}
    for question in asked:
        if not (together and question in ranked):
            alone[query_of(question)] = (*alone.get(query_of(question), ()), question)
    parts: list[Single | Joint | Counts] = [
        _part(own, replace(problem, epsilon=share), ranked.get(own[0]), find, everyday, seed) for own in alone.values()
    ]
    if together:
        left = rounded_down(least_of(epsilon) - len(alone) * Fraction(share))
        parts.append(_jointly(ranked, replace(problem, epsilon=left), everyday, seed, step))
    return Plan(epsilon, problem, tuple(parts), tuple(asked))


def answer(
    x: Any,
    questions: str | Sequence[str],
    bounds: Sequence[float],
    epsilon: float | None = None,
    distribution: Belief | None = None,
    *,
    delta: float = 0.0,
    rho: float | None = None,
    budget: AnyBudget = None,
    clamp: bool = False,
    robustness: float | None = 0.25,
    settings: Settings | None = None,
    adjacency: Adjacency = "replace_one",
    step: float | None = None,
) -> list[Answer]:
    """Plan for as many records as there are, charge, release: see :func:`plan`. Their number is public, see ``adjacency``.

    Args:
        x: the column, one number for each record; values outside of ``bounds`` are an error, see ``clamp``.
        questions: one or several, as in :func:`plan`.
        bounds: (lo, hi) that hold for every possible record, known without looking at ``x``.
        epsilon: of all answers together, unless ``rho`` is given.
        distribution: a belief about such columns, as in :func:`~lipdp.mechanisms.learn`.
        delta: as in :func:`plan`, and so is ``rho``.
        budget: what pays for it, before noise is drawn: a budget, the path of its file, or none.
        clamp: move values outside of ``bounds`` to the nearest bound instead.
        robustness: τ, as in :func:`~lipdp.mechanisms.learn`.
        settings: how much work to do; by default a robust mechanism is fitted to 800 datasets.
        adjacency: "replace_one": n is public. "add_remove": it is private, a part of ε goes to a noisy count, and ``"count"`` can
            be asked; mechanisms without a belief (:class:`~lipdp.mechanisms.OpenPlan`).
        step: as in :func:`plan`.
    """
    one_of("adjacency", adjacency, get_args(Adjacency))
    if adjacency == "add_remove":
        if distribution is not None:
            raise ConfigurationError("a distribution is for a public number of records: leave it out, or use replace_one.")
        problem = Problem.of("mean", 1.0 if epsilon is None else epsilon, 2, bounds)
        opened = OpenPlan(epsilon, problem.low, problem.high, tuple(normalised(questions)), step, delta, rho)
        return opened.release(x, budget=budget, clamp=clamp)
    try:
        size = len(x)
    except TypeError:
        raise DataError(f"the dataset is a {type(x).__name__}: give a tensor, array or list of numbers.") from None
    kept = {"robustness": robustness, "settings": settings, "step": step}
    Problem.of("mean", 1.0, size, bounds).dataset(x, clamp)  # what is wrong with them is said before the work, not behind it
    planned = plan(questions, epsilon, size, bounds, distribution, delta=delta, rho=rho, **kept)  # type: ignore[arg-type]
    return planned.release(x, budget=budget, clamp=clamp)


def _part(
    questions: tuple[str, ...],
    problem: Problem,
    levels: tuple[Fraction, ...] | None,
    find: Callable[[str | Query], Mechanism],
    belief: Any,
    seed: int,
) -> Single | Counts:
    """How to answer questions that have one release in common, for ``problem``'s share of ε."""
    question = questions[0]
    kind = question.partition(":")[0]
    if kind in ("histogram", "count"):
        return Counts(question, edges_of(question, problem), problem, 1 if kind == "count" else 2)
    mechanism = find(query_of(question) if levels is None else Query("quantile", levels[0]))
    return Single(questions, mechanism, None if mechanism.certain else _believed_error(mechanism, belief, seed))


def _gaussian(
    asked: list[str], spending: Spending, problem: Problem, belief: Any, seed: int, step: float | None
) -> GaussianPlan | None:
    """All questions for this spending, sums with Gaussian noise and quantiles by one choice; none where no such noise will do."""
    of_rank = [question for question in asked if levels_of(question, problem.n, 1.0) is not None]
    sums = groups_of([question for question in asked if question not in of_rank], problem)
    own, share = split(spending, len(sums), len(of_rank))
    if sums and not math.isfinite(own.std(math.sqrt(len(sums)), sum(group.entries for group in sums))):
        return None
    if share is not None and share < _LEAST_JOINT and spending.rho is None:
        return None
    joint = None
    if share is not None:
        ranked = {question: levels_of(question, problem.n, share) or () for question in of_rank}
        joint = _jointly(ranked, replace(problem, epsilon=share), belief, seed, step)
    return GaussianPlan(spending, problem, tuple(asked), joint)


def _is_less(noised: GaussianPlan, shares: int) -> bool:
    """Whether Gaussian noise on its sums is less than Laplace noise for an even share of ε each (cells have √2 of L2 in L1)."""
    if not noised.groups:
        return False
    epsilon, gains = noised.spending.epsilon, []
    assert epsilon is not None
    for group in noised.groups:
        for _ in group.questions:
            l1 = 2.0 if group.l2 > 1 else 1.0
            gains.append(math.log(noised.std * group.unit) - math.log(math.sqrt(2) * l1 * shares / epsilon))
    return sum(gains) < 0


def _in_steps(belief: Distribution, lattice: Lattice) -> Distribution:
    """A belief whose records are all on a lattice."""
    return lambda count, n, generator: lattice.values(lattice.places(belief(count, n, generator)))


def _among_steps(problem: Problem, step: float) -> Mechanism:
    """A quantile by ranks among the numbers that there can be, by permute-and-flip: it needs no prior, and has no place between."""
    lattice = Lattice.of_steps(problem.low, problem.high, step)
    if lattice.last >= 20_000:
        return IntervalMechanism.deep(problem)  # nearly all numbers
    values = torch.tensor([lattice.value(place) for place in range(lattice.last + 1)], dtype=torch.float64)
    utility = RankUtility(((values - problem.low) / problem.width).clamp(0, 1), problem.query.p * problem.n)
    title = f"permute-and-flip by rank among the {len(values)} multiples of {step:g}"
    return SelectionMechanism(problem, title, utility, "permute_and_flip", utility.grid)


def _jointly(ranked: dict[str, tuple[Fraction, ...]], problem: Problem, belief: Any, seed: int, step: float | None) -> Joint:
    """All questions about ranks from one choice, with the error of each on 95% of the datasets believed in.

    These are of 4,000 records at most: with more, the noise on a rank is the same and a rank is less far.
    """
    levels = tuple(sorted({level for own in ranked.values() for level in own}))
    asked = tuple(tuple(levels.index(level) for level in own) for own in ranked.values())
    quantiles = JointQuantiles(levels, problem.epsilon, problem.n, problem.low, problem.high, step=step)
    fewer = problem.resized(min(problem.n, 4000))
    trial = replace(quantiles, n=fewer.n)
    errors = []
    for row in draw(belief, fewer, _SIMULATED // 2, seed + 17):
        truth = [float(fewer.answer(Query("quantile", level)(row[None]))) for level in levels]
        released = trial.respond(fewer.low + fewer.width * row)
        errors.append(np.abs(np.subtract(combined(released, asked), combined(truth, asked))))
    bounds = np.quantile(np.array(errors), CONFIDENCE, axis=0).tolist()
    return Joint(tuple(ranked), asked, quantiles, problem, tuple(bounds))


def _believed_error(mechanism: Mechanism, belief: Any, seed: int) -> float:
    """What |answer − truth| stays below on 95% of the datasets believed in: by releases about public draws of them. Unit scale."""
    problem = mechanism.problem
    count = max(min(_SIMULATED, 20_000_000 // problem.n), 40)
    rows = max(2_000_000 // problem.n, 1)
    errors: list[float] = []
    for start in range(0, count, rows):
        t = draw(belief, problem, min(rows, count - start), seed + 17 + start)
        truth = problem.query(t)
        errors += [abs(float(mechanism._respond(t[[i]], "auto") - truth[i])) for i in range(len(t))]
    return float(torch.tensor(errors, dtype=torch.float64).quantile(CONFIDENCE))
