"""Quantiles by the exponential mechanism on all numbers of the range; no prior is needed, one can be used.

Candidates are the multiples of a fine decimal step (a millionth of the range), so the answer is as continuous as a float is, and
all have as many copies: the public base measure is even.

P(r) ∝ copies(r)·exp(−(ε/2)·min(dist(np, [#{x < r}, #{x ≤ r}]), L)). The distance moves by at most one when a record is replaced (a
maximum of two counts and 0, see :class:`~lipdp.mechanisms.utilities.RankUtility`), and so does its minimum with a constant; copies
do not depend on the data. So each weight, and their sum, move by a factor of at most exp(ε/2): ε-DP.

A belief enters by what is public or free: ``tilt`` multiplies the copies of each of 48 parts of the range, ``shift`` is added to
answers from it, and ``ends`` are more copies of the two ends, where zeros, full marks and clamped values lie.

**Depth.** A distance of 0 says that r is the quantile, not how surely: one record more or less, or a hundred. The *signed* distance
max(#{x < r} − np, np − #{x ≤ r}) is −k where k records have to move before r is no quantile any more; it moves by one at most, too.
Further copies of each candidate (``atoms``, and those for the ends) are weighed by it, down to −C: a value that holds many records
draws as many more answers, and numbers that hold none have a signed distance that is no less than the other one. So, with nothing
but such copies (:meth:`IntervalMechanism.deep`), every candidate but the quantile itself is less likely than with the textbook's
weights: the loss is at most as large, on every dataset.

**Reach.** Columns of many different numbers have no atoms, but records lie close together. A copy with reach h of a candidate r is
weighed by the signed distance max(#{x < r − h} − np, np − #{x ≤ r + h}), which moves by one at most like the others: −k where k
records have to move before the quantile is further than h from r. Where the records about the quantile are within h of each other,
such copies outweigh all that is far away; what they cost is h, where the records alone would have said it better. ``near`` are the
copies in each part, to the tilts as ``atoms``. How much they may be is bounded in :mod:`lipdp.mechanisms.worst`.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Array, Range, check_fields, read
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.noise import Sampler, deepest, release_block
from lipdp.mechanisms.problem import COPIES, Lattice, Problem

PARTS = 48
"""Parts of the range that a belief can tilt and shift."""
_DEEP = 45.0  # beyond exp(−45) an evaluation sees nothing
_CAP = 64  # C·ε: depth counts up to a factor of exp(32), which outweighs all other numbers together
_NUMBERS = 1_500_000  # in one intermediate tensor


Extra = Annotated[int, Range(least=0, most=2**30)]
Whole = Annotated[Tensor, Array(1, torch.int64)]


@dataclass(frozen=True)
class Profile:
    """What a dataset makes of the mechanism, part by part, before tilt and shift: all (batch, PARTS + 3 + …), then the two
    ends, then the further copies of all candidates, which are weighed by depth as those of the ends are; then PARTS for each reach.

    ``mass`` is the weight of the answers in a part, ``error`` and ``cost`` are Σ weight·(r − q) and Σ weight·loss there (unit
    scale). With tilts θ and shifts s, the expected squared loss is Σ θ(cost + 2s·error + s²·mass) ÷ Σ θ·mass.
    """

    mass: Tensor
    error: Tensor
    cost: Tensor

    def losses(self, tilt: Tensor, shift: Tensor | None = None) -> Tensor:
        """Expected losses (batch,)."""
        cost = self.cost if shift is None else self.cost + 2 * shift * self.error + shift**2 * self.mass
        return (tilt * cost).sum(1) / (tilt * self.mass).sum(1)

    def losses_of_many(self, tilts: Tensor, shifts: Tensor) -> Tensor:
        """Expected losses (batch, many) for rows of tilts and of shifts (0 where there are none), (many, columns)."""
        cost = self.cost @ tilts.T + 2 * (self.error @ (tilts * shifts).T) + self.mass @ (tilts * shifts**2).T
        return cost / (self.mass @ tilts.T)

    def join(self, other: Profile) -> Profile:
        """Of both batches."""
        pairs = ((self.mass, other.mass), (self.error, other.error), (self.cost, other.cost))
        return Profile(*(torch.cat(pair) for pair in pairs))


@dataclass(frozen=True)
class IntervalMechanism(Mechanism):
    """The exponential mechanism of this module. ``tilt`` (PARTS,) are whole numbers, ``shift`` (PARTS,) is in unit scale; ``ends``
    are to the tilts as the further copies of an end are to all of an even measure, ``atoms`` as those of each candidate to its own;
    ``near`` (PARTS,) likewise, for each of ``reaches``, in steps of the lattice.
    """

    tilt: Whole
    shift: Annotated[Tensor, Array(1, torch.float64)]
    ends: tuple[Extra, Extra] = (0, 0)
    atoms: Extra = 0
    reaches: tuple[Extra, ...] = ()
    near: tuple[Whole, ...] = ()
    kind: ClassVar[str] = "interval"

    def __post_init__(self) -> None:
        """There is a query with ranks, and a tilt and a shift for each part."""
        if self.problem.query.kind != "quantile":
            raise ConfigurationError(f"ranks answer quantiles, not the {self.problem.query.name}.")
        check_fields(self, "a mechanism by intervals")
        if (
            self.tilt.shape[0] != PARTS
            or self.shift.shape[0] != PARTS
            or not 1 <= int(self.tilt.min()) <= int(self.tilt.max()) <= 2**30
        ):
            raise ConfigurationError(f"a mechanism by intervals has {PARTS} tilts of 1 to 2^30, and as many shifts.")
        if len(self.reaches) != len(self.near) or any(
            part.shape[0] != PARTS or not 0 <= int(part.min()) <= int(part.max()) <= 2**30 for part in self.near
        ):
            raise ConfigurationError(f"each reach has copies of 0 to 2^30 in {PARTS} parts.")
        if self.problem.n >= 2**50:
            raise ConfigurationError(f"n is {self.problem.n}: ranks are exact below 2^50.")

    @classmethod
    def plain(cls, problem: Problem) -> IntervalMechanism:
        """Without any belief."""
        title = "exponential mechanism on all numbers"
        return cls(problem, title, torch.ones(PARTS, dtype=torch.int64), torch.zeros(PARTS, dtype=torch.float64))

    @classmethod
    def deep(cls, problem: Problem) -> IntervalMechanism:
        """Without any belief, by depth: on no dataset worse than the plain one."""
        plain = cls.plain(problem)
        return replace(plain, title="exponential mechanism on all numbers, by depth", atoms=2**30)

    @classmethod
    def tilted(
        cls,
        problem: Problem,
        tilt: Tensor,
        shift: Tensor,
        ends: Sequence[float] = (0.0, 0.0),
        atoms: float = 0.0,
        reaches: tuple[int, ...] = (),
        near: Sequence[Tensor] = (),
    ) -> IntervalMechanism:
        """With tilts (any positive numbers; only their ratios count) and shifts.

        ``ends``, ``atoms``, ``near``: the further copies of each end, of all candidates, and those of a reach in each part, an even
        base measure of tilt 1 being 1 in all.
        """
        scale = 2**30 / max(float(tilt.max()), *ends, atoms, *(float(part.max()) for part in near))
        whole = (tilt * scale).round().to(torch.int64).clamp(min=1)
        low, high, all_ = (round(more * scale) for more in (*ends, atoms))
        title = "exponential mechanism on all numbers, learned base measure and answers"
        within = tuple((part * scale).floor().to(torch.int64) for part in near)
        return cls(problem, title, whole, shift.to(torch.float64), (low, high), all_, reaches, within)

    @property
    def tilts(self) -> Tensor:
        """Of all columns of a profile."""
        return torch.cat([self.tilt, torch.tensor([*self.ends, self.atoms]), *self.near]).to(torch.float64)

    @property
    def shifts(self) -> Tensor | None:
        """Likewise; what is drawn by depth is the answer. Where the loss counts records there is none."""
        unshifted = torch.zeros(3 + PARTS * len(self.near), dtype=torch.float64)
        return torch.cat([self.shift, unshifted]) if self.problem.loss == "squared" else None

    @cached_property
    def deepest(self) -> int:
        """C: from this depth on, records more count no more."""
        return math.ceil(_CAP / self.problem.exact_epsilon)

    @cached_property
    def lattice(self) -> Lattice:
        """The candidates."""
        return Lattice.of(self.problem.low, self.problem.high)

    @cached_property
    def edges(self) -> Tensor:
        """Where each part of the range begins, as candidates (PARTS,); the last one ends with the range."""
        own = self.lattice
        return torch.tensor([own.first + (own.last - own.first + 1) * part // PARTS for part in range(PARTS)])

    @property
    def sensitivity(self) -> float:
        """Of each utility, in counts."""
        return 1.0

    def profile(self, t: Tensor) -> Profile:
        """Of unit datasets, sorted. Records too far from the quantile to matter are left out, so n costs nothing."""
        rows = max(_NUMBERS // ((2 * self._reach + PARTS) * (1 + len(self.reaches))), 1)
        parts = [self._profile(part) for part in torch.split(t, rows)]
        made = parts[0]
        for part in parts[1:]:
            made = made.join(part)
        return made

    @cached_property
    def _reach(self) -> int:
        return min(math.ceil(2 * _DEEP / self.epsilon) + 2, self.problem.n)

    def _profile(self, t: Tensor) -> Profile:
        own, problem, rank = self.lattice, self.problem, self.problem.rank()
        start = max(0, math.floor(rank) - self._reach)
        data = own.places(problem.low + problem.width * t[:, start : math.ceil(rank) + self._reach])
        batch = t.shape[0]
        ends = torch.cat([data, self.edges.expand(batch, -1)], 1).sort(1).values
        truth = problem.query(t)
        below, upto = (start + torch.searchsorted(data, ends, right=right) for right in (False, True))
        # Blocks: each breakpoint by itself, once, then the open interval behind it.
        behind = torch.cat([ends[:, 1:], torch.full((batch, 1), own.last + 1)], 1)
        again = torch.cat([torch.zeros(batch, 1, dtype=torch.bool), ends[:, 1:] == ends[:, :-1]], 1)
        first = torch.cat([torch.where(again, ends + 1, ends), ends + 1], 1)
        last = torch.cat([ends, behind - 1], 1)
        signed = torch.cat([torch.maximum(below - rank, rank - upto), (upto - rank).abs()], 1)
        weight, deep = self._weights(signed)
        count, error, square = self._moments(first, last, truth[:, None])
        if problem.loss == "quantile":
            square = count * self._between(t, truth, first, last)
        part = torch.searchsorted(self.edges, first.clamp(max=own.last).contiguous(), right=True) - 1

        def summed(values: Tensor) -> Tensor:
            return values.new_zeros(batch, PARTS).scatter_add_(1, part, weight * values)

        parts = [summed(values) for values in (count, error, square)]
        whole = [(deep * values).sum(1, keepdim=True) for values in (count, error, square)]
        within = [self._within(reach, t, data, truth, start) for reach in self.reaches]
        return Profile(
            *(torch.cat(own, 1) for own in zip(parts, self._at_the_ends(t, data, truth, start), whole, *within, strict=True))
        )

    def _weights(self, signed: Tensor) -> tuple[Tensor, Tensor]:
        """Of the textbook, and by depth, from signed distances."""
        half = self.epsilon / 2
        return torch.exp(-half * signed.clamp(min=0)), torch.exp(-half * signed.clamp(min=-self.deepest))

    def _at_the_ends(self, t: Tensor, data: Tensor, truth: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, error and cost of each end by itself, (batch, 2)."""
        own, problem, rank = self.lattice, self.problem, self.problem.rank()
        places = torch.tensor([own.first, own.last]).expand(t.shape[0], -1).contiguous()
        below, upto = (start + torch.searchsorted(data, places, right=right) for right in (False, True))
        _, weight = self._weights(torch.maximum(below - rank, rank - upto))
        away = ((own.values(places) - problem.low) / problem.width).clamp(0, 1) - truth[:, None]
        cost = away**2 if problem.loss == "squared" else self._between(t, truth, places, places)
        return weight, weight * away, weight * cost

    def _within(self, reach: int, t: Tensor, data: Tensor, truth: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Weight, error and cost of copies with this reach in each part, (batch, PARTS)."""
        own, rank, batch = self.lattice, self.problem.rank(), t.shape[0]
        starts = [self.edges.expand(batch, -1), data - reach, data + reach + 1]
        first = torch.cat(starts, 1).clamp(own.first, own.last + 1).sort(1).values
        last = torch.cat([first[:, 1:], torch.full((batch, 1), own.last + 1)], 1) - 1
        below = start + torch.searchsorted(data, first - reach)
        upto = start + torch.searchsorted(data, first + reach, right=True)
        _, weight = self._weights(torch.maximum(below - rank, rank - upto))
        count, error, square = self._moments(first, last, truth[:, None])
        if self.problem.loss == "quantile":
            square = count * self._between(t, truth, first, last)
        part = torch.searchsorted(self.edges, first.clamp(max=own.last).contiguous(), right=True) - 1
        mass, away, cost = (
            torch.zeros(batch, PARTS, dtype=torch.float64).scatter_add_(1, part, weight * each) for each in (count, error, square)
        )
        return mass, away, cost

    def _moments(self, first: Tensor, last: Tensor, truth: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Σ copies, Σ copies·(r − q), Σ copies·(r − q)² over each block's candidates first … last (none where last < first).

        They are an arithmetic progression: c numbers of mean (first + last)/2 and variance (c² − 1)/12, in steps.
        """
        own, scale = self.lattice, float(self.lattice.step) / self.problem.width
        zero = (own.origin - self.problem.low) / self.problem.width
        count = (last - first + 1).clamp(min=0).to(torch.float64)
        away = (scale / 2) * (first + last).to(torch.float64) + zero - truth
        spread = scale**2 / 12 * (count**2 - 1).clamp(min=0)
        total = own.each / COPIES * count
        return total, total * away, total * (away**2 + spread)

    def _between(self, t: Tensor, truth: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """The quantile error of each block's middle: how many records lie strictly between truth and answer."""
        own, problem = self.lattice, self.problem
        middle = (own.values(first) + own.values(last)) / 2
        answer = ((middle - problem.low) / problem.width).clamp(0, 1)
        low, high = torch.minimum(truth[:, None], answer).contiguous(), torch.maximum(truth[:, None], answer).contiguous()
        inside = torch.searchsorted(t.contiguous(), high) - torch.searchsorted(t.contiguous(), low, right=True)
        return inside.clamp(min=0).to(torch.float64)

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`; exact (answers that a shift takes out of the range count as they are)."""
        return self.profile(t).losses(self.tilts, self.shifts)

    @classmethod
    def _from_state(cls, problem: Problem, title: str, report: dict[str, Any], state: Any) -> Mechanism:
        """A file of before said, too, that numbers are not liked better for being round."""
        kept = dict(state) if isinstance(state, dict) else state
        if isinstance(kept, dict) and read(bool, kept.pop("rounds", False), "the mechanism's state.rounds"):
            raise ConfigurationError("round numbers come first in it, which is not made any more: learn it again.")
        return super()._from_state(problem, title, report, kept)

    def check_sampler(self, sampler: Sampler) -> None:
        """Its draws are lipdp's own."""
        if sampler == "opendp":
            raise ConfigurationError("sampler='opendp', but opendp has no weighted choice with pure DP: use 'auto' or 'exact'.")

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        own, problem = self.lattice, self.problem
        data = own.places(problem.low + problem.width * t[0]).numpy()
        blocks = [*self._blocks(data), *self._blocks_within(data)]
        index, number = release_block([(block.distance + self.deepest, block.copies) for block in blocks], problem.exact_epsilon)
        block = blocks[index]
        # The first copies of a block that is an end are those for being one.
        chosen = block.first if number < block.extra else block.first + (number - block.extra) // (block.each * own.each)
        moved = 0.0 if block.deep else float(self.shift[block.part])
        unit = (float(own.values(torch.tensor(chosen))) - problem.low) / problem.width
        return torch.tensor(min(max(unit + moved, 0.0), 1.0), dtype=torch.float64)

    def _blocks(self, data: npt.NDArray[np.int64]) -> Iterator[_Block]:
        """Blocks that make up all copies of all candidates, in order.

        Values so far from the quantile that every candidate near them has the same, least weight make no blocks of their own.
        """
        own, rank = self.lattice, self.problem.query.p * self.problem.n
        ranks = {value: (below, upto) for value, below, upto in self._ranks(data)}
        edges, tilts = self.edges.tolist(), self.tilt.tolist()
        extras = {own.first: COPIES * self.ends[0], own.last: COPIES * self.ends[1]}
        ends = sorted(ranks.keys() | set(edges) | {own.last})
        seen = min(below for below, _ in ranks.values())
        for place, behind in zip(ends, [*ends[1:], own.last + 1], strict=True):
            part = bisect.bisect_right(edges, place) - 1
            below, seen = ranks.get(place, (seen, seen))
            here, open_ = own.each, own.each * (behind - 1 - place)
            signed, away, extra = max(below - rank, rank - seen), abs(seen - rank), extras.get(place, 0)
            yield _Block(max(signed, Fraction(0)), here * tilts[part], tilts[part], place, place, part)
            deep = self.atoms * here + extra
            yield _Block(max(signed, Fraction(-self.deepest)), deep, max(self.atoms, 1), place, place, part, extra, deep=True)
            if open_:
                yield _Block(away, open_ * tilts[part], tilts[part], place + 1, behind - 1, part)
                yield _Block(away, open_ * self.atoms, max(self.atoms, 1), place + 1, behind - 1, part, deep=True)

    def _ranks(self, data: npt.NDArray[np.int64]) -> list[tuple[int, int, int]]:
        """(value, records below it, records up to it) of all that are not too far from the quantile."""
        rank = float(self.problem.query.p * self.problem.n)
        values, counts = np.unique(data, return_counts=True)
        upto = np.cumsum(counts)
        reach = float(deepest(self.problem.exact_epsilon)) + 1
        near = (upto - counts <= rank + reach) & (upto >= rank - reach)
        return [(int(v), int(b - c), int(b)) for v, c, b in zip(values[near], counts[near], upto[near], strict=True)]

    def _blocks_within(self, data: npt.NDArray[np.int64]) -> Iterator[_Block]:
        """Blocks that make up all copies with a reach, in order; values far from the quantile are left out as by the others."""
        own, rank, ranks = self.lattice, self.problem.query.p * self.problem.n, self._ranks(data)
        values, upto, none = [value for value, _, _ in ranks], [b for _, _, b in ranks], ranks[0][1]
        edges = self.edges.tolist()
        for reach, near in zip(self.reaches, self.near, strict=True):
            copies = near.tolist()
            starts = {place for value in values for place in (value - reach, value + reach + 1) if own.first < place <= own.last}
            ends = sorted(starts | set(edges))
            for first, behind in zip(ends, [*ends[1:], own.last + 1], strict=True):
                part = bisect.bisect_right(edges, first) - 1
                if not copies[part]:
                    continue
                below, seen = bisect.bisect_left(values, first - reach), bisect.bisect_right(values, first + reach)
                signed = max((upto[below - 1] if below else none) - rank, rank - (upto[seen - 1] if seen else none))
                made = own.each * (behind - first) * copies[part]
                yield _Block(max(signed, Fraction(-self.deepest)), made, copies[part], first, behind - 1, part, deep=True)

    def _noised(self) -> str:
        return "the choice among all numbers of the range, by the exponential mechanism on ranks (factor 1/2)"


@dataclass(frozen=True)
class _Block:
    """Copies of candidates first … last that weigh the same: ``each`` of every copy in the lattice, after ``extra`` ones of an end.

    ``deep``: by signed distances, and not shifted.
    """

    distance: Fraction
    copies: int
    each: int
    first: int
    last: int
    part: int
    extra: int = 0
    deep: bool = False
