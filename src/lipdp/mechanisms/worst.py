"""What is lost at worst by mechanisms that gain from a belief: how much more than a plain one, on *any* dataset.

They gain where the belief is true and lose little where it is not: on no dataset more than 1 + τ times the loss of a mechanism that
assumes nothing. Means and variances: :mod:`lipdp.mechanisms.truths`; quantiles: :mod:`lipdp.mechanisms.ranked`. What these share
stands here: what is known of losses on all datasets, noise on the query, which assumes nothing, and draws of a belief.

**By intervals**: how much more than the plain mechanism can a mechanism by intervals lose? A bound, proved by duality. A dataset
enters by q, its quantile, and by f(r) = exp(−(ε/2)·dist(np, [#{x < r}, #{x ≤ r}])): at most 1, rising up to q and falling behind
it, and at least φ = exp(−(ε/2)·np) below q and exp(−(ε/2)·(n − np)) above. The plain mechanism's loss is ℓ = ∫f(r − q)² ÷ ∫f. The
other one's is at most ρ·ℓ if and only if S = Σ weight·(loss − ρℓ) ≤ 0 over all its copies. As ∫f((r − q)² − ℓ) = 0,

    S ≤ G = Σ weight·(loss − ρℓ) − μ·∫f((r − q)² − ℓ)   for any number μ.

**Nothing but f.** Tilted copies, further copies and ends weigh f (by depth: f, and more at q itself, where nothing is lost).
Copies within reach h of r weigh f(r − h) behind q + h and f(r + h) before q − h, which is f again; for r between, 1 ÷ max(f(r
− h), f(r + h)): at least 1, where that helps; and at most Ω + 1 − Ω·f, Ω = exp(ε/2·min(np, n − np)), since a convex function
is below its chord. So G is at most a constant and an integral ∫f·g, and that is largest for an f of steps: 1 between two
places about q, as small as it can be beyond. Two running sums and their maxima give the largest G over *all* datasets with
this q and ℓ.

**Between numbers.** For one f, G is linear in ℓ and quadratic in q. So a cell of q and ℓ is done if for one μ G is not above
0 at its four corners, plus (width/2)²·μ∫f for its curvature. Places of the steps are looked at on a grid, and between its
points g is taken for the largest that it is. So nothing is left out, but for rounding (10⁻¹² of each term is added), and
that candidates, and so records, are multiples of a millionth of the range: losses below LEAST, three of these steps squared,
count as LEAST, and sums are taken for integrals, which differ by a 120th of LEAST at most.
"""

from __future__ import annotations

import math
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


LEAST = 1e-11
"""The loss (unit scale) that smaller ones count as."""
_DEEPEST = 14.0  # (ε/2)·min(np, n − np): deeper, there are too many cells
_WIDTH, _LOSSES = 0.15, 1.25  # of a cell: of q in √ℓ, of ℓ as a factor
_PLACES, _NEAREST = 100, 0.05  # of the grid on either side of q, from this part of √ℓ on to the end of the range
_MULTIPLIERS = 14  # of μ are tried for a cell
_CHUNK, _SOME = 64, 120  # cells at a time, and to look for hostile datasets
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Copies:
    """What the bound needs of a mechanism, an even measure of the range being 1.

    ``tilt`` and ``shift`` of each part (the parts are even), further copies of all numbers and of the two ends; ``reaches`` are (h,
    copies in each part) of copies within reach h. ``rank`` of ``n`` records is the quantile's.
    """

    tilt: Tensor
    shift: Tensor
    atoms: float
    ends: tuple[float, float]
    reaches: tuple[tuple[float, Tensor], ...]
    epsilon: float
    rank: float
    n: int

    @property
    def floors(self) -> tuple[float, float]:
        """The least f below and above the quantile."""
        return math.exp(-self.epsilon / 2 * self.rank), math.exp(-self.epsilon / 2 * (self.n - self.rank))


@dataclass(frozen=True)
class Hostile:
    """Cells that no multiplier was found for, (cells,): corners in q and ℓ; and how far G is above 0."""

    q: Tensor
    loss: Tensor
    above: Tensor


def within_reach_of_a_proof(epsilon: float, rank: float, n: int) -> bool:
    """Whether there are few enough cells."""
    return epsilon / 2 * min(rank, n - rank) <= _DEEPEST


