"""Convolutions of a few distributions with themselves, very many times, by Fourier transforms; with bounds on their rounding.

The argument is at the head of :mod:`lipdp.privacy._composed_losses`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from lipdp.privacy._step_losses import Array

__all__ = ["Convolved", "convolve", "fast_length"]

_UNIT = 2.0**-53
_CORE = 512  # grid steps on either side of the mean that are summed up by sines, at most
_SUMMED = 5_000_000  # terms of such sums, at most
_FEW = 64  # up to so many steps, transforms alone keep digits enough
_NOTHING = -50.0  # logarithm of a coefficient of a transform that is left out; counted


def fast_length(least: int) -> int:
    """A length, at least this, that transforms are fast at."""
    from scipy import fft

    return int(fft.next_fast_len(least, real=True))


class Convolved(NamedTuple):
    """A convolution modulo the length of ``masses``.

    Attributes:
        masses: the result.
        start: the place of its first entry.
        error: a bound on the norm of one part of its error (see the head of this file).
        numbers: of the coefficients of its transform that are not 0.
        errors: bounds on the other part, in these.
    """

    masses: Array
    start: int
    error: float
    numbers: npt.NDArray[np.int64]
    errors: Array

    def weighted(self, t: float, h: float) -> tuple[float, float]:
        """Bounds on what ``errors`` do to Σ_{ε < y ≤ Y} v(y)·e^{−ty}·(1 − e^{ε − y}): one in units of e^{−tε}, one of e^{−tY}.

        With z = e^{iω − th}, ω = 2πk/N, b = e^−h and y = ε + κ + jh, 0 < κ ≤ h, a coefficient adds up to
        Σ_j z^j·(1 − e^{−κ}b^j) = ((1 − e^{−κ}) + z(e^{−κ} − b))/((1 − z)(1 − zb)), whose numerator is at most 1 − b in size. What
        is missing beyond Y is z^J·(1/(1 − z) − e^{−κ}b^J/(1 − zb)): at most as much again and 1/|1 − zb|, in units of e^{−tY}.
        """
        turn = np.exp(-t * h + 2j * math.pi / len(self.masses) * self.numbers)
        again = np.abs(1 - turn * math.exp(-h))
        sums = -math.expm1(-h) / (np.abs(1 - turn) * again)
        each = 2 / len(self.masses) * self.errors
        return float(each @ sums), float(each @ (sums + 1 / again))


def convolve(weights: Sequence[Array], lowest: Sequence[int], counts: Sequence[int], size: int) -> Convolved:
    """The convolution of all weights, each with itself ``counts`` times, modulo ``size``."""
    from scipy import fft

    # Around its mean a weight's transform turns slowly: its angle keeps its digits when it is multiplied.
    middles = [round(float(weight @ np.arange(len(weight)))) for weight in weights]
    eta = 8 * _UNIT * math.log2(size + 2)
    whole = [fft.rfft(_placed(weight, middle, size)) for weight, middle in zip(weights, middles, strict=True)]
    slack = [eta * math.sqrt(size) * float(np.linalg.norm(weight)) for weight in weights]
    seen = np.flatnonzero(_log_size(whole, slack, counts) > _NOTHING)
    core = min(_CORE, _SUMMED // (2 * len(seen) * len(weights) + 1)) if sum(counts) >= _FEW else 0
    values, near, far = [], [], 0.0
    for weight, middle, n in zip(weights, middles, counts, strict=True):
        rest = weight.copy()
        first, last = max(0, middle - core), min(len(weight), middle + core + 1)
        rest[first:last] = 0.0
        value, angle = _summed(weight[first:last], first - middle, seen, size)
        value += fft.rfft(_placed(rest, middle, size))[seen] - rest.sum()
        values.append(value)
        # Of a logarithm, what 1 + s loses to cancellation counts against |c|; of a c that is nothing, against its root.
        cancelled = np.minimum(8 * _UNIT / np.maximum(np.abs(1 + value), 1e-9), 4 * math.sqrt(_UNIT))
        near.append(_UNIT * (40 * angle + 8 * np.abs(value) + 8 * float(rest.sum())) + cancelled * np.abs(value))
        far += n * eta * float(np.linalg.norm(rest))
    coefficients = [1 + value for value in values]
    share = sum(n * off / (np.abs(c) + off) for c, off, n in zip(coefficients, near, counts, strict=True))
    errors = np.exp(_log_size(coefficients, near, counts)) * share
    error = math.exp(min(far * math.sqrt(size), 700.0)) * far
    product = np.zeros(size // 2 + 1, dtype=np.complex128)
    product[seen] = np.exp(sum(n * _log1p(value) for value, n in zip(values, counts, strict=True)))
    result = fft.irfft(product, size)
    error += eta * float(np.linalg.norm(result)) + 2 * math.exp(_NOTHING)
    start = sum(n * (low + middle) for n, low, middle in zip(counts, lowest, middles, strict=True))
    return Convolved(result, start, error, seen, errors)


def _placed(weight: Array, middle: int, size: int) -> Array:
    """The weight with its middle at 0, around the end."""
    placed = np.zeros(size)
    placed[: len(weight) - middle] = weight[middle:]
    if middle:
        placed[-middle:] = weight[:middle]
    return placed


def _log_size(coefficients: Sequence[Any], offs: Sequence[Any], counts: Sequence[int]) -> Array:
    """log Π (|c_i| + off_i)^n_i: at least the size of what is meant."""
    total: Array = sum(n * np.log(np.abs(c) + off) for c, off, n in zip(coefficients, offs, counts, strict=True))
    return total


def _log1p(value: npt.NDArray[np.complex128]) -> npt.NDArray[np.complex128]:
    """log(1 + value), with the digits that a small value has."""
    # A coefficient that is 0 to all digits: 1e-16 is within what it may be off by.
    real = np.log1p(np.maximum(2 * value.real + value.real**2 + value.imag**2, -1 + 1e-16)) / 2
    result: npt.NDArray[np.complex128] = real + 1j * np.arctan2(value.imag, 1 + value.real)
    return result


def _summed(weight: Array, first: int, numbers: npt.NDArray[np.int64], size: int) -> tuple[npt.NDArray[np.complex128], Array]:
    """Σ_j w_j·(e^{−iθ_j} − 1), θ_j = 2πk·(first + j)/size, for each k of ``numbers``, as −2·sin²(θ/2) − i·sin θ; and Σ w|θ|."""
    value, angle = np.zeros(len(numbers), dtype=np.complex128), np.zeros(len(numbers))
    width = max(1, 2_000_000 // len(weight))
    for start in range(0, len(numbers), width):
        turned = numbers[start : start + width, None] * np.arange(first, first + len(weight))
        theta = ((turned + size // 2) % size - size // 2) * (2 * math.pi / size)
        part = slice(start, start + len(theta))
        angle[part] = np.minimum(np.abs(theta), 2.0) @ weight
        value[part] = -2 * np.sum(np.square(np.sin(theta / 2)) * weight, axis=1) - 1j * np.sum(np.sin(theta) * weight, axis=1)
    return value, angle
