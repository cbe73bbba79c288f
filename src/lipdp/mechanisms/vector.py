"""Several queries in one budget, and datasets of vectors.

Two ways to answer Q queries with ε in all: *split* gives each its own mechanism with ε/Q (basic composition), *joint* releases one
vector of learned sums with all of ε and decodes every answer from it. ``learn_vector`` returns the better one on held-out
datasets. Replacing a record of a dataset of vectors changes all its columns, so d columns share the budget too: ε/d each.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lipdp.errors import CheckpointError, ConfigurationError, DataError
from lipdp.mechanisms.distributions import Distribution, Mixture, draw
from lipdp.mechanisms.learn_sum import train_joint
from lipdp.mechanisms.learning import Settings, learn
from lipdp.mechanisms.ledger import payer
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism, from_content
from lipdp.mechanisms.noise import Sampler
from lipdp.mechanisms.postprocess import Network, decoder_from_state
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.queries import Query, parse_query
from lipdp.privacy._checks import positive
from lipdp.privacy.budget import AnyBudget, Budget
from lipdp.privacy.costs import Pure

__all__ = ["ColumnMechanism", "VectorMechanism", "learn_columns", "learn_vector", "load_columns", "load_vector"]

_VECTOR, _COLUMNS = "lipdp vector mechanism 1", "lipdp column mechanism 1"


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
        if (account := payer(budget, ledger)) is not None:
            account.charge(Pure(self.epsilon, "replace_one"), ", ".join(problem.query.name for problem in self.problems))
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
        return dict(self.report["expected_loss"])

    def describe(self) -> dict[str, Any]:
        """What it is and guarantees; all public."""
        names = [problem.query.name for problem in self.problems]
        parts = [part.describe() for part in self.parts]
        guarantee = {"epsilon": self.epsilon, "delta": 0.0, "adjacency": "replace_one"}
        return {"queries": names, **guarantee, "way": "split" if self.decoder is None else "joint", "parts": parts, **self.report}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that :func:`load_vector` reads."""
        content = {
            "problems": [problem.state() for problem in self.problems],
            "epsilon": self.epsilon,
            "parts": [part.content() for part in self.parts],
            "decoder": None if self.decoder is None else self.decoder.state(),
            "report": self.report,
        }
        torch.save({"format": _VECTOR, **content}, path)


def load_vector(path: str | os.PathLike[str]) -> VectorMechanism:
    """A vector mechanism that was saved."""
    content = _read(path, _VECTOR)
    try:
        decoder = None if content["decoder"] is None else decoder_from_state(content["decoder"])
        assert decoder is None or isinstance(decoder, Network)
        problems = tuple(Problem.from_state(state) for state in content["problems"])
        parts = tuple(from_content(part) for part in content["parts"])
        return VectorMechanism(problems, content["epsilon"], parts, decoder, content["report"])
    except Exception as error:  # torch raises many kinds
        raise _unreadable(path, error) from None


