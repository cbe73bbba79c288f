"""What can be asked, how it is read, and how the parts of a plan answer it once it is clear what they noise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.mechanisms.joint import JointQuantiles
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.noise import release_noise
from lipdp.mechanisms.problem import Problem, least_of, parse_query
from lipdp.mechanisms.worst import largest
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.budget import AnyBudget, open_budget
from lipdp.privacy.costs import Pure

CONFIDENCE = 0.95
"""Of intervals."""
_NEAREST = 6  # ÷ ε: how many values from its end min and max are looked for


@dataclass(frozen=True)
class Answer:
    """One released answer.

    Attributes:
        question: as it was asked.
        value: the answer; a list for a histogram.
        interval: around a number, for 95% of the noise; counts of a histogram have ± the same, each.
        basis: what the interval rests on: "noise" (whatever the data are) or "belief" (95% of the datasets believed in).
        epsilon: its share; ``None`` where ρ was given.
    """

    question: str
    value: float | list[float]
    interval: tuple[float, float] | None
    basis: str
    epsilon: float | None


class Planned:
    """Questions about one column, and how they will be answered; no data were read for it."""

    questions: tuple[str, ...]
    adjacency: ClassVar[Adjacency]

    def release(self, x: Any, *, budget: AnyBudget = None, clamp: bool = False) -> list[Answer]:
        """All answers; data are checked first, then they are charged at once, then noise is drawn."""
        return release_all([self], [x], budget=budget, clamp=clamp)[0]

    def checked(self, x: Any, clamp: bool) -> Tensor:
        """The data as :meth:`respond` takes them, or why they are refused."""
        raise NotImplementedError

    def costs(self, paying: Adjacency) -> list[Any]:
        """What a budget for these neighbours is charged."""
        raise NotImplementedError

    def respond(self, t: Tensor) -> list[Answer]:
        """All answers, in the order of the questions; nothing is charged."""
        raise NotImplementedError


def release_all(
    plans: Sequence[Planned], columns: Sequence[Any], *, budget: AnyBudget = None, clamp: bool = False
) -> list[list[Answer]]:
    """Plans for several columns of one dataset: all are checked, then charged at once, then noise is drawn.

    Replacing a row changes all of its columns, so the plans' ε add up, as exact decimals.
    """
    checked = [each.checked(x, clamp) for each, x in zip(plans, columns, strict=True)]
    if len({each.adjacency for each in plans}) > 1:
        raise ConfigurationError("plans of one release are for the same neighbours: all with a public n, or none.")
    account = open_budget(budget)
    if account is not None:
        costs = [cost for each in plans for cost in each.costs(account.adjacency)]
        pure = sum((cost.epsilon for cost in costs if isinstance(cost, Pure)), Fraction(0))
        others = [cost for cost in costs if not isinstance(cost, Pure)]
        what = "; ".join(", ".join(each.questions) for each in plans)
        account.charge([*([Pure(pure, plans[0].adjacency)] if pure else []), *others], what)
    return [each.respond(t) for each, t in zip(plans, checked, strict=True)]


@dataclass(frozen=True)
class Single:
    """Questions that one release of a mechanism answers; ``believed`` is its error (95%, unit scale) where it knows none itself."""

    questions: tuple[str, ...]
    mechanism: Mechanism
    believed: float | None

    def respond(self, t: Tensor) -> list[Answer]:
        """Its answers about a unit dataset."""
        own = self.mechanism
        unit, off = own.respond_within(t, CONFIDENCE)
        basis, off = ("noise", off) if self.believed is None else ("belief", self.believed)
        value, error = float(own.problem.answer(unit)), (off or 0.0) * own.problem.scale
        least, most = own.problem.answer(torch.tensor([0.0, largest(own.problem)], dtype=torch.float64)).tolist()
        ends = [min(max(value + off, least), most) for off in (-error, error)]
        made = []
        for question in self.questions:
            found, low, high = (self._as_asked(question, one) for one in (value, *ends))
            made.append(Answer(question, found, (low, high), basis, own.epsilon / len(self.questions)))
        return made

    def _as_asked(self, question: str, value: float) -> float:
        """What a question makes of what is released: sum = n·mean, std = √variance."""
        if question == "sum":
            return self.problem.n * value
        return math.sqrt(max(value, 0.0)) if question == "std" else value

    @property
    def problem(self) -> Problem:
        """What its mechanism is for."""
        return self.mechanism.problem

    @property
    def exact_epsilon(self) -> Fraction:
        """What it spends."""
        return self.problem.exact_epsilon

    def describe(self) -> dict[str, Any]:
        """What will be done."""
        return {"questions": list(self.questions), "question": self.questions[0], "mechanism": self.mechanism.describe()}


def query_of(question: str) -> str:
    """What is released for a question: mean and sum, variance and std have one release in common."""
    return {"sum": "mean", "std": "variance"}.get(question, question)


@dataclass(frozen=True)
class Joint:
    """Questions that quantiles answer, all from one choice: each is a difference of two quantiles, or one (numbers of levels)."""

    questions: tuple[str, ...]
    asked: tuple[tuple[int, ...], ...]
    quantiles: JointQuantiles
    problem: Problem
    errors: tuple[float, ...]

    def respond(self, t: Tensor) -> list[Answer]:
        """All answers about a unit dataset."""
        values = self.quantiles.respond(self.problem.low + self.problem.width * t[0])
        share = self.problem.epsilon / len(self.questions)
        return [
            Answer(question, value, self._around(value, error, len(places)), "belief", share)
            for question, places, value, error in zip(
                self.questions, self.asked, combined(values, self.asked), self.errors, strict=True
            )
        ]

    def _around(self, value: float, error: float, places: int) -> tuple[float, float]:
        low, high = (self.problem.low, self.problem.high) if places == 1 else (0.0, self.problem.width)
        return max(value - error, low), min(value + error, high)

    @property
    def exact_epsilon(self) -> Fraction:
        """What it spends."""
        return least_of(self.quantiles.epsilon)

    def describe(self) -> dict[str, Any]:
        """What will be done."""
        own = self.quantiles
        guarantee = {
            "epsilon": own.epsilon,
            "sensitivity": 2.0,
            "noised": "one choice of all quantiles, by the counts between them",
        }
        return {"questions": list(self.questions), "levels": [float(level) for level in own.levels], **guarantee}


def combined(values: Sequence[float], asked: Sequence[tuple[int, ...]]) -> list[float]:
    """Quantiles, or differences of two: by their numbers."""
    return [values[places[0]] if len(places) == 1 else values[places[1]] - values[places[0]] for places in asked]


@dataclass(frozen=True)
class Counts:
    """How many records lie in [edge, next edge), a last cell that reaches the bound with its end; Laplace noise on each count."""

    question: str
    edges: tuple[float, ...]
    problem: Problem
    sensitivity: int

    def respond(self, t: Tensor) -> list[Answer]:
        """Its answer about a unit dataset."""
        noisy = release_noise("laplace", counts_in(t[0], self.edges, self.problem), self.sensitivity, self.problem.exact_epsilon)
        values = [float(min(max(count, 0), self.problem.n)) for count in noisy]
        error = laplace_error(self.sensitivity, self.problem.epsilon)
        if len(values) > 1:
            return [Answer(self.question, values, (-error, error), "noise", self.problem.epsilon)]
        (value,) = values
        interval = max(value - error, 0.0), min(value + error, float(self.problem.n))
        return [Answer(self.question, value, interval, "noise", self.problem.epsilon)]

    @property
    def questions(self) -> tuple[str, ...]:
        """One."""
        return (self.question,)

    @property
    def exact_epsilon(self) -> Fraction:
        """What it spends."""
        return self.problem.exact_epsilon

    def describe(self) -> dict[str, Any]:
        """What will be done."""
        noised = {"sensitivity": float(self.sensitivity), "noised": "each count, with laplace noise"}
        return {"question": self.question, "edges": list(self.edges), "epsilon": self.problem.epsilon, **noised}


def counts_in(t: Tensor, edges: Sequence[float], problem: Problem) -> list[int]:
    """Of records in unit form. Edges are brought there by the same arithmetic: a record at an edge is at it."""
    inner = (torch.tensor(edges, dtype=torch.float64) - problem.low) / problem.width
    place = torch.searchsorted(inner, t.contiguous(), right=True)
    if edges[-1] >= problem.high:
        place = place.clamp(max=len(edges) - 1)
    return torch.bincount(place, minlength=len(edges) + 1)[1 : len(edges)].tolist()


def laplace_error(sensitivity: float, epsilon: float, confidence: float = CONFIDENCE) -> int:
    """What whole Laplace noise, P(z) ∝ a^|z| with a = exp(−ε/Δ), is not above with this chance: the least k with P(|z| > k) =
    2a^(k+1) ÷ (1 + a) small enough. (Continuous noise would be below ln(1/risk)·Δ/ε: on counts, 90% for 95.)
    """
    slope = epsilon / sensitivity
    return max(math.ceil((math.log(2 / (1 - confidence)) - math.log1p(math.exp(-slope))) / slope) - 1, 0)


def normalised(questions: str | Sequence[str]) -> list[str]:
    """One or more different questions, in lower case."""
    if not isinstance(questions, Iterable):
        raise ConfigurationError(f"questions is {questions!r}: give one or more, e.g. 'mean' or ['mean', 'p90'].")
    asked = [str(question).strip().lower() for question in ([questions] if isinstance(questions, str) else questions)]
    if not asked or len(set(asked)) < len(asked):
        raise ConfigurationError(f"questions is {questions!r}: give one or more different ones.")
    return asked


def levels_of(question: str, n: int, epsilon: float) -> tuple[Fraction, ...] | None:
    """The levels of the quantiles that answer a question about n records; none where others do."""
    if question == "iqr":
        return Fraction(1, 4), Fraction(3, 4)
    if question in ("min", "max"):
        place = Fraction(min(math.ceil(_NEAREST / epsilon), n // 2), n) if n > 1 else Fraction(0)
        return (place if question == "min" else 1 - place,)
    if question.partition(":")[0] in ("sum", "std", "histogram", "count"):
        return None
    query = parse_query(question)
    return (query.p,) if query.kind == "quantile" else None


def edges_of(question: str, problem: Problem) -> tuple[float, ...]:
    """The edges of a histogram's cells, or the two of a count's."""
    kind, _, text = question.partition(":")
    try:
        edges = tuple(float(part) for part in text.split(","))
    except ValueError:
        edges = ()
    if len(edges) < 2 or not all(a < b for a, b in itertools.pairwise(edges)) or (kind == "count" and len(edges) > 2):
        raise ConfigurationError(
            f"{question!r}: give a histogram's edges in rising order, e.g. histogram:0,18,65,120, and a count's two, count:18,65. "
            "How many records there are in all is public here; with adjacency add_remove, 'count' asks for it."
        )
    if kind == "histogram" and (edges[0] > problem.low or edges[-1] < problem.high):
        raise ConfigurationError(
            f"{question!r}: its edges have to span the bounds [{problem.low:g}, {problem.high:g}], so that every record counts."
        )
    return edges
