"""Mechanisms that gain from a belief where it is true and lose little where it is not: on no dataset more than 1 + τ times the
loss of a mechanism that assumes nothing. Means and variances: :mod:`lipdp.mechanisms.truths`; quantiles:
:mod:`lipdp.mechanisms.ranked`. Here is what these share: what is known of losses on all datasets, noise on the query, which assumes
nothing, and draws of a belief.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lipdp.mechanisms.distributions import Distribution, draw
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism
from lipdp.mechanisms.noise import NoiseKind, draw_noise
from lipdp.mechanisms.postprocess import Plain, Table
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.statistics import QueryStatistic

__all__ = ["KINDS", "MARGIN", "NUMBERS", "Robust", "affordable", "draws", "largest", "noisy_query", "truth_losses"]

MARGIN = 0.98
"""Of τ is used: quadrature and the space between grid points get the rest."""
NUMBERS = 4_000_000
"""Records that are drawn at a time."""
KINDS: tuple[NoiseKind, ...] = ("laplace", "staircase")
_QUANTILES = 1500  # noise quantiles that an expectation is taken over


@dataclass(frozen=True)
class Robust:
    """A mechanism with what is proved of its losses on all datasets.

    Attributes:
        mechanism: the one that gains from the belief, or the plain one.
        plain: the mechanism without assumptions that it is held against (the best of them, under the belief).
        ratio: the largest loss ÷ the plain one's, over datasets.
        loss: the largest loss, unit scale; ``plain_loss``: that of the plain one.
        ratio_at: a dataset where that ratio is reached, in words; ``loss_at`` likewise.
    """

    mechanism: Mechanism
    plain: Mechanism
    ratio: float
    loss: float
    plain_loss: float
    ratio_at: str
    loss_at: str

    def of_plain(self) -> Robust:
        """The same about the mechanism without assumptions: it loses nothing to itself."""
        everywhere = "every dataset: it is the mechanism that assumes nothing"
        return replace(self, mechanism=self.plain, ratio=1.0, ratio_at=everywhere, loss=self.plain_loss)

    def report(self, robustness: float) -> dict[str, Any]:
        """As plain values, losses in the user's units."""
        return {
            "robustness": robustness,
            "worst_ratio": self.ratio,
            "worst_ratio_at": self.ratio_at,
            "worst_loss": self.loss * self.mechanism.problem.loss_scale,
            "worst_loss_at": self.loss_at,
            "worst_case": "of all datasets",
            "plain": self.plain.title,
        }


def draws(belief: Distribution, problem: Problem, count: int, seed: int) -> Iterator[Tensor]:
    """``count`` unit datasets, a few at a time: so that n costs no memory."""
    rows = max(NUMBERS // problem.n, 1)
    for place in range(0, count, rows):
        yield draw(belief, problem, min(rows, count - place), seed + place)


def affordable(count: int, n: int) -> int:
    """So many datasets of n records, fewer where n is large: their truths differ less, too."""
    return min(count, max(100, 5 * NUMBERS // n))


def largest(problem: Problem) -> float:
    """The largest that the query can be, for numbers of [0, 1]."""
    return 0.25 if problem.query.kind == "variance" else 1.0


def noisy_query(problem: Problem, noise: NoiseKind, shift: Table | None = None) -> AdditiveMechanism:
    """Noise on the query, limited to its range: it assumes nothing, unless answers are shifted."""
    title = f"{noise} noise on the query" + (", limited to the range" if shift is None else ", answers shifted by a belief")
    return AdditiveMechanism(problem, title, QueryStatistic(problem.query, problem.n), noise, Plain(largest(problem), shift))


def truth_losses(mechanism: AdditiveMechanism, truths: Tensor) -> Tensor:
    """E(D(q + Z) − q)² for each q: the loss of every dataset that has this truth."""
    size = mechanism.statistic.sensitivity * mechanism.statistic.unit
    uniform = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    z = draw_noise(mechanism.noise, uniform, size, mechanism.epsilon)
    released = (truths[:, None] + z).reshape(-1, 1)
    answers = mechanism.decoder(released).reshape(truths.shape[0], -1)
    return ((answers - truths[:, None]) ** 2).mean(1)
