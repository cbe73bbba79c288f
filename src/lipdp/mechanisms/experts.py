"""What an expert would use, each with the best decoder E[q | released] under the public distribution of datasets.

Textbook: a constant; Laplace and staircase noise on the query, decoded and as they are; exponential mechanism and permute-and-flip
with the rank utility on the paper's grid of 50, and the exponential mechanism on all numbers, which needs no prior; smooth
sensitivity; for the variance, both moments. Tuned adds clip windows anywhere, grid sizes, a noisy clipped mean decoded to a
quantile (hard to beat at small ε), and, for the variance, clipped moments (λ·z, z²) whose joint L1 sensitivity is calibrated
exactly. Strong adds the same moments decoded to quantiles. Each level contains the one before; the
best of a level is chosen on validation datasets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal, get_args

import torch
from torch import Tensor

from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.mechanism import AdditiveMechanism, ConstantMechanism, Mechanism, SelectionMechanism
from lipdp.mechanisms.noise import NoiseKind, density
from lipdp.mechanisms.postprocess import Plain, Sample, best_responses, tabulate
from lipdp.mechanisms.problem import Problem, Query
from lipdp.mechanisms.selection import ENOUGH_NODES, Selection, probabilities
from lipdp.mechanisms.smooth import SmoothSensitivity, heavy_density, smooth_sensitivity
from lipdp.mechanisms.statistics import PiecewiseSum, QueryStatistic, Statistic
from lipdp.mechanisms.utilities import RankUtility, Utility

__all__ = ["Expert", "Level", "additive", "best_expert", "best_experts", "catalogue", "experts", "levels_to", "selection"]

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
    yield from (_fixed(IntervalMechanism.plain(problem, rounds)) for rounds in (False, True))
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
    few, check = sample.first(_SCREEN[0]), validation[: _SCREEN[1]]
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


def best_expert(problem: Problem, t: Tensor, validation: Tensor, level: Level = "strong", releasable: bool = True) -> Mechanism:
    """The best expert of one level."""
    return best_experts(problem, t, validation, (level,), releasable)[level]
