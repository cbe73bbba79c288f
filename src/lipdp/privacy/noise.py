"""Gaussian noise on a public grid, exact: what every release is made of.

**What is drawn.** For noise of standard deviation s, the grid has the spacing g = 2^(e−42) where 2^(e−1) ≤ s < 2^e, a power of two
of at most s·2⁻⁴¹. A sum S is rounded to it, K = round(S/g), and what is released is (K + N + ½)·g with N = ⌊X⌋, X a *continuous*
Gaussian of standard deviation r = s/g. As K is whole, K + ⌊X⌋ = ⌊K + X⌋: the release is a function of K·g plus real Gaussian noise
of std s. It is the Gaussian mechanism and post-processing, so whatever is proved of that one (for vectors, with sampling, composed)
holds as it is. The ½ makes its mean S. Of the exact sum K + N + ½ the nearest float64 is released; more post-processing.

**How.** |X| is in bin k, [kW, (k+1)W) with W = 2³⁶ grid steps, 1/64 to 1/32 of r. Under the curve φ(x) = exp(−x²/2r²) lie a
rectangle of height φ((k+1)W) and, above it, a part of the box up to φ(kW). Of a 64-bit word, the upper bit is the sign, 27 bits
choose among all rectangles and boxes by their areas, and 36 are the place inside the bin. In a rectangle (98 times of 100) that is
all. Where 27 bits do not decide, or say "box", another word is read: 24 bits for the choice, 40 for the height V in the box; and
where these do not decide, which hardly ever happens, a block of further bits that makes it 128 of each. A point above the curve is
thrown away, and all begins anew with other words. The point is under the curve if 1 − exp(−t) < V·(1 − exp(−T)), where t = h·v(2k
+ v), v ∈ [0, 1) is the place from the side of 0, T = h·(2k + 1), h = W²/2r². Negative X is in bin −1−k = ~k, whose places run the
other way: N = ~k·W + y.

**How exact.** Given uniform bits, the law of N is within 2⁻¹¹⁰ (total variation) of the one above: bins end at 13 standard
deviations (2⁻¹²⁶ beyond), areas are rounded to 2⁻¹²⁸ (1,664 of them at most), and heights are compared with an error below 2⁻¹¹⁵.
Floating point decides only where its error can't matter; what is closer is decided in whole numbers of 128 bits, and on CUDA
everything is. So the two give the same numbers for the same key.
"""

from __future__ import annotations

import bisect
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from lipdp.errors import ConfigurationError
from lipdp.privacy.randomness import chacha_bytes, chacha_words, exp_of_minus, fill_with_chacha

DISTANCE = 2.0**-110
"""Total variation between the noise of one value and exact noise is below this, given uniform bits."""
GRID_LOSS = 2.0**-41
"""g/s is at most this."""
DRAWABLE = 2.0**-900, 2.0**900
"""The least and the largest standard deviation of noise. Beyond, the grid leaves float64: 1/g would be infinite, every sum but 0 be
brought to the end of the numbers, and noise be nothing beside it."""

PLACE = 36  # bits of a place inside a bin
_STEPS = 42  # log2 of the least power of two above r
_CHOICE = 27  # bits of a word that choose the bin
_REACH = 13  # standard deviations that the bins cover
CELLS = 18  # bits of a word (the sign and the upper part of the choice) that are looked up
SLOW = -(2**15)  # in place of a bin: more bits are needed
_FINE = 256  # bits of the table's own arithmetic
_ONE = 1 << 128
TERMS = 26  # of the exponential series: 0.43^27/27! < 2^-126
_CHUNK = 1 << 17  # values drawn at a time
_PIECE = 1 << 15  # values whose words stay in a processor's cache
_IN_BIN = (1 << PLACE) - 1
_UPPER = (1 << 64) - (1 << (64 - _CHOICE))
_FLOAT_52 = 0x433 << 52  # the bits of 2^52
# What the bits that were not read can move a height by, as a part of its box (2^-40 of V, at most 2·2^-36 of the place), and an
# eighth of this the rounding of floating point.
_SURE, _ROUNDING = 2.0**-34, 2.0**-46

