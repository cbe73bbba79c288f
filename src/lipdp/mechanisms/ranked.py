"""Quantiles that gain from a belief, against a pool of hostile datasets and an attack.

The plain mechanism is :meth:`~lipdp.mechanisms.intervals.IntervalMechanism.plain`; the belief chooses base measures and shifts
answers. Here a dataset is n numbers: the ratio is held below 1 + τ on a pool of hostile columns and on what a search for the worst
dataset finds. That is an attack, no proof, except where there is no shift and the base measure is within 1 + τ of itself: then each
wrong number's chance, and so each loss, is at most 1 + τ times the plain one's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from copy import copy
from fractions import Fraction

import torch
from torch import Tensor

from lipdp.mechanisms.distributions import Distribution, World, lumps
from lipdp.mechanisms.intervals import PARTS, IntervalMechanism, Profile
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.robust import KINDS, MARGIN, NUMBERS, Robust, draws, noisy_query, truth_losses

__all__ = ["by_depth", "by_intervals"]

_STEPS = 250  # of fitting a base measure and shifts
_WISH, _BEHIND = 15.0, 0.3  # how much it counts to be near to noise on the query where that is better: in a fit, in a choice
_START, _ATOMS = 0.02, 0.1  # of the measure lie on each end of the range, and on all numbers by depth, to begin with
_ENDS = (0.0, 0.001, 0.003, 0.006, 0.01, 0.02, 0.035, 0.05, 0.07, 0.1)  # … and what else is tried, at the far end
_NEAR = (0.0, 1e-6, 1e-5, 1e-4, 1e-3)  # … and at the end that the quantile is nearer to
_FITS = 2  # each against all that was found for those before it
_SEARCHES, _QUIET = 80, 16  # for a dataset that breaks the bound: at most, and so many in a row that find none
_KEPT = 1.1  # times the plain one's loss, for a dataset that was found to be kept
_FRESH = 128  # datasets that each of them begins with
_FLOOR = 1e-13  # losses (unit scale) below it are the lattice's rounding


def by_intervals(problem: Problem, belief: Distribution, robustness: float, count: int, seed: int) -> Robust:
    """A base measure with shifts and ends is fitted, and attacked; as much of it as holds, with the ends that suit best."""
    plain = IntervalMechanism.plain(problem)
    pool = _Pool(plain, belief, count, seed)
    for _ in range(3):
        pool.attack(_fitted(plain, pool, robustness))
    held = [_survivor(_fitted(plain, pool, robustness), pool, robustness) for _ in range(_FITS)]
    best = min((each for each in held if pool.worst(each)[0] <= 1 + MARGIN * robustness), key=pool.score, default=held[-1])
    if pool.score(best) >= pool.score(IntervalMechanism.deep(problem)):
        return by_depth(problem)
    (loss, loss_at), (ratio, ratio_at) = pool.largest(best), pool.worst(best)
    return Robust(best, plain, ratio, loss, pool.largest(plain)[0], ratio_at, loss_at, proved=_is_even(best, robustness))


def _survivor(fit: IntervalMechanism, pool: _Pool, robustness: float) -> IntervalMechanism:
    """What is left of a fit when no search finds a dataset any more that breaks the bound; the pool keeps all that were found."""
    best, quiet = _held(fit, pool, robustness), 0
    for _ in range(_SEARCHES):
        pool.attack(best)
        quiet += 1
        if pool.worst(best)[0] > 1 + MARGIN * robustness:
            best, quiet = _held(fit, pool, robustness), 0
        if quiet == _QUIET:
            break
    return best


def by_depth(problem: Problem) -> Robust:
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
        ((part * logs).exp(), part * fit.shift, ends, atoms)
        for part in (1.0, 0.8, 0.6, 0.4, 0.2, 0.0)
        for ends in ([part * end for end in own], *others)
    ]
    tried += [((part * logs).exp(), 0 * fit.shift, (0.0, 0.0), atoms) for part in (1.0, 0.6, 0.3)]
    tried += [(0 * logs + 2.0**-30, 0 * fit.shift, ends, 1.0) for ends in others]  # by depth alone
    tilts = torch.stack([torch.cat([tilt, tilt.new_tensor([*ends, atoms])]) for tilt, _, ends, atoms in tried])
    shifts = torch.stack([torch.cat([shift, shift.new_zeros(3)]) for _, shift, _, _ in tried])
    worst, order = pool.worst_of(tilts, shifts), pool.scores(tilts, shifts).argsort().tolist()
    for place in order:
        if float(worst[place]) <= 1 + MARGIN * robustness:
            tilt, shift, ends, atoms = tried[place]
            made = IntervalMechanism.tilted(problem, tilt, shift, ends=ends, atoms=atoms)
            if pool.worst(made)[0] <= 1 + MARGIN * robustness:  # with whole tilts
                return made
    return IntervalMechanism.deep(problem)  # which keeps to the bound on every dataset


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
            additive = [noisy_query(plain.problem, noise) for noise in KINDS]
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
        self._try(self._random(min(256, count)), None)

    def _random(self, count: int) -> Tensor:
        made = torch.rand(count, 6, dtype=torch.float64, generator=self.generator)
        made[:, 2:4] = 5 * made[:, 2:4] - 5
        kind = torch.rand(count, 2, dtype=torch.float64, generator=self.generator)
        near = 10 ** (4 * made[:, :2] - 4)  # close to an end, on every scale
        made[:, :2] = torch.where(kind < 0.2, made[:, :2].round(), torch.where(kind < 0.4, near, made[:, :2]))
        made[:, :2] = torch.where((kind > 0.3) & (kind < 0.5), 1 - made[:, :2], made[:, :2])
        return made

    def _try(self, parameters: Tensor, against: IntervalMechanism | None) -> None:
        """Add datasets, or those of them on which a mechanism loses much."""
        n = self.plain.problem.n
        rows = max(min(len(parameters), NUMBERS // n), 1)
        seen = _Seen(self.plain, (lumps(part, n) for part in torch.split(parameters, rows)))
        if against is not None:
            kept = seen.of(against) > _KEPT * seen.plain
            seen, parameters = seen.only(kept), parameters[kept]
        self.hostile.add(seen)
        self.parameters = torch.cat([self.parameters, parameters])

    def scores(self, tilts: Tensor, shifts: Tensor) -> Tensor:
        """Under the belief, in all and dataset by dataset; and what is lost to noise on the query if all records are at an end.

        Of mechanisms by rows of their tilts and shifts.
        """
        losses = self.believed.profile.losses_of_many(tilts, shifts)
        behind = self.edges.profile.losses_of_many(tilts, shifts) / self.edges.best[:, None]
        own = losses.mean(0) / self.believed.plain.mean() + (losses / self.believed.best[:, None]).mean(0)
        return own + _BEHIND * behind.clamp(min=1).sum(0)

    def score(self, mechanism: IntervalMechanism) -> float:
        """Of one."""
        shifts = torch.zeros_like(mechanism.tilts) if mechanism.shifts is None else mechanism.shifts
        return float(self.scores(mechanism.tilts[None], shifts[None]))

    def worst_of(self, tilts: Tensor, shifts: Tensor) -> Tensor:
        """The largest ratio to the plain mechanism of each."""
        return (self.hostile.profile.losses_of_many(tilts, shifts) / self.hostile.plain[:, None]).amax(0)

    def attack(self, mechanism: IntervalMechanism, rounds: int = 3) -> None:
        """Add datasets, some anywhere, and more near those on which it does worst."""
        self._try(self._random(_FRESH), mechanism)
        for number in range(rounds):
            ratios = self._ratios(mechanism)[self.drawn :]
            worst = self.parameters[ratios.topk(min(16, len(ratios))).indices].repeat(4, 1)
            spread = torch.tensor([0.1, 0.1, 0.5, 0.5, 0.1, 0.1], dtype=torch.float64) / 3**number
            near = worst + spread * torch.randn(worst.shape, dtype=torch.float64, generator=self.generator)
            near[:, [0, 1, 4, 5]] = near[:, [0, 1, 4, 5]].clamp(0, 1)
            near[:, 2:4] = near[:, 2:4].clamp(-5, 0)
            self._try(near, mechanism)

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
