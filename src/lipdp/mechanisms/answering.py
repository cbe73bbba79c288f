"""Questions as people ask them: planned before data are read, paid for once, released with an interval.

A question is answered from one or two mechanisms of its share of ε: sum = n·mean, std = √variance, iqr = p75 − p25 (two halves of
the share), min and max = the ⌈6/ε⌉-th value from that end (nearer to it, noise would rather leave the data than find their end).
A histogram noises its counts: replacing a record changes two of them by one, an L1 sensitivity of 2. Several questions share ε.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.distributions import Belief, as_distribution, draw
from lipdp.mechanisms.learning import Settings, learn
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism
from lipdp.mechanisms.noise import draw_noise, release_noise
from lipdp.mechanisms.postprocess import Plain
from lipdp.mechanisms.problem import Problem, Query, least_of, share_of
from lipdp.mechanisms.worlds import Everyday
from lipdp.privacy.budget import AnyBudget, charge
from lipdp.privacy.costs import Pure

__all__ = ["Answer", "Plan", "answer", "plan", "release_all"]

_CONFIDENCE = 0.95
_NEAREST = 6  # ÷ ε: how many values from its end min and max are looked for
_SIMULATED = 200  # releases about public draws, for an interval that a belief gives


@dataclass(frozen=True)
class Answer:
    """One released answer.

    Attributes:
        question: as it was asked.
        value: the answer; a list for a histogram.
        interval: around a number, for 95% of the noise; counts of a histogram have ± the same, each.
        basis: what the interval rests on: "noise" (whatever the data are) or "belief" (95% of the datasets believed in).
        epsilon: its share.
    """

    question: str
    value: float | list[float]
    interval: tuple[float, float] | None
    basis: str
    epsilon: float


@dataclass(frozen=True)
class _Part:
    """A question with its mechanisms: ``combine`` makes the answer, ``errors`` are bounds on each mechanism's error (95%)."""

    question: str
    mechanisms: tuple[Mechanism, ...]
    combine: Callable[[list[float]], float]
    errors: tuple[float, ...]
    basis: str

    def respond(self, t: Tensor) -> Answer:
        values = [float(mechanism.problem.answer(mechanism._respond(t, "auto"))) for mechanism in self.mechanisms]
        low, high = (self.combine(self._moved(values, side)) for side in (-1, 1))
        epsilon = sum(mechanism.epsilon for mechanism in self.mechanisms)
        return Answer(self.question, self.combine(values), (low, high), self.basis, epsilon)

    def _moved(self, values: list[float], side: int) -> list[float]:
        """Each value at an end of its interval: a second one, which is subtracted, at the other end."""
        ends = [value + sign * side * error for value, error, sign in zip(values, self.errors, (1, -1), strict=False)]
        limits = [mechanism.problem.answer(torch.tensor([0.0, 1.0], dtype=torch.float64)).tolist() for mechanism in self.mechanisms]
        return [min(max(end, low), high) for end, (low, high) in zip(ends, limits, strict=True)]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Of each mechanism."""
        return tuple(mechanism.problem for mechanism in self.mechanisms)

    @property
    def exact_epsilon(self) -> Fraction:
        """What it spends."""
        return sum((problem.exact_epsilon for problem in self.problems), Fraction(0))

    @property
    def level(self) -> Fraction | None:
        """p, where the answer is a quantile's."""
        query = self.mechanisms[0].problem.query
        return query.p if query.kind == "quantile" and len(self.mechanisms) == 1 else None

    def describe(self) -> dict[str, Any]:
        return {"question": self.question, "mechanisms": [mechanism.describe() for mechanism in self.mechanisms]}


@dataclass(frozen=True)
class _Counts:
    """A histogram: how many records lie in [edge, next edge), the last cell with its end, with Laplace noise on each count."""

    question: str
    edges: tuple[float, ...]
    problem: Problem

    @property
    def problems(self) -> tuple[Problem, ...]:
        """One."""
        return (self.problem,)

    @property
    def exact_epsilon(self) -> Fraction:
        """What it spends."""
        return self.problem.exact_epsilon

    def respond(self, t: Tensor) -> Answer:
        # In unit form like the records, by the same arithmetic: a record at an edge is at it.
        edges = (torch.tensor(self.edges[1:-1], dtype=torch.float64) - self.problem.low) / self.problem.width
        place = torch.searchsorted(edges, t[0].contiguous(), right=True)
        counts = torch.bincount(place, minlength=len(self.edges) - 1).tolist()
        noisy = release_noise("laplace", counts, 2, self.problem.exact_epsilon)
        error = float(draw_noise("laplace", torch.tensor([(1 + _CONFIDENCE) / 2]), 2.0, self.problem.epsilon))
        return Answer(self.question, [float(max(count, 0)) for count in noisy], (-error, error), "noise", self.problem.epsilon)

    def describe(self) -> dict[str, Any]:
        guarantee = {"epsilon": self.problem.epsilon, "sensitivity": 2.0, "noised": "each count, with laplace noise"}
        return {"question": self.question, "edges": list(self.edges), **guarantee}


