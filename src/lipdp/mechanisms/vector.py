"""Several queries in one budget, and datasets of vectors.

Two ways to answer Q queries with ε in all: *split* gives each its own mechanism with ε/Q (basic composition), *joint* releases one
vector of learned sums with all of ε and decodes every answer from it. ``learn_vector`` returns the better one on held-out
datasets. Replacing a record of a dataset of vectors changes all its columns, so d columns share the budget too: ε/d each.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from lipdp._checks import is_number, positive
from lipdp._texts import brief
from lipdp.errors import ConfigurationError, DataError
from lipdp.fields import read
from lipdp.mechanisms.distributions import Belief, Mixture, as_distribution, draw
from lipdp.mechanisms.files import load_file, payer, save_file
from lipdp.mechanisms.learn_parts import train_joint
from lipdp.mechanisms.learning import Settings, learn, settings_or
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism, checked_report, from_content
from lipdp.mechanisms.noise import Sampler
from lipdp.mechanisms.postprocess import Network, NetworkState
from lipdp.mechanisms.problem import Problem, Query, as_numbers, each_bounds, least_of, parse_query, share_of
from lipdp.privacy.budget import AnyBudget, Budget, charge
from lipdp.privacy.costs import Pure

_VECTOR, _COLUMNS = "lipdp vector mechanism 2", "lipdp column mechanism 2"


@dataclass(frozen=True)
class VectorMechanism:
    """Answers to several queries about one dataset, ε in all.

    Attributes:
        problems: one for each query; their ε is the share of that query (split) or all of it (joint).
        epsilon: of one release of all answers.
        parts: the mechanisms, one for each query; or a single one, from whose released sums ``decoder`` reads all answers.
        decoder: the joint network, or None for a split.
        report: expected losses of both ways.
    """

    problems: tuple[Problem, ...]
    epsilon: float
    parts: tuple[Mechanism, ...]
    decoder: Network | None
    report: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """The parts cost no more than ε together, are about the same data, and there is an answer for each query."""
        check_parts(self.parts, self.epsilon)
        names = [problem.query.name for problem in self.problems]
        if len(set(names)) < len(names) or not names:
            raise ConfigurationError(f"the queries are {', '.join(names) or 'none'}: give different ones.")
        data = {(p.n, p.low, p.high) for p in (*self.problems, *(part.problem for part in self.parts))}
        if len(data) > 1:
            raise ConfigurationError("the queries of a vector mechanism are about one dataset: the same n and the same bounds.")
        if self.decoder is None and tuple(part.problem for part in self.parts) != self.problems:
            raise ConfigurationError("each query of a split has a mechanism of its own, for its own problem.")
        if self.decoder is not None:
            fits = len(self.parts) == 1 and isinstance(self.parts[0], AdditiveMechanism)
            if not fits or self.decoder.sizes[1] != len(names):
                raise ConfigurationError(f"a joint answer to {len(names)} queries needs one released vector and a decoder for all.")
            self.decoder.check(self.parts[0].statistic.dimension)  # type: ignore[attr-defined]

    @property
    def sensitivity(self) -> tuple[float, ...]:
        """Of each part."""
        return tuple(part.sensitivity for part in self.parts)

    def release(
        self,
        x: Any,
        *,
        budget: AnyBudget = None,
        clamp: bool = False,
        sampler: Sampler = "auto",
        ledger: Budget | None = None,
    ) -> dict[str, float]:
        """All answers by name; ε is charged once, before any noise is drawn."""
        t = self.problems[0].dataset(x, clamp)
        for part in self.parts:
            part.check_sampler(sampler)
        what = ", ".join(problem.query.name for problem in self.problems)
        charge(payer(budget, ledger), Pure(self.epsilon, "replace_one"), what)
        if self.decoder is None:
            answers = [part._respond(t, sampler) for part in self.parts]
        else:
            (joint,) = self.parts
            assert isinstance(joint, AdditiveMechanism)
            answers = list(self.decoder.answers(joint.released(t, sampler))[0])
        return {problem.query.name: float(problem.answer(value)) for problem, value in zip(self.problems, answers, strict=True)}

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """Expected losses (batch, queries) of unit datasets, in unit scale."""
        if self.decoder is None:
            return torch.stack([part.losses(t, seed + i) for i, part in enumerate(self.parts)], 1)
        (joint,) = self.parts
        assert isinstance(joint, AdditiveMechanism)
        truth = torch.stack([problem.query(t) for problem in self.problems], 1)
        noisy = joint.noisy(t, seed, 16)
        return torch.stack([(self.decoder.answers(part) - truth) ** 2 for part in noisy]).mean(0)

    def expected_loss(self) -> dict[str, float]:
        """Each query's, on held-out draws, in the user's units."""
        if not isinstance(self.report.get("expected_loss"), dict):
            raise ConfigurationError("this vector mechanism was not evaluated when it was made: learn_vector() does.")
        return dict(self.report["expected_loss"])

    def describe(self) -> dict[str, Any]:
        """What it is and guarantees; all public."""
        names = [problem.query.name for problem in self.problems]
        parts = [part.describe() for part in self.parts]
        guarantee = {"epsilon": self.epsilon, "delta": 0.0, "adjacency": "replace_one"}
        own = {"queries": names, **guarantee, "parts": parts, "way": "split" if self.decoder is None else "joint"}
        return {**own, **{name: value for name, value in self.report.items() if name not in own or name == "way"}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that :func:`load_vector` reads."""
        content = {
            "queries": [problem.query.state() for problem in self.problems],
            "epsilon": self.epsilon,
            "parts": [part.content() for part in self.parts],
            "decoder": None if self.decoder is None else self.decoder.state(),
            "report": self.report,
        }
        save_file(content, path, _VECTOR)


