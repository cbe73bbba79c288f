"""A mean whose noise knows how many records lie beyond a cut.

Replacing a record of [0, 1] moves the sum T by 1 only if one of the two, old or new, lies beyond the cut b: below it, records move
T by b at most. Noise on the query is for 1 everywhere. Here the answer's distribution depends on T and on E, how many records lie
beyond: P(answer = T + z) = p_E(z), one row of a table for each E = 0, …, J, the last one for all that are more. Where E = 0 noise
is small and lopsided (few records bring T further up, many are needed to bring it down); where E is large it is about what plain
noise is. No ε is spent to find out which: one table is ε-DP as a whole.

**Privacy.** Records are whole numbers of 1/F, those up to b·F are *inside*. With U, a uniform number that is as good as public,
T + U is rounded down to cells of 1/D, S. So, U being given, neighbours differ in one of three ways: both records inside, |ΔS| ≤ bD
and E is the same; both beyond, |ΔS| ≤ (1 − b)D and E is the same; one of either kind, 0 ≤ ΔS ≤ D where E grows by one. For each of
these moves, and each place z of the table, p_E(z) ≤ e^ε·p_E'(z − ΔS) is looked at in whole numbers whenever a mechanism is made or
read: there is no table that is not private. Beyond its ends a row falls by the factor ρ ≥ e^(−ε/D) for each cell, where ratios no
longer change, so that finitely many of them are all.

**Losses** depend on the data by T and E alone: those of all datasets are computed. The table is the solution of a linear programme:
least expected ratio to the loss of plain noise under a belief, at most 1 + τ for every T and E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Array, Range, check_fields
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.noise import Sampler, check_sampler, draw_noise
from lipdp.mechanisms.problem import Problem, response_loss
from lipdp.mechanisms.statistics import places
from lipdp.privacy.randomness import Stream, exp_of_minus

Floats = npt.NDArray[np.float64]
CELLS = 5
"""D: cells of the table that a record spans."""
_CUTS = (3, 4)  # in cells: a lower one gains nothing, for records beyond it move T by more
WAYS = tuple((cut, high) for cut in _CUTS for high in (True, False))
"""Which records may be counted: beyond which cut, at which end."""
PLACES = CELLS * 2**28
"""F."""
_CELL = PLACES // CELLS
_SCALE = 2**60  # ρ is a multiple of its inverse
_BITS = 256  # of e^−ε in the proof
_TOTAL = 2.0**56  # about the sum of a row
_REACH, _ROWS = 9.0, 3.6  # ÷ ε: how far the table reaches, in records, and how many rows it has
_LEAST, _MOST = 0.25, 3.0  # of ε: tables for less are large, and for more staircase noise has finer steps than cells
_SMOOTH = 0.6  # of ε: below, rows fall evenly, which is nearly as good; one comparison of neighbouring cells is for all moves
_SPARE = 1e-4  # of ε and of 1 + τ, for the tolerance of the programme
_FINER = 4  # points of a cell, for expectations
_NEARLY = 0.85
_QUANTILES = 1500  # of plain noise: as many as its losses are computed with elsewhere
_ENDS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0)  # ÷ ε: T that is so near to its ends that limiting answers counts
Cut = Annotated[int, Range(least=1, most=CELLS)]
Rows = Annotated[Tensor, Array(2, torch.int64)]


def moves_of(cut: int, rows: int) -> list[tuple[int, int, int]]:
    """(row, row of the neighbour, ΔS) of a table of so many rows, each pair once."""
    last = rows - 1
    made = [(row, row, by) for row in range(last) for by in range(1, max(cut, CELLS - cut) + 1)]
    made += [(row, row + 1, by) for row in range(last) for by in range(CELLS + 1)]
    return made + [(last, last, by) for by in range(1, CELLS + 1)]


@dataclass(frozen=True)
class BeyondMechanism(Mechanism):
    """The mean, by a table of chances for each number of records beyond a cut.

    Attributes:
        cut: b, in cells.
        high: records above b are counted; else those below 1 − b, everything mirrored.
        table: whole numbers in proportion to p_E(z), (rows, an odd number of cells).
    """

    cut: Cut
    high: bool
    table: Rows
    kind: ClassVar[str] = "beyond"

    def __post_init__(self) -> None:
        """It answers means, and the table keeps what it promises."""
        if self.problem.query.kind != "mean":
            raise ConfigurationError(f"records beyond a cut are counted for the mean, not the {self.problem.query.name}.")
        check_fields(self, "a mechanism by records beyond a cut")
        if self.table.shape[1] % 2 == 0 or self.table.shape[1] <= 4 * CELLS or int(self.table.min()) < 1:
            raise ConfigurationError("a table of chances has an odd number of cells, more than four records span, all above 0.")
        if int(self.table.max()) > _TOTAL:
            raise ConfigurationError("a table of chances holds whole numbers of up to 2^56.")
        _prove(self.table, self.cut, self.problem.exact_epsilon)

    @classmethod
    def of(cls, problem: Problem, cut: int, high: bool, table: Tensor) -> BeyondMechanism:
        """With a title that says what it does."""
        place = problem.low + problem.width * (cut if high else CELLS - cut) / CELLS
        side = "above" if high else "below"
        return cls(problem, f"noise on the mean by how many records lie {side} {place:.4g}", cut, high, table)

    @property
    def sensitivity(self) -> float:
        """Of the mean: noise is for less where no record lies beyond the cut."""
        return self.problem.scale / self.problem.n

    @cached_property
    def chances(self) -> tuple[Floats, Floats]:
        """p_E(z), (rows, cells), and z in units of T; with as many cells more on either side as noise may reach."""
        weights, tail = self.table.numpy().astype(np.float64), math.exp(-self.epsilon / CELLS)
        more = math.ceil(12 * CELLS / self.epsilon)
        fall = tail ** np.arange(1, more + 1)
        made = np.concatenate([weights[:, :1] * fall[::-1], weights, weights[:, -1:] * fall], 1)
        half = made.shape[1] // 2
        return made / made.sum(1, keepdims=True), np.arange(-half, half + 1) / CELLS

    def seen(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """T and E of unit datasets (batch, n), as they are told apart: mirrored where the low end is cut."""
        records = places(t if self.high else 1 - t, PLACES)
        return records.to(torch.float64).sum(1) / PLACES, (records > self.cut * _CELL).sum(1)

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`; by quadrature, no noise is drawn."""
        if self.problem.loss == "squared":
            return torch.cat([self.losses_of(*self.seen(part)) for part in torch.split(t, 64)])
        total, beyond = self.seen(t)
        p, away = (torch.as_tensor(part) for part in self.chances)
        answers = ((total[:, None] + away) / self.problem.n).clamp(0, 1)
        costs = response_loss(self.problem.loss, t, self.problem.query(t), answers if self.high else 1 - answers)
        return (costs * p[beyond.clamp(max=len(p) - 1)]).sum(1)

    def losses_of(self, total: Tensor, beyond: Tensor) -> Tensor:
        """The expected squared loss of every dataset of this T and so many records beyond (unit scale), (batch,)."""
        p, away = (torch.as_tensor(part) for part in self.chances)
        inner = (torch.arange(_FINER, dtype=torch.float64) + 0.5) / _FINER - 0.5
        z = (away[:, None] + inner / CELLS).reshape(-1)
        own = total[:, None]
        off = torch.minimum(torch.maximum(z, -own), self.problem.n - own)
        squares = (off**2).reshape(len(total), -1, _FINER).mean(2)
        return (squares * p[beyond.clamp(max=len(p) - 1)]).sum(1) / self.problem.n**2

    def error(self, confidence: float) -> float:
        """What |answer − truth| stays below with this chance, whatever the data are (unit scale): the worst row's."""
        p, away = self.chances
        order = np.argsort(np.abs(away), kind="stable")
        inside = np.cumsum(p[:, order], 1).min(0)
        place = min(int(np.searchsorted(inside, confidence)), len(order) - 1)
        return float((abs(away[order[place]]) + 0.5 / CELLS) / self.problem.n)

    def check_sampler(self, sampler: Sampler) -> None:
        """See :func:`lipdp.mechanisms.noise.check_sampler`."""
        check_sampler(sampler, "table")

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        check_sampler(sampler, "table")
        stream, records = Stream(), places(t[0] if self.high else 1 - t[0], PLACES)
        row = self.table[min(int((records > self.cut * _CELL).sum()), self.table.shape[0] - 1)].tolist()
        moved = stream.below(_CELL)
        cell = (int(records.sum()) + moved) // _CELL + _drawn(row, self.problem.exact_epsilon, stream)
        mean = float(Fraction(2 * (cell * _CELL - moved) + _CELL - 1, 2 * PLACES * self.problem.n))
        answer = min(max(mean, 0.0), 1.0)
        return torch.tensor(answer if self.high else 1 - answer, dtype=torch.float64)

    def _noised(self) -> str:
        return "the mean, with noise from a table for each number of records beyond a cut (every ratio checked)"


