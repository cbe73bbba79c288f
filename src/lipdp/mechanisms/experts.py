"""What an expert would use, each with the best decoder E[q | released] under the public distribution of datasets.

Textbook: a constant; Laplace and staircase noise on the query, decoded and as they are; exponential mechanism and permute-and-flip
with the rank utility on the paper's grid of 50, and the exponential mechanism on all numbers, which needs no prior; smooth
sensitivity; for the variance, both moments. Tuned adds clip windows anywhere, grid sizes, a noisy clipped mean decoded to a
quantile (hard to beat at small ε), and, for the variance, clipped moments (λ·z, z²) whose joint L1 sensitivity is calibrated
exactly. Strong adds the same moments decoded to quantiles. Each level contains the one before; the
best of a level is chosen on validation datasets.

Smooth sensitivity (Nissim, Raskhodnikova and Smith 2007) for quantiles, as an expert to compare with.

The answer is q(x) + S(x)/α·Z, with Z of density ∝ 1/(1 + z⁴) and α = β = ε/10: pure ε-DP (their lemma 2.6 with γ = 4). S is
β-smooth: S(x) = max_k e^(−βk)·A_k(x), A_k the local sensitivity within k replacements. It is here for evaluation only: its noise
has a data-dependent scale and no exact integer sampler, so :meth:`release` is refused and ``learn()`` never falls back to it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from lipdp.errors import UnsupportedError
from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.mechanism import AdditiveMechanism, ConstantMechanism, Mechanism, SelectionMechanism
from lipdp.mechanisms.noise import NoiseKind, Sampler, density
from lipdp.mechanisms.postprocess import Plain, Sample, Table, best_responses, tabulate
from lipdp.mechanisms.problem import Problem, Query, response_loss
from lipdp.mechanisms.statistics import PiecewiseSum, QueryStatistic, Statistic
from lipdp.mechanisms.utilities import ENOUGH_NODES, RankUtility, Selection, Utility, probabilities

Level = Literal["textbook", "tuned", "strong"]
_AXIS = 401  # grid points of decoders over one coordinate
_PLANE = {"squared": 97, "quantile": 41}  # … and along each of two: without a closed form, each point is a search
_REACH = 8.0  # noise scales that a decoder's grid reaches beyond the noiseless values
_SCREEN, _FINALISTS = (3000, 1000), 4  # datasets (for decoders, for losses) to screen all candidates with; how many go on
_EDGES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
_ASIDE = (
    (0.0, 0.2),
    (0.0, 0.3),
    (0.0, 0.4),
    (0.0, 0.5),
    (0.1, 0.4),
    (0.1, 0.5),
    (0.2, 0.5),
)  # windows off the middle
_NOISES: tuple[NoiseKind, ...] = ("laplace", "staircase")


def constant(problem: Problem, sample: Sample) -> ConstantMechanism:
    """The best data-blind answer."""
    value = best_responses(sample.t.new_ones(sample.t.shape[0], 1), sample)
    return ConstantMechanism(problem, "constant", float(value[0]))


def additive(problem: Problem, title: str, statistic: Statistic, noise: NoiseKind, sample: Sample) -> AdditiveMechanism:
    """statistic + noise, with its decoder tabulated on the sample (for one or two coordinates)."""
    values = statistic.integers(sample.t).to(torch.float64) * statistic.unit
    size = statistic.sensitivity * statistic.unit
    reach = _REACH * size / problem.epsilon
    likelihoods = []
    for column in values.T:
        points = _AXIS if statistic.dimension == 1 else _PLANE[problem.loss]
        axis = torch.linspace(float(column.min()) - reach, float(column.max()) + reach, points, dtype=torch.float64)
        likelihoods.append((axis, density(noise, axis - column[:, None], size, problem.epsilon)))
    return AdditiveMechanism(problem, title, statistic, noise, tabulate(likelihoods, sample))


def selection(problem: Problem, title: str, utility: Utility, method: Selection, sample: Sample) -> SelectionMechanism:
    """A choice by utility, with the best answer for each response under the sample."""
    utilities = utility.integers(sample.t).to(torch.float64)
    weights = probabilities(method, utilities, utility.sensitivity, problem.epsilon, nodes=ENOUGH_NODES)
    return SelectionMechanism(problem, title, utility, method, best_responses(weights, sample))


def grid(responses: int, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Midpoints of equal cells of [low, high]."""
    return low + (high - low) * (torch.arange(responses, dtype=torch.float64) + 0.5) / responses