@dataclass(frozen=True)
class _VectorContent:
    queries: tuple[Query, ...]
    epsilon: float
    parts: list[Any]
    decoder: NetworkState | None
    report: dict[str, Any]

    def build(self) -> VectorMechanism:
        parts = tuple(from_content(part) for part in self.parts)
        check_parts(parts, self.epsilon)
        problems = tuple(part.problem for part in parts)
        if self.decoder is not None:
            problems = tuple(replace(parts[0].problem, query=query, loss="squared") for query in self.queries)
        elif tuple(problem.query for problem in problems) != self.queries:
            raise ConfigurationError("the queries of a split are those of its parts.")
        decoder = None if self.decoder is None else self.decoder.build()
        return VectorMechanism(problems, self.epsilon, parts, decoder, checked_report(self.report, dict[str, float]))


@dataclass(frozen=True)
class _ColumnContent:
    epsilon: float
    parts: list[Any]

    def build(self) -> ColumnMechanism:
        return ColumnMechanism(tuple(from_content(part) for part in self.parts), self.epsilon)


def check_parts(parts: Sequence[Mechanism], epsilon: float) -> None:
    """Refuse mechanisms that cost more than ε together: exactly, for they are compared as the rational numbers that they are."""
    positive("epsilon", epsilon)
    if not parts or sum(part.problem.exact_epsilon for part in parts) > least_of(epsilon):
        spent = ", ".join(brief(part.epsilon) for part in parts)
        raise ConfigurationError(
            f"its parts have the epsilons ({spent}): there have to be some, of {brief(epsilon)} together at most."
        )


def load_vector(path: str | os.PathLike[str]) -> VectorMechanism:
    """A vector mechanism that was saved.

    Args:
        path: a file of :meth:`VectorMechanism.save`; nothing in it is executed.
    """
    made: VectorMechanism = load_file(path, _VECTOR, lambda content: read(_VectorContent, content, "the mechanism").build())
    return made


def load_columns(path: str | os.PathLike[str]) -> ColumnMechanism:
    """A column mechanism that was saved.

    Args:
        path: a file of :meth:`ColumnMechanism.save`; nothing in it is executed.
    """
    made: ColumnMechanism = load_file(path, _COLUMNS, lambda content: read(_ColumnContent, content, "the mechanism").build())
    return made


