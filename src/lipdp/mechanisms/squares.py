"""The variance from Σz and Σz², noised together, z = 2x − 1 the records about the middle of the range.

Noise on the variance itself is for a record that moves it by 1/n, which needs the others at an end of the range. Σz² moves by ¼ of
that, wherever they lie; Σz moves a lot, but counts little where the mean is near the middle. So the vector (λΣz, Σz²) gets Laplace
noise for its L1 sensitivity, and the answer is (Σz²/n − (Σz/n)² − c·s)/4, each part limited to what is possible. s is the scale of
the noise on Σz²/n; taking c of it away costs little, and gains where the variance is near 0, as most are. No ε is spent on
finding the mean first (:mod:`lipdp.mechanisms.centred`), so this is for few records.

**Sensitivity.** λ|z − y| + |z² − y²| = |z − y|·(λ + |z + y|), for z = 1 and y = −λ/2 the largest: (1 + λ/2)², if λ ≤ 2. For both
alone, ε would have to be split, and each part's noise be for all it can move.

**A coin.** Where the mean is near an end, noise on the variance itself is better, by up to 1.6. ``often`` 64ths of the answers are
from the sums, the others from that noise, by a coin that knows nothing of the data: losses are averages of both, and so are ratios.

**All datasets.** The loss depends on mean and variance alone: its worst ratio to noise on the variance is that of a function of two
variables, and is computed.

**Privacy.** Records are whole numbers of 2⁻³⁰; z² is rounded down to as many, record by record, which the sensitivity counts.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Range, check_fields
from lipdp.mechanisms.centred import exponential_cells
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism
from lipdp.mechanisms.noise import Sampler, check_sampler, draw_noise, release_noise
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.robust import noisy_query, truth_losses
from lipdp.mechanisms.statistics import PLACES, places
from lipdp.privacy.randomness import Stream

__all__ = ["SIDES", "SquaresMechanism", "candidates"]

Weight = Annotated[int, Range(least=1, most=16)]
Less = Annotated[float, Range(least=0, most=100)]
SIDES = 64
"""Of the coin."""
Often = Annotated[int, Range(least=1, most=SIDES)]
_EIGHTHS = 8  # λ is a multiple of ⅛
_CHUNK = 2_000_000  # records at a time
_WEIGHTS, _LESS = (4, 5, 6, 8, 10), (0.0, 0.25, 0.5, 0.75, 1.0)


@dataclass(frozen=True)
class SquaresMechanism(Mechanism):
    """The variance from two noisy sums, in ``often`` of 64 answers; ``weight`` is 8λ, ``less`` is c."""

    weight: Weight
    less: Less
    often: Often = SIDES
    kind: ClassVar[str] = "squares"

    def __post_init__(self) -> None:
        """It answers variances."""
        if self.problem.query.kind != "variance":
            raise ConfigurationError(f"sums of squares answer the variance, not the {self.problem.query.name}.")
        check_fields(self, "a variance from sums of squares")

    @classmethod
    def of(cls, problem: Problem, weight: int, less: float, often: int = SIDES) -> SquaresMechanism:
        """With a title that says what it does."""
        title = "laplace noise on both moments about the middle" + (", or noise on the variance" if often < SIDES else "")
        return cls(problem, title, weight, less, often)

    @cached_property
    def other(self) -> AdditiveMechanism:
        """Noise on the variance."""
        return noisy_query(self.problem, "staircase")

    @property
    def sensitivity(self) -> float:
        """Of the two sums, in L1, with Σz² in units of the squared half range."""
        return self.moves / (_EIGHTHS * PLACES)

    @property
    def moves(self) -> int:
        """Of :meth:`statistic`: 8·(1 + λ/2)² places, and for each square less than one by which it is rounded."""
        return (2 * _EIGHTHS + self.weight) ** 2 * (PLACES // (4 * _EIGHTHS)) + _EIGHTHS

    @property
    def scale(self) -> float:
        """s, of the noise on Σz²/n."""
        return self.sensitivity / (self.problem.n * self.epsilon)

    def statistic(self, t: Tensor) -> list[tuple[int, int]]:
        """(8λΣz, 8Σz²) of unit datasets (batch, n), in places."""
        made = []
        for row in t:
            total = squares = 0
            for part in torch.split(2 * places(row) - PLACES, _CHUNK):
                total, squares = total + int(part.sum()), squares + int((part**2 >> 30).sum())
            made.append((self.weight * total, _EIGHTHS * squares))
        return made

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`; by quadrature, no noise is drawn."""
        return self.losses_of(t.mean(1), t.var(1, correction=0))

    def losses_of(self, means: Tensor, variances: Tensor) -> Tensor:
        """The expected loss of every dataset of this mean and variance (unit scale): over the noise on Σz cell by cell, over that
        on Σz² by its partial moments.
        """
        away, chance = exponential_cells()
        away, s = torch.cat([away, -away]) * self.scale * _EIGHTHS / self.weight, self.scale
        z, truth = (2 * means - 1)[:, None], 4 * variances[:, None]
        taken = (z + away).clamp(-1, 1) ** 2 + self.less * s
        middle, top = truth + z**2 - taken, (1 - taken).clamp(min=0)
        low, high = _partial(-middle / s), _partial((top - middle) / s)
        p0, p1, p2 = (above - below for above, below in zip(high, low, strict=True))
        gap = middle - truth
        inside = gap**2 * p0 + 2 * gap * s * p1 + s**2 * p2
        own = (inside + truth**2 * low[0] + (top - truth) ** 2 * (1 - high[0])) @ torch.cat([chance, chance]) / 32
        if self.often == SIDES:
            return own
        return (self.often * own + (SIDES - self.often) * truth_losses(self.other, variances)) / SIDES

    @property
    def certain(self) -> bool:
        """See :meth:`Mechanism.certain`."""
        return True

    def moved(self, one: Tensor, other: Tensor) -> list[tuple[int, int]]:
        """See :meth:`Mechanism.moved`."""
        pairs = zip(self.statistic(one), self.statistic(other), strict=True)
        return [(max(abs(a - c) + abs(b - d) for (a, b), (c, d) in pairs), self.moves)]

    def check_sampler(self, sampler: Sampler) -> None:
        """See :func:`lipdp.mechanisms.noise.check_sampler`."""
        check_sampler(sampler, "laplace")

    def respond_within(self, t: Tensor, confidence: float, sampler: Sampler = "auto") -> tuple[Tensor, float]:
        """One answer about a unit dataset (1, n), with what its error stays below with this chance, whatever the data are.

        Half of the risk is for either noise. The mean that came out, m, is within r of the true one: so m² is off by at most
        r·(2|m| + r).
        """
        if Stream().below(SIDES) >= self.often:
            size = self.other.statistic.sensitivity * self.other.statistic.unit
            upper = torch.tensor([(1 + confidence) / 2], dtype=torch.float64)
            return self.other._respond(t, "exact"), float(draw_noise("staircase", upper, size, self.epsilon))
        total, squares = release_noise("laplace", self.statistic(t)[0], self.moves, self.problem.exact_epsilon, sampler)
        n, s = self.problem.n, self.scale
        mean = min(max(total / (self.weight * PLACES * n), -1.0), 1.0)
        second = min(max(squares / (_EIGHTHS * PLACES * n), 0.0), 1.0)
        answer = min(max((second - mean**2 - self.less * s) / 4, 0.0), 0.25)
        reach = math.log(2 / (1 - confidence)) * s
        off = reach * _EIGHTHS / self.weight
        return torch.tensor(answer, dtype=torch.float64), (reach + off * (2 * abs(mean) + off) + self.less * s) / 4

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        return self.respond_within(t, 0.95, sampler)[0]

    def _noised(self) -> str:
        return "the sum and the sum of squares about the middle, with laplace noise for their joint L1 sensitivity"


def _partial(limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """P(L ≤ y), E[L; L ≤ y] and E[L²; L ≤ y] of standard Laplace noise."""
    size, below = limit.abs(), limit < 0
    tail = torch.exp(-size) / 2
    square = tail * (size**2 + 2 * size + 2)
    return torch.where(below, tail, 1 - tail), -tail * (size + 1), torch.where(below, square, 2 - square)


def candidates(problem: Problem) -> list[SquaresMechanism]:
    """One for each weight and what is taken away, without a coin."""
    return [SquaresMechanism.of(problem, *own) for own in itertools.product(_WEIGHTS, _LESS)]