Ints = npt.NDArray[np.int64]
Wide = npt.NDArray[np.uint64]
Floats = npt.NDArray[np.float64]
Segment = tuple[Sequence[torch.Tensor], float, torch.dtype]
"""Sums that get noise of one std and are released in one type: as one long vector."""
_LONGEST = 2**30  # values of a draw: its places are numbered with 32 bits


def grid(std: float) -> float:
    """g, the spacing of what is released with noise of this standard deviation: a power of two, at most 2⁻⁴¹ of it."""
    if not DRAWABLE[0] <= std <= DRAWABLE[1]:
        raise ConfigurationError(
            f"noise of standard deviation {std:g} can't be drawn: its grid leaves float64 (it has to be {DRAWABLE[0]:.0e} to "
            f"{DRAWABLE[1]:.0e}). Count what is released in larger or smaller units."
        )
    return math.ldexp(1.0, math.frexp(std)[1] - _STEPS)


def grid_factor(multiplier: float, size: int) -> float:
    """By how much noise has to grow, for a release of ``size`` numbers at this noise multiplier: rounding sums to the grid.

    Rounding moves each number of two neighbours' sums by g/2 at most, so their distance by g_d·√p_d in group d, and in units of the
    noise, over all groups, by √(Σ p_d·g_d²/s_d²) ≤ 2⁻⁴¹·√p. Noise that is larger by a factor f brings 1/σ down to 1/(σf): both
    together stay at 1/σ for f = 1/(1 − σ·2⁻⁴¹·√p). Sums that come from several processes are rounded to a much finer grid before
    (:mod:`lipdp.training.query`), by 2⁻²³·g: the last factor.
    """
    lost = multiplier * GRID_LOSS * math.sqrt(size) * (1 + 2.0**-22)
    return 1 / (1 - lost) if lost < 1 else math.inf


@dataclass(frozen=True)
class Table:
    """Bins for noise of one mantissa: std = mantissa·2^(e−53). All areas are parts of 2¹²⁸.

    Attributes:
        bins: K.
        half_square: h·2¹²⁸.
        ends: where the area of each choice ends: K rectangles, then K boxes but the last.
        heights: (1 − exp(−T_k))·2¹²⁸.
        cells: of the upper 18 bits of a word, the bin (complemented for the negative side) whose rectangle they choose; SLOW where
            they choose none.
        upper_ends: the upper halves of ``ends``.
        float_heights: ``heights`` as parts of 1, nearly.
    """

    bins: int
    half_square: int
    ends: tuple[int, ...]
    heights: tuple[int, ...]
    cells: npt.NDArray[np.int16]
    upper_ends: Wide
    float_heights: Floats


def mantissa_of(std: float) -> int:
    """That of a standard deviation, 2^52 to 2^53 − 1: all that its table depends on."""
    return int(math.ldexp(math.frexp(std)[0], 53))