# --- exact ------------------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=64)
def _fall(epsilon: Fraction) -> int:
    """ρ in units of its scale: a little above e^(−ε/D), as the programme's is."""
    return (exp_of_minus(epsilon * (1 - Fraction(_SPARE)) / CELLS, 128) + 1 >> 68) + 1


def _totals(table: list[list[int]], fall: int) -> list[int]:
    """Each row's sum with both of its tails, times 1 − ρ and the scale: W·ρ/(1 − ρ) is one tail's."""
    return [(_SCALE - fall) * sum(row) + fall * (row[0] + row[-1]) for row in table]


def _prove(table: Tensor, cut: int, epsilon: Fraction) -> None:
    """Refuse a table with a ratio above e^ε, in whole numbers."""
    fall, rows = _fall(epsilon), table.tolist()
    least, totals = exp_of_minus(epsilon, _BITS) + 1, _totals(rows, fall)  # e^−ε, rounded up
    powers = [fall**k * _SCALE ** (CELLS - k) for k in range(CELLS + 1)]
    wide = np.array(
        [
            [row[0] * p for p in powers[:0:-1]] + [value * powers[0] for value in row] + [row[-1] * p for p in powers[1:]]
            for row in rows
        ],
        dtype=object,
    )
    for one, other, by in moves_of(cut, len(rows)):
        # An answer that is z cells above S is z − by above the neighbour's.
        a = wide[one][by:] * totals[other]
        b = wide[other][: len(wide[other]) - by] * totals[one]
        if bool((a * least > (b << _BITS)).any()) or bool((b * least > (a << _BITS)).any()):
            raise ConfigurationError(
                f"a record that moves the sum by {by} of {CELLS} cells can be told by more than epsilon (rows {one} and {other}): "
                "this table is not private."
            )