def rank_utility(problem: Problem, responses: int, low: float = 0.0, high: float = 1.0) -> RankUtility:
    """The expert's utility on a grid."""
    return RankUtility(grid(responses, low, high), problem.query.p * problem.n)


def moments(low: float, high: float, weight: float) -> PiecewiseSum:
    """Σ (λ·z_i, z_i²) with z the record clipped to [low, high], centred, and scaled to [−1, 1]; λ = 0: the square alone."""
    inner = torch.linspace(low, high, 65, dtype=torch.float64)
    knots = torch.unique(torch.cat([torch.tensor([0.0, 1.0], dtype=torch.float64), inner]))
    z = (knots.clamp(low, high) - (low + high) / 2) / ((high - low) / 2)
    return PiecewiseSum.quantised(knots, torch.stack([weight * z, z**2], 1) if weight else z[:, None] ** 2)


def smooth(problem: Problem, sample: Sample) -> SmoothSensitivity:
    """Smooth sensitivity with its decoder."""
    truth, scale = sample.truth, smooth_sensitivity(sample.t, problem) * 10 / problem.epsilon
    axis = torch.linspace(-1.0, 2.0, _AXIS, dtype=torch.float64)
    likelihood = heavy_density((axis - truth[:, None]) / scale[:, None]) / scale[:, None]
    return SmoothSensitivity(problem, "smooth sensitivity", tabulate([(axis, likelihood)], sample))


@dataclass(frozen=True)
class Expert:
    """A mechanism before its decoder is fitted, and the lowest level that it belongs to."""

    level: Level
    fit: Callable[[Sample], Mechanism]
    releasable: bool = True


def levels_to(level: Level) -> tuple[Level, ...]:
    """That level and those below."""
    every: tuple[Level, ...] = get_args(Level)
    return every[: every.index(level) + 1]


def catalogue(problem: Problem) -> Iterator[Expert]:
    """All experts for a problem."""
    yield Expert("textbook", lambda sample: constant(problem, sample))
    yield from _on_the_query(problem)
    if problem.query.kind == "quantile":
        yield Expert("textbook", lambda sample: smooth(problem, sample), releasable=False)
        yield from _by_rank(problem)
        yield from _on_the_mean(problem)
    if problem.query.kind != "mean":
        yield from _on_moments(problem)


def windows() -> list[tuple[float, float]]:
    """Clip windows: around the middle, from 0.4 at most to 0.6 at least, then on either side of it."""
    middle = [(low, 1 - top) for low, top in product(_EDGES, _EDGES)]
    return [*middle, *_ASIDE, *((1 - high, 1 - low) for low, high in _ASIDE)]


def _on_the_query(problem: Problem) -> Iterator[Expert]:
    most = 0.25 if problem.query.kind == "variance" else 1.0
    for noise in _NOISES:
        statistic = QueryStatistic(problem.query, problem.n)
        undecoded = AdditiveMechanism(problem, f"{noise} on the query, undecoded", statistic, noise, Plain(most))
        yield _fixed(undecoded)
    for (low, high), noise in product(windows(), _NOISES):
        whole = (low, high) == (0.0, 1.0)
        title = f"{noise} on the query" + ("" if whole else f" clipped to [{low:g}, {high:g}] of the range")
        statistic = QueryStatistic(problem.query, problem.n, (low, high))
        yield _added("textbook" if whole else "tuned", problem, title, statistic, noise)