@lru_cache(maxsize=64)
def table(mantissa: int) -> Table:
    """The bins for standard deviations of this mantissa."""
    # W/r = 2^36/(m·2^42) with m = mantissa/2^53, so h = (W/r)²/2 = 2^(106-13)/mantissa².
    square = mantissa * mantissa
    bins = -(-_REACH * mantissa >> 47)  # 13·r/W = 13·64·m, rounded up
    step = exp_of_minus(Fraction(1 << 93, square), _FINE)  # exp(-h)
    ratio, twice = step, step * step >> _FINE
    areas, ratios = [1 << _FINE], []
    for _ in range(bins):  # φ_{k+1} = φ_k·exp(-(2k+1)h)
        ratios.append(ratio)
        areas.append(areas[-1] * ratio >> _FINE)
        ratio = ratio * twice >> _FINE
    total = sum(areas[:-1])
    rectangles = list(itertools.accumulate(areas[1:]))
    boxes = [rectangles[-1] + (1 << _FINE) - area for area in areas[1:-1]]
    ends = tuple((end << 128) // total for end in (*rectangles, *boxes))
    heights = tuple(((1 << _FINE) - ratio) >> (_FINE - 128) for ratio in ratios)
    return Table(
        bins,
        (1 << (128 + 93)) // square,
        ends,
        heights,
        cells_of(ends[:bins], CELLS),
        np.array([end >> 64 for end in ends], dtype=np.uint64),
        np.array([height / _ONE for height in heights]),
    )


def cells_of(ends: tuple[int, ...], bits: int) -> npt.NDArray[np.int16]:
    """What the upper bits of a word say: its sign, and in which of the 2^(bits−1) cells of equal area the choice lies."""
    last = np.array([end >> (129 - bits) for end in ends])  # where each rectangle ends: undecided
    cells = np.full(1 << (bits - 1), SLOW, dtype=np.int16)
    cells[: last[-1]] = np.repeat(np.arange(len(ends), dtype=np.int16), np.diff(last, prepend=0))
    cells[last] = SLOW
    return np.concatenate([cells, np.where(cells == SLOW, SLOW, ~cells).astype(np.int16)])


def pieces_of(tensors: Sequence[torch.Tensor], std: float, dtype: torch.dtype) -> Sequence[torch.Tensor]:
    """The vector of a segment, in pieces that are one draw each."""
    flat = [tensor.reshape(-1).to(dtype) for tensor in tensors]
    return torch.split(flat[0] if len(flat) == 1 else torch.cat(flat), _LONGEST)


def noised_on_processor(sums: Any, std: float, key: bytes, segment: int = 0, place: Any = None) -> Any:
    """(round(S/g) + N + ½)·g for each sum, N drawn from ``key``; what is not a number counts as 0.

    Sums are an array of float64, or of float32, whose releases are those of float64 rounded once more. They come into ``place``,
    which may be the sums' own memory: where they are many, making new memory takes longer than drawing.
    """
    released = np.empty_like(sums) if place is None else place
    spacing, bins = grid(std), table(mantissa_of(std))

    def work(starts: Sequence[int]) -> None:
        scratch, thrown, sums_again = _kept.scratch, [], []
        for start in starts:
            given = sums[start : start + _CHUNK]
            drawn, again = _drawn(bins, key, start, len(given), segment, scratch)
            thrown.append(again)
            sums_again.append(given[again - start])
            for first in range(0, len(given), _PIECE):
                part = slice(first, first + _PIECE)
                _release(given[part], drawn[part], spacing, released[start : start + _CHUNK][part], scratch)
        places = np.concatenate(thrown)
        again = np.empty(len(places), dtype=released.dtype)
        _release(
            np.concatenate(sums_again), _drawn_anew(bins, key, places, segment), spacing, again, _Scratch(len(places), len(places))
        )
        released[places] = again

    starts = range(0, len(sums), _CHUNK)
    threads = min(torch.get_num_threads(), len(starts))
    if threads > 1:
        with ThreadPoolExecutor(threads) as workers:
            list(workers.map(work, [starts[number::threads] for number in range(threads)]))
    elif len(sums):
        work(starts)
    return released


class _Scratch:
    """Memory to draw in, ``piece`` values at a time of ``count``."""

    def __init__(self, count: int, piece: int) -> None:
        self.words, self.index = np.empty(piece, dtype="<u8"), np.empty(piece, dtype=np.int64)
        self.chosen, self.undecided = np.empty(piece, dtype=np.int16), np.empty(piece, dtype=np.bool_)
        self.steps, self.bins = np.empty(piece), np.empty(piece)
        self.drawn = np.empty(count)


class _Kept(threading.local):
    """One for each thread, kept: new pages cost more than the arithmetic on them."""

    def __init__(self) -> None:
        self.scratch = _Scratch(_CHUNK, _PIECE)


_kept = _Kept()


def _release(sums: Any, drawn: Floats, spacing: float, released: Any, scratch: _Scratch) -> None:
    """(round(S/g) + N + ½)·g. The division is exact, for g is a power of two, and so is N + ½: only their sum is rounded."""
    steps = scratch.steps[: len(sums)]
    steps[:] = sums
    with np.errstate(over="ignore", invalid="ignore"):
        steps *= 1 / spacing
        if not math.isfinite(steps.sum()):
            np.nan_to_num(steps, copy=False, nan=0.0, posinf=math.inf, neginf=-math.inf)
            np.clip(steps, -most_steps(spacing), most_steps(spacing), out=steps)
        np.rint(steps, out=steps)
        steps += drawn
        steps *= spacing
        released[:] = steps


def most_steps(spacing: float) -> float:
    """Sums beyond this are brought back to it: close to where float64 ends."""
    return 2.0**1000 / max(1.0, spacing)


def whole_noise(bins: Table, key: bytes, start: int, count: int, segment: int = 0) -> Ints:
    """N at the places start, …, start + count − 1 of a segment; ``start`` is a multiple of 8."""
    drawn, thrown = _drawn(bins, key, start, count, segment, _Scratch(count, _PIECE))
    drawn[thrown - start] = _drawn_anew(bins, key, thrown, segment)
    return np.floor(drawn).astype(np.int64)


def _drawn(bins: Table, key: bytes, start: int, count: int, segment: int, scratch: _Scratch) -> tuple[Floats, Ints]:
    """N + ½ at the places from ``start`` on (exact: |N| < 2⁴⁷, and a float64 has 53 bits), and the places to be drawn anew."""
    drawn, left, undecided = scratch.drawn[:count], [], []
    for first in range(0, count, _PIECE):
        words = scratch.words[: min(_PIECE, count - first)]
        fill_with_chacha(words.data.cast("B"), key, (start + first) // 8, (0, segment, 0))
        slow = _look_up(bins, words, drawn[first : first + _PIECE], scratch)
        left.append(slow + first)
        undecided.append(words[slow])
    places = np.concatenate(left)
    drawn[places], fine = _settled_at(bins, key, places + start, np.concatenate(undecided), segment, 0)
    return drawn, places[~fine] + start


def _drawn_anew(bins: Table, key: bytes, places: Ints, segment: int) -> Floats:
    """N + ½ where the first point was above the curve, from the words of the second attempt on."""
    drawn, left, attempt = np.empty(len(places)), np.arange(len(places)), 1
    while len(left):
        words = chacha_words(key, places[left], (0, segment, attempt))
        found = np.empty(len(left))
        slow = _look_up(bins, words, found, _Scratch(len(left), len(left)))
        drawn[left] = found
        left = left[slow]
        drawn[left], fine = _settled_at(bins, key, places[left], words[slow], segment, attempt)
        left, attempt = left[~fine], attempt + 1
    return drawn


def _settled_at(
    bins: Table, key: bytes, places: Ints, words: Wide, segment: int, attempt: int
) -> tuple[Floats, npt.NDArray[np.bool_]]:
    """N + ½ where a first word did not decide, and whether the point is under the curve."""
    more = chacha_words(key, places, (1, segment, attempt))
    chosen, fine = _settled(bins, words, more, lambda row: _rest(key, int(places[row]), segment, attempt))
    drawn: Floats = ((chosen << PLACE) | (words.view(np.int64) & _IN_BIN)).astype(np.float64)
    return drawn + 0.5, fine


def _look_up(bins: Table, words: Wide, drawn: Floats, scratch: _Scratch) -> Ints:
    """Where a word alone does not decide; N + ½ for all the others.

    The place, 36 bits, becomes a float by being put below the exponent of 2⁵²; from that, 2⁵² − ½ is taken off, exactly.
    """
    size = len(words)
    index, chosen = scratch.index[:size], scratch.chosen[:size]
    np.right_shift(words, np.uint64(64 - CELLS), out=index.view(np.uint64))
    bins.cells.take(index, out=chosen, mode="clip")
    np.bitwise_and(words, np.uint64(_IN_BIN), out=index.view(np.uint64))
    np.bitwise_or(index, _FLOAT_52, out=index)
    np.subtract(index.view(np.float64), 2.0**52 - 0.5, out=drawn)
    drawn += np.multiply(chosen, 2.0**PLACE, out=scratch.bins[:size], dtype=np.float64)
    return np.flatnonzero(np.equal(chosen, SLOW, out=scratch.undecided[:size]))


Rest = Callable[[int], tuple[int, int, int]]


def _rest(key: bytes, place: int, segment: int, attempt: int) -> tuple[int, int, int]:
    """The last bits of the choice (77), of the place in the bin (92) and of the height (88)."""
    block = chacha_bytes(key, 36, counter=place, nonce=(2, segment, attempt))
    choice, inside, height = (int.from_bytes(block[at : at + 12], "little") for at in (0, 12, 24))
    return choice >> 19, inside >> 4, height >> 8


def _settled(bins: Table, words: Wide, more: Wide, rest: Rest) -> tuple[Ints, npt.NDArray[np.bool_]]:
    """The bin that is chosen (complemented where the sign is set), and whether the point is under the curve.

    By 51 bits of the choice, 36 of the place and 40 of the height, in floating point; where they do not decide, by all bits.
    """
    lowest = (words << np.uint64(1)) & np.uint64(_UPPER) | (more >> np.uint64(40) << np.uint64(13))
    choice = np.searchsorted(bins.upper_ends, lowest, side="left").astype(np.int64)
    unsure = bins.upper_ends.take(choice, mode="clip") <= lowest | np.uint64((1 << 13) - 1)
    unsure &= choice < len(bins.upper_ends)  # beyond the last end there is the last box alone
    boxed = choice >= bins.bins
    chosen = np.where(boxed, choice - bins.bins, choice)
    sign = words.view(np.int64) >> 63
    place = (words.view(np.int64) ^ sign) & _IN_BIN  # counted from 0 on either side
    v = place * 2.0**-PLACE
    left = -np.expm1(-(bins.half_square / _ONE) * v * (2 * chosen + v))
    height = bins.float_heights[chosen]
    right = (more & np.uint64((1 << 40) - 1)) * 2.0**-40 * height
    fine = ~boxed | (left < right)
    unsure |= boxed & (np.abs(left - right) < _SURE * height + _ROUNDING)
    for row in np.flatnonzero(unsure).tolist():
        chosen[row], fine[row] = _exactly(
            bins, int(lowest[row]) >> 13, int(place[row]), int(more[row]) & ((1 << 40) - 1), rest(row)
        )
    return chosen ^ sign, fine


def _exactly(bins: Table, choice: int, place: int, height: int, rest: tuple[int, int, int]) -> tuple[int, bool]:
    """The bin, and whether the point is under the curve, from all 128 bits of each."""
    chosen = bisect.bisect_right(bins.ends, choice << 77 | rest[0])
    if chosen < bins.bins:
        return chosen, True
    chosen -= bins.bins
    return chosen, is_under(bins.half_square, bins.heights[chosen], chosen, place << 92 | rest[1], height << 88 | rest[2])


def is_under(half_square: int, height: int, chosen: int, place: int, drawn: int) -> bool:
    """1 − exp(−h·v(2k + v)) < V·(1 − exp(−T)), all of them parts of 2¹²⁸; off by less than 2⁻¹¹⁵. CUDA does the same to the bit."""
    scaled = place * half_square >> 128
    t = scaled * 2 * chosen + (scaled * place >> 128)
    inner = SERIES[-1]
    for coefficient in reversed(SERIES[:-1]):  # 1/2! − t·(1/3! − t·(1/4! − …))
        inner = coefficient - (t * inner >> 128)
    return t - (t * (t * inner >> 128) >> 128) < height * drawn >> 128


SERIES = tuple(_ONE // math.factorial(n) for n in range(2, TERMS + 1))