def _drawn(row: list[int], epsilon: Fraction, stream: Stream) -> int:
    """A cell of p_E, from the middle; exact."""
    fall, half = _fall(epsilon), len(row) // 2
    (total,) = _totals([row], fall)
    place = stream.below(total)
    for number, weight in enumerate(row):
        place -= weight * (_SCALE - fall)
        if place < 0:
            return number - half
    further = 1
    while stream.below(_SCALE) < fall:
        further += 1
    return half + further if place < row[-1] * fall else -half - further


# --- the programme ----------------------------------------------------------------------------------------------------------


def fits(problem: Problem) -> bool:
    """Whether a table can be made, and noise does not cover the range."""
    return _LEAST <= problem.epsilon <= _MOST and problem.n * problem.epsilon >= 10 and problem.loss == "squared"


def counted(t: Tensor) -> Tensor:
    """How many records of unit datasets (batch, n) lie beyond each cut, (batch, ways): those of :data:`WAYS`, in order."""
    return torch.stack([(places(t if high else 1 - t, PLACES) > cut * _CELL).sum(1) for cut, high in WAYS], 1)


def candidate(problem: Problem, means: Tensor, counts: Tensor, robustness: float) -> BeyondMechanism | None:
    """The mechanism for datasets of these means that have so many records beyond each cut (those believed in), or none.

    Of the ends, the upper one, unless clearly more datasets are clear of the lower one (many columns begin at a natural zero, and
    upper bounds are rounded up); there, the lowest cut that nearly as many are clear of as of the highest.
    """
    if not fits(problem):
        return None
    rows = math.ceil(_ROWS / problem.epsilon) + 1
    clear = (counts <= 1 / problem.epsilon).to(torch.float64).mean(0).tolist()
    above, below = (clear[WAYS.index((_CUTS[-1], end))] for end in (True, False))
    high = below - above <= 2 * math.sqrt((above + below) / len(counts))
    of_cut = {cut: clear[WAYS.index((cut, high))] for cut in _CUTS}
    cut = min(cut for cut in _CUTS if of_cut[cut] >= _NEARLY * of_cut[_CUTS[-1]])
    own = counts[:, WAYS.index((cut, high))].clamp(max=rows - 1)
    spots = _spots(problem)
    near = _stretched(problem, problem.n * (means if high else 1 - means))[:, None] - _stretched(problem, spots)
    place = own * len(spots) + near.abs().argmin(1)
    chances = torch.bincount(place, minlength=rows * len(spots)).reshape(rows, -1).to(torch.float64) / len(own)
    table = fitted(problem.epsilon, cut, tuple(map(tuple, chances.tolist())), tuple(spots.tolist()), problem.n, 1 + robustness)
    if table is None:
        return None
    try:
        return BeyondMechanism.of(problem, cut, high, table)
    except ConfigurationError:  # the programme's tolerance was too large for this one
        return None


