"""What an expert would use, each with the best decoder E[q | released] under the public distribution of datasets.

Textbook: a constant; Laplace and staircase noise on the query; exponential mechanism and permute-and-flip with the rank
utility on the paper's grid of 50; smooth sensitivity; for the variance, both moments. Tuned adds clip windows, grid sizes, a
noisy clipped mean decoded to a quantile (hard to beat at small ε), and, for the variance, clipped moments (λ·z, z²) whose joint
L1 sensitivity is calibrated exactly. Strong adds the same moments decoded to quantiles, which beats the others, so ``learn()``
competes with it. The best is chosen on validation datasets.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Literal

import torch
from torch import Tensor

from lipdp.mechanisms.mechanism import AdditiveMechanism, ConstantMechanism, Mechanism, SelectionMechanism
from lipdp.mechanisms.noise import NoiseKind, density
from lipdp.mechanisms.postprocess import best_responses, tabulate
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.queries import Query
from lipdp.mechanisms.selection import ENOUGH_NODES, Selection, probabilities
from lipdp.mechanisms.smooth import SmoothSensitivity, heavy_density, smooth_sensitivity
from lipdp.mechanisms.statistics import PiecewiseSum, QueryStatistic, Statistic
from lipdp.mechanisms.utilities import RankUtility, Utility

__all__ = ["Level", "additive", "best_expert", "experts", "selection"]

Level = Literal["textbook", "tuned", "strong"]
_AXIS = 401  # grid points of decoders over one coordinate
_PLANE = {"squared": 97, "quantile": 41}  # … and along each of two: without a closed form, each point is a search
_REACH = 8.0  # noise scales that a decoder's grid reaches beyond the noiseless values
_SCREEN, _FINALISTS = (3000, 1000), 4  # datasets (for decoders, for losses) to screen all candidates with; how many go on
_EDGES = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)


def constant(problem: Problem, t: Tensor) -> ConstantMechanism:
    """The best data-blind answer."""
    value = best_responses(t.new_ones(t.shape[0], 1), t, problem.query(t), problem.loss)
    return ConstantMechanism(problem, "constant", float(value[0]))


def additive(problem: Problem, title: str, statistic: Statistic, noise: NoiseKind, t: Tensor) -> AdditiveMechanism:
    """statistic + noise, with its decoder tabulated on unit datasets ``t`` (for one or two coordinates)."""
    values = statistic.integers(t).to(torch.float64) * statistic.unit
    size = statistic.sensitivity * statistic.unit
    reach = _REACH * size / problem.epsilon
    likelihoods = []
    for column in values.T:
        points = _AXIS if statistic.dimension == 1 else _PLANE[problem.loss]
        axis = torch.linspace(float(column.min()) - reach, float(column.max()) + reach, points, dtype=t.dtype)
        likelihoods.append((axis, density(noise, axis - column[:, None], size, problem.epsilon)))
    table = tabulate(likelihoods, t, problem.query(t), problem.loss)
    return AdditiveMechanism(problem, title, statistic, noise, table)


def selection(problem: Problem, title: str, utility: Utility, method: Selection, t: Tensor) -> SelectionMechanism:
    """A choice by utility, with the best answer for each response under unit datasets ``t``."""
    utilities = utility.integers(t).to(torch.float64)
    weights = probabilities(method, utilities, utility.sensitivity, problem.epsilon, nodes=ENOUGH_NODES)
    return SelectionMechanism(problem, title, utility, method, best_responses(weights, t, problem.query(t), problem.loss))


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


def smooth(problem: Problem, t: Tensor) -> SmoothSensitivity:
    """Smooth sensitivity with its decoder."""
    truth, scale = problem.query(t), smooth_sensitivity(t, problem) * 10 / problem.epsilon
    axis = torch.linspace(-1.0, 2.0, _AXIS, dtype=t.dtype)
    likelihood = heavy_density((axis - truth[:, None]) / scale[:, None]) / scale[:, None]
    return SmoothSensitivity(problem, "smooth sensitivity", tabulate([(axis, likelihood)], t, truth, problem.loss))


def experts(problem: Problem, t: Tensor, level: Level = "strong") -> Iterator[Mechanism]:
    """All of a level's candidates, decoders fitted to unit datasets ``t``."""
    noises: tuple[NoiseKind, ...] = ("laplace", "staircase")
    methods: tuple[Selection, ...] = ("exponential", "permute_and_flip")
    yield constant(problem, t)
    edges = _EDGES if level != "textbook" else (0.0,)
    for low, top, noise in product(edges, edges, noises):
        window = (low, 1 - top)
        name = f"{noise} on the query" + ("" if window == (0.0, 1.0) else f" clipped to [{low:g}, {1 - top:g}] of the range")
        yield additive(problem, name, QueryStatistic(problem.query, problem.n, window), noise, t)
    if problem.query.kind == "quantile":
        yield smooth(problem, t)
        sizes = (50,) if level == "textbook" else (12, 25, 50, 100)
        windows = [(0.0, 1.0)] if level == "textbook" else [(0.0, 1.0), (0.1, 0.9), (0.2, 0.8), (0.0, 0.6)]
        places = [*product(sizes, windows), *([] if level == "textbook" else [(200, (0.0, 1.0))])]
        for (size, (low, high)), method in product(places, methods):
            utility = rank_utility(problem, size, low, high)
            words = f"{method.replace('_', '-')}, rank utility, {size} responses in [{low:g}, {high:g}] of the range"
            yield selection(problem, words, utility, method, t)
    if problem.query.kind == "variance" or (problem.query.kind == "quantile" and level == "strong"):
        clips = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3) if level != "textbook" else (0.0,)
        weights = (0.0, 0.25, 0.5, 1.0, 2.0) if level != "textbook" else (1.0,)
        for edge, weight in product(clips, weights):
            for noise in noises if weight == 0 else noises[:1]:
                words = f"{noise} on clipped moments, [{edge:g}, {1 - edge:g}] of the range, weight {weight:g}"
                yield additive(problem, words, moments(edge, 1 - edge, weight), noise, t)
    if problem.query.kind == "quantile" and level != "textbook":
        for low, top in product(edges, edges):
            words = f"laplace on the mean clipped to [{low:g}, {1 - top:g}] of the range"
            yield additive(problem, words, QueryStatistic(Query("mean"), problem.n, (low, 1 - top)), "laplace", t)


