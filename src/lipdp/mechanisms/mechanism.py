"""What a mechanism is: a statistic or a utility with a proved sensitivity, its noise, and a free decoder of what comes out.

Of one that is read from a file every field is checked, what it promises derived anew, and tried on neighbours.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError, DataError
from lipdp.fields import Array, Range, read
from lipdp.mechanisms.files import load_file, payer, save_file
from lipdp.mechanisms.networks import LaplaceState, UtilityState
from lipdp.mechanisms.noise import NoiseKind, Sampler, check_sampler, draw_noise, release_noise, release_selection
from lipdp.mechanisms.postprocess import Decoder, NetworkState, Plain, PlainState, TableState
from lipdp.mechanisms.problem import Problem, as_numbers, response_loss
from lipdp.mechanisms.statistics import PiecewiseSum, QueryState, QueryStatistic, Statistic, SumState
from lipdp.mechanisms.utilities import ENOUGH_NODES, LearnedState, RankState, Selection, Utility, probabilities
from lipdp.privacy.budget import AnyBudget, Budget, charge
from lipdp.privacy.costs import Pure

FORMAT = "lipdp mechanism 2"
Factor = Annotated[float, Range(least=1e-100, most=1e100)]
_DRAWS = 16  # noise draws for each dataset, where the expectation over noise is not exact


@dataclass(frozen=True)
class Mechanism:
    """An ε-DP answer (replace-one, pure) to one query.

    Attributes:
        problem: what is asked.
        title: which mechanism it is, in words.
        report: how it was found and compared, as plain values (public: made from draws of the distribution only).
    """

    problem: Problem
    title: str
    report: dict[str, Any] = field(default_factory=dict, kw_only=True)
    kind: ClassVar[str] = ""
    kinds: ClassVar[dict[str, type[Mechanism]]] = {}
    """Those that files hold, by name."""

    def __init_subclass__(cls) -> None:
        if cls.kind:
            Mechanism.kinds[cls.kind] = cls

    @property
    def epsilon(self) -> float:
        """ε of one release."""
        return self.problem.epsilon

    @property
    def sensitivity(self) -> float:
        """The proved sensitivity of what is noised (see :meth:`describe` for what that is), rounding included."""
        raise NotImplementedError

    def release(
        self,
        x: Any,
        *,
        budget: AnyBudget = None,
        clamp: bool = False,
        sampler: Sampler = "auto",
        ledger: Budget | None = None,
    ) -> float:
        """One private answer about the dataset ``x``, (n,) in the user's units. Each call spends ε again.

        The data are checked first; then the budget is charged; then noise is drawn. A refusal before the charge costs nothing.

        Args:
            x: the private data.
            budget: where the release is paid for: a :class:`lipdp.privacy.Budget`, or the path of its file.
            clamp: move values outside of the bounds to the nearest bound, instead of refusing them.
            sampler: ``"opendp"``, ``"exact"``, or ``"auto"``: opendp where it is installed.
            ledger: older name of ``budget``.
        """
        t = self.problem.dataset(x, clamp)
        self.check_sampler(sampler)
        charge(payer(budget, ledger), Pure(self.epsilon, "replace_one"), f"{self.problem.query.name}: {self.title}")
        return float(self.problem.answer(self._respond(t, sampler)))

    def probabilities(self, x: Any, *, clamp: bool = False) -> Tensor:
        """P(response | x) over :attr:`responses`, exactly; private data in, private data out: do not publish it."""
        raise ConfigurationError(
            f"{self.title} has a continuous response: there are no probabilities, only a density. Mechanisms that choose from a "
            "list have them (e.g. experts with 'permute-and-flip' in their name)."
        )

    def expected_loss(self, datasets: Any = None, seed: int = 0) -> float:
        """The expected response loss, in the user's units.

        Without arguments: as estimated on held-out draws of the public distribution when the mechanism was made. With
        ``datasets`` (count, n): their average, over the mechanism's randomness too (exact for selection; ``seed`` fixes the
        noise draws of the others). That number depends on the datasets without noise: do not publish it for private ones.
        """
        if datasets is None:
            if "expected_loss" not in self.report:
                raise ConfigurationError(
                    f"{self.title} was not evaluated when it was made: call expected_loss(datasets) with draws of a distribution."
                )
            return float(self.report["expected_loss"])
        own = as_numbers(datasets)
        if own.ndim != 2 or own.shape[1] != self.problem.n or not bool(torch.isfinite(own).all()):
            raise DataError(
                f"datasets has shape {tuple(own.shape)}: give finite numbers (count, {self.problem.n}), one dataset in each row."
            )
        return float(self.losses(self.problem.unit(own), seed).mean()) * self.problem.loss_scale

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """Each unit dataset's expected loss, (batch,), in unit scale; the same seed gives paired noise."""
        raise NotImplementedError

    def for_size(self, n: int) -> Mechanism:
        """The same mechanism for datasets of another (public) size; see docs/mechanisms_inside.md for the rule."""
        return replace(self, problem=self.problem.resized(n), report=self._resized_report(n))

    def error(self, confidence: float) -> float | None:
        """What |answer − truth| stays below with this chance, whatever the data are (unit scale); None: only a belief can say."""
        return None

    @property
    def certain(self) -> bool:
        """Whether its answers have such an error: one for all of them, or each its own."""
        return self.error(0.5) is not None

    def respond_within(self, t: Tensor, confidence: float, sampler: Sampler = "auto") -> tuple[Tensor, float | None]:
        """One answer about a unit dataset (1, n), with its error: that of all answers, or what this one says of itself."""
        return self._respond(t, sampler), self.error(confidence)

    def moved(self, one: Tensor, other: Tensor) -> list[tuple[int, int]]:
        """How far unit datasets that differ in one record, row by row, are apart in what is noised, and how far they may be."""
        return []

    def describe(self) -> dict[str, Any]:
        """What it is, what it guarantees, what it is expected to cost; all public."""
        p = self.problem
        what = {"query": p.query.name, "loss": p.loss, "n": p.n, "bounds": [p.low, p.high], "mechanism": self.title}
        guarantee = {"epsilon": p.epsilon, "delta": 0.0, "adjacency": "replace_one", "sensitivity": self.sensitivity}
        own = {**what, **guarantee, "noised": self._noised()}
        return {**own, **{name: value for name, value in self.report.items() if name not in own}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that :func:`load` reads, whole or not at all. It holds nothing private."""
        save_file(self.content(), path, FORMAT)

    def content(self) -> dict[str, Any]:
        """All of it as plain values and tensors."""
        own = {"kind": self.kind, "problem": self.problem.state(), "title": self.title}
        return {**own, "report": self.report, "state": self._state()}

    def check_sampler(self, sampler: Sampler) -> None:
        """Refuse a sampler that can't make this mechanism's draws, before anything is paid."""
        raise NotImplementedError

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        raise NotImplementedError

    def _noised(self) -> str:
        raise NotImplementedError

    def _state(self) -> dict[str, Any]:
        """What is its own: with the problem, all of it."""
        shared = {each.name for each in fields(Mechanism)}
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in shared}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in own.items()}

    @classmethod
    def _from_state(cls, problem: Problem, title: str, report: dict[str, Any], state: Any) -> Mechanism:
        """The inverse; every field is checked by its annotation."""
        own = {"problem": problem, "title": title, "report": report, **read(dict[str, Any], state, "the mechanism's state")}
        made: Mechanism = read(cls, own, "the mechanism")
        return made

    def _resized_report(self, n: int) -> dict[str, Any]:
        kept = {key: value for key, value in self.report.items() if key in ("returned", "expert", "learned", "seed", "made_for_n")}
        return {"made_for_n": self.problem.n, **kept}


@dataclass(frozen=True)
class ConstantMechanism(Mechanism):
    """The data-blind answer: the best constant under the distribution. 0-DP."""

    value: float
    kind: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        read(float, self.value, "a mechanism's constant")

    @property
    def sensitivity(self) -> float:
        """0: the data play no part."""
        return 0.0

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`."""
        answer = t.new_full((t.shape[0], 1), self.value)
        return response_loss(self.problem.loss, t, self.problem.query(t), answer)[:, 0]

    def check_sampler(self, sampler: Sampler) -> None:
        """Nothing is drawn."""

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        return torch.tensor(self.value, dtype=torch.float64)

    def _noised(self) -> str:
        return "nothing: the answer does not depend on the data"


@dataclass(frozen=True)
class AdditiveMechanism(Mechanism):
    """statistic(x) + noise, decoded: ε-DP, since the noise is set for the statistic's L1 sensitivity.

    ``factor`` multiplies what was released before it is decoded (n_trained ÷ n for a resized mechanism; free).
    """

    statistic: Statistic
    noise: NoiseKind
    decoder: Decoder
    factor: float = 1.0
    kind: ClassVar[str] = "additive"

    def __post_init__(self) -> None:
        """The statistic's sensitivity holds for the problem; what is released can be decoded."""
        self.statistic.check(self.problem)
        read(NoiseKind, self.noise, "a mechanism's noise")
        read(Factor, self.factor, "a mechanism's factor")
        self.decoder.check(self.statistic.dimension)
        if self.noise == "staircase" and self.statistic.dimension != 1:
            raise ConfigurationError(
                f"staircase noise is for one value, not {self.statistic.dimension}: use Laplace noise for a vector."
            )

    @property
    def sensitivity(self) -> float:
        """L1, in the units of the statistic: the query's where the query itself is noised."""
        own = self.statistic.sensitivity * self.statistic.unit
        return own * self.problem.scale if isinstance(self.statistic, QueryStatistic) else own

    def noisy(self, t: Tensor, seed: int, draws: int) -> Tensor:
        """What would be released, (draws, batch, m), with floating-point noise: for evaluation, not for release.

        One-dimensional noise is stratified over the draws, so few of them are enough.
        """
        values = self.statistic.integers(t).to(torch.float64) * self.statistic.unit
        generator = torch.Generator().manual_seed(seed)
        shape = (draws, t.shape[0], self.statistic.dimension)
        uniform = torch.rand(shape, dtype=torch.float64, generator=generator)
        if self.statistic.dimension == 1:
            uniform = (torch.arange(draws, dtype=torch.float64)[:, None, None] + uniform) / draws
        size = self.statistic.sensitivity * self.statistic.unit
        return (values + draw_noise(self.noise, uniform, size, self.epsilon)) * self.factor

    def simulate(self, t: Tensor, seed: int, draws: int) -> Tensor:
        """Answers (batch, draws) for evaluation."""
        return torch.stack([self.decoder(part) for part in self.noisy(t, seed, draws)], 1)

    def released(self, t: Tensor, sampler: Sampler = "auto") -> Tensor:
        """The noised statistic (1, m) of one unit dataset, with real noise: each call spends ε."""
        values = [int(value) for value in self.statistic.integers(t)[0]]
        noisy = release_noise(self.noise, values, self.statistic.sensitivity, self.problem.exact_epsilon, sampler)
        return torch.tensor([[value * self.statistic.unit * self.factor for value in noisy]], dtype=torch.float64)

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`."""
        answers = self.simulate(t, seed, _DRAWS * (4 if self.statistic.dimension == 1 else 1))
        return response_loss(self.problem.loss, t, self.problem.query(t), answers).mean(1)

    def for_size(self, n: int) -> AdditiveMechanism:
        """A query's sensitivity is set anew; a sum is scaled by n_old/n after the noise (its sensitivity has no n in it)."""
        problem, report = self.problem.resized(n), self._resized_report(n)
        if isinstance(self.statistic, QueryStatistic):
            return replace(self, problem=problem, report=report, statistic=replace(self.statistic, n=n))
        if not isinstance(self.statistic, PiecewiseSum):
            raise ConfigurationError(f"{self.title} reads exactly {self.problem.n} numbers: train one for n = {n}, or use learn().")
        return replace(self, problem=problem, report=report, factor=self.factor * self.problem.n / n)

    def error(self, confidence: float) -> float | None:
        """See :meth:`Mechanism.error`: |noise| and the largest shift, for limiting an answer only brings it nearer."""
        if not isinstance(self.decoder, Plain):
            return None
        upper = torch.tensor([(1 + confidence) / 2], dtype=torch.float64)
        noise = float(draw_noise(self.noise, upper, self.statistic.sensitivity * self.statistic.unit, self.epsilon))
        return noise + (0.0 if self.decoder.shift is None else float(self.decoder.shift.values.abs().max()))

    def moved(self, one: Tensor, other: Tensor) -> list[tuple[int, int]]:
        """See :meth:`Mechanism.moved`."""
        apart = (self.statistic.integers(one) - self.statistic.integers(other)).abs().sum(1)
        return [(int(apart.max()), self.statistic.sensitivity)]

    def check_sampler(self, sampler: Sampler) -> None:
        """See :func:`lipdp.mechanisms.noise.check_sampler`."""
        check_sampler(sampler, self.noise)

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        return self.decoder(self.released(t, sampler))[0]

    def _noised(self) -> str:
        kinds = {QueryStatistic: "the query", PiecewiseSum: f"{self.statistic.dimension} sum(s) of phi(x_i)"}
        what = kinds.get(type(self.statistic), "a network's output")
        return f"{what}, with {self.noise} noise for the L1 sensitivity"

    def _state(self) -> dict[str, Any]:
        parts = {"statistic": self.statistic.state(), "decoder": self.decoder.state()}
        return {**parts, "noise": self.noise, "factor": self.factor}

    @classmethod
    def _from_state(cls, problem: Problem, title: str, report: dict[str, Any], state: Any) -> AdditiveMechanism:
        own: _AdditiveState = read(_AdditiveState, state, "the mechanism's state")
        statistic, decoder = own.statistic.build(problem), own.decoder.build()
        return cls(problem, title, statistic, own.noise, decoder, own.factor, report=report)


@dataclass(frozen=True)
class SelectionMechanism(Mechanism):
    """One response of a public list, chosen by utility: ε-DP, with the factor ½ (see :mod:`lipdp.mechanisms.experts`).

    ``values`` are the answers (unit scale) that the responses stand for: decoded, so not the grid itself in general.
    """

    utility: Utility
    method: Selection
    values: Tensor
    kind: ClassVar[str] = "selection"

    def __post_init__(self) -> None:
        """The utility's sensitivity holds for the problem; there is an answer for each response."""
        self.utility.check(self.problem)
        read(Selection, self.method, "a mechanism's method")
        if self.values.shape != self.utility.grid.shape:
            raise ConfigurationError(f"{tuple(self.values.shape)} answers don't fit {tuple(self.utility.grid.shape)} responses.")

    @property
    def sensitivity(self) -> float:
        """Of each utility, in counts."""
        return self.utility.sensitivity * self.utility.unit

    @property
    def responses(self) -> Tensor:
        """The possible answers, in the user's units."""
        return self.problem.answer(self.values)

    def probabilities(self, x: Any, *, clamp: bool = False) -> Tensor:
        """See :meth:`Mechanism.probabilities`."""
        return self.table(self.problem.dataset(x, clamp))[0]

    def table(self, t: Tensor, nodes: int | None = None) -> Tensor:
        """P(response | x) of unit datasets, (batch, R)."""
        utilities = self.utility.integers(t).to(torch.float64)
        return probabilities(self.method, utilities, self.utility.sensitivity, self.epsilon, nodes)

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`; exact."""
        costs = response_loss(self.problem.loss, t, self.problem.query(t), self.values.expand(t.shape[0], -1))
        return (self.table(t, ENOUGH_NODES) * costs).sum(1)

    def for_size(self, n: int) -> SelectionMechanism:
        """Ranks scale with n; a learned utility sees counts scaled to its own n, and its sensitivity scales with them."""
        utility = self.utility.resized(n, self.problem.n)
        return replace(self, problem=self.problem.resized(n), report=self._resized_report(n), utility=utility)

    def moved(self, one: Tensor, other: Tensor) -> list[tuple[int, int]]:
        """See :meth:`Mechanism.moved`."""
        return [(int((self.utility.integers(one) - self.utility.integers(other)).abs().max()), self.utility.sensitivity)]

    def check_sampler(self, sampler: Sampler) -> None:
        """See :func:`lipdp.mechanisms.noise.check_sampler`."""
        check_sampler(sampler, self.method)

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        utilities = [int(value) for value in self.utility.integers(t)[0]]
        index = release_selection(self.method, utilities, self.utility.sensitivity, self.problem.exact_epsilon, sampler)
        return self.values[index]

    def _noised(self) -> str:
        return f"the choice among {self.values.shape[0]} responses, by {self.method.replace('_', '-')} (factor 1/2)"

    def _state(self) -> dict[str, Any]:
        return {"utility": self.utility.state(), "method": self.method, "values": self.values}

    @classmethod
    def _from_state(cls, problem: Problem, title: str, report: dict[str, Any], state: Any) -> SelectionMechanism:
        own: _SelectionState = read(_SelectionState, state, "the mechanism's state")
        return cls(problem, title, own.utility.build(problem), own.method, own.values, report=report)


@dataclass(frozen=True)
class _AdditiveState:
    statistic: SumState | QueryState | LaplaceState
    decoder: TableState | NetworkState | PlainState
    noise: NoiseKind
    factor: Factor


@dataclass(frozen=True)
class _SelectionState:
    utility: RankState | LearnedState | UtilityState
    method: Selection
    values: Annotated[Tensor, Array(1, torch.float64)]


_PAIRS, _LARGEST = 24, 20_000  # neighbours to try, and records above which none are: reading a file should be quick


@dataclass(frozen=True)
class _Content:
    kind: str
    problem: Problem
    title: str
    report: dict[str, Any]
    state: Any


def load(path: str | os.PathLike[str]) -> Mechanism:
    """A mechanism that was saved. Nothing in the file is executed, what it promises is derived anew, and tried on neighbours.

    Args:
        path: a file of :meth:`Mechanism.save`.
    """
    return load_file(path, FORMAT, from_content)


def neighbours(n: int, pairs: int = _PAIRS) -> tuple[Tensor, Tensor]:
    """Sorted unit datasets in pairs that differ in one record: uniform ones, of ends only, half and half, and constant ones.

    The sensitivity of what a file holds follows from its content by proof; tried on these, it is looked at a second time.
    """
    generator = torch.Generator().manual_seed(n)
    t = torch.rand(pairs, n, generator=generator, dtype=torch.float64)
    quarter = pairs // 4
    t[:quarter] = t[:quarter].round()
    t[quarter : 2 * quarter] = (torch.arange(n) < n // 2).to(torch.float64)
    t[2 * quarter : 3 * quarter] = t[2 * quarter : 3 * quarter, :1]
    other = t.clone()
    other[:, 0] = torch.where(torch.rand(pairs, generator=generator) < 0.5, 1 - t[:, 0].round(), t[:, 0].round())
    return t.sort(-1).values, other.sort(-1).values


def from_content(content: Any) -> Mechanism:
    """The inverse of :meth:`Mechanism.content`: every field is checked, and that neighbours don't move it further than it says."""
    own: _Content = read(_Content, content, "the mechanism")
    if own.kind not in Mechanism.kinds:
        raise ConfigurationError(f"the mechanism.kind is {own.kind[:60]!r}: it has to be one of {', '.join(Mechanism.kinds)}")
    made = Mechanism.kinds[own.kind]._from_state(own.problem, own.title, checked_report(own.report), own.state)
    if own.problem.n <= _LARGEST:
        for moved, allowed in made.moved(*neighbours(own.problem.n)):
            if moved > allowed:
                raise ConfigurationError(f"one record moves what it noises by {moved} steps, and its noise is for {allowed}.")
    return made


def checked_report(report: Any, losses: Any = float) -> dict[str, Any]:
    """A report of plain values; ``losses`` is the type of its expected loss, where it has one."""
    own: dict[str, Any] = read(dict[str, Any], report, "the mechanism's report")
    _check_plain(own, "the mechanism's report")
    if "expected_loss" in own:
        read(losses, own["expected_loss"], "the mechanism's report.expected_loss")
    return own


def _check_plain(value: Any, where: str) -> None:
    if isinstance(value, dict):
        for name, part in read(dict[str, Any], value, where).items():
            _check_plain(part, f"{where}[{name!r}]")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            _check_plain(part, f"{where}[{number}]")
    elif isinstance(value, str):
        read(str, value, where)
    elif value is not None and not isinstance(value, bool | int | float):
        raise ConfigurationError(f"{where} is a {type(value).__name__}: a report holds plain values")
