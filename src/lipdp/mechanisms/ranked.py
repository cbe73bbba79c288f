"""Quantiles that gain from a belief, and on no dataset lose more than 1 + τ times what the plain mechanism loses.

The plain mechanism is :meth:`~lipdp.mechanisms.intervals.IntervalMechanism.plain`. A belief chooses base measures, copies
with reach and ends, and shifts answers; of what it would like, as much is taken as is *proved* to keep to 1 + τ on all
datasets, in one of three ways: the bound of :mod:`lipdp.mechanisms.worst`, where the numbers far from the quantile are likely
enough to be counted; a base measure that is within 1 + τ of an even one, with which each wrong number's chance, and so each
loss of any kind, is at most 1 + τ times the plain one's; and depth alone, with which no number but the quantile is likelier.
Hostile datasets are only what a fit learns from: cells of datasets that the bound did not hold for are turned into columns,
and the next fit has these, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import replace
from fractions import Fraction

import torch
from torch import Tensor

from lipdp.mechanisms.distributions import Distribution, World
from lipdp.mechanisms.intervals import PARTS, IntervalMechanism, Profile
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.worst import (
    KINDS,
    MARGIN,
    NUMBERS,
    Copies,
    Hostile,
    Robust,
    draws,
    exceeded,
    noisy_query,
    some_exceeded,
    truth_losses,
    within_reach_of_a_proof,
)

_STEPS = 150  # of fitting a base measure and shifts
_WISH, _BEHIND = 15.0, 0.3  # how much it counts to be near to noise on the query where that is better: in a fit, in a choice
_START, _ATOMS, _NEAR = 0.02, 0.1, 0.05  # of the measure on each end, on all numbers by depth, and for each reach, to begin with
_REACHES = (0.35, 0.1)  # times the width that numbers far from the quantile are as likely as: see _reaching
_ROUNDS = 2  # fits, each against what was not proved for those before it
_PARTS_KEPT = (1.0, 0.8, 0.6, 0.4, 0.25, 0.1)  # of a fit: the first that is proved
_PLACES, _AROUND = 24, 24  # cells that were not proved, and columns for each of them
_FLOOR = 1e-13  # losses (unit scale) below it are the lattice's rounding


def by_intervals(problem: Problem, belief: Distribution, robustness: float, count: int, seed: int) -> Robust:
    """The best of some fits under the belief, as far as it is proved; or the mechanism by depth alone."""
    plain, target = IntervalMechanism.plain(problem), 1 + MARGIN * robustness
    provable = problem.loss == "squared" and within_reach_of_a_proof(problem.epsilon, float(problem.rank()), problem.n)
    pool = _Pool(_reaching(plain) if provable else plain, belief, count, seed)
    held = []
    for _ in range(_ROUNDS if provable else 1):
        fit = _fitted(pool, robustness, provable)
        if not provable:
            held.append(_within(fit, target))
            break
        held.append(_proved(fit, target))
        refuted = some_exceeded(copies_of(fit), target)
        if refuted is None:
            break
        pool.add(refuted)
    best = min(held, key=pool.score)
    if pool.score(best) >= pool.score(IntervalMechanism.deep(problem)):
        return by_depth(problem)
    ratio = target if provable else float(best.tilt.max()) / float(best.tilt.min())
    (loss, loss_at), (reached, where) = pool.largest(best), pool.worst(best)
    words = f"a bound for all datasets; {reached:.4g} is reached by {where}"
    return Robust(best, plain, ratio, loss, pool.largest(plain)[0], words, loss_at)


def by_depth(problem: Problem) -> Robust:
    """Without a belief: nowhere worse than the textbook's, with its largest loss on columns of zeros and ones around the rank."""
    plain, rank = IntervalMechanism.deep(problem), math.floor(problem.rank())
    first = [rank + k for k in range(-3, 4) if 0 < rank + k < problem.n]
    corners = [(f"{k} of {problem.n} records at {problem.low:.4g}, the others at {problem.high:.4g}", k, 0.0, 1.0) for k in first]
    losses = torch.cat([plain.losses(part) for part in _in_two(corners, problem.n)])
    high = int(losses.argmax())
    everywhere, most = "every dataset: no wrong number is likelier than with the plain mechanism", float(losses[high])
    return Robust(plain, IntervalMechanism.plain(problem), 1.0, most, most, everywhere, corners[high][0])