def _read(path: str | os.PathLike[str], wanted: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = torch.load(Path(path), weights_only=True)
        found = content["format"]
    except Exception as error:  # torch and pickle raise many kinds
        raise _unreadable(path, error) from None
    if found != wanted:
        raise CheckpointError(
            f"{path} is of format {found!r}, not {wanted!r}: use the loader for what was saved, or learn it again."
        )
    return content


def _unreadable(path: str | os.PathLike[str], error: Exception) -> CheckpointError:
    return CheckpointError(f"{path} can't be read as a saved mechanism ({type(error).__name__}): is it one, and whole?")


def learn_vector(
    queries: Sequence[str | Query],
    epsilon: float,
    n: int,
    bounds: Sequence[float],
    distribution: Distribution | None = None,
    *,
    settings: Settings | None = None,
    seed: int = 0,
) -> VectorMechanism:
    """Answer several different queries with ε in all (squared loss): the better of joint sums and of a split budget.

    They are compared by Σ loss_i / Var(q_i) on held-out draws.
    """
    parsed = [parse_query(query) for query in queries]
    if len(parsed) < 2 or len({query.name for query in parsed}) < len(parsed):
        raise ConfigurationError(f"queries is {queries!r}: give two or more different ones; for one, use learn().")
    work = settings if settings is not None else Settings()
    total, share = positive("epsilon", epsilon), _share(epsilon, len(parsed))
    parts = tuple(learn(query, share, n, bounds, distribution, settings=work, seed=seed) for query in parsed)
    whole = tuple(Problem.of(query, total, n, bounds) for query in parsed)
    belief = distribution if distribution is not None else Mixture(4, whole[0].low, whole[0].high)
    t, held_out = (draw(belief, whole[0], count, seed + place) for place, count in ((101, work.training), (102, work.held_out)))
    split = VectorMechanism(tuple(part.problem for part in parts), total, parts, None)
    scales = torch.stack([query(t).var() for query in parsed])
    ways = {"split": split}
    for m in (2, 3, 4, 6):
        statistic, network = train_joint(whole[0], parsed, t, m, work.sums, seed)
        one = AdditiveMechanism(whole[0], f"learned sums for {len(parsed)} queries, m = {m}", statistic, "laplace", network)
        ways[f"joint, m = {m}"] = VectorMechanism(whole, total, (one,), network)
    losses = {name: way.losses(held_out, seed).mean(0) for name, way in ways.items()}
    # Ties and the choice among joint ways are decided on the same datasets: five candidates, thousands of datasets.
    best = min(ways, key=lambda name: float((losses[name] / scales).sum()))
    report = {
        "way": best,
        "expected_loss": {p.query.name: float(v) * p.loss_scale for p, v in zip(whole, losses[best], strict=True)},
        "normalised": {name: float((value / scales).sum()) for name, value in losses.items()},
    }
    chosen = ways[best]
    return VectorMechanism(chosen.problems, total, chosen.parts, chosen.decoder, report)


def _share(epsilon: float, count: int) -> float:
    """ε/count, rounded down: the parts' exact sum is not above ε."""
    return math.nextafter(positive("epsilon", epsilon) / count, 0.0)


@dataclass(frozen=True)
class ColumnMechanism:
    """One mechanism for each column of datasets (n, d). Replacing one row may change every column: their ε add up."""

    parts: tuple[Mechanism, ...]
    epsilon: float

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
        data = torch.as_tensor(x, dtype=torch.float64)
        if data.ndim != 2 or data.shape[1] != len(self.parts):
            raise DataError(
                f"the dataset has shape {tuple(data.shape)}: give (n, {len(self.parts)}), one column for each mechanism."
            )
        columns = [part.problem.dataset(column, clamp) for part, column in zip(self.parts, data.T, strict=True)]
        for part in self.parts:
            part.check_sampler(sampler)
        if (account := payer(budget, ledger)) is not None:
            what = f"{self.parts[0].problem.query.name} of {len(self.parts)} columns"
            account.charge(Pure(self.epsilon, "replace_one"), what)
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
        torch.save({"format": _COLUMNS, "epsilon": self.epsilon, "parts": [part.content() for part in self.parts]}, path)


def learn_columns(
    query: str | Query,
    epsilon: float,
    n: int,
    bounds: Sequence[Sequence[float]],
    distribution: Distribution | None = None,
    loss: str = "squared",
    *,
    settings: Settings | None = None,
    seed: int = 0,
) -> ColumnMechanism:
    """The same query about each column, with ε/d each; ``bounds`` has one (lo, hi) for each of the d columns."""
    if not bounds:
        raise ConfigurationError("bounds is empty: give one (lo, hi) for each column.")
    share = _share(epsilon, len(bounds))
    made: dict[tuple[float, ...], Mechanism] = {}
    for pair in bounds:
        if tuple(pair) not in made:
            made[tuple(pair)] = learn(query, share, n, pair, distribution, loss, settings=settings, seed=seed)
    return ColumnMechanism(tuple(made[tuple(pair)] for pair in bounds), positive("epsilon", epsilon))


def load_columns(path: str | os.PathLike[str]) -> ColumnMechanism:
    """A column mechanism that was saved."""
    content = _read(path, _COLUMNS)
    try:
        return ColumnMechanism(tuple(from_content(part) for part in content["parts"]), content["epsilon"])
    except Exception as error:  # torch raises many kinds
        raise _unreadable(path, error) from None
