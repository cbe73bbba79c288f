"""The variance about a private centre: a small share of ε finds where the mean is, the rest noises the variance as seen from there.

A record of [0, 1] can move the variance by 1/n, if the others lie at an end; if their mean is in the middle, by ¼ of that. So the
mean is released first, a = μ + Z limited to the range, Z Laplace noise for the share β of ε. What is noised then is F = Σ(x_i −
a)²/n − m², m = (Σx_i/n − a) limited to [−h, h]: the variance itself where |μ − a| ≤ h, which h = ``reach`` times the scale of Z
makes likely; elsewhere it is larger by (μ − a)² − h².

**Sensitivity** of F for a given a: (c + h)²/n with c = max(a, 1 − a). For a record that goes from x to y, (y − a)² − (x − a)² =
(y − x)(x + y − 2a), and m² changes by an average of 2s(y − x)/n over s ∈ [−h, h], or by less where it is limited. So n·ΔF is an
average of (y − x)(x + y − 2a − 2s) = (y − a − s)² − (x − a − s)², and both squares are in [0, (c + h)²]. Where c + h ≥ 1 nothing
is gained, and the variance itself is noised, of sensitivity (n − 1)/n²: so the centre costs at most 1/(1 − β)², and gains up to
16 times that.

**All datasets.** The loss depends on the data by mean and variance alone, 0 ≤ V ≤ μ(1 − μ): its worst ratio to plain noise on the
variance is the maximum of a function of two variables, and is computed.

**Privacy.** Records are whole numbers of 2⁻³⁰, so sums and squares are exact; the centre is a function of what was released, so
public; n·Σ(x_i − a)² − (n·m)² is a whole number, and rounded down to a lattice whose steps are counted, rounded up, in the
sensitivity. The two parts of ε are exact fractions.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Range, check_fields
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.noise import NoiseKind, Sampler, check_sampler, density, draw_noise, release_noise
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.statistics import PLACES, places

SHARES, REACHES = (0.02, 0.035, 0.05, 0.065, 0.075, 0.085, 0.095, 0.12, 0.16), (1.5, 2.5, 4.0, 5.5, 7.0, 9.0)
"""Shares of ε that may go to the centre, and how far from it, in scales of its noise, the mean is corrected for."""
Share = Annotated[float, Range(least=1e-6, most=0.999)]
Reach = Annotated[float, Range(least=0, most=1e6)]
_COARSER = 2**24  # squares of places to one step of what is noised: steps of 2⁻³⁶
_TAIL, _POINTS = 40.0, 20_001  # tables of the noise's partial moments: how far, in units of 1/ε, and how fine
_CHUNK = 2_000_000  # records at a time


@dataclass(frozen=True)
class CentredMechanism(Mechanism):
    """The variance as seen from a private centre; ``share`` of ε is for the centre, ``noise`` is the variance's."""

    share: Share
    reach: Reach
    noise: NoiseKind
    kind: ClassVar[str] = "centred"

    def __post_init__(self) -> None:
        """It answers variances; there is something for either part."""
        if self.problem.query.kind != "variance":
            raise ConfigurationError(f"squares about a centre answer the variance, not the {self.problem.query.name}.")
        check_fields(self, "a variance about a private centre")

    @classmethod
    def of(cls, problem: Problem, share: float, reach: float, noise: NoiseKind) -> CentredMechanism:
        """With a title that says what it does."""
        title = f"{noise} noise on the variance about a private centre ({share:.3g} of epsilon)"
        return cls(problem, title, share, reach, noise)

    @property
    def shares(self) -> tuple[Fraction, Fraction]:
        """ε of the centre and of the variance: together exactly ε."""
        own = self.problem.exact_epsilon
        return Fraction(self.share) * own, own - Fraction(self.share) * own

    @property
    def sensitivity(self) -> float:
        """Of what is noised, where the centre is at an end of the range: the largest that it can be."""
        return self.problem.scale * float(self.problem.query.sensitivity(self.problem.n))

    @property
    def centre_scale(self) -> float:
        """Of the centre's Laplace noise, unit interval."""
        return 1 / (self.problem.n * float(self.shares[0]))

    @cached_property
    def half_width(self) -> int:
        """h, in places."""
        return min(round(self.reach * self.centre_scale * PLACES), PLACES)

    def centre(self, t: Tensor, sampler: Sampler = "auto") -> int:
        """A private centre (places) of a unit dataset (1, n): spends the first share."""
        total = int(places(t).sum())
        (released,) = release_noise("laplace", [total], PLACES, self.shares[0], sampler)
        return min(max(round(Fraction(released, self.problem.n)), 0), PLACES)

    def statistic(self, t: Tensor, centre: int) -> list[int]:
        """n·F of unit datasets (batch, n), in steps of what is noised, rounded down."""
        made, n, most = [], self.problem.n, self.problem.n * self.half_width
        for row in t:
            upper = lower = total = 0
            for part in torch.split(places(row) - centre, _CHUNK):
                squares = part**2  # at most 2⁶⁰
                upper, lower = upper + int((squares >> 30).sum()), lower + int((squares & (PLACES - 1)).sum())
                total += int(part.sum())
            limited = total if self._is_plain(centre) else min(max(total, -most), most)
            made.append((n * (upper * PLACES + lower) - limited**2) // (n * _COARSER))
        return made

    def moves(self, centre: int) -> int:
        """The sensitivity of :meth:`statistic`, in its steps: numbers that are Δ apart have floors that are ⌈Δ⌉ apart at most."""
        n, widest = self.problem.n, max(centre, PLACES - centre) + self.half_width
        above, below = ((n - 1) * PLACES**2, n * _COARSER) if self._is_plain(centre) else (widest**2, _COARSER)
        return -(-above // below)

    def _is_plain(self, centre: int) -> bool:
        return max(centre, PLACES - centre) + self.half_width >= PLACES

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`; by quadrature, no noise is drawn."""
        return self.losses_of(t.mean(1), t.var(1, correction=0))

    def losses_of(self, means: Tensor, variances: Tensor) -> Tensor:
        """The expected loss of every dataset of this mean and variance (unit scale).

        Over the centre's noise cell by cell; over the variance's by its partial moments: limited to [0, ¼], the answer is F + s·Z
        between two values of Z, and one of the ends outside.
        """
        away, chance = exponential_cells()
        away = self.centre_scale * torch.cat([away, -away])
        centre, h, v = (means[:, None] + away).clamp(0, 1), self.half_width / PLACES, variances[:, None]
        widest = torch.maximum(centre, 1 - centre) + h
        plain, n = widest >= 1, self.problem.n
        expected = torch.where(plain, v, v + ((means[:, None] - centre) ** 2 - h**2).clamp(min=0))
        size = torch.where(plain, (n - 1) / n**2, widest**2 / n)
        low, high = self._partial(-expected / size), self._partial((0.25 - expected) / size)
        p0, p1, p2 = (above - below for above, below in zip(high, low, strict=True))
        gap = expected - v
        inside = gap**2 * p0 + 2 * gap * size * p1 + size**2 * p2
        return (inside + v**2 * low[0] + (0.25 - v) ** 2 * (1 - high[0])) @ torch.cat([chance, chance]) / 2

    def _partial(self, limit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """P(Z ≤ limit), E[Z; Z ≤ limit] and E[Z²; Z ≤ limit] for the variance's noise of sensitivity 1."""
        axis, tables = self._tables
        place = ((limit.clamp(float(axis[0]), float(axis[-1])) - axis[0]) / (axis[1] - axis[0])).clamp(0, len(axis) - 1)
        first = place.floor().clamp(max=len(axis) - 2).to(torch.int64)
        part = place - first
        zero, one, two = (torch.lerp(table[first], table[first + 1], part) for table in tables)
        return zero, one, two

    @cached_property
    def _tables(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        epsilon = float(self.shares[1])
        reach = _TAIL / epsilon + 2
        axis = torch.linspace(-reach, reach, _POINTS, dtype=torch.float64)
        middle = (axis[1:] + axis[:-1]) / 2
        p = density(self.noise, middle, 1.0, epsilon)
        p = p / p.sum()
        start = torch.zeros(1, dtype=torch.float64)
        return axis, tuple(torch.cat([start, (p * middle**power).cumsum(0)]) for power in (0, 1, 2))

    @property
    def certain(self) -> bool:
        """See :meth:`Mechanism.certain`."""
        return True

    def moved(self, one: Tensor, other: Tensor) -> list[tuple[int, int]]:
        """See :meth:`Mechanism.moved`: at some centres."""
        made = []
        for centre in (0, PLACES // 2, PLACES - 1, PLACES):
            pairs = zip(self.statistic(one, centre), self.statistic(other, centre), strict=True)
            made.append((max(abs(a - b) for a, b in pairs), self.moves(centre)))
        return made

    def check_sampler(self, sampler: Sampler) -> None:
        """See :func:`lipdp.mechanisms.noise.check_sampler`."""
        check_sampler(sampler, self.noise)

    def respond_within(self, t: Tensor, confidence: float, sampler: Sampler = "auto") -> tuple[Tensor, float]:
        """One answer about a unit dataset (1, n), with what its error stays below with this chance, whatever the data are.

        The centre that came out says how large the noise was. A fifth of the risk is for |Z| > z (limiting the centre to the range
        only brings it nearer): F is above the variance by at most z² − h².
        """
        centre = self.centre(t, sampler)
        size, epsilon = self.moves(centre), self.shares[1]
        (released,) = release_noise(self.noise, self.statistic(t, centre), size, epsilon, sampler)
        unit = _COARSER / (PLACES**2 * self.problem.n)
        answer = min(max(released * unit, 0.0), 0.25)
        risk = 1 - confidence
        upper = torch.tensor([1 - 0.4 * risk], dtype=torch.float64)
        noise = float(draw_noise(self.noise, upper, size * unit, float(epsilon)))
        furthest = (-math.log(0.2 * risk) * self.centre_scale) ** 2 - (self.half_width / PLACES) ** 2
        above = 0.0 if self._is_plain(centre) else max(furthest, 0.0)
        return torch.tensor(answer, dtype=torch.float64), noise + above

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        return self.respond_within(t, 0.95, sampler)[0]

    def _noised(self) -> str:
        first = f"the mean, with laplace noise for {self.share:.0%} of epsilon"
        return f"{first}; then the variance about it, with {self.noise} noise for its sensitivity there and the rest of epsilon"


def exponential_cells() -> tuple[Tensor, Tensor]:
    """A standard exponential variable: the mean of each of 72 cells, and their chances."""
    edges = torch.cat([torch.arange(41, dtype=torch.float64) / 10, 4 + torch.arange(1, 33, dtype=torch.float64) / 2])
    low, high = edges[:-1], torch.cat([edges[1:-1], torch.tensor([math.inf], dtype=torch.float64)])
    chance = torch.exp(-low) - torch.exp(-high)
    width = torch.where(high.isinf(), 0.0, (high - low) * torch.exp(-high) / chance)
    return low + 1 - width.nan_to_num(0.0), chance


def candidates(problem: Problem) -> list[CentredMechanism]:
    """One for each share and reach, with staircase noise, which has less variance; none where its reach is most of the range."""
    made = [CentredMechanism.of(problem, share, reach, "staircase") for share, reach in itertools.product(SHARES, REACHES)]
    return [one for one in made if one.reach * one.centre_scale < 0.4]


def grid() -> tuple[Tensor, Tensor]:
    """(mean, variance) of datasets, close enough for a smooth loss; the other half of the means is its mirror image."""
    means = torch.cat([torch.tensor([0.0, 1e-3, 3e-3, 0.01, 0.025], dtype=torch.float64), torch.linspace(0.05, 0.5, 19).double()])
    parts = torch.cat(
        [torch.tensor([0.0, 1e-4, 1e-3, 3e-3, 0.01, 0.03], dtype=torch.float64), torch.linspace(0.08, 1, 16).double()]
    )
    variances = parts * (means * (1 - means))[:, None]
    return means[:, None].expand_as(variances).reshape(-1), variances.reshape(-1)
