"""Mechanisms that gain from a belief where it is true and lose little where it is not: on no dataset more than 1 + τ times the
loss of a mechanism that assumes nothing. Means and variances: :mod:`lipdp.mechanisms.truths`; quantiles:
:mod:`lipdp.mechanisms.ranked`.
"""

from __future__ import annotations

import torch

from lipdp.mechanisms import beyond
from lipdp.mechanisms.bounded import KINDS, Robust, affordable, draws, noisy_query, truth_losses
from lipdp.mechanisms.distributions import Distribution
from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.ranked import by_depth, by_intervals
from lipdp.mechanisms.truths import by_mean_and_variance, by_records_beyond, on_the_query

__all__ = ["Robust", "affordable", "draws", "plain_mechanisms", "robust_mechanism", "truth_losses"]

_CLEAR = 400.0  # ε times the records beyond a quantile above which only the noise on its rank counts, and nothing is fitted


def plain_mechanisms(problem: Problem) -> list[Mechanism]:
    """What a textbook offers that assumes nothing: noise on the query, or a choice by rank; answers limited to the possible."""
    if problem.query.kind == "quantile":
        return [IntervalMechanism.plain(problem)]
    return [noisy_query(problem, noise) for noise in KINDS]


def robust_mechanism(problem: Problem, belief: Distribution, robustness: float, count: int, seed: int) -> Robust:
    """The best one under the belief whose loss is nowhere above 1 + τ times the plain one's."""
    if problem.query.kind == "quantile":
        if problem.epsilon * min(problem.rank(), problem.n - problem.rank()) >= _CLEAR:
            return by_depth(problem)
        return by_intervals(problem, belief, robustness, affordable(count, problem.n), seed)
    if problem.loss == "quantile":  # of a mean: its loss depends on all of the data, and nothing is shifted
        plain = noisy_query(problem, "laplace")
        everywhere, most = "every dataset: it is the mechanism that assumes nothing", float(problem.n)
        return Robust(plain, plain, 1.0, most, most, everywhere, "no more than all records lie in between", proved=True)
    drawn = draws(belief, problem, affordable(count, problem.n), seed)
    parts = [(problem.query(part), part.mean(1), beyond.counted(part)) for part in drawn]
    truths, means, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    found = on_the_query(problem, truths, robustness)
    if problem.query.kind == "variance":
        return by_mean_and_variance(found, means, truths, robustness)
    return by_records_beyond(found, means, counts, robustness)
