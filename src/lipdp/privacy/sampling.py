"""Real sampling, as it is accounted for. By default Poisson: each record is in a step's sample independently with probability q.

Samples vary in size and may be empty, and an empty one is a step like any other: pure noise. Their size is private, so
sums are divided by the public constant q·N, never by it. The other schemes are those of :class:`~lipdp.privacy.Sampling`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lipdp._checks import rate, whole
from lipdp.errors import ConfigurationError
from lipdp.privacy.randomness import Stream, chacha_bytes, fill_with_chacha, fresh_seed
from lipdp.privacy.randomness import generator as seeded_stream
from lipdp.privacy.runs import Sampling

_PIECE = 1 << 18  # words drawn at a time: 1 MB
_BITS, _MORE = 32, 512  # of a coin, and further ones where the first do not decide
# From this many records on, and up to this rate, what is drawn are the gaps between the records of a sample.
_MANY, _RARE = 1 << 20, 1 / 16


def poisson_indices(size: int, sampling_rate: float, generator: Stream) -> Tensor:
    """The indices, ascending, of a Poisson sample of 0 … size−1: i is in when U_i < q, with independent uniforms U_i.

    A uniform has 32 bits, and 512 more where those do not tell it from q: each record's probability is q, the very number that is
    accounted for, to within 2⁻⁵⁴⁴ however small it is. Of very many records the gaps are drawn instead, one number for each record
    of the sample (:func:`_by_gaps`). The result (int64) is on the processor, and may be empty.

    Args:
        size: N, the number of records, 0 or more.
        sampling_rate: q, each record's probability; at 1 all are in.
        generator: a stream that nobody can predict; torch's generators are refused.
    """
    count, q = whole("size", size, least=0), rate(sampling_rate)
    key = _secret(generator).next_key("poisson", count, q)
    if q == 1:
        return torch.arange(count)
    if count >= _MANY and q <= _RARE:
        return torch.from_numpy(_by_gaps(count, q, key))
    below = math.floor(math.ldexp(q, _BITS))
    rest = math.floor((Fraction(q) * 2**_BITS - below) * 2**_MORE)
    words = np.empty(min(count, _PIECE), dtype="<u4")
    parts = [np.empty(0, dtype=np.int64)]
    for start in range(0, count, _PIECE):
        drawn = words[: min(_PIECE, count - start)]
        fill_with_chacha(drawn.data.cast("B"), key, start // 16, (0, 0, 0))
        inside = drawn < below
        if rest:
            _resolve(inside, drawn == below, rest, key, start)
        parts.append(np.flatnonzero(inside).astype(np.int64, copy=False) + start)
    return torch.from_numpy(np.concatenate(parts))


def _secret(generator: object) -> Stream:
    if not isinstance(generator, Stream):
        raise ConfigurationError(
            f"samples are drawn from a lipdp.privacy.Stream, not from a {type(generator).__name__}: who can predict the sample has "
            "no amplification to pay with. Use lipdp.privacy.Stream() (a fresh secret key) or lipdp.privacy.generator(seed, …)."
        )
    return generator


def sample_indices(size: int, sampling_rate: float, generator: Stream, sampling: Sampling) -> Tensor:
    """The indices, ascending, of a sample of 0 … size−1, drawn as ``sampling`` says. It is for datasets that it admits.

    Args:
        size: N, the number of records; at least the batch size where that is fixed.
        sampling_rate: q of Poisson sampling, before truncation; "fixed_size" has no use for it.
        generator: a stream that nobody can predict.
        sampling: the scheme, with the batch size that it needs.
    """
    if not isinstance(sampling, Sampling):
        raise ConfigurationError(f"sampling is {sampling!r}: a lipdp.privacy.Sampling, e.g. Sampling('fixed_size', 1000, 50).")
    if sampling.batch_size is None:
        return poisson_indices(size, sampling_rate, generator)
    if sampling.scheme == "fixed_size":
        return _subset(whole("size", size, least=sampling.batch_size), sampling.batch_size, _secret(generator))
    drawn = poisson_indices(size, sampling_rate, generator)
    return drawn if len(drawn) <= sampling.batch_size else drawn[_subset(len(drawn), sampling.batch_size, generator)]


def _subset(count: int, chosen: int, generator: Stream) -> Tensor:
    """``chosen`` of the numbers 0 … count−1, ascending, every such set as likely as any other: those of the smallest random words.

    Words have 128 bits: two equal ones, which alone would make it uneven, have a chance of count²·2⁻¹²⁹. Of very many numbers the
    first different ones of a sequence of uniform numbers are taken, which needs no word for the others.
    """
    if count >= _MANY and chosen <= _RARE * count:
        return torch.from_numpy(_different(count, chosen, generator))
    words = generator.words(4 * count).view(np.uint64).reshape(count, 2)
    order = np.lexsort((words[:, 1], words[:, 0]))[:chosen]
    return torch.from_numpy(np.sort(order))


def _resolve(inside: npt.NDArray[np.bool_], tied: npt.NDArray[np.bool_], rest: int, key: bytes, start: int) -> None:
    """Coins whose first bits are q's: by further ones, at a place of their own."""
    for row in np.flatnonzero(tied).tolist():
        more = chacha_bytes(key, _MORE // 8, counter=(start + row) % 2**32, nonce=(1, (start + row) // 2**32, 0))
        inside[row] = int.from_bytes(more, "little") < rest


def _different(count: int, chosen: int, generator: Stream) -> npt.NDArray[np.int64]:
    """The first ``chosen`` different ones of uniform numbers below ``count`` (by rejection, so exactly uniform), ascending.

    By symmetry every set of that size is as likely as any other.
    """
    mask, drawn = np.uint64((1 << (count - 1).bit_length()) - 1), np.empty(0, dtype=np.int64)
    while True:
        words = generator.words(4 * chosen + 64).view(np.uint64) & mask
        drawn = np.concatenate([drawn, words[words < np.uint64(count)].astype(np.int64)])
        numbers, first = np.unique(drawn, return_index=True)
        if len(numbers) >= chosen:
            return np.sort(numbers[np.argsort(first)[:chosen]])


def _by_gaps(count: int, q: float, key: bytes) -> npt.NDArray[np.int64]:
    """A Poisson sample of many records from as many random words as it has records.

    Before each of its records lie G others, independently, with P(G ≥ k) = (1−q)ᵏ: G = ⌊ln U/ln(1−q)⌋ for uniform U. In floating
    point x = ln U/ln(1−q) is off by less than t below (the 64 bits of U that were drawn stand for an interval of 2⁻⁶⁴; a float64 of
    it, the logarithm and the division round by a few 2⁻⁵³). Where x is closer than t to a whole number, 512 further bits of U are
    drawn and compared with (1−q)ᵏ in whole numbers: what that can't tell has a chance below 2⁻⁵⁰⁰.
    """
    rate_of_log = math.log1p(-q)
    positions, number, last = [], 0, -1
    while last < count:
        expected = max(0.0, (count - last) * q)
        words = np.empty(int(expected + 6 * math.sqrt(expected)) + 16, dtype="<u8")
        fill_with_chacha(words.data.cast("B"), key, number // 8, (2, 0, 0))
        uniform = (words.astype(np.float64) + 0.5) * 2.0**-64
        x = np.log(uniform) / rate_of_log
        gaps = np.floor(np.minimum(x, 2.0**62)).astype(np.int64)
        unsure = np.abs(x - np.rint(x)) <= (2.0**-50 + 2.0**-61 / uniform) / q + 2.0**-49 * x
        for row in np.flatnonzero(unsure & (x < 2.0 * count + 2)).tolist():
            gaps[row] = _exact_gap(int(words[row]), q, int(gaps[row]), key, number + row)
        gaps = np.minimum(gaps, count)  # beyond the end all are the same, and sums do not overflow
        places = last + np.cumsum(gaps + 1)
        positions.append(places[places < count])
        last, number = int(places[-1]), number + -(-len(words) // 8) * 8
    return np.concatenate(positions)


def _exact_gap(word: int, q: float, guess: int, key: bytes, number: int) -> int:
    """The k with (1−q)^(k+1) ≤ U < (1−q)^k, near ``guess``, from 576 bits of U."""
    more = chacha_bytes(key, _MORE // 8, counter=number % 2**32, nonce=(3, number // 2**32, 0))
    bits = 64 + _MORE
    u, fine = word << _MORE | int.from_bytes(more, "little"), bits + 192
    kept = (1 << fine) - math.floor(Fraction(q) * (1 << fine))  # 1−q

    def power(k: int) -> int:
        """(1−q)^k in units of 2^-576: rounded down at every multiplication, which its 192 further bits have room for."""
        result, base = 1 << fine, kept
        while k:
            if k & 1:
                result = result * base >> fine
            base, k = base * base >> fine, k >> 1
        return result >> (fine - bits)

    k = max(0, guess)
    while k > 0 and u >= power(k):
        k -= 1
    while u < power(k + 1):
        k += 1
    return k


@dataclass(frozen=True)
class PoissonSampler:
    """Poisson samples of a dataset of ``size`` records, one per step, each a function of a secret seed and the step.

    They are drawn on the CPU wherever the model is, so that a run resumed elsewhere samples the same records.

    Args:
        size: number of records.
        sampling_rate: q.
        seed: for repeatable samples, with ``reproducible=True``: whoever knows it knows the samples, so that what is trained with
            them is not private. By default it is drawn from the operating system.
        reproducible: that this is meant.
    """

    size: int
    sampling_rate: float
    seed: int | None = field(default=None, repr=False)
    reproducible: bool = False

    def __post_init__(self) -> None:
        whole("size", self.size, least=0)
        rate(self.sampling_rate)
        if self.seed is None:
            object.__setattr__(self, "seed", fresh_seed())
        elif not self.reproducible:
            raise ConfigurationError(
                "a sampler's seed is a secret that nobody can guess, so it is drawn from the operating system: leave seed out. For "
                "repeatable samples, which are not private, pass reproducible=True with it."
            )
        assert self.seed is not None
        whole("seed", self.seed, least=0)

    @property
    def expected_size(self) -> float:
        """q·N, the public constant that sums are divided by."""
        return self.sampling_rate * self.size

    def indices(self, step: int) -> Tensor:
        """The sample of this step (0, 1, …): the same at every call."""
        assert self.seed is not None
        return poisson_indices(self.size, self.sampling_rate, seeded_stream(self.seed, step, "sample"))