def copies_of(mechanism: IntervalMechanism) -> Copies:
    """What :mod:`lipdp.mechanisms.worst` needs to know of a mechanism."""
    problem, own = mechanism.problem, mechanism.lattice
    scale, step = 2.0**30, float(own.step) / problem.width
    near = [part.to(torch.float64) / scale for part in mechanism.near]
    reaches = tuple((reach * step, part) for reach, part in zip(mechanism.reaches, near, strict=True))
    ends = (mechanism.ends[0] / scale, mechanism.ends[1] / scale)
    tilt, rank = mechanism.tilt.to(torch.float64) / scale, float(problem.rank())
    return Copies(tilt, mechanism.shift, mechanism.atoms / scale, ends, reaches, problem.epsilon, rank, problem.n)


def _reaching(plain: IntervalMechanism) -> IntervalMechanism:
    """The same with reaches that may pay, and no copies for them yet.

    Numbers far from the quantile are likely by φ = exp(−(ε/2)·min(np, n − np)) each, so they cost some φ in all. Copies with
    reach h cost h² instead; where the records lie within φ of each other they are as likely as all others, and so h³ may be
    some φ.
    """
    problem, own = plain.problem, plain.lattice
    floor = math.exp(-problem.epsilon / 2 * min(problem.rank(), problem.n - problem.rank()))
    reaches = tuple(max(round(part * floor ** (1 / 3) * (own.last - own.first)), 1) for part in _REACHES)
    return replace(plain, reaches=reaches, near=tuple(torch.zeros(PARTS, dtype=torch.int64) for _ in reaches))


def _room(problem: Problem, reach: float) -> Tensor:
    """What numbers far from the quantile cost for quantiles within reach of each part, (PARTS,): 1 where they cost most.

    Below q it is exp(−(ε/2)·np)·q³, above exp(−(ε/2)·(n − np))·(1 − q)³: next to nothing where q is near an end and many records
    lie on its other side, and there copies with reach, or a shift, would cost any number of times more.
    """
    epsilon, rank = problem.epsilon, float(problem.rank())
    low = (torch.arange(PARTS, dtype=torch.float64) / PARTS - reach).clamp(0, 1)
    high = ((torch.arange(PARTS, dtype=torch.float64) + 1) / PARTS + reach).clamp(0, 1)
    q = low[:, None] + (high - low)[:, None] * torch.linspace(0, 1, 21, dtype=torch.float64)
    ends = math.exp(-epsilon / 2 * rank), math.exp(-epsilon / 2 * (problem.n - rank))
    return (ends[0] * q**3 + ends[1] * (1 - q) ** 3).amin(1) / max(ends)


def _within(fit: IntervalMechanism, target: float) -> IntervalMechanism:
    """A base measure alone, all of it within ``target`` of itself."""
    logs = fit.tilt.to(torch.float64).log()
    part = min(1.0, math.log(target) / max(float(logs.max() - logs.min()), 1e-9))
    tilt = (part * (logs - logs.max())).exp()
    return IntervalMechanism.tilted(fit.problem, tilt, 0 * fit.shift, atoms=fit.atoms / float(fit.tilt.max()))


def _proved(fit: IntervalMechanism, target: float) -> IntervalMechanism:
    """As much of a fit as is proved to lose at most ``target`` times what the plain mechanism loses; depth alone at the last."""
    for part in _PARTS_KEPT:
        made = _part_of(fit, part)
        if exceeded(copies_of(made), target) is None:
            return made
    return IntervalMechanism.deep(fit.problem)


def _part_of(fit: IntervalMechanism, part: float) -> IntervalMechanism:
    """A fit with less of everything that depends on where an answer is."""
    scale = float(fit.tilt.max())
    tilt, near = (fit.tilt.to(torch.float64) / scale) ** part, [part * each.to(torch.float64) / scale for each in fit.near]
    low, high = (part * end / scale for end in fit.ends)
    return IntervalMechanism.tilted(
        fit.problem, tilt, part * fit.shift, ends=(low, high), atoms=fit.atoms / scale, reaches=fit.reaches, near=near
    )


def _far_ends(problem: Problem) -> tuple[bool, bool]:
    """Which ends may have copies of their own: not the one that a quantile is nearer to by rank.

    Beyond the data on that side, δ wide, little else weighs as much as their even measure does: it costs δ³/3, and copies M of the
    end δ²·M. Data close to the end, with δ small, would lose any number of times more.
    """
    return problem.query.p >= Fraction(1, 2), problem.query.p <= Fraction(1, 2)