def _spots(problem: Problem) -> Tensor:
    """T where losses are looked at: near to its ends, where limiting answers counts, and in the middle."""
    near = torch.tensor(_ENDS, dtype=torch.float64) / problem.epsilon
    near = near[near < 0.45 * problem.n]
    return torch.cat([near, near.new_tensor([problem.n / 2]), (problem.n - near).flip(0)])


def _stretched(problem: Problem, total: Tensor) -> Tensor:
    """Distances from either end, as far as they count."""
    far = 1.4 * _ENDS[-1] / problem.epsilon
    return total.clamp(max=far) - (problem.n - total).clamp(max=far)


def grid(mechanism: BeyondMechanism) -> tuple[Tensor, Tensor]:
    """(T, E) of datasets, close enough for a loss that is smooth in T and changes only near to its ends."""
    n, rows, b = mechanism.problem.n, mechanism.table.shape[0], mechanism.cut / CELLS
    near = torch.linspace(0, 12 / mechanism.epsilon, 97, dtype=torch.float64)
    totals = torch.cat([near, n - near, torch.linspace(0, n, 33, dtype=torch.float64)]).clamp(0, n)
    total, beyond = totals.repeat_interleave(rows), torch.arange(rows).repeat(len(totals))
    most = torch.where(beyond == rows - 1, float(n), beyond + (n - beyond) * b)
    there = (beyond <= n) & (total >= beyond * b) & (total <= most)
    return total[there], beyond[there]