def _by_rank(problem: Problem) -> Iterator[Expert]:
    yield from map(_fixed, (IntervalMechanism.plain(problem), IntervalMechanism.deep(problem)))
    ranges = ((0.0, 1.0), (0.1, 0.9), (0.2, 0.8), (0.0, 0.6), (0.4, 1.0))
    places = [*product((12, 25, 50, 100), ranges), *product((200, 300), ranges[:1])]
    methods: tuple[Selection, ...] = ("exponential", "permute_and_flip")
    for (size, (low, high)), method in product(places, methods):
        title = f"{method.replace('_', '-')}, rank utility, {size} responses in [{low:g}, {high:g}] of the range"
        utility = rank_utility(problem, size, low, high)
        yield _chosen("textbook" if (size, low, high) == (50, 0.0, 1.0) else "tuned", problem, title, utility, method)


def _on_the_mean(problem: Problem) -> Iterator[Expert]:
    for low, high in windows():
        title = f"laplace on the mean clipped to [{low:g}, {high:g}] of the range"
        yield _added("tuned", problem, title, QueryStatistic(Query("mean"), problem.n, (low, high)), "laplace")


def _on_moments(problem: Problem) -> Iterator[Expert]:
    for edge, weight in product((0.0, 0.05, 0.1, 0.15, 0.2, 0.3), (0.0, 0.25, 0.5, 1.0, 2.0)):
        level: Level = "textbook" if (edge, weight) == (0.0, 1.0) else "tuned"
        for noise in _NOISES if weight == 0 else _NOISES[:1]:
            title = f"{noise} on clipped moments, [{edge:g}, {1 - edge:g}] of the range, weight {weight:g}"
            own = level if problem.query.kind == "variance" else "strong"
            yield _added(own, problem, title, moments(edge, 1 - edge, weight), noise)


def _fixed(mechanism: Mechanism) -> Expert:
    """One that assumes nothing: no decoder is fitted."""
    return Expert("textbook", lambda sample: mechanism)


def _added(level: Level, problem: Problem, title: str, statistic: Statistic, noise: NoiseKind) -> Expert:
    return Expert(level, lambda sample: additive(problem, title, statistic, noise, sample))


def _chosen(level: Level, problem: Problem, title: str, utility: Utility, method: Selection) -> Expert:
    return Expert(level, lambda sample: selection(problem, title, utility, method, sample))


def experts(problem: Problem, t: Tensor, level: Level = "strong") -> Iterator[Mechanism]:
    """All of a level's mechanisms, decoders fitted to unit datasets ``t``."""
    sample = Sample.of(problem, t)
    return (expert.fit(sample) for expert in catalogue(problem) if expert.level in levels_to(level))