def _fitted(pool: _Pool, robustness: float, everything: bool) -> IntervalMechanism:
    """Least loss under the belief, half of it relative to the plain one's dataset by dataset, with ratios on the pool held down.

    Without ``everything``: only a base measure and copies by depth.
    """
    base, problem = pool.plain, pool.plain.problem
    believed, own = pool.believed.profile, pool.believed.plain
    hostile, least = pool.hostile.profile, pool.hostile.plain
    scale, layers = float(own.quantile(0.1).sqrt()), len(base.reaches)
    logs = torch.zeros(PARTS, dtype=torch.float64, requires_grad=True)
    moves = torch.zeros(PARTS, dtype=torch.float64, requires_grad=True)
    more = torch.tensor([_START, _START, _ATOMS], dtype=torch.float64).log().requires_grad_()
    near = torch.full((layers, PARTS), math.log(_NEAR), dtype=torch.float64, requires_grad=True)
    size = float(base.lattice.step) / problem.width
    room = [_room(problem, reach * size) for reach in base.reaches]
    room_of_near, room_of_shifts = (torch.stack(room) if room else near.detach()), _room(problem, 0.0) ** (1 / 3)
    ends = _far_ends(problem) if everything else (False, False)
    nothing, allowed = torch.zeros(3 + layers * PARTS, dtype=torch.float64), torch.tensor([*ends, 1.0], dtype=torch.float64)
    optimiser = torch.optim.Adam([logs, moves, more, near], lr=0.03)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.06, total_steps=_STEPS, pct_start=0.1)
    for _ in range(_STEPS):
        tilt = torch.cat([logs.exp(), allowed * more.exp(), (room_of_near * near.exp()).reshape(-1)])
        shift = torch.cat([scale * room_of_shifts * moves, nothing]) if everything else None
        losses = believed.losses(tilt, shift)
        against = hostile.losses(tilt, shift)
        over = torch.relu(against / least - (1 + 0.75 * robustness))
        behind = torch.relu(against / pool.hostile.best - (1 + robustness))  # not always to be had: a wish, no bound
        optimiser.zero_grad()
        gain = losses.mean() / own.mean() + (losses / pool.believed.best).mean() + _WISH * behind.mean()
        objective = gain + 30 * over.mean() + over.max()
        objective.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    shifts = (scale * room_of_shifts * moves).detach() if everything else torch.zeros(PARTS, dtype=torch.float64)
    low, high, atoms = (allowed * more.detach().exp()).tolist()
    tilts, within = logs.detach().exp(), list(room_of_near * near.detach().exp())
    return IntervalMechanism.tilted(problem, tilts, shifts, ends=(low, high), atoms=atoms, reaches=base.reaches, near=within)


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
            additive = [noisy_query(plain.problem, noise) for noise in KINDS]
            self.noisy = torch.stack([truth_losses(each, torch.cat(truths)) for each in additive]).amin(0)
        self._measure()

    def _measure(self) -> None:
        even = (torch.arange(self.profile.mass.shape[1]) < PARTS).to(torch.float64)
        self.plain = self.profile.losses(even).clamp(min=_FLOOR)
        self.best = torch.minimum(self.plain, self.noisy)

    def add(self, other: _Seen) -> None:
        """More of them."""
        self.profile = self.profile.join(other.profile)
        self.noisy = torch.cat([self.noisy, other.noisy])
        self._measure()

    def only(self, kept: Tensor) -> _Seen:
        """Those of them."""
        made = copy(self)
        made.profile = Profile(self.profile.mass[kept], self.profile.error[kept], self.profile.cost[kept])
        made.noisy = self.noisy[kept]
        made._measure()
        return made

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
    rows = max(NUMBERS // n, 1)
    for start in range(0, len(corners), rows):
        own = corners[start : start + rows]
        first, low, high = (torch.tensor([one[place] for one in own], dtype=torch.float64)[:, None] for place in (1, 2, 3))
        yield torch.where(torch.arange(n) < first, low, high)


class _Pool:
    """Datasets of the belief, and hostile ones: a world of columns, corner cases, and columns about a quantile.

    These are what the proof's bound is made of: records close beside a quantile, and some of them further away, on either side.
    """

    def __init__(self, plain: IntervalMechanism, belief: Distribution, count: int, seed: int) -> None:
        self.plain, self.generator = plain, torch.Generator().manual_seed(seed)
        problem = plain.problem
        self.believed = _Seen(plain, draws(belief, problem, count, seed))
        world = draws(World(problem.low, problem.high), problem, count, seed + 1)
        corners = _corners(problem)
        self.words = [f"dataset {number} of the hostile columns" for number in range(count)] + [words for words, _, _, _ in corners]
        self.hostile = _Seen(plain, itertools.chain(world, _in_two(corners, problem.n)))
        self.edges = _Seen(plain, [torch.tensor([[0.0], [1.0]], dtype=torch.float64).expand(2, problem.n).contiguous()])
        q, far = self._random(2, min(count, 400))
        q = torch.where(far < 0.25, 10 ** (5 * q - 5), torch.where(far > 0.75, 1 - 10 ** (5 * q - 5), q))
        self._about(q, 10 ** (5 * self._random(1, len(q))[0] - 5))

    def _random(self, kinds: int, count: int) -> Tensor:
        return torch.rand(kinds, count, dtype=torch.float64, generator=self.generator)

    def add(self, refuted: Hostile) -> None:
        """Columns about the cells that a bound did not hold for, those furthest above it first."""
        worst = refuted.above.topk(min(_PLACES, len(refuted.above))).indices.repeat(_AROUND)
        q, width = refuted.q[worst], refuted.loss[worst].sqrt() * 10 ** (2 * self._random(1, len(worst))[0] - 1.5)
        self._about(q, width)

    def _about(self, q: Tensor, width: Tensor) -> None:
        """Columns whose records are ``width`` beside q, but for some that are anywhere further away."""
        problem, count = self.plain.problem, len(q)
        below = math.floor(problem.rank())
        above = problem.n - below
        most = 8 / problem.epsilon
        shares = self._random(6, count)
        a, b = (q - width).clamp(0, 1), (q + width).clamp(0, 1)
        left = a * torch.where(shares[0] < 0.3, 0.0, shares[1])
        right = b + (1 - b) * torch.where(shares[2] < 0.3, 1.0, shares[3])
        some = [(share * min(side, most)).floor() * (share > 0.3) for share, side in ((shares[4], below), (shares[5], above))]
        few = [torch.where(part < side, side - kept, kept) for part, side, kept in zip(shares[:2], (0.2, 0.2), some, strict=True)]
        place = torch.arange(problem.n, dtype=torch.float64)
        columns = torch.where(place < below, a[:, None], b[:, None])
        columns = torch.where(place < few[0][:, None].clamp(max=below), left[:, None], columns)
        columns = torch.where(place >= problem.n - few[1][:, None].clamp(max=above), right[:, None], columns)
        self.hostile.add(_Seen(self.plain, torch.split(columns, max(NUMBERS // problem.n, 1))))
        for row in torch.stack([few[0], a, b, few[1]], 1).tolist():
            low, high = (problem.low + problem.width * value for value in row[1:3])
            self.words.append(f"records at {low:.4g} and {high:.4g}, but {row[0]:.0f} further down and {row[3]:.0f} further up")

    def scores(self, tilts: Tensor, shifts: Tensor) -> Tensor:
        """Under the belief, in all and dataset by dataset; and what is lost to noise on the query if all records are at an end.

        Of mechanisms by rows of their tilts and shifts.
        """
        losses = self.believed.profile.losses_of_many(tilts, shifts)
        behind = self.edges.profile.losses_of_many(tilts, shifts) / self.edges.best[:, None]
        own = losses.mean(0) / self.believed.plain.mean() + (losses / self.believed.best[:, None]).mean(0)
        return own + _BEHIND * behind.clamp(min=1).sum(0)

    def _losses(self, mechanism: IntervalMechanism) -> Tensor:
        tilts, shifts = self._padded(mechanism)
        return self.hostile.profile.losses(tilts, shifts)

    def _padded(self, mechanism: IntervalMechanism) -> tuple[Tensor, Tensor]:
        """Its tilts and shifts, with no copies for reaches that it has not."""
        size = self.hostile.profile.mass.shape[1]
        tilts, shifts = torch.zeros(2, size, dtype=torch.float64)
        tilts[: len(mechanism.tilts)] = mechanism.tilts
        if mechanism.shifts is not None:
            shifts[: len(mechanism.shifts)] = mechanism.shifts
        return tilts, shifts

    def score(self, mechanism: IntervalMechanism) -> float:
        """Of one."""
        tilts, shifts = self._padded(mechanism)
        return float(self.scores(tilts[None], shifts[None]))

    def worst(self, mechanism: IntervalMechanism) -> tuple[float, str]:
        """The largest ratio to the plain mechanism, and where."""
        ratios = self._losses(mechanism) / self.hostile.plain
        return float(ratios.max()), self.words[int(ratios.argmax())]

    def largest(self, mechanism: IntervalMechanism) -> tuple[float, str]:
        """The largest loss, and where."""
        losses = self._losses(mechanism)
        return float(losses.max()), self.words[int(losses.argmax())]
