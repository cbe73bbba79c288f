"""Mechanisms that gain from a belief where it is true and lose little where it is not: on no dataset more than 1 + τ times the
loss of a mechanism that assumes nothing.

**Mean, variance.** The query itself is noised, so the loss of a dataset depends on its truth q alone: L(q) = E(D(q + Z) − q)², Z
the noise and D the decoder. All datasets are all q ∈ [0, most]: their worst ratio to the plain mechanism is the maximum of a
function of one variable, and is computed. D is the plain answer plus a shift, found as the Bayes answer under belief + λ, λ ≥ 0 an
adversary's prior that grows where the ratio is above 1 + τ (the dual of: least expected loss, ratio at most 1 + τ everywhere).
A mean from Σφ(x_i) gains nothing at such a τ when nε is large: a φ that is not linear is biased by n times its curvature on some
dataset, and the noise is only 1/ε. What gains is noise that depends on the data (:mod:`lipdp.mechanisms.beyond`, and
:mod:`lipdp.mechanisms.centred` for the variance), where losses are functions of two variables.

**Quantiles.** The plain mechanism is :class:`~lipdp.mechanisms.intervals.IntervalMechanism`; the belief chooses its base measure
and shifts its answers. Here a dataset is n numbers: the ratio is held below 1 + τ on a pool of hostile columns and on what a search
for the worst dataset finds. That is an attack, no proof, except where there is no shift and the base measure is within 1 + τ of
itself: then each probability, and so each loss, is at most 1 + τ times the plain one's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from lipdp.mechanisms import beyond, centred, squares
from lipdp.mechanisms.distributions import Distribution, World, draw, lumps
from lipdp.mechanisms.intervals import PARTS, IntervalMechanism, Profile
from lipdp.mechanisms.mechanism import AdditiveMechanism, Mechanism
from lipdp.mechanisms.noise import NoiseKind, density, draw_noise
from lipdp.mechanisms.postprocess import Plain, Table
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.statistics import QueryStatistic

__all__ = ["Robust", "affordable", "draws", "plain_mechanisms", "robust_mechanism"]

_MARGIN = 0.98  # of τ is used: quadrature and the space between grid points get the rest
_TRUTHS, _AXIS, _REACH = 301, 601, 12.0
_FINE = 0.004  # noise scales (÷ range) below which a belief has nothing to say, and no shift is fitted
_QUANTILES = 1500  # noise quantiles that an expectation is taken over
_NUMBERS = 4_000_000  # records drawn at a time
_STEPS = 250  # of fitting a base measure and shifts
_KINDS: tuple[NoiseKind, ...] = ("laplace", "staircase")
_WISH, _BEHIND = 15.0, 0.3  # how much it counts to be near to noise on the query where that is better: in a fit, in a choice
_START, _ATOMS = 0.02, 0.1  # of the measure lie on each end of the range, and on all numbers by depth, to begin with
_ENDS = (0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.035, 0.05, 0.07, 0.1)  # … and what else is tried
_NEAR = (0.0, 1e-6, 1e-5, 1e-4, 1e-3)
_CLEAR = 400.0  # ε times the records beyond a quantile above which only the noise on its rank counts, and nothing is fitted
_FLOOR = 1e-13  # losses (unit scale) below it are the lattice's rounding


@dataclass(frozen=True)
class Robust:
    """A mechanism with what is known of its losses on all datasets.

    Attributes:
        mechanism: the one that gains from the belief, or the plain one.
        plain: the mechanism without assumptions that it is held against (the best of them, under the belief).
        ratio: the largest loss ÷ the plain one's, over datasets.
        loss: the largest loss, unit scale; ``plain_loss``: that of the plain one.
        ratio_at: a dataset where that ratio is reached, in words; ``loss_at`` likewise.
        proved: the ratio is that of all datasets; else it is the worst that a search found.
    """

    mechanism: Mechanism
    plain: Mechanism
    ratio: float
    loss: float
    plain_loss: float
    ratio_at: str
    loss_at: str
    proved: bool

    def of_plain(self) -> Robust:
        """The same about the mechanism without assumptions: it loses nothing to itself."""
        everywhere = "every dataset: it is the mechanism that assumes nothing"
        return replace(self, mechanism=self.plain, ratio=1.0, ratio_at=everywhere, loss=self.plain_loss, proved=True)

    def report(self, robustness: float) -> dict[str, Any]:
        """As plain values, losses in the user's units."""
        return {
            "robustness": robustness,
            "worst_ratio": self.ratio,
            "worst_ratio_at": self.ratio_at,
            "worst_loss": self.loss * self.mechanism.problem.loss_scale,
            "worst_loss_at": self.loss_at,
            "worst_case": "of all datasets" if self.proved else "the worst that a search over datasets found",
            "plain": self.plain.title,
        }


