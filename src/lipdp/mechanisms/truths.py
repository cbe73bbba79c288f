"""Means and variances that gain from a belief: all datasets are all truths, or all pairs of two numbers.

The query itself is noised, so the loss of a dataset depends on its truth q alone: L(q) = E(D(q + Z) − q)², Z the noise and D the
decoder. All datasets are all q ∈ [0, most]: their worst ratio to the plain mechanism is the maximum of a function of one variable,
and is computed. D is the plain answer plus a shift, found as the Bayes answer under belief + λ, λ ≥ 0 an adversary's prior that
grows where the ratio is above 1 + τ (the dual of: least expected loss, ratio at most 1 + τ everywhere). A mean from Σφ(x_i) gains
nothing at such a τ when nε is large: a φ that is not linear is biased by n times its curvature on some dataset, and the noise is
only 1/ε. What gains is noise that depends on the data (:mod:`lipdp.mechanisms.beyond`, and for the variance by
sums of squares, or :mod:`lipdp.mechanisms.centred`), where losses are functions of two variables.

**Sums of squares**: the variance from Σz and Σz², noised together, z = 2x − 1 the records about the middle of the range. Noise on
the variance itself is for a record that moves it by 1/n, which needs the others at an end of the range. Σz² moves by ¼ of that,
wherever they lie; Σz moves a lot, but counts little where the mean is near the middle. So the vector (λΣz, Σz²) gets Laplace noise
for its L1 sensitivity, and the answer is (Σz²/n − (Σz/n)² − c·s)/4, each part limited to what is possible. s is the scale of the
noise on Σz²/n; taking c of it away costs little, and gains where the variance is near 0, as most are. No ε is spent on finding the
mean first (:mod:`lipdp.mechanisms.centred`), so this is for few records.

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Range, check_fields
from lipdp.mechanisms import beyond, centred
from lipdp.mechanisms.centred import exponential_cells
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism
from lipdp.mechanisms.noise import NoiseKind, Sampler, check_sampler, density, draw_noise, release_noise
from lipdp.mechanisms.postprocess import Table
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.statistics import PLACES, places
from lipdp.mechanisms.worst import KINDS, MARGIN, Robust, largest, noisy_query, truth_losses
from lipdp.privacy.randomness import Stream

_TRUTHS, _AXIS, _REACH = 301, 601, 12.0
_NEAR, _STEPS, _EVEN = 0.05, 80, 60  # the grid of all spreads: from where on it is even, and its points below and beyond
_ROWS = 4000  # datasets at a time
_FINE = 0.004  # noise scales (÷ range) below which a belief has nothing to say, and no shift is fitted


def on_the_query(problem: Problem, belief: Tensor, robustness: float) -> Robust:
    """Noise on the query, answers shifted by a belief, which is given as a sample of truths."""
    plain = {noise: noisy_query(problem, noise) for noise in KINDS}
    most = largest(problem)
    truths = torch.linspace(0, most, _TRUTHS, dtype=torch.float64)
    fine = torch.linspace(0, most, 2 * _TRUTHS + 1, dtype=torch.float64)
    least = torch.stack([truth_losses(each, truths) for each in plain.values()]).amin(0)  # the better one, for each truth
    least_fine = torch.stack([truth_losses(each, fine) for each in plain.values()]).amin(0)
    chances = _smoothed(belief.clamp(0, most), truths)

    def expected(mechanism: AdditiveMechanism) -> float:
        return float((chances * truth_losses(mechanism, truths)).sum())

    best = min(plain.values(), key=expected)
    candidates = [best]
    if best.statistic.sensitivity * best.statistic.unit / problem.epsilon > _FINE * most:
        for noise, own in plain.items():
            shift = _shift(own, truths, chances, least, robustness)

            def make(part: float, noise: NoiseKind = noise, shift: Table = shift) -> AdditiveMechanism:
                return noisy_query(problem, noise, Table(shift.axes, part * shift.values))

            candidates.append(_within(make, fine, least_fine, robustness))
    chosen = min(candidates, key=expected)

    def where(place: int) -> str:
        return f"any dataset whose {problem.query.name} is {float(problem.answer(fine[place])):.4g}"

    most_of_plain = float(truth_losses(best, fine).max())
    unchanged = Robust(best, best, 1.0, most_of_plain, most_of_plain, "", "")
    return _held(unchanged, chosen, truth_losses(chosen, fine), least_fine, where)


def by_mean_and_variance(found: Robust, means: Tensor, variances: Tensor, robustness: float) -> Robust:
    """The variance from noisy sums, or about a private centre: the best under the belief that keeps to 1 + τ on all datasets.

    A few datasets tell which ones are worth it; all, on a grid that is fine beside the noise, whether the best of these is taken.
    """
    problem = found.mechanism.problem
    assert isinstance(found.mechanism, AdditiveMechanism)
    highest, few = 1 + MARGIN * robustness, _Spread(problem, *centred.grid())
    believed = _Spread(problem, means, variances)
    tried: list[tuple[float, SquaresMechanism | centred.CentredMechanism]] = []
    for one in (*sums_of_squares(problem), *centred.candidates(problem)):
        kept = few.within(one, highest)
        if kept is not None:
            tried.append((_score(believed.losses(kept[0]), believed.least), kept[0]))
    unchanged = _score(truth_losses(found.mechanism, variances), believed.least)
    better = sorted((pair for pair in tried if pair[0] < unchanged), key=lambda pair: pair[0])
    every = _Spread(problem, *_all_spreads(problem)) if better else few
    for _, one in better:
        kept = every.within(one, highest)
        if kept is not None:
            return _held(found, *kept, every.least, every.where)
    return found


class _Spread:
    """Datasets by mean and variance, with the loss of the better noise on the query, and of staircase noise."""

    def __init__(self, problem: Problem, means: Tensor, variances: Tensor) -> None:
        self.problem, self.means, self.variances = problem, means, variances
        noises = [noisy_query(problem, noise) for noise in KINDS]
        parts = [torch.stack([truth_losses(one, part) for one in noises]) for part in torch.split(variances, _ROWS)]
        both = torch.cat(parts, 1)
        self.least, self.staircase = both.amin(0), both[KINDS.index("staircase")]

    def losses(self, one: SquaresMechanism | centred.CentredMechanism) -> Tensor:
        """Of a mechanism."""
        if isinstance(one, SquaresMechanism) and one.often < SIDES:  # the average of both sides of its coin
            share, always = one.often / SIDES, self.losses(replace(one, often=SIDES))
            return self.staircase + share * (always - self.staircase)
        parts = zip(torch.split(self.means, _ROWS), torch.split(self.variances, _ROWS), strict=True)
        return torch.cat([one.losses_of(*part) for part in parts])

    def within(self, one: Any, highest: float) -> tuple[Any, Tensor] | None:
        """The mechanism, as often as keeps to this ratio, with its losses; none if it does not."""
        if isinstance(one, SquaresMechanism):
            always, there = self.losses(replace(one, often=SIDES)), self.staircase
            over = always > there
            parts = ((highest * self.least - there)[over] / (always - there)[over]).tolist()
            often = min([one.often, *(int(part * SIDES) for part in parts if part < 1)])
            if often < 1:
                return None
            one = SquaresMechanism.of(self.problem, one.weight, one.less, often)
        losses = self.losses(one)
        return (one, losses) if float((losses / self.least).max()) <= highest else None

    def where(self, place: int) -> str:
        """A dataset, in words."""
        mean, variance = self.problem.low + self.problem.width * float(self.means[place]), float(self.variances[place])
        return f"any dataset whose mean is {mean:.4g} and variance {self.problem.scale * variance:.4g}"


def _all_spreads(problem: Problem) -> tuple[Tensor, Tensor]:
    """(mean, variance) of all datasets, but for the mirror image of the means: near 0 close to one another beside the noise, 1/nε.

    Losses change where mean or variance are as small as the noise: on the 24 × 22 pairs of :func:`centred.grid` alone a ratio of
    1.264 was missed between two that had 1.244. On this grid a search from its worst points on finds 2·10⁻⁴ more.
    """
    least = min(max(0.1 / (problem.n * problem.epsilon), 1e-6), _NEAR / 2)
    near = torch.logspace(math.log10(least), math.log10(_NEAR), _STEPS, dtype=torch.float64)[:-1]
    means, variances = (
        torch.cat([near.new_zeros(1), near, torch.linspace(_NEAR, most, _EVEN, dtype=torch.float64)]) for most in (0.5, 0.25)
    )
    most = means * (1 - means)
    inside = torch.cat([torch.ones(len(means), 1, dtype=torch.bool), variances[:-1] < most[:, None]], 1)
    pairs = torch.minimum(variances, most[:, None])  # in place of the first that is too large: the largest
    return means[:, None].expand_as(pairs)[inside], pairs[inside]


def by_records_beyond(found: Robust, means: Tensor, counts: Tensor, robustness: float) -> Robust:
    """The mean by how many records lie beyond a cut, if it keeps to 1 + τ on all datasets and is better under the belief."""
    problem = found.mechanism.problem
    made = beyond.candidate(problem, means, counts, MARGIN * robustness)
    if made is None:
        return found
    plain = [noisy_query(problem, noise) for noise in KINDS]
    totals, seen = beyond.grid(made)
    losses, least = made.losses_of(totals, seen), torch.stack([truth_losses(one, totals / problem.n) for one in plain]).amin(0)
    believed = torch.stack([truth_losses(one, means) for one in plain]).amin(0)
    own = made.losses_of(problem.n * (means if made.high else 1 - means), counts[:, beyond.WAYS.index((made.cut, made.high))])
    assert isinstance(found.mechanism, AdditiveMechanism)
    unchanged = _score(truth_losses(found.mechanism, means), believed)
    if float((losses / least).max()) > 1 + robustness or _score(own, believed) >= unchanged:
        return found

    def where(place: int) -> str:
        unit, edge = float(totals[place]) / problem.n, made.cut / beyond.CELLS
        mean, cut = (problem.low + problem.width * (part if made.high else 1 - part) for part in (unit, edge))
        more = " or more" if int(seen[place]) == made.table.shape[0] - 1 else ""
        side = "above" if made.high else "below"
        return f"any dataset whose mean is {mean:.4g}, with {int(seen[place])}{more} records {side} {cut:.4g}"

    return _held(found, made, losses, least, where)


def _score(losses: Tensor, least: Tensor) -> float:
    """Under a belief: against the plain mechanism's losses, in all and dataset by dataset."""
    return float(losses.mean() / least.mean() + (losses / least).mean())