def best_expert(problem: Problem, t: Tensor, validation: Tensor, level: Level = "strong", releasable: bool = True) -> Mechanism:
    """The best expert on ``validation``: all are screened on part of the datasets, the best few are fitted and compared on all.

    ``releasable=False`` lets smooth sensitivity compete, for comparison.
    """
    few, check = t[: _SCREEN[0]], validation[: _SCREEN[1]]
    ranked: list[tuple[float, int, Mechanism]] = []
    for index, candidate in enumerate(experts(problem, few, level)):
        if not (releasable and isinstance(candidate, SmoothSensitivity)):
            ranked.append((float(candidate.losses(check).mean()), index, candidate))
            ranked = sorted(ranked)[:_FINALISTS]
    finalists = [refitted(problem, candidate, t) for _, _, candidate in ranked]
    return min(finalists, key=lambda candidate: float(candidate.losses(validation).mean()))


def refitted(problem: Problem, candidate: Mechanism, t: Tensor) -> Mechanism:
    """The same expert with its decoder fitted to ``t``."""
    if isinstance(candidate, AdditiveMechanism):
        return additive(problem, candidate.title, candidate.statistic, candidate.noise, t)
    if isinstance(candidate, SelectionMechanism):
        return selection(problem, candidate.title, candidate.utility, candidate.method, t)
    return smooth(problem, t) if isinstance(candidate, SmoothSensitivity) else constant(problem, t)