@lru_cache(maxsize=32)
def fitted(
    epsilon: float, cut: int, belief: tuple[tuple[float, ...], ...], spots: tuple[float, ...], n: int, most: float
) -> Tensor | None:
    """The table of least expected ratio to plain noise, with no ratio above ``most``; or none.

    Unknown are p_E(z)·e^(ε|z|), all of a size, which the programme's tolerance is for.

    Args:
        epsilon: ε.
        cut: b, in cells.
        belief: the chance of each row and spot, (rows, spots).
        spots: of T, where losses are looked at.
        n: the number of records.
        most: 1 + τ.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    half, rows = math.ceil(_REACH / epsilon) * CELLS, len(belief)
    own = epsilon * (1 - _SPARE)
    places = np.arange(-half - CELLS, half + CELLS + 1)  # with the first cells of the tails
    size, inner = len(places), slice(CELLS, -CELLS)
    tail = math.exp(-own / CELLS)
    scale = np.exp(-own * np.abs(places.clip(-half, half)) / CELLS) * tail ** (np.abs(places) - half).clip(min=0)
    column = places.clip(-half, half) + half  # of the unknown that a place is a multiple of
    count = 2 * half + 1
    found: list[Any] = []

    def compare(one: int, other: int, by: int, log: float) -> None:
        a, b = np.arange(by, size), np.arange(size - by)
        for (first, x), (second, y) in (((one, a), (other, b)), ((other, b), (one, a))):
            numbers, ones = np.arange(len(x)), np.ones(len(x))
            values = np.concatenate([ones, -math.exp(log) * scale[y] / scale[x]])
            where = np.concatenate([first * count + column[x], second * count + column[y]])
            found.append(sparse.csr_matrix((values, (np.tile(numbers, 2), where)), shape=(len(x), rows * count)))

    for one, other, by in moves_of(cut, rows):
        if epsilon >= _SMOOTH or (one != other and by in (0, 1, CELLS - 1, CELLS)):
            compare(one, other, by, own)
        elif one == other and by == 1:
            compare(one, other, by, own / (CELLS if one == rows - 1 else max(cut, CELLS - cut)))

    weight = scale[inner].copy()
    weight[[0, -1]] *= 1 / (1 - tail)  # the tails' chance; their squares are a little more, and nothing
    cost, limits, risks = np.zeros((rows, count)), [], []
    for place, total in enumerate(spots):
        squares, plain = _limited(places[inner] / CELLS, total, n), _plain_loss(epsilon, total, n)
        for row in range(rows):
            cost[row] += belief[row][place] / plain * squares * weight
            if row * cut / CELLS <= total <= (n if row == rows - 1 else row + (n - row) * cut / CELLS):
                where = row * count + np.arange(count)
                risks.append(sparse.csr_matrix((squares * weight, (np.zeros(count, dtype=int), where)), shape=(1, rows * count)))
                limits.append(most * (1 - _SPARE) * plain)
    made = linprog(
        cost.reshape(-1),
        A_ub=sparse.vstack([*found, *risks]),
        b_ub=np.concatenate([np.zeros(sum(part.shape[0] for part in found)), np.array(limits)]),
        A_eq=sparse.kron(sparse.identity(rows), weight[None]),
        b_eq=np.ones(rows),
        method="highs-ipm",
    )
    if made.x is None or made.status != 0:
        return None
    whole: Tensor = torch.as_tensor(np.rint(made.x.reshape(rows, count) * scale[inner] * 2.0**54).astype(np.int64))
    return whole


def _limited(z: Floats, total: float, n: int) -> Floats:
    """Squares of what is off at this T where answers are limited to the range: averaged over a cell."""
    inner = (np.arange(_FINER) + 0.5) / _FINER - 0.5
    made: Floats = ((z[:, None] + inner / CELLS).clip(-total, n - total) ** 2).mean(1)
    return made


def _plain_loss(epsilon: float, total: float, n: int) -> float:
    """Of the better one of Laplace and staircase noise on T."""
    uniform = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    drawn = [draw_noise(kind, uniform, 1.0, epsilon) for kind in ("laplace", "staircase")]
    return min(float((z.clamp(-total, n - total) ** 2).mean()) for z in drawn)