def _held(found: Robust, made: Mechanism, losses: Tensor, least: Tensor, where: Callable[[int], str]) -> Robust:
    """A mechanism in place of what was found, with the largest of its losses, and ratios to the plain one's, on all datasets."""
    ratios = losses / least
    at, high = int(ratios.argmax()), int(losses.argmax())
    places = {"ratio_at": where(at), "loss_at": where(high)}
    return replace(found, mechanism=made, ratio=float(ratios[at]), loss=float(losses[high]), **places)  # type: ignore[arg-type]


def _within(make: Callable[[float], AdditiveMechanism], truths: Tensor, least: Tensor, robustness: float) -> AdditiveMechanism:
    """The largest part of a shift that keeps every ratio at 1 + τ: the loss is convex in it, and nothing is shifted at 0.

    It is looked for on every third truth, and then kept to on all of them.
    """

    def fits(part: float, every: int) -> bool:
        return float((truth_losses(make(part), truths[::every]) / least[::every]).max()) <= 1 + MARGIN * robustness

    low, high = 0.0, 1.0
    if fits(1.0, 3):
        low = 1.0
    else:
        for _ in range(6):
            middle = (low + high) / 2
            low, high = (middle, high) if fits(middle, 3) else (low, middle)
    while low > 0 and not fits(low, 1):
        low = max(low - 1 / 64, 0.0)
    return make(low)