def learn_vector(
    queries: Sequence[str | Query],
    epsilon: float,
    n: int,
    bounds: Sequence[float],
    distribution: Belief | None = None,
    *,
    robustness: float | None = 0.25,
    settings: Settings | None = None,
    seed: int = 0,
) -> VectorMechanism:
    """Answer several different queries with ε in all (squared loss): the better of joint sums and of a split budget.

    They are compared by Σ loss_i / Var(q_i) on held-out draws. Joint sums are as good as the belief: with a ``robustness`` (see
    :func:`~lipdp.mechanisms.learn`), the budget is split.

    Args:
        queries: two or more different ones, as in :func:`~lipdp.mechanisms.learn`.
        epsilon: ε of all answers together.
        n: size of the dataset, public.
        bounds: (lo, hi) that hold for every possible record.
        distribution: a belief about datasets; without one and without a ``robustness``, four truncated Gaussians.
        robustness: τ of each mechanism; ``None``: only the belief counts, and joint sums are tried too.
        settings: how much work to do.
        seed: of training and evaluation; release noise has nothing to do with it.
    """
    parsed = [] if isinstance(queries, str) or not isinstance(queries, Iterable) else [parse_query(query) for query in queries]
    if len(parsed) < 2 or len({query.name for query in parsed}) < len(parsed):
        raise ConfigurationError(f"queries is {queries!r}: give two or more different ones; for one, use learn().")
    work = settings_or(Settings(), settings)
    total, share = positive("epsilon", epsilon), share_of(epsilon, len(parsed))
    parts = tuple(learn(query, share, n, bounds, distribution, robustness=robustness, settings=work, seed=seed) for query in parsed)
    if robustness is not None:
        losses = {part.problem.query.name: part.expected_loss() for part in parts}
        problems = tuple(part.problem for part in parts)
        return VectorMechanism(problems, total, parts, None, {"way": "split", "expected_loss": losses})
    whole = tuple(Problem.of(query, total, n, bounds) for query in parsed)
    low, high = whole[0].low, whole[0].high
    belief = as_distribution(distribution, low, high) if distribution is not None else Mixture(4, low, high)
    t, held_out = (draw(belief, whole[0], count, seed + place) for place, count in ((101, work.training), (102, work.held_out)))
    split = VectorMechanism(tuple(part.problem for part in parts), total, parts, None)
    scales = torch.stack([query(t).var() for query in parsed])
    ways = {"split": split}
    for m in (2, 3, 4, 6):
        statistic, network = train_joint(whole[0], parsed, t, m, work.sums, seed)
        one = AdditiveMechanism(whole[0], f"learned sums for {len(parsed)} queries, m = {m}", statistic, "laplace", network)
        ways[f"joint, m = {m}"] = VectorMechanism(whole, total, (one,), network)
    tried = {name: way.losses(held_out, seed).mean(0) for name, way in ways.items()}
    # Ties and the choice among joint ways are decided on the same datasets: five candidates, thousands of datasets.
    best = min(ways, key=lambda name: float((tried[name] / scales).sum()))
    report = {
        "way": best,
        "expected_loss": {p.query.name: float(v) * p.loss_scale for p, v in zip(whole, tried[best], strict=True)},
        "normalised": {name: float((value / scales).sum()) for name, value in tried.items()},
    }
    chosen = ways[best]
    return VectorMechanism(chosen.problems, total, chosen.parts, chosen.decoder, report)