def draws(belief: Distribution, problem: Problem, count: int, seed: int) -> Iterator[Tensor]:
    """``count`` unit datasets, a few at a time: so that n costs no memory."""
    rows = max(_NUMBERS // problem.n, 1)
    for place in range(0, count, rows):
        yield draw(belief, problem, min(rows, count - place), seed + place)


def affordable(count: int, n: int) -> int:
    """So many datasets of n records, fewer where n is large: their truths differ less, too."""
    return min(count, max(100, 5 * _NUMBERS // n))


def plain_mechanisms(problem: Problem) -> list[Mechanism]:
    """What a textbook offers that assumes nothing: noise on the query, or a choice by rank; answers limited to the possible."""
    if problem.query.kind == "quantile":
        return [IntervalMechanism.plain(problem)]
    return [_plain(problem, noise) for noise in _KINDS]


def robust_mechanism(problem: Problem, belief: Distribution, robustness: float, count: int, seed: int) -> Robust:
    """The best one under the belief whose loss is nowhere above 1 + τ times the plain one's."""
    if problem.query.kind == "quantile":
        if problem.epsilon * min(problem.rank(), problem.n - problem.rank()) >= _CLEAR:
            return _by_depth(problem)
        return _by_intervals(problem, belief, robustness, affordable(count, problem.n), seed)
    if problem.loss == "quantile":  # of a mean: its loss depends on all of the data, and nothing is shifted
        plain = _plain(problem, "laplace")
        everywhere, most = "every dataset: it is the mechanism that assumes nothing", float(problem.n)
        return Robust(plain, plain, 1.0, most, most, everywhere, "no more than all records lie in between", proved=True)
    drawn = draws(belief, problem, affordable(count, problem.n), seed)
    parts = [(problem.query(part), part.mean(1), beyond.counted(part)) for part in drawn]
    truths, means, counts = (torch.cat(part) for part in zip(*parts, strict=True))
    found = _on_the_query(problem, truths, robustness)
    if problem.query.kind == "variance":
        return _by_mean_and_variance(found, means, truths, robustness)
    return _by_records_beyond(found, means, counts, robustness)


# --- mean and variance: all datasets are all truths --------------------------------------------------------------------------


def _plain(problem: Problem, noise: NoiseKind, shift: Table | None = None) -> AdditiveMechanism:
    title = f"{noise} noise on the query" + (", limited to the range" if shift is None else ", answers shifted by a belief")
    return AdditiveMechanism(problem, title, QueryStatistic(problem.query, problem.n), noise, Plain(_most(problem), shift))


def _most(problem: Problem) -> float:
    """The largest that the query can be, for numbers of [0, 1]."""
    return 0.25 if problem.query.kind == "variance" else 1.0


def truth_losses(mechanism: AdditiveMechanism, truths: Tensor) -> Tensor:
    """E(D(q + Z) − q)² for each q: the loss of every dataset that has this truth."""
    size = mechanism.statistic.sensitivity * mechanism.statistic.unit
    uniform = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    z = draw_noise(mechanism.noise, uniform, size, mechanism.epsilon)
    released = (truths[:, None] + z).reshape(-1, 1)
    answers = mechanism.decoder(released).reshape(truths.shape[0], -1)
    return ((answers - truths[:, None]) ** 2).mean(1)


def _on_the_query(problem: Problem, belief: Tensor, robustness: float) -> Robust:
    plain = {noise: _plain(problem, noise) for noise in _KINDS}
    most = _most(problem)
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
                return _plain(problem, noise, Table(shift.axes, part * shift.values))

            candidates.append(_within(make, fine, least_fine, robustness))
    chosen = min(candidates, key=expected)
    losses = truth_losses(chosen, fine)
    ratios = losses / least_fine
    name = problem.query.name

    def where(place: int) -> str:
        value = float(problem.answer(fine[place]))
        return f"any dataset whose {name} is {value:.4g}"

    at, high = int(ratios.argmax()), int(losses.argmax())
    plain_loss = float(truth_losses(best, fine).max())
    return Robust(chosen, best, float(ratios[at]), float(losses[high]), plain_loss, where(at), where(high), proved=True)


def _by_mean_and_variance(found: Robust, means: Tensor, variances: Tensor, robustness: float) -> Robust:
    """The variance from noisy sums, or about a private centre: the best under the belief that keeps to 1 + τ on all datasets."""
    problem = found.mechanism.problem
    at_means, at_variances = centred.grid()
    plain = [_plain(problem, noise) for noise in _KINDS]
    least, believed = (torch.stack([truth_losses(one, v) for one in plain]).amin(0) for v in (at_variances, variances))

    def score(losses: Tensor) -> float:
        return float(losses.mean() / believed.mean() + (losses / believed).mean())

    assert isinstance(found.mechanism, AdditiveMechanism)
    best: squares.SquaresMechanism | centred.CentredMechanism | None = None
    score_of_best, made = score(truth_losses(found.mechanism, variances)), least
    candidates: list[squares.SquaresMechanism | centred.CentredMechanism]
    candidates = [*squares.candidates(problem), *centred.candidates(problem)]
    for one in candidates:
        losses, own = one.losses_of(at_means, at_variances), score(one.losses_of(means, variances))
        if own < score_of_best and float((losses / least).max()) <= 1 + _MARGIN * robustness:
            best, score_of_best, made = one, own, losses
    if best is None:
        return found

    def where(place: int) -> str:
        mean, variance = problem.low + problem.width * float(at_means[place]), problem.scale * float(at_variances[place])
        return f"any dataset whose mean is {mean:.4g} and variance {variance:.4g}"

    ratios = made / least
    at, high = int(ratios.argmax()), int(made.argmax())
    return replace(
        found, mechanism=best, ratio=float(ratios[at]), loss=float(made[high]), ratio_at=where(at), loss_at=where(high), proved=True
    )


def _by_records_beyond(found: Robust, means: Tensor, counts: Tensor, robustness: float) -> Robust:
    """The mean by how many records lie beyond a cut, if it keeps to 1 + τ on all datasets and is better under the belief."""
    problem = found.mechanism.problem
    made = beyond.candidate(problem, means, counts, _MARGIN * robustness)
    if made is None:
        return found
    plain = [_plain(problem, noise) for noise in _KINDS]
    totals, seen = beyond.grid(made)
    losses = made.losses_of(totals, seen)
    ratios = losses / torch.stack([truth_losses(one, totals / problem.n) for one in plain]).amin(0)
    believed = torch.stack([truth_losses(one, means) for one in plain]).amin(0)
    own = made.losses_of(problem.n * (means if made.high else 1 - means), counts[:, beyond.WAYS.index((made.cut, made.high))])

    def score(losses: Tensor) -> float:
        return float(losses.mean() / believed.mean() + (losses / believed).mean())

    assert isinstance(found.mechanism, AdditiveMechanism)
    if float(ratios.max()) > 1 + robustness or score(own) >= score(truth_losses(found.mechanism, means)):
        return found

    def where(place: int) -> str:
        unit, edge = float(totals[place]) / problem.n, made.cut / beyond.CELLS
        mean, cut = (problem.low + problem.width * (part if made.high else 1 - part) for part in (unit, edge))
        more = " or more" if int(seen[place]) == made.table.shape[0] - 1 else ""
        side = "above" if made.high else "below"
        return f"any dataset whose mean is {mean:.4g}, with {int(seen[place])}{more} records {side} {cut:.4g}"

    at, high = int(ratios.argmax()), int(losses.argmax())
    worst = {"ratio": float(ratios[at]), "loss": float(losses[high]), "ratio_at": where(at), "loss_at": where(high)}
    return replace(found, mechanism=made, proved=True, **worst)  # type: ignore[arg-type]


def _within(make: Callable[[float], AdditiveMechanism], truths: Tensor, least: Tensor, robustness: float) -> AdditiveMechanism:
    """The largest part of a shift that keeps every ratio at 1 + τ: the loss is convex in it, and nothing is shifted at 0."""

    def fits(part: float) -> bool:
        return float((truth_losses(make(part), truths) / least).max()) <= 1 + _MARGIN * robustness

    if fits(1.0):
        return make(1.0)
    low, high = 0.0, 1.0
    for _ in range(6):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return make(low)


def _shift(plain: AdditiveMechanism, truths: Tensor, chances: Tensor, least: Tensor, robustness: float) -> Table:
    """By how much to move the plain answer, for each released value: Bayes under belief and adversary.

    With p_jo = P(o | q_j) and base answers b_o, a shift s costs L_j = Σ_o p_jo (b_o + s_o − q_j)². For weights ω_j the best shift
    is s_o = Σ_j ω_j p_jo (q_j − b_o) ÷ Σ_j ω_j p_jo; ω_j = chance_j ÷ mean loss + λ_j ÷ least_j, and λ follows the ratios.
    """
    size = plain.statistic.sensitivity * plain.statistic.unit
    most = float(truths[-1])
    reach = _REACH * size / plain.epsilon
    axis = torch.linspace(-reach, most + reach, _AXIS, dtype=torch.float64)
    p = density(plain.noise, axis - truths[:, None], size, plain.epsilon)
    p = p / p.sum(1, keepdim=True)
    away = axis.clamp(0, most) - truths[:, None]
    scale = (chances * least).sum()
    adversary = torch.full_like(truths, 1e-3 / truths.shape[0])
    target = 1 + _MARGIN * robustness
    shift = torch.zeros_like(axis)
    for step in range(400):
        weights = 0.5 * chances / scale + 0.5 * chances / least + adversary / least
        shift = -(weights[:, None] * p * away).sum(0) / (weights @ p).clamp(min=1e-300)
        ratios = (p * (away + shift) ** 2).sum(1) / least
        adversary = (adversary * torch.exp((4.0 / (1 + step / 40)) * (ratios / target - 1).clamp(max=1.0))).clamp(1e-12, 1e6)
    return Table((axis,), shift)


def _smoothed(values: Tensor, grid: Tensor) -> Tensor:
    """The chance of each point of an even grid, from a sample: Gaussian kernels of 2% of the range, folded in at its ends."""
    width = 0.02 * float(grid[-1])
    mirrored = torch.cat([values, -values, 2 * grid[-1] - values])
    made = torch.exp(-0.5 * ((grid[:, None] - mirrored) / width) ** 2).sum(1)
    return made / made.sum()


# --- quantiles: a base measure and shifts, against a pool and an attack ---------------------------------------------------------


def _by_intervals(problem: Problem, belief: Distribution, robustness: float, count: int, seed: int) -> Robust:
    """A base measure with shifts and ends is fitted, and attacked; as much of it as holds, with the ends that suit best."""
    plain = IntervalMechanism.plain(problem)
    pool = _Pool(plain, belief, count, seed)
    for _ in range(3):
        fit = _fitted(plain, pool, robustness)
        pool.attack(fit)
    for _ in range(3):  # what is left of it is attacked again
        pool.attack(_held(fit, pool, robustness))
    best = _held(fit, pool, robustness)
    if pool.score(best) >= pool.score(IntervalMechanism.deep(problem)):
        return _by_depth(problem)
    (loss, loss_at), (ratio, ratio_at) = pool.largest(best), pool.worst(best)
    return Robust(best, plain, ratio, loss, pool.largest(plain)[0], ratio_at, loss_at, proved=_is_even(best, robustness))


def _by_depth(problem: Problem) -> Robust:
    """Without a belief: nowhere worse than the textbook's, with its largest loss on columns of zeros and ones around the rank."""
    plain, rank = IntervalMechanism.deep(problem), math.floor(problem.rank())
    first = [rank + k for k in range(-3, 4) if 0 < rank + k < problem.n]
    corners = [(f"{k} of {problem.n} records at {problem.low:.4g}, the others at {problem.high:.4g}", k, 0.0, 1.0) for k in first]
    losses = torch.cat([plain.losses(part) for part in _in_two(corners, problem.n)])
    high = int(losses.argmax())
    everywhere, most = "every dataset: no wrong number is likelier than with the plain mechanism", float(losses[high])
    return Robust(plain, IntervalMechanism.plain(problem), 1.0, most, most, everywhere, corners[high][0], proved=True)


def _is_even(mechanism: IntervalMechanism, robustness: float) -> bool:
    """Whether each wrong number's chance is at most 1 + τ times the plain one's: no shift, no ends, and tilts within 1 + τ.

    Further copies of all numbers are even, and make none but the quantile likelier.
    """
    spread = int(mechanism.tilt.max()) <= (1 + robustness) * int(mechanism.tilt.min())
    return spread and not bool(mechanism.shift.any()) and not any(mechanism.ends)


def _far_ends(problem: Problem) -> tuple[bool, bool]:
    """Which ends may have copies of their own: not the one that a quantile is nearer to by rank.

    Beyond the data on that side, δ wide, little else weighs as much as their even measure does: it costs δ³/3, and copies M of the
    end δ²·M. Data close to the end, with δ small, would lose any number of times more.
    """
    return problem.query.p >= Fraction(1, 2), problem.query.p <= Fraction(1, 2)


def _held(fit: IntervalMechanism, pool: _Pool, robustness: float) -> IntervalMechanism:
    """The best part of a fit, with its own ends or others, that keeps to 1 + τ on the pool; the plain one at the last."""
    problem, scale = fit.problem, float(fit.tilt.max())
    logs, own, atoms = (fit.tilt.to(torch.float64) / scale).log(), [end / scale for end in fit.ends], fit.atoms / scale
    others = list(itertools.product(*(_ENDS if far else _NEAR for far in _far_ends(problem))))
    tried = [
        IntervalMechanism.tilted(problem, (part * logs).exp(), part * fit.shift, ends=ends, atoms=atoms)
        for part in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
        for ends in ([part * end for end in own], *others)
    ]
    tried += [IntervalMechanism.tilted(problem, (part * logs).exp(), 0 * fit.shift, atoms=atoms) for part in (1.0, 0.6, 0.3)]
    tried += [replace(IntervalMechanism.deep(problem), ends=(round(low * 2**30), round(high * 2**30))) for low, high in others]
    # The first of the last ones has no ends: it keeps to the bound on every dataset.
    return next(one for one in sorted(tried, key=pool.score) if pool.worst(one)[0] <= 1 + _MARGIN * robustness)


def _fitted(base: IntervalMechanism, pool: _Pool, robustness: float) -> IntervalMechanism:
    """Least loss under the belief, half of it relative to the plain one's dataset by dataset, with ratios on the pool held down."""
    squared = base.problem.loss == "squared"
    believed, own = pool.believed.profile, pool.believed.plain
    hostile, least = pool.hostile.profile, pool.hostile.plain
    scale = float(own.quantile(0.1).sqrt())
    logs = torch.zeros(PARTS, dtype=torch.float64, requires_grad=True)
    moves = torch.zeros(PARTS, dtype=torch.float64, requires_grad=True)
    more = torch.tensor([_START, _START, _ATOMS], dtype=torch.float64).log().requires_grad_()
    nothing, allowed = torch.zeros(3, dtype=torch.float64), torch.tensor([*_far_ends(base.problem), 1.0], dtype=torch.float64)
    optimiser = torch.optim.Adam([logs, moves, more], lr=0.03)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.03, total_steps=_STEPS, pct_start=0.1)
    for _ in range(_STEPS):
        tilt = torch.cat([logs.exp(), allowed * more.exp()])
        shift = torch.cat([scale * moves, nothing]) if squared else None
        losses = believed.losses(tilt, shift)
        against = hostile.losses(tilt, shift)
        over = torch.relu(against / least - (1 + 0.9 * robustness))
        behind = torch.relu(against / pool.hostile.best - (1 + robustness))  # not always to be had: a wish, no bound
        optimiser.zero_grad()
        gain = losses.mean() / own.mean() + (losses / pool.believed.best).mean() + _WISH * behind.mean()
        objective = gain + 30 * over.mean() + over.max()
        objective.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    shifts = (scale * moves).detach() if squared else torch.zeros(PARTS, dtype=torch.float64)
    low, high, atoms = (allowed * more.detach().exp()).tolist()
    return IntervalMechanism.tilted(base.problem, logs.detach().exp(), shifts, ends=(low, high), atoms=atoms)


class _Seen:
    """Datasets as the mechanism sees them, what the plain one loses on them, and the better one of it and of noise on the query,
    limited to the range: which is good where the answer is an end.
    """

    def __init__(self, plain: IntervalMechanism, parts: Iterable[Tensor]) -> None:
        seen, truths = [], []
        for part in parts:
            seen.append(plain.profile(part))
            truths.append(plain.problem.query(part))
        self.profile = _joined(seen)
        self.noisy = torch.full((sum(map(len, truths)),), math.inf, dtype=torch.float64)
        if plain.problem.loss == "squared":
            additive = [_plain(plain.problem, noise) for noise in _KINDS]
            self.noisy = torch.stack([truth_losses(each, torch.cat(truths)) for each in additive]).amin(0)
        self._measure()

    def _measure(self) -> None:
        even = torch.cat([torch.ones(PARTS, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)])
        self.plain = self.profile.losses(even).clamp(min=_FLOOR)
        self.best = torch.minimum(self.plain, self.noisy)

    def add(self, other: _Seen) -> None:
        """More of them."""
        self.profile = self.profile.join(other.profile)
        self.noisy = torch.cat([self.noisy, other.noisy])
        self._measure()

    def of(self, mechanism: IntervalMechanism) -> Tensor:
        """A mechanism's losses."""
        return self.profile.losses(mechanism.tilts, mechanism.shifts)


def _joined(profiles: list[Profile]) -> Profile:
    made = profiles[0]
    for profile in profiles[1:]:
        made = made.join(profile)
    return made


_Corner = tuple[str, int, float, float]


def _corners(problem: Problem) -> list[_Corner]:
    """Datasets of one value or two on which a choice by ranks hardly errs, as (words, records at the first, the two values).

    A column of one value, in every part of the range: any shift errs there. And an end of the range that holds some records fewer
    than it would need to be the quantile, all others close beside it: there, answers that are drawn to the end err.
    """
    n, rank = problem.n, problem.rank()
    places = ((torch.arange(2 * PARTS) + 0.5) / (2 * PARTS)).mul(1e4).round().div(1e4).tolist()
    made = [(f"all records at {problem.low + problem.width * place:.4g}", n, place, place) for place in places]
    for short in sorted({1, 2, 5, *(math.ceil(part / problem.epsilon) for part in (4, 12, 30))}):
        for beside in (1e-5, 1e-4, 1e-3, 0.01, 0.1):
            for end, held in ((0.0, math.floor(rank)), (1.0, n - math.ceil(rank))):
                if held > short:
                    other, value = abs(end - beside), problem.low + problem.width * end
                    words = f"{held - short} of {n} records at {value:.4g}, the others {problem.width * beside:.2g} beside it"
                    made.append((words, held - short if end == 0 else n - held + short, min(end, other), max(end, other)))
    return made


def _in_two(corners: list[_Corner], n: int) -> Iterator[Tensor]:
    """The sorted datasets, a few at a time."""
    rows = max(_NUMBERS // n, 1)
    for start in range(0, len(corners), rows):
        own = corners[start : start + rows]
        first, low, high = (torch.tensor([one[place] for one in own], dtype=torch.float64)[:, None] for place in (1, 2, 3))
        yield torch.where(torch.arange(n) < first, low, high)


class _Pool:
    """Datasets of the belief, and hostile ones: a world of columns, corner cases, and a search for the worst.

    The search is over two lumps (places, widths, a share, a grid), varied round by round from the worst ones so far.
    """

    def __init__(self, plain: IntervalMechanism, belief: Distribution, count: int, seed: int) -> None:
        self.plain, self.generator = plain, torch.Generator().manual_seed(seed)
        problem = plain.problem
        self.believed = _Seen(plain, draws(belief, problem, count, seed))
        world = draws(World(problem.low, problem.high), problem, count, seed + 1)
        corners = _corners(problem)
        self.corners = [words for words, _, _, _ in corners]
        self.hostile = _Seen(plain, itertools.chain(world, _in_two(corners, problem.n)))
        self.edges = _Seen(plain, [torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, problem.n).contiguous()])
        self.drawn = self.hostile.plain.shape[0]  # the others have parameters
        self.parameters = torch.zeros(0, 6, dtype=torch.float64)
        self._try(self._random(min(256, count)))

    def _random(self, count: int) -> Tensor:
        made = torch.rand(count, 6, dtype=torch.float64, generator=self.generator)
        made[:, 2:4] = 5 * made[:, 2:4] - 5
        kind = torch.rand(count, 2, dtype=torch.float64, generator=self.generator)
        near = 10 ** (4 * made[:, :2] - 4)  # close to an end, on every scale
        made[:, :2] = torch.where(kind < 0.2, made[:, :2].round(), torch.where(kind < 0.4, near, made[:, :2]))
        made[:, :2] = torch.where((kind > 0.3) & (kind < 0.5), 1 - made[:, :2], made[:, :2])
        return made

    def _try(self, parameters: Tensor) -> None:
        n = self.plain.problem.n
        rows = max(min(len(parameters), _NUMBERS // n), 1)
        seen = _Seen(self.plain, (lumps(part, n) for part in torch.split(parameters, rows)))
        self.hostile.add(seen)
        self.parameters = torch.cat([self.parameters, parameters])

    def score(self, mechanism: IntervalMechanism) -> float:
        """Under the belief, in all and dataset by dataset; and what is lost to noise on the query if all records are at an end."""
        losses, behind = self.believed.of(mechanism), self.edges.of(mechanism) / self.edges.best
        own = float(losses.mean() / self.believed.plain.mean() + (losses / self.believed.best).mean())
        return own + _BEHIND * float(behind.clamp(min=1).sum())

    def attack(self, mechanism: IntervalMechanism, rounds: int = 3) -> None:
        """Add datasets near those on which it does worst."""
        for number in range(rounds):
            ratios = self._ratios(mechanism)[self.drawn :]
            worst = self.parameters[ratios.topk(min(16, len(ratios))).indices].repeat(4, 1)
            spread = torch.tensor([0.1, 0.1, 0.5, 0.5, 0.1, 0.1], dtype=torch.float64) / 3**number
            near = worst + spread * torch.randn(worst.shape, dtype=torch.float64, generator=self.generator)
            near[:, [0, 1, 4, 5]] = near[:, [0, 1, 4, 5]].clamp(0, 1)
            near[:, 2:4] = near[:, 2:4].clamp(-5, 0)
            self._try(near)

    def _ratios(self, mechanism: IntervalMechanism) -> Tensor:
        return self.hostile.of(mechanism) / self.hostile.plain

    def worst(self, mechanism: IntervalMechanism) -> tuple[float, str]:
        """The largest ratio to the plain mechanism, and where."""
        ratios = self._ratios(mechanism)
        return float(ratios.max()), self._words(int(ratios.argmax()))

    def largest(self, mechanism: IntervalMechanism) -> tuple[float, str]:
        """The largest loss, and where."""
        losses = self.hostile.of(mechanism)
        return float(losses.max()), self._words(int(losses.argmax()))

    def _words(self, at: int) -> str:
        problem = self.plain.problem
        if at < self.drawn - len(self.corners):
            return f"dataset {at} of the hostile columns"
        if at < self.drawn:
            return self.corners[at - self.drawn]
        a, b, width, other, share, _ = self.parameters[at - self.drawn].tolist()
        low, high = (problem.low + problem.width * place for place in (a, b))
        wide = [problem.width * 10**value for value in (width, other)]
        lump = f"{share:.0%} of the records within {wide[0] / 2:.2g} of {low:.4g}"
        return f"{lump}, the others within {wide[1] / 2:.2g} of {high:.4g}"