def exceeded(copies: Copies, ratio: float) -> Hostile | None:
    """The first cells of datasets whose loss of at most ``ratio`` times the plain one's is not proved; None: it is for all."""
    for cells in torch.split(_cells(copies.floors), _CHUNK):
        found = _hostile(copies, ratio, cells)
        if found is not None:
            return found
    return None


def some_exceeded(copies: Copies, ratio: float) -> Hostile | None:
    """The same for some cells out of all: where to look for hostile datasets, and no proof where there are none."""
    cells = _cells(copies.floors)
    return _hostile(copies, ratio, cells[:: max(len(cells) // _SOME, 1)])


def _hostile(copies: Copies, ratio: float, cells: Tensor) -> Hostile | None:
    open_, above = _undecided(copies, ratio, cells)
    return Hostile(open_[:, :2].mean(1), open_[:, 2:].mean(1), above) if len(open_) else None


def _cells(floors: tuple[float, float]) -> Tensor:
    """(q₁, q₂, ℓ₁, ℓ₂) of all cells that a dataset may be in, those of large losses first.

    With ℓ the plain loss, the floors' φq³/3 + … alone have to be balanced by what is nearer than √ℓ: at most 4/3·ℓ^1.5.
    """
    down, up = floors
    tried = torch.cat([torch.zeros(1), torch.logspace(-8, -2, 121)[:-1], torch.linspace(0.01, 0.5, 99)]).double()
    tried = torch.cat([tried, 1 - tried.flip(0)[1:]])
    high, made = 1.0, []
    while high > 0:
        low = high / _LOSSES if high > LEAST else 0.0
        root = math.sqrt(max(high, LEAST))
        far = down * (tried**3 / 3 - root**2 * tried) + up * ((1 - tried) ** 3 / 3 - root**2 * (1 - tried)) <= 4 / 3 * root**3
        if bool(far.any()):
            places = far.nonzero()[:, 0]
            start, end = float(tried[max(int(places[0]) - 1, 0)]), float(tried[min(int(places[-1]) + 1, len(tried) - 1)])
            count = math.ceil((end - start) / (_WIDTH * root))
            edges = torch.linspace(start, end, count + 1, dtype=torch.float64)
            losses = torch.tensor([low, max(high, LEAST)], dtype=torch.float64).expand(count, 2)
            made.append(torch.cat([edges[:-1, None], edges[1:, None], losses], 1))
        high = low
    return torch.cat(made)


def _undecided(copies: Copies, ratio: float, cells: Tensor) -> tuple[Tensor, Tensor]:
    """The cells for which no μ was found, with how far G stays above 0, as a part of ℓ."""
    held = _Held(copies, ratio, cells)
    # As a function of μ, the largest G is convex: a golden section, that ends where it is not above 0.
    low, high = (torch.full((len(cells),), end, dtype=torch.float64) for end in (-1.0, 3.0))
    golden = (math.sqrt(5) - 1) / 2
    a, b = high - golden * (high - low), low + golden * (high - low)
    at_a, at_b = held.largest(a), held.largest(b)
    best, left = torch.minimum(at_a, at_b), torch.arange(len(cells))
    for _ in range(_MULTIPLIERS):
        keep = best > 0
        if not bool(keep.any()):
            break
        low, high, a, b, at_a, at_b, best, left = (part[keep] for part in (low, high, a, b, at_a, at_b, best, left))
        held = held.only(keep)
        first = at_a < at_b
        low, high = torch.where(first, low, a), torch.where(first, b, high)
        new = torch.where(first, high - golden * (high - low), low + golden * (high - low))
        at_new = held.largest(new)
        a, b, at_a, at_b = (
            torch.where(first, new, b),
            torch.where(first, a, new),
            torch.where(first, at_new, at_b),
            torch.where(first, at_a, at_new),
        )
        best = torch.minimum(best, at_new)
    keep = best > 0
    return cells[left[keep]], best[keep] / cells[left[keep], 3]


class _Held:
    """What G is made of at the four corners of each cell, before μ is chosen: (corners, sides, cells, steps of the grid)."""

    def __init__(self, copies: Copies, ratio: float, cells: Tensor) -> None:
        self.copies, self.cells = copies, cells
        scale = float(copies.tilt.mean()) + copies.atoms
        self.width = cells[:, 1] - cells[:, 0]
        sides = [_Side(copies, cells, sign) for sign in (-1, 1)]
        made: list[list[Tensor]] = [[] for _ in range(9)]
        for corner in range(4):
            offset = self.width if corner % 2 else torch.zeros_like(self.width)
            # The plain one's loss is ℓ wherever it is above LEAST; ρ times it is never below ρ·LEAST.
            loss = cells[:, 2 + corner // 2]
            target = ratio * torch.where(loss > 0, loss, LEAST)
            parts = [side.terms(offset, target, loss) for side in sides]
            for place, own in enumerate(zip(*parts, strict=True)):
                made[place].append(torch.stack(own))
        tensors = [torch.stack(own) for own in made]
        self.base, self.kinks, self.ends = (tensors[place] / scale for place in (0, 4, 7))
        self.away, self.constant = tensors[1], tensors[8].sum(1) / scale
        self.slopes, self.turns = (tensors[2] / scale, tensors[3] / scale), (tensors[5], tensors[6])
        self.size = torch.stack([side.size for side in sides])
        self.reach = torch.stack([side.u[:, 1:] for side in sides])

    def only(self, keep: Tensor) -> _Held:
        """Some of the cells."""
        made = object.__new__(_Held)
        made.copies, made.cells, made.width = self.copies, self.cells[keep], self.width[keep]
        made.base, made.away, made.kinks = self.base[:, :, keep], self.away[:, :, keep], self.kinks[:, :, keep]
        made.slopes, made.turns = ((both[0][:, :, keep], both[1][:, :, keep]) for both in (self.slopes, self.turns))
        made.ends, made.constant = self.ends[:, :, keep], self.constant[:, keep]
        made.size, made.reach = self.size[:, keep], self.reach[:, keep]
        return made

    def largest(self, mu: Tensor) -> Tensor:
        """The largest G of each cell, over all f and its corners."""
        m = mu[None, None, :, None]
        curve = ((self.width / 2) ** 2 * mu)[None, None, :, None] * self.size
        g = self.base - m * self.away + curve
        steepest = (self.slopes[0] - m * self.turns[0]).abs().maximum((self.slopes[1] - m * self.turns[1]).abs()) + self.kinks
        loose = steepest * self.size**2 / 2  # the largest of g in a step is its mean and half of this ÷ size, at most
        before = torch.cat([torch.zeros_like(g[..., :1]), g.cumsum(-1)], -1)
        # Between two points of the grid: all of the step if g is above 0 there, none if it is below, else all that is above.
        inside = torch.where(g > loose, g, (g + loose).clamp(min=0))
        best = (before[..., :-1] + inside).amax(-1).clamp(min=0)
        whole = before[..., -1] + self.ends
        best = torch.maximum(best, whole)
        # The cell itself lies at the beginning of the right side: a step may begin in it, too.
        up_to = (before[:, 1, :, :-1] + inside[:, 1]).flip(-1).cummax(-1).values.flip(-1)
        behind = torch.cat([up_to[..., 1:] - before[:, 1, :, 1:-1], torch.zeros_like(up_to[..., :1])], -1).clamp(min=0)
        middle = self.reach[1] <= self.width[:, None] * (1 + 1e-12)
        begun = torch.where(middle, inside[:, 1] + behind, 0.0).amax(-1)
        rest = torch.where(middle, inside[:, 1] - before[:, 1, :, 1:], -math.inf).amax(-1)
        between = torch.maximum(best.sum(1), begun)
        down, up = self.copies.floors
        every = whole.sum(1)
        if down <= up:
            made = down * every + (up - down) * (whole[:, 1] + torch.maximum(best[:, 0], rest)) + (1 - up) * between
        else:
            made = up * every + (down - up) * (whole[:, 0] + best[:, 1]) + (1 - down) * between
        rounding = _ROUNDING * (self.base.abs() + m * self.away.abs()).sum((1, 3))
        top: Tensor = (made + self.constant + rounding).amax(0)
        return top


class _Side:
    """The numbers to one side of a cell's q₁ (``sign`` −1: below, 1: above), by their distance u from it."""

    def __init__(self, copies: Copies, cells: Tensor, sign: int) -> None:
        self.copies, self.cells, self.sign = copies, cells, sign
        self.start, self.width = cells[:, :1], (cells[:, 1] - cells[:, 0])[:, None]
        extent = self.start if sign < 0 else 1 - self.start
        root = cells[:, 3:].clamp(min=LEAST).sqrt()
        part = torch.linspace(0, 1, _PLACES, dtype=torch.float64)
        near = torch.exp(torch.log(_NEAREST * root) * (1 - part))
        edges = sign * (torch.linspace(0, 1, len(copies.tilt) + 1, dtype=torch.float64) - self.start)
        places = [torch.zeros_like(root), near, edges, self.width / 2, self.width, extent]
        for h, _ in copies.reaches:
            places += [edges - h, edges + h, torch.full_like(root, h)]
        self.u = torch.cat(places, 1).clamp(min=0).minimum(extent).sort(1).values
        self.size = self.u.diff(dim=1)
        self.middle = self.start + sign * (self.u[:, 1:] + self.u[:, :-1]) / 2

    def _part(self, place: Tensor) -> Tensor:
        count = len(self.copies.tilt)
        return (place * count).floor().clamp(0, count - 1).to(torch.int64)

    def terms(self, offset: Tensor, target: Tensor, loss: Tensor) -> tuple[Tensor, ...]:
        """Of each step of the grid: ∫weight·(loss − ρℓ) and ∫((r − q)² − ℓ); the slopes of the first at both ends and, where it has
        kinks, how much steeper it may be; the slopes of the second; and what the end has, and what has no f.

        ``offset`` is that of q from q₁.
        """
        own, sign, size = self.copies, self.sign, self.size
        x, target = sign * self.u - offset[:, None], target[:, None]
        low, high = x[:, :-1], x[:, 1:]

        def squares(moved: Tensor | float) -> Tensor:
            return sign * ((high + moved) ** 3 - (low + moved) ** 3) / 3

        part = self._part(self.middle)
        tilt, shift, even = own.tilt[part], own.shift[part], squares(0.0)
        base = tilt * (squares(shift) - target * size) + own.atoms * (even - target * size)
        slopes = [2 * (tilt * (end + shift) + own.atoms * end) for end in (low, high)]
        kinks, constant = torch.zeros_like(base), torch.zeros_like(loss)
        beyond = self.u[:, :-1] >= (self.width if sign > 0 else 0.0)  # of all q of the cell
        deepest = math.exp(own.epsilon / 2 * min(own.rank, own.n - own.rank))
        for h, copies in own.reaches:
            behind, ahead = (self.middle + way * sign * h for way in (1, -1))
            there = copies[self._part(behind)] * ((behind >= 0) & (behind <= 1) & beyond)
            base = base + there * (squares(sign * h) - target * size)
            slopes = [slope + 2 * there * (end + sign * h) for slope, end in zip(slopes, (low, high), strict=True)]
            # The copies that f of this place weighs from above are on the other side of q.
            here = copies[self._part(ahead)] * ((ahead >= 0) & (ahead <= 1) & (self.u[:, 1:] <= h * (1 + 1e-12)))
            costs = [(place - sign * h) ** 2 - target for place in (low, high, (low + high) / 2)]
            upper = size * (costs[0].clamp(min=0) + costs[1].clamp(min=0)) / 2
            base = base - deepest * here * beyond * size * costs[2].clamp(min=0)
            kinks = kinks + 2 * deepest * here * beyond * (h + self.width) * ((costs[0] > 0) | (costs[1] > 0))
            helps = beyond & (costs[0] <= 0) & (costs[1] <= 0)
            constant = constant + (here * ((1 + deepest) * upper + helps * (squares(-sign * h) - target * size))).sum(1)
            if sign > 0:  # and between q₁ + h and q₂ + h
                most = (((h + self.width) ** 2 - target).clamp(min=0) * self.width)[:, 0]
                edges = torch.linspace(0, 1, len(copies) + 1, dtype=torch.float64)
                met = (edges[:-1] <= self.start + self.width + h) & (edges[1:] >= self.start + h)
                constant = constant + deepest * torch.where(met, copies, 0.0).amax(1) * most
        end = (0.0 if sign < 0 else 1.0) - self.start[:, 0] - offset
        ends = own.ends[0 if sign < 0 else 1] * (end**2 - target[:, 0])
        return base, even - loss[:, None] * size, *slopes, kinks, 2 * low, 2 * high, ends, constant