def best_experts(
    problem: Problem, t: Tensor, validation: Tensor, levels: Sequence[Level] = ("strong",), releasable: bool = True
) -> dict[Level, Mechanism]:
    """The best expert of each level on ``validation``: all are screened on part of the datasets, the best few fitted to all.

    The same draws give the same mechanisms, whatever other levels are asked for. ``releasable=False`` lets smooth sensitivity
    compete, for comparison.
    """
    everything = {level for wanted in levels for level in levels_to(wanted)}
    sample = Sample.of(problem, t)
    few, check = sample.first(min(_SCREEN[0], max(t.shape[0] // 3, 300))), validation[: _SCREEN[1]]
    screened = [
        (float(expert.fit(few).losses(check).mean()), place, expert)
        for place, expert in enumerate(catalogue(problem))
        if expert.level in everything and (expert.releasable or not releasable)
    ]
    screened.sort(key=lambda entry: entry[:2])
    fitted: dict[int, tuple[float, Mechanism]] = {}
    best: dict[Level, Mechanism] = {}
    for level in levels:
        own = [(place, expert) for _, place, expert in screened if expert.level in levels_to(level)]
        finalists = [entry for entry in own if entry[1].releasable][:_FINALISTS]
        finalists += [entry for entry in own[:_FINALISTS] if not entry[1].releasable]
        for place, expert in finalists:
            if place not in fitted:
                mechanism = expert.fit(sample)
                fitted[place] = (float(mechanism.losses(validation).mean()), mechanism)
        best[level] = min((fitted[place] for place, _ in finalists), key=lambda pair: pair[0])[1]
    return best


_POINTS = 20_001


def smooth_sensitivity(t: Tensor, problem: Problem) -> Tensor:
    """S(x) of sorted unit datasets, (batch,).

    An order statistic x_(j) has, within k replacements, local sensitivity max_{0≤s≤k+1} (x_(j+s) − x_(j+s−k−1)), with 0 and 1
    beyond the ends; a midpoint of two has at most the average of theirs. All k ≥ n give 1.
    """
    batch, n = t.shape
    beta = problem.epsilon / 10
    low, high = problem.query._places(n)
    padded = torch.cat([t.new_zeros(batch, n + 1), t, t.new_ones(batch, n + 1)], 1)
    best = t.new_zeros(batch)
    for k in range(n + 1):
        if math.exp(-beta * k) <= float(best.min()):  # A_k ≤ 1: nothing more to find
            break
        local = t.new_zeros(batch)
        for place in (low, high):
            start = n + 1 + place - k - 1
            gaps = padded[:, start + k + 1 : start + 2 * k + 3] - padded[:, start : start + k + 2]
            local = local + gaps.amax(1) / 2
        best = torch.maximum(best, math.exp(-beta * k) * local)
    return best


def heavy_density(z: Tensor) -> Tensor:
    """√2/π · 1/(1 + z⁴)."""
    return math.sqrt(2) / math.pi / (1 + z**4)


def heavy_quantile(u: Tensor) -> Tensor:
    """The inverse CDF of that density, from a table in arctan z."""
    angle = torch.linspace(-math.pi / 2, math.pi / 2, _POINTS, dtype=torch.float64)[1:-1]
    z = torch.tan(angle)
    cdf = torch.cumulative_trapezoid(heavy_density(z) * (1 + z**2), angle)
    cdf = torch.cat([cdf.new_zeros(1), cdf])
    return Table((cdf / cdf[-1],), z)(u.reshape(-1, 1)).reshape(u.shape)


@dataclass(frozen=True)
class SmoothSensitivity(Mechanism):
    """The mechanism of this module with a decoder; evaluated, never released."""

    decoder: Table
    report: dict[str, Any] = field(default_factory=dict, kw_only=True)

    @property
    def sensitivity(self) -> float:
        """The global one; the noise follows the smooth one, which is smaller."""
        return float(self.problem.query.sensitivity(self.problem.n)) * self.problem.scale

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`."""
        draws = 64
        generator = torch.Generator().manual_seed(seed)
        uniform = torch.rand((t.shape[0], draws), dtype=torch.float64, generator=generator)
        z = heavy_quantile((torch.arange(draws, dtype=torch.float64) + uniform) / draws)
        truth = self.problem.query(t)
        noisy = truth[:, None] + smooth_sensitivity(t, self.problem)[:, None] * (10 / self.epsilon) * z
        answers = self.decoder(noisy.reshape(-1, 1)).reshape(noisy.shape)
        return response_loss(self.problem.loss, t, truth, answers).mean(1)

    def for_size(self, n: int) -> SmoothSensitivity:
        """The same rule at another size."""
        return replace(self, problem=self.problem.resized(n), report=self._resized_report(n))

    def check_sampler(self, sampler: Sampler) -> None:
        """No sampler will do."""
        raise UnsupportedError(
            "smooth sensitivity is here for comparison only: its noise can't be drawn without floating point. Use the mechanism "
            "that learn() returns, or another expert."
        )

    def _noised(self) -> str:
        return "the query, with noise of density 1/(1+z^4) for the smooth sensitivity (comparison only)"

    def _state(self) -> dict[str, Any]:
        return {"decoder": self.decoder.state()}
