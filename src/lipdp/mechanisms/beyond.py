"""A mean whose noise knows how many records lie beyond a cut.

Replacing a record of [0, 1] moves the sum T by 1 only if one of the two, old or new, lies beyond the cut b: below it, records move
T by b at most. Noise on the query is for 1 everywhere. Here the answer's distribution depends on T and on E, how many records lie
beyond: P(answer = T + z) = p_E(z), one row of a table for each E = 0, …, J, the last one for all that are more. Where E = 0 noise
is small and lopsided (few records bring T further up, and many are needed to bring it down); where E is large it is about what plain
noise is. No ε is spent to find out which: one table is ε-DP as a whole.

**Privacy.** Records are whole numbers of 1/F, those up to b·F are *inside*. With U, a uniform number that is as good as public,
T + U is rounded down to cells of F/D, S. So, U being given, neighbours differ in one of three ways: both records inside, |ΔS| ≤ bD
and E is the same; both beyond, |ΔS| ≤ (1 − b)D and E is the same; one of either kind, 0 ≤ ΔS ≤ D where E grows by one. For each of
these moves, and each place z of the table, p_E(z) ≤ e^ε·p_E'(z − ΔS) is looked at in whole numbers whenever a mechanism is made or
read: there is no table that is not private. Beyond its ends a row falls by the factor ρ ≥ e^(−ε/D) for each cell, where ratios no
longer change, so that finitely many of them are all.

**Losses** depend on the data by T and E alone: those of all datasets are computed. The table is the solution of a linear programme:
least expected loss under a belief, at most 1 + τ times the loss of plain noise for every T and E.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Annotated, Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Array, Range, read
from lipdp.mechanisms.mechanism import Mechanism
from lipdp.mechanisms.noise import Sampler, check_sampler, draw_noise
from lipdp.mechanisms.problem import Problem
from lipdp.privacy.exact import exp_of_minus
from lipdp.privacy.randomness import Stream

__all__ = ["CELLS", "WAYS", "BeyondMechanism", "BeyondState", "candidate", "counted", "fitted", "grid", "places_of"]

Floats = npt.NDArray[np.float64]
CELLS = 5
"""D: cells of the table that a record spans."""
_CUTS, _HIGHEST = (3, 4), 4  # b, in cells: a lower one gains nothing, for records beyond it move the sum by more than b
WAYS = tuple((cut, high) for cut in _CUTS for high in (True, False))
"""Which records may be counted: beyond which cut, at which end."""
_PLACES = CELLS * 2**28  # F
_SCALE = 2**60  # ρ is a multiple of its inverse
_BITS = 256  # of e^−ε in the proof
_TOTAL = 2.0**56  # about the sum of a row
_REACH, _ROWS = 9.0, 3.6  # ÷ ε: how far the table reaches, in records, and how many rows it has
_LEAST, _MOST = 0.25, 3.0  # of ε: tables for less are large, and for more staircase noise has finer steps than cells
_SMOOTH = 0.6  # of ε: below, rows fall evenly, which is nearly as good; one comparison of neighbouring cells is for all moves
_SPARE = 1e-4  # of ε and of 1 + τ, for the tolerance of the programme
_FINER = 4  # points of a cell, for expectations
_QUANTILES = 1500  # of plain noise: as many as its losses are computed with elsewhere
_ENDS = (0.0, 0.5, 1.0, 2.0, 4.0)  # ÷ ε: sums that are so near to 0 or n that limiting answers to the range counts
Cut = Annotated[int, Range(least=1, most=CELLS)]
Rows = Annotated[Tensor, Array(2, torch.int64)]


@dataclass(frozen=True)
class BeyondMechanism(Mechanism):
    """The mean, by a table of chances for each number of records beyond a cut.

    Attributes:
        cut: b, in cells.
        high: records above b are counted; else those below 1 − b, everything mirrored.
        table: whole numbers in proportion to p_E(z), (rows, an odd number of cells).
    """

    cut: int
    high: bool
    table: Tensor
    kind: ClassVar[str] = "beyond"

    def __post_init__(self) -> None:
        """It answers means, and the table keeps what it promises."""
        if self.problem.query.kind != "mean":
            raise ConfigurationError(f"a table of records beyond a cut answers the mean, not the {self.problem.query.name}.")
        read(BeyondState, self._state(), "a mean by records beyond a cut")
        if self.table.shape[1] % 2 == 0 or self.table.shape[1] <= 2 * CELLS or int(self.table.min()) < 1:
            raise ConfigurationError("a table of chances has an odd number of cells, more than two records span, all above 0.")
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
        """p_E(z), (rows, cells), and z in records; with as many cells on either side again as a record spans twelve times ÷ ε."""
        weights, tail = self.table.numpy().astype(np.float64), math.exp(-self.epsilon / CELLS)
        more = math.ceil(12 * CELLS / self.epsilon)
        fall = tail ** np.arange(1, more + 1)
        made = np.concatenate([weights[:, :1] * fall[::-1], weights, weights[:, -1:] * fall], 1)
        half = made.shape[1] // 2
        return made / made.sum(1, keepdims=True), np.arange(-half, half + 1) / CELLS

    def seen(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """T (records) and E of unit datasets (batch, n), as they are told apart: mirrored where the low end is cut."""
        places = places_of(t if self.high else 1 - t)
        return places.to(torch.float64).sum(1) / _PLACES, (places > self.cut * (_PLACES // CELLS)).sum(1)

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        """See :meth:`Mechanism.losses`; by quadrature, no noise is drawn."""
        if self.problem.loss == "squared":
            return torch.cat([self.losses_of(*self.seen(part)) for part in torch.split(t, 64)])
        from lipdp.mechanisms.problem import response_loss

        total, beyond = self.seen(t)
        p, away = (torch.as_tensor(part) for part in self.chances)
        answers = ((total[:, None] + away) / self.problem.n).clamp(0, 1)
        answers = answers if self.high else 1 - answers
        costs = response_loss(self.problem.loss, t, self.problem.query(t), answers)
        return (costs * p[beyond.clamp(max=len(p) - 1)]).sum(1)

    def losses_of(self, total: Tensor, beyond: Tensor) -> Tensor:
        """The expected squared loss of every dataset of this sum and so many records beyond (unit scale), (batch,)."""
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

    def for_size(self, n: int) -> BeyondMechanism:
        """The same table: there is no n in it."""
        return replace(self, problem=self.problem.resized(n), report=self._resized_report(n))

    def check_sampler(self, sampler: Sampler) -> None:
        """See :func:`lipdp.mechanisms.noise.check_sampler`."""
        check_sampler(sampler, "table")

    def released(self, t: Tensor, stream: Stream) -> tuple[int, int]:
        """The released cell and U, of one unit dataset (1, n): each call spends ε."""
        places = places_of(t[0] if self.high else 1 - t[0])
        cell = _PLACES // CELLS
        beyond = min(int((places > self.cut * cell).sum()), self.table.shape[0] - 1)
        moved = stream.below(cell)
        return (int(places.sum()) + moved) // cell + _drawn(self.table[beyond].tolist(), self.problem.exact_epsilon, stream), moved

    def _respond(self, t: Tensor, sampler: Sampler) -> Tensor:
        check_sampler(sampler, "table")
        cell = _PLACES // CELLS
        place, moved = self.released(t, Stream())
        mean = float(Fraction(2 * (place * cell - moved) + cell - 1, 2 * _PLACES * self.problem.n))
        answer = min(max(mean, 0.0), 1.0)
        return torch.tensor(answer if self.high else 1 - answer, dtype=torch.float64)

    def _noised(self) -> str:
        return "the mean, with noise from a table for each number of records beyond a cut (every ratio checked)"

    def _state(self) -> dict[str, Any]:
        return {"cut": self.cut, "high": self.high, "table": self.table}


@dataclass(frozen=True)
class BeyondState:
    """A :class:`BeyondMechanism` in a file."""

    cut: Cut
    high: bool
    table: Rows

    def build(self, problem: Problem, title: str, report: dict[str, Any]) -> BeyondMechanism:
        """The mechanism; its constructor proves it anew."""
        return BeyondMechanism(problem, title, self.cut, self.high, self.table, report=report)


def places_of(t: Tensor) -> Tensor:
    """Records of the unit interval as whole numbers: record by record, so neighbours stay neighbours."""
    return (t.clamp(0, 1) * _PLACES).round().to(torch.int64)


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
    last = len(rows) - 1
    moves = [(row, row, by) for row in range(last) for by in range(1, max(cut, CELLS - cut) + 1)]
    moves += [(row, row + 1, by) for row in range(last) for by in range(CELLS + 1)]
    moves += [(last, last, by) for by in range(1, CELLS + 1)]
    for one, other, by in moves:
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
    """Whether a table can be made, and clipping answers to the range does not decide everything."""
    return _LEAST <= problem.epsilon <= _MOST and problem.n * problem.epsilon >= 10 and problem.loss == "squared"


def counted(t: Tensor) -> Tensor:
    """How many records of unit datasets (batch, n) lie beyond each cut, (batch, ways): those of :data:`WAYS`, in order."""
    made = [(places_of(t if high else 1 - t) > cut * (_PLACES // CELLS)).sum(1) for cut, high in WAYS]
    return torch.stack(made, 1)


def candidate(problem: Problem, counts: Tensor, robustness: float) -> BeyondMechanism | None:
    """The mechanism for datasets that have so many records beyond each cut (those believed in), or none.

    Of the ends, the one that more datasets are clear of; there, the lowest cut that three quarters of these are clear of too.
    """
    if not fits(problem):
        return None
    clear = (counts <= 1 / problem.epsilon).to(torch.float64).mean(0).tolist()
    high = clear[WAYS.index((_HIGHEST, True))] >= clear[WAYS.index((_HIGHEST, False))]
    of_cut = {cut: clear[WAYS.index((cut, high))] for cut in _CUTS}
    cut = min(cut for cut in _CUTS if of_cut[cut] >= 0.75 * of_cut[_HIGHEST])
    rows = math.ceil(_ROWS / problem.epsilon) + 1
    own = counts[:, WAYS.index((cut, high))].clamp(max=rows - 1)
    chances = torch.bincount(own, minlength=rows).to(torch.float64) / len(own)
    table = fitted(problem.epsilon, cut, tuple(chances.tolist()), 1 + robustness)
    if table is None:
        return None
    try:
        return BeyondMechanism.of(problem, cut, high, table)
    except ConfigurationError:  # the programme's tolerance was too large for this one
        return None


def grid(mechanism: BeyondMechanism) -> tuple[Tensor, Tensor]:
    """(T, E) of datasets, close enough for a loss that is smooth in T and changes only near to 0 and n."""
    n, rows = mechanism.problem.n, mechanism.table.shape[0]
    near = torch.linspace(0, 12 / mechanism.epsilon, 97, dtype=torch.float64)
    totals = torch.cat([near, n - near, torch.linspace(0, n, 33, dtype=torch.float64)]).clamp(0, n)
    total, beyond = totals.repeat_interleave(rows), torch.arange(rows).repeat(len(totals))
    b = mechanism.cut / CELLS
    most = torch.where(beyond == rows - 1, float(n), beyond + (n - beyond) * b)
    there = (beyond <= n) & (total >= beyond * b) & (total <= most)
    return total[there], beyond[there]


@lru_cache(maxsize=32)
def fitted(epsilon: float, cut: int, chances: tuple[float, ...], most: float) -> Tensor | None:
    """The table of least expected loss, Σ_E chance_E·loss_E, with no loss above ``most`` times that of plain noise; or none.

    Unknown are p_E(z)·e^(ε|z|), all of a size, which the programme's tolerance is for.
    """
    from scipy import sparse
    from scipy.optimize import linprog

    half, rows = math.ceil(_REACH / epsilon) * CELLS, len(chances)
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

    smooth = epsilon < _SMOOTH
    most_inside = max(cut, CELLS - cut)
    for row in range(rows):
        own_reach = most_inside if row < rows - 1 else CELLS
        for by in (1,) if smooth else range(1, own_reach + 1):
            compare(row, row, by, own / own_reach if smooth else own)
        if row < rows - 1:
            for by in (0, 1, CELLS - 1, CELLS) if smooth else range(CELLS + 1):
                compare(row, row + 1, by, own)

    z = places[inner] / CELLS
    weight = scale[inner].copy()
    weight[[0, -1]] *= 1 / (1 - tail)  # the tails' chance; their squares are a little more, and nothing
    plain = _plain_losses(epsilon)

    def loss(row: int, squares: Floats) -> Any:
        where = row * count + np.arange(count)
        return sparse.csr_matrix((squares * weight, (np.zeros(count, dtype=int), where)), shape=(1, rows * count))

    limits: list[float] = []
    risks: list[Any] = []
    even = z**2 + 1 / (12 * CELLS**2)
    for row in range(rows):
        risks.append(loss(row, even))
        limits.append(most * plain[-1])
        for near, least in zip(_ENDS, plain, strict=False):
            total = near / epsilon
            if total >= row * cut / CELLS:
                risks.append(loss(row, _limited(z, -total)))
                limits.append(most * least)
    for near, least in zip(_ENDS, plain, strict=False):
        risks.append(loss(rows - 1, _limited(-z, -near / epsilon)))
        limits.append(most * least)
    cost = np.concatenate([chance * even * weight for chance in chances])
    ones = sparse.kron(sparse.identity(rows), weight[None])
    made = linprog(
        cost,
        A_ub=sparse.vstack([*found, *risks]),
        b_ub=np.concatenate([np.zeros(sum(part.shape[0] for part in found)), np.array(limits) * (1 - _SPARE)]),
        A_eq=ones,
        b_eq=np.ones(rows),
        method="highs-ipm",
    )
    if made.x is None or made.status != 0:
        return None
    p = made.x.reshape(rows, count) * scale[inner]
    whole: Tensor = torch.as_tensor(np.rint(p * 2.0**54).astype(np.int64))
    return whole


def _limited(z: Floats, least: float) -> Floats:
    """Squares of what is off where answers are not below ``least``: averaged over a cell."""
    inner = (np.arange(_FINER) + 0.5) / _FINER - 0.5
    made: Floats = (np.maximum(z[:, None] + inner / CELLS, least) ** 2).mean(1)
    return made


def _plain_losses(epsilon: float) -> list[float]:
    """Of the better one of Laplace and staircase noise on a sum, so near to an end; last, far from it."""
    uniform = (torch.arange(_QUANTILES, dtype=torch.float64) + 0.5) / _QUANTILES
    drawn = [draw_noise(kind, uniform, 1.0, epsilon) for kind in ("laplace", "staircase")]
    return [min(float((z.clamp(min=-near / epsilon) ** 2).mean()) for z in drawn) for near in (*_ENDS, math.inf)]
