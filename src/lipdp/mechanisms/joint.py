"""Several quantiles from one choice: the exponential mechanism on all rising tuples (Gillenwater, Joseph and Kulesza 2021).

Of a tuple o_1 ≤ … ≤ o_m let n_j be how many records lie between o_{j−1} and o_j, and t_j how many should: u(o) = −Σ_j min(|n_j −
t_j|, L), over all m + 1 gaps. Replacing a record moves two of the n_j by one, so u by at most 2, and P(o) ∝ exp(ε·u/4) is ε-DP.
Moving one o_j by a rank costs two gaps one each, exp(−ε/2): what a single quantile pays for all of ε. Where a record may be added
or removed, and the t_j are public, u moves by at most 1: exp(ε·u/2).

**Ties.** A place of the range is a decimal step of a millionth of it, and J ≥ 4n finer ones; each record stands at a finer one of
its place, drawn by itself (so neighbours stay neighbours). So ranks inside of an atom can be told apart, and an answer at the atom
is the atom.

**Drawing.** A tuple's weight depends on the ranks c_j = n_1 + … + n_j alone. H_j(c), the weight of all tuples of j whose last one
has c records below, follows from H_{j−1} by a sum over c' < c of H_{j−1}(c')·exp(−s·min(|c − c' − t_j|, L)), and where k of them
share a gap between records of length ℓ they weigh ℓᵏ/k!. Then a tuple is drawn from its end. Sums with geometric weights over a
window are two cumulative sums, so all of it takes O(n·m²), in floating point with sums and products of positive numbers only, none
below 10⁻³⁰⁰: every weight, and every chance, is right to a relative 2⁻⁵²·(2n + 200)·(m + 1), which is taken from ε (``_LOST``).
Choices among such weights are made in whole numbers.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Annotated

import numpy as np
import numpy.typing as npt
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.fields import Range, check_fields
from lipdp.mechanisms.problem import Lattice, Step, check_step, least_of
from lipdp.privacy.accounting import Adjacency
from lipdp.privacy.randomness import Stream

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_MOST_RECORDS = 2**26
_LOST = 16 * (2 * _MOST_RECORDS + 200) * 2.0**-52  # of ε, for each gap: see above, for both neighbours and their totals
_RANGE = 690.0  # −log of the least positive number that may come up
_DEEP, _SHALLOW = 40.0, 22.0  # s·L: gaps that are further off than L all count alike; and what it must not be below
_PIECE = 1024


def _trailing(values: Floats, length: int, slope: float) -> Floats:
    """Σ_{i < length} exp(−slope·i)·values[c − i] for each c, where slope·length is at most some 40: sums of positive numbers only.

    A window of this length covers the end of one block of as many numbers and the beginning of the next: two cumulative sums.
    """
    if length <= 0:
        return np.zeros_like(values)
    length = min(length, len(values))
    blocks = -(-len(values) // length)
    padded = np.zeros(blocks * length)
    padded[: len(values)] = values
    rows = padded.reshape(blocks, length)
    decay = np.exp(-slope * np.arange(length))
    own = decay * np.cumsum(rows / decay, axis=1)  # those of c's own block
    ends = np.cumsum((rows * decay[::-1])[:, ::-1], axis=1)[:, ::-1]  # Σ from here to the block's end, weighted from there
    before = np.zeros_like(own)
    before[1:, :-1] = ends[:-1, 1:] * (decay[:-1] * math.exp(-slope))
    total: Floats = (own + before).reshape(-1)[: len(values)]
    return total


def _moved(values: Floats, by: int) -> Floats:
    """values[c − by], zeros where there are none."""
    made = np.zeros_like(values)
    made[by:] = values[: max(len(values) - by, 0)]
    return made


@dataclass(frozen=True)
class Chain:
    """The weights of all tuples of candidates 0 … ``size`` − 1, for records at whole places and gaps that should hold ``targets``.

    Attributes:
        places: of the records, sorted, 0 … size.
        size: how many candidates there are.
        targets: of each of the m + 1 gaps.
        slope: s.
        limit: L, at least 1.
    """

    places: Ints
    size: int
    targets: tuple[int, ...]
    slope: float
    limit: int

    def kernel(self, off: Ints) -> Floats:
        """exp(−s·min(|off|, L))."""
        made: Floats = np.exp(-self.slope * np.minimum(np.abs(off), self.limit))
        return made

    @cached_property
    def lengths(self) -> Ints:
        """How many candidates have c records at or below them, for c = 0 … n."""
        return np.diff(np.concatenate([[0], self.places, [self.size]]))

    @cached_property
    def _counts(self) -> Ints:
        return np.arange(len(self.places) + 1)

    def _entered(self, weights: Floats, target: int) -> Floats:
        """Σ_{c' < c} weights[c']·kernel(c − c' − target)."""
        s, far = self.slope, self.limit
        least = math.exp(-s * far)
        total = least * _moved(np.cumsum(weights), max(target + far, 1))  # c − c' ≥ target + L
        if target:
            total += _moved(_trailing(weights, far, s), target)
            inner = min(target, far) - 1  # c − c' = target − i, for i = 1 … inner: a window that may begin below 0
            ahead = _trailing(np.concatenate([np.zeros(target - 1), weights])[::-1], inner, s)[::-1]
            total += math.exp(-s) * ahead[: len(weights)]
            total += least * _moved(_trailing(weights, target - far, 0.0), 1)
        else:
            total += math.exp(-s) * _moved(_trailing(weights, far - 1, s), 1)
        return total

    @cached_property
    def _messages(self) -> tuple[list[Floats], list[Floats]]:
        """The weight of what comes before a run of quantiles that begins with j in the gap c; and H_j (index j − 1)."""
        m = len(self.targets) - 1
        entered = [self.kernel(self._counts - self.targets[0])]
        held = [np.zeros(len(self._counts)) for _ in range(m)]
        for j in range(m):
            if j:
                entered.append(self._entered(held[j - 1], self.targets[j]))
            for run in range(1, m - j + 1):
                held[j + run - 1] += entered[j] * self._run(j, run)
        return entered, held

    def _run(self, first: int, run: int) -> Floats:
        """The weight of ``run`` quantiles in one gap, the first being number ``first``: ℓᵏ/k!, and empty gaps between them."""
        empty = math.exp(-self.slope * sum(min(target, self.limit) for target in self.targets[first + 1 : first + run]))
        made: Floats = (self.lengths / self.size) ** run * (empty / math.factorial(run))
        return made

    @cached_property
    def _ends(self) -> Floats:
        """The weight of all tuples whose last one has c records below."""
        made: Floats = self._messages[1][-1] * self.kernel(self._counts[-1] - self._counts - self.targets[-1])
        return made

    @property
    def total(self) -> float:
        """Of all tuples, a single candidate weighing 1/size."""
        return float(self._ends.sum())

    def draw(self, stream: Stream) -> list[int]:
        """One tuple of candidates, rising."""
        entered, held = self._messages
        drawn: list[int] = []
        j, c = len(held), _choose(self._ends, stream)
        while True:
            runs = [float(entered[j - run][c] * self._run(j - run, run)[c]) for run in range(1, j + 1)]
            run = 1 + _choose(np.array(runs), stream)
            start, length = int(self.places[c - 1]) if c else 0, int(self.lengths[c])
            drawn += sorted((start + stream.below(length) for _ in range(run)), reverse=True)
            j -= run
            if not j:
                return drawn[::-1]
            before = self._counts[:c]
            c = _choose(held[j - 1][:c] * self.kernel(c - before - self.targets[j]), stream)


def _choose(weights: Floats, stream: Stream) -> int:
    """An index with a chance in proportion to its weight: pieces by their sums, then one of the piece, both in whole numbers."""
    starts = np.arange(0, len(weights), _PIECE)
    start = int(starts[_exactly(np.add.reduceat(weights, starts), stream)]) if len(starts) > 1 else 0
    return start + _exactly(weights[start : start + _PIECE], stream)


def _exactly(weights: Floats, stream: Stream) -> int:
    mantissas, powers = np.frexp(weights)
    least = int(powers[weights > 0].min())
    parts = zip((mantissas * 2.0**53).astype(np.int64).tolist(), powers.tolist(), strict=True)
    whole = [mantissa << (power - least) if mantissa else 0 for mantissa, power in parts]
    drawn = stream.below(sum(whole))
    for index, part in enumerate(whole):
        if drawn < part:
            return index
        drawn -= part
    raise AssertionError


@dataclass(frozen=True)
class JointQuantiles:
    """Quantiles of the given levels, rising, from one choice that costs ε: pure, see the module's text.

    Attributes:
        levels: of the quantiles, rising, from 0 to 1.
        epsilon: of one release.
        n: the number of records: public, or a public estimate where records may be added or removed.
        low: lower bound of every possible record.
        high: upper bound.
        adjacency: which datasets are neighbours.
        step: public, where every record is low, low + step, …: no other number is answered then.
    """

    levels: tuple[Annotated[Fraction, Range(least=0, most=1)], ...]
    epsilon: Annotated[float, Range(least=0.999e-3, most=1e10)]  # a share of 0.001, rounded down, is one
    n: Annotated[int, Range(least=1, most=_MOST_RECORDS)]
    low: Annotated[float, Range(least=-1e60, most=1e60)]
    high: Annotated[float, Range(least=-1e60, most=1e60)]
    adjacency: Adjacency = "replace_one"
    step: Step | None = None

    def __post_init__(self) -> None:
        check_fields(self, "joint quantiles")
        if not self.levels or any(b <= a for a, b in itertools.pairwise(self.levels)):
            raise ConfigurationError(f"levels is {[float(p) for p in self.levels]}: one or more, different and rising.")
        if not self.high - self.low >= 1e-60:
            raise ConfigurationError(f"bounds is ({self.low!r}, {self.high!r}): the lower one first, and 1e-60 apart at least")
        check_step(self.step, self.low, self.high)
        if self._depth < _SHALLOW:
            raise ConfigurationError(
                f"{len(self.levels)} quantiles of {self.n} records are too many for one choice: ask for fewer."
            )

    @cached_property
    def lattice(self) -> Lattice:
        """The places that can be answered."""
        if self.step is not None:
            return Lattice.of_steps(self.low, self.high, self.step)
        return Lattice.of(self.low, self.high)

    @cached_property
    def _finer(self) -> int:
        """J, a power of two."""
        return 1 << (4 * self.n - 1).bit_length()

    @cached_property
    def size(self) -> int:
        """Candidates in all."""
        return (self.lattice.last - self.lattice.first + 1) * self._finer

    @cached_property
    def _depth(self) -> float:
        """s·L: as deep as m gaps and m lengths of one candidate leave room for."""
        m = len(self.levels)
        return min(_DEEP, (_RANGE - m * math.log(self.size) - math.lgamma(m + 1)) / (m + 1))

    @cached_property
    def slope(self) -> float:
        """s, rounding paid for."""
        spent = float(least_of(self.epsilon)) - (len(self.levels) + 1) * _LOST
        return min(spent / (4 if self.adjacency == "replace_one" else 2), self._depth)

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """How many records should lie in each gap."""
        ranks = [0, *(round(p * self.n) for p in self.levels), self.n]
        return tuple(b - a for a, b in itertools.pairwise(ranks))

    def chain(self, x: Tensor, stream: Stream) -> Chain:
        """The weights for one dataset, (records,) in the user's units and inside the bounds; its ties are broken by chance."""
        own = self.lattice
        if len(x) > _MOST_RECORDS:
            raise ConfigurationError(f"there are {len(x)} records: joint quantiles are for {_MOST_RECORDS} at most.")
        inside = stream.words(len(x)).astype(np.int64) & (self._finer - 1)
        places = (own.places(x).numpy() - own.first) * self._finer + inside
        return Chain(np.sort(places), self.size, self.targets, self.slope, max(math.floor(self._depth / self.slope), 1))

    def respond(self, x: Tensor) -> list[float]:
        """One release, real randomness; nothing is charged here."""
        stream = Stream()
        drawn = self.chain(x, stream).draw(stream)
        own = self.lattice
        values = [own.value(own.first + place // self._finer) for place in drawn]
        return [min(max(value, self.low), self.high) for value in values]