@dataclass(frozen=True)
class Plan:
    """Questions about one column of n records inside bounds, and how they will be answered; no data were read for it.

    Attributes:
        epsilon: of one release of all answers (pure, replace-one).
        problem: n and the bounds that hold for the data.
        parts: one for each question.
    """

    epsilon: float
    problem: Problem
    parts: tuple[_Part | _Counts, ...]

    def __post_init__(self) -> None:
        """Its parts cost no more than ε together, and are for the plan's own data."""
        if not self.parts or sum(part.exact_epsilon for part in self.parts) > least_of(self.epsilon):
            raise ConfigurationError(f"the parts of a plan cost more than its epsilon {self.epsilon:g}: make it with plan().")
        own = self.problem.n, self.problem.low, self.problem.high
        if any((problem.n, problem.low, problem.high) != own for part in self.parts for problem in part.problems):
            raise ConfigurationError("the parts of a plan are for other data: the same n and bounds, which plan() sees to.")

    def release(self, x: Any, *, budget: AnyBudget = None, clamp: bool = False) -> list[Answer]:
        """All answers; data are checked first, then ε is charged once, then noise is drawn."""
        return release_all([self], [x], budget=budget, clamp=clamp)[0]

    def respond(self, t: Tensor) -> list[Answer]:
        """All answers about a unit dataset; nothing is charged. Quantiles are put in order: free, and never further off."""
        answers = [part.respond(t) for part in self.parts]
        levels = [(part.level, i) for i, part in enumerate(self.parts) if isinstance(part, _Part) and part.level is not None]
        places = [i for _, i in sorted(levels)]
        ordered = sorted((answers[i].value, answers[i].interval) for i in places)
        for i, (value, interval) in zip(places, ordered, strict=True):
            answers[i] = replace(answers[i], value=value, interval=interval)
        return answers

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
    epsilon: float,
    n: int,
    bounds: Sequence[float],
    distribution: Belief | None = None,
    *,
    robustness: float | None = 0.25,
    settings: Settings | None = None,
    seed: int = 0,
) -> Plan:
    """How to answer questions about a column with ε in all.

    Args:
        questions: ``"mean"``, ``"sum"``, ``"variance"``, ``"std"``, ``"median"``, ``"p25"``, ``"iqr"``, ``"min"``, ``"max"``,
            ``"histogram:0,18,65,120"`` (edges of its cells), or several of these. Different quantiles come back in order.
        epsilon: of all answers together.
        n: the number of records, public.
        bounds: (lo, hi) that hold for every possible record.
        distribution: as in :func:`~lipdp.mechanisms.learn`, and so are ``robustness``, ``settings`` and ``seed``.
    """
    asked = [questions] if isinstance(questions, str) else list(questions)
    if not asked or len(set(asked)) < len(asked):
        raise ConfigurationError(f"questions is {questions!r}: give one or more different ones.")
    problem = Problem.of("mean", epsilon, n, bounds)
    share = share_of(epsilon, len(asked))
    belief = as_distribution(distribution, problem.low, problem.high) if distribution is not None else None
    work = settings if settings is not None else Settings(robust=800)

    def find(query: str | Query, spent: float) -> Mechanism:
        return learn(query, spent, n, bounds, belief, robustness=robustness, settings=work, seed=seed)

    everyday = belief or Everyday(problem.low, problem.high)
    parts = tuple(_part(question.strip().lower(), replace(problem, epsilon=share), find, everyday, seed) for question in asked)
    return Plan(epsilon, problem, parts)


def answer(
    x: Any,
    questions: str | Sequence[str],
    bounds: Sequence[float],
    epsilon: float,
    distribution: Belief | None = None,
    *,
    budget: AnyBudget = None,
    clamp: bool = False,
    robustness: float | None = 0.25,
    settings: Settings | None = None,
) -> list[Answer]:
    """Plan for as many records as there are (their number is public), charge, release: see :func:`plan`.

    Args:
        x: the column, one number for each record; values outside of ``bounds`` are an error, see ``clamp``.
        questions: one or several, as in :func:`plan`.
        bounds: (lo, hi) that hold for every possible record, known without looking at ``x``.
        epsilon: of all answers together.
        distribution: a belief about such columns, as in :func:`~lipdp.mechanisms.learn`.
        budget: what pays for it, before noise is drawn: a budget, the path of its file, or none.
        clamp: move values outside of ``bounds`` to the nearest bound instead.
        robustness: τ, as in :func:`~lipdp.mechanisms.learn`.
        settings: how much work to do; by default a robust mechanism is fitted to 800 datasets.
    """
    try:
        size = len(x)
    except TypeError:
        raise DataError(f"the dataset is a {type(x).__name__}: give a tensor, array or list of numbers.") from None
    made = plan(questions, epsilon, size, bounds, distribution, robustness=robustness, settings=settings)
    return made.release(x, budget=budget, clamp=clamp)