@dataclass(frozen=True)
class ColumnMechanism:
    """One mechanism for each column of datasets (n, d). Replacing one row may change every column: their ε add up.

    Attributes:
        parts: one for each column, in their order, all for the same n.
        epsilon: of one release of all columns; the parts' ε add up to no more.
    """

    parts: tuple[Mechanism, ...]
    epsilon: float

    def __post_init__(self) -> None:
        """The columns' mechanisms cost no more than ε together, and are for as many rows."""
        check_parts(self.parts, self.epsilon)
        if len({part.problem.n for part in self.parts}) > 1:
            raise ConfigurationError("the columns of a dataset have the same number of rows, and so do their mechanisms.")

    @property
    def sensitivity(self) -> tuple[float, ...]:
        """Of each column's mechanism."""
        return tuple(part.sensitivity for part in self.parts)

    def release(
        self,
        x: Any,
        *,
        budget: AnyBudget = None,
        clamp: bool = False,
        sampler: Sampler = "auto",
        ledger: Budget | None = None,
    ) -> list[float]:
        """One answer for each column of ``x`` (n, d). All columns are checked before anything is charged."""
        data = as_numbers(x)
        if data.ndim != 2 or data.shape[1] != len(self.parts):
            raise DataError(
                f"the dataset has shape {tuple(data.shape)}: give (n, {len(self.parts)}), one column for each mechanism."
            )
        columns = [part.problem.dataset(column, clamp) for part, column in zip(self.parts, data.T, strict=True)]
        for part in self.parts:
            part.check_sampler(sampler)
        what = f"{self.parts[0].problem.query.name} of {len(self.parts)} columns"
        charge(payer(budget, ledger), Pure(self.epsilon, "replace_one"), what)
        return [
            float(part.problem.answer(part._respond(column, sampler))) for part, column in zip(self.parts, columns, strict=True)
        ]

    def expected_loss(self) -> list[float]:
        """Each column's, on held-out draws, in the user's units."""
        return [part.expected_loss() for part in self.parts]

    def describe(self) -> dict[str, Any]:
        """What it is and guarantees; all public."""
        guarantee = {"epsilon": self.epsilon, "delta": 0.0, "adjacency": "replace_one"}
        return {"columns": len(self.parts), **guarantee, "parts": [part.describe() for part in self.parts]}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that :func:`load_columns` reads."""
        save_file({"epsilon": self.epsilon, "parts": [part.content() for part in self.parts]}, path, _COLUMNS)


def learn_columns(
    query: str | Query,
    epsilon: float,
    n: int,
    bounds: Sequence[Sequence[float]],
    distribution: Belief | Sequence[Belief | None] | None = None,
    loss: str = "squared",
    *,
    robustness: float | None = 0.25,
    settings: Settings | None = None,
    seed: int = 0,
) -> ColumnMechanism:
    """The same query about each column, with ε/d each; ``bounds`` has one (lo, hi) for each of the d columns.

    ``distribution`` is one belief for all columns, or a list with one for each (None: the default). Where columns have different
    bounds, one belief has to lie inside all of them.

    Args:
        query: as in :func:`~lipdp.mechanisms.learn`.
        epsilon: ε of all columns together.
        n: number of rows, public.
        bounds: for each column, what holds for every possible record.
        distribution: as above; columns with the same bounds and the same belief share a mechanism.
        loss: "squared" or "quantile", for every column.
        robustness: τ of each column's mechanism; ``None``: only the belief counts.
        settings: how much work to do, for each mechanism.
        seed: of training and evaluation; release noise has nothing to do with it.
    """
    pairs = each_bounds(bounds)
    several = isinstance(distribution, list | tuple) and not all(is_number(part) for part in distribution)
    beliefs = list(distribution) if several else [distribution] * len(pairs)  # type: ignore[arg-type]
    if len(beliefs) != len(pairs):
        raise ConfigurationError(
            f"distribution has {len(beliefs)} beliefs for {len(pairs)} columns: give one for each, or one for all."
        )
    share = share_of(epsilon, len(pairs))
    learned: dict[tuple[float, float, int], Mechanism] = {}
    keys = [(*pair, id(belief)) for pair, belief in zip(pairs, beliefs, strict=True)]
    for key, pair, belief in zip(keys, pairs, beliefs, strict=True):
        if key not in learned:
            learned[key] = learn(query, share, n, pair, belief, loss, robustness=robustness, settings=settings, seed=seed)
    return ColumnMechanism(tuple(learned[key] for key in keys), positive("epsilon", epsilon))