def _shift(plain: AdditiveMechanism, truths: Tensor, chances: Tensor, least: Tensor, robustness: float) -> Table:
    """By how much to move the plain answer, for each released value: Bayes under belief and adversary.

    With p_jo = P(o | q_j) and base answers b_o, a shift s costs L_j = Σ_o p_jo (b_o + s_o − q_j)². For weights ω_j the best shift
    is s_o = Σ_j ω_j p_jo (q_j − b_o) ÷ Σ_j ω_j p_jo; ω_j = chance_j ÷ mean loss + λ_j ÷ least_j, and λ follows the ratios. With the
    square multiplied out, both are products with one matrix, which holds p and p·(b − q).
    """
    size = plain.statistic.sensitivity * plain.statistic.unit
    most = float(truths[-1])
    reach = _REACH * size / plain.epsilon
    axis = torch.linspace(-reach, most + reach, _AXIS, dtype=torch.float64)
    p = density(plain.noise, axis - truths[:, None], size, plain.epsilon)
    p = p / p.sum(1, keepdim=True)
    away = axis.clamp(0, most) - truths[:, None]
    both, unshifted = torch.cat([p, p * away], 1), (p * away**2).sum(1)
    scale = (chances * least).sum()
    adversary = torch.full_like(truths, 1e-3 / truths.shape[0])
    target = 1 + MARGIN * robustness
    shift = torch.zeros_like(axis)
    for step in range(400):
        weights = 0.5 * chances / scale + 0.5 * chances / least + adversary / least
        chance, moved = (weights @ both).view(2, -1)
        shift = -moved / chance.clamp(min=1e-300)
        ratios = (unshifted + both @ torch.cat([shift**2, 2 * shift])) / least
        adversary = (adversary * torch.exp((4.0 / (1 + step / 40)) * (ratios / target - 1).clamp(max=1.0))).clamp(1e-12, 1e6)
    return Table((axis,), shift)


def _smoothed(values: Tensor, grid: Tensor) -> Tensor:
    """The chance of each point of an even grid, from a sample: Gaussian kernels of 2% of the range, folded in at its ends."""
    width = 0.02 * float(grid[-1])
    mirrored = torch.cat([values, -values, 2 * grid[-1] - values])
    made = torch.exp(-0.5 * ((grid[:, None] - mirrored) / width) ** 2).sum(1)
    return made / made.sum()


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


def sums_of_squares(problem: Problem) -> list[SquaresMechanism]:
    """One for each weight and what is taken away, without a coin."""
    return [SquaresMechanism.of(problem, *own) for own in itertools.product(_WEIGHTS, _LESS)]