def release_all(
    plans: Sequence[Plan], columns: Sequence[Any], *, budget: AnyBudget = None, clamp: bool = False
) -> list[list[Answer]]:
    """Plans for several columns of one dataset: all are checked, then their ε is charged at once, then noise is drawn.

    Replacing a row changes all of its columns, so the plans' ε add up.
    """
    checked = [each.problem.dataset(x, clamp) for each, x in zip(plans, columns, strict=True)]
    total = sum(Fraction(repr(each.epsilon)) for each in plans)
    what = "; ".join(", ".join(part.question for part in each.parts) for each in plans)
    charge(budget, Pure(Fraction(total), "replace_one"), what)
    return [each.respond(t) for each, t in zip(plans, checked, strict=True)]


def _part(
    question: str, problem: Problem, find: Callable[[str | Query, float], Mechanism], belief: Any, seed: int
) -> _Part | _Counts:
    """A question's mechanisms, for ``problem``'s share of ε."""
    share = problem.epsilon
    if question.startswith("histogram"):
        return _Counts(question, _edges(question, problem), problem)
    if question == "iqr":
        half = share_of(share, 2)
        quartiles = (find("p75", half), find("p25", half))
        errors = tuple(_believed_error(each, belief, seed) for each in quartiles)
        return _Part(question, quartiles, lambda v: max(v[0] - v[1], 0.0), errors, "belief")
    if question in ("min", "max"):
        place = Fraction(min(math.ceil(_NEAREST / share), problem.n // 2), problem.n) if problem.n > 1 else Fraction(0)
        mechanism = find(Query("quantile", place if question == "min" else 1 - place), share)
        return _Part(question, (mechanism,), _first, (_believed_error(mechanism, belief, seed),), "belief")
    known: dict[str, tuple[str, Callable[[list[float]], float]]] = {
        "sum": ("mean", lambda v: problem.n * v[0]),
        "std": ("variance", lambda v: math.sqrt(max(v[0], 0.0))),
    }
    query, combine = known.get(question, (question, _first))
    mechanism = find(query, share)
    certain = isinstance(mechanism, AdditiveMechanism) and isinstance(mechanism.decoder, Plain)
    error = _noise_error(mechanism) if certain else _believed_error(mechanism, belief, seed)  # type: ignore[arg-type]
    return _Part(question, (mechanism,), combine, (error,), "noise" if certain else "belief")


def _first(values: list[float]) -> float:
    return values[0]


def _edges(question: str, problem: Problem) -> tuple[float, ...]:
    try:
        edges = tuple(float(part) for part in question.partition(":")[2].split(","))
    except ValueError:
        edges = ()
    if len(edges) < 2 or any(b <= a for a, b in itertools.pairwise(edges)):
        raise ConfigurationError(f"{question!r}: give a histogram's edges in rising order, e.g. histogram:0,18,65,120.")
    if edges[0] > problem.low or edges[-1] < problem.high:
        raise ConfigurationError(
            f"{question!r}: its edges have to span the bounds [{problem.low:g}, {problem.high:g}], so that every record counts."
        )
    return edges


def _noise_error(mechanism: AdditiveMechanism) -> float:
    """What |answer − truth| stays below with 95%, for all data: |noise| + the largest shift, for limiting only brings it nearer."""
    decoder = mechanism.decoder
    assert isinstance(decoder, Plain)
    size = mechanism.statistic.sensitivity * mechanism.statistic.unit
    noise = float(draw_noise(mechanism.noise, torch.tensor([(1 + _CONFIDENCE) / 2], dtype=torch.float64), size, mechanism.epsilon))
    moved = 0.0 if decoder.shift is None else float(decoder.shift.values.abs().max())
    return (noise + moved) * mechanism.problem.scale


def _believed_error(mechanism: Mechanism, belief: Any, seed: int) -> float:
    """What |answer − truth| stays below on 95% of the datasets believed in: by releases about draws of them, which are public."""
    problem = mechanism.problem
    count = max(min(_SIMULATED, 20_000_000 // problem.n), 40)
    rows = max(2_000_000 // problem.n, 1)
    errors: list[float] = []
    for start in range(0, count, rows):
        t = draw(belief, problem, min(rows, count - start), seed + 17 + start)
        truth = problem.query(t)
        errors += [abs(float(mechanism._respond(t[[i]], "auto") - truth[i])) for i in range(len(t))]
    return float(torch.tensor(errors, dtype=torch.float64).quantile(_CONFIDENCE)) * problem.scale
