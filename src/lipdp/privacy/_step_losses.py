"""The privacy loss of one step on a grid, with digits that dp-accounting's own has not: a sampled Gaussian's.

It is the distribution that dp-accounting makes (pessimistic "connect the dots", Doroshenko et al. 2022): what lies between two
points of the grid is divided among them so that its mass under P and its mass under Q are both kept. dp-accounting takes these
parts as second differences of δ(ε), ÷ h: of numbers of size 1, whatever q and the place. Here they come from the masses of the
bins themselves, in the nearer tail, by a formula without the terms that cancel, so that errors are relative.

**Rounding only adds.** Each mass is raised by what it may have lost, and each division is shifted upwards by what it may be wrong
by. A larger loss, or more mass, makes δ(ε) = E[1 − e^{ε − L}]₊ larger, alone and composed. The points themselves belong to x to a
few units in the last place of a loss: :data:`MISPLACED` of (q + the largest loss) for each step, which is added to ε in the end.

Many steps are convolutions of a few such distributions with themselves, by Fourier transforms, with bounds on their rounding: see
:mod:`lipdp.privacy._composed_losses`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Neighbours = Literal["add_remove", "replace_one"]

_UNIT = float(np.finfo(np.float64).eps)
MISPLACED = 16 * _UNIT


@dataclass(frozen=True)
class SampledGaussian:
    """One step: Gaussian noise of multiplier ``sigma`` on the sum over a sample that holds a record with probability ``rate``.

    Attributes:
        sigma: noise std ÷ the bound on one record's part of the sum.
        rate: q.
        truncation: for samples cut to a largest size: (the probability p of a cut, given that the record was drawn; the
            probability c that it stays, then). The step is then P = (1 − p)·(as above) + p·(one record replaced by another with
            probability c, which moves the sum twice as far), see dp-accounting's ``TruncatedSubsampledGaussianDpEvent``.
    """

    sigma: float
    rate: float
    truncation: tuple[float, float] | None = None


class Masses(NamedTuple):
    """A distribution of losses on the grid: ``probabilities`` at (lowest, lowest + 1, …)·h, and the mass at infinity."""

    lowest: int
    probabilities: Array
    infinity: float


def deviation(step: SampledGaussian, neighbours: Neighbours) -> float:
    """About the standard deviation of the loss: √χ², or for little noise the loss of one that is sampled; a scale for grids."""
    power = ((1.0 if neighbours == "add_remove" else 2.0) / step.sigma) ** 2
    return math.sqrt(min(step.rate**2 * math.expm1(min(power, 30.0)), power + power**2 / 4))


def largest_loss(step: SampledGaussian, neighbours: Neighbours, log_tail: float) -> float:
    """The loss at which a tail of e^log_tail is left."""
    if step.truncation is not None:
        cut = SampledGaussian(step.sigma / 2, step.truncation[1])
        kept = largest_loss(SampledGaussian(step.sigma, step.rate), neighbours, log_tail)
        return max(largest_loss(cut, "replace_one", log_tail), kept)
    x = _furthest(step, log_tail)
    if neighbours == "add_remove":
        return _sampled((2 * x - 1) / (2 * step.sigma**2), step.rate)
    return _replaced_loss(x, step)


def step_masses(step: SampledGaussian, neighbours: Neighbours, h: float, log_tail: float) -> tuple[Masses, ...]:
    """The distributions of a step's loss: for a record removed and for one added, or for one replaced (both ways the same).

    Losses beyond a tail of e^log_tail count as infinite.
    """
    if step.truncation is not None:
        cut, stays = step.truncation
        kept = step_masses(SampledGaussian(step.sigma, step.rate), neighbours, h, log_tail)
        (swapped,) = step_masses(SampledGaussian(step.sigma / 2, stays), "replace_one", h, log_tail)
        return tuple(_mixture(swapped, each, cut) for each in kept)
    return _add_remove(step, h, log_tail) if neighbours == "add_remove" else (_replace_one(step, h, log_tail),)


def _tail_deviations(log_mass: float) -> float:
    """z with Φ(−z) = e^log_mass."""
    from scipy import special

    return float(-special.ndtri_exp(log_mass))


def _furthest(step: SampledGaussian, log_tail: float) -> float:
    """x with at most e^log_tail beyond it of (1 − q)·N(0, σ²) + q·N(1, σ²): half of it for each part, or all of N(1, σ²) at once.

    Rare samples need not reach far: a record that is hardly ever drawn is hardly ever drawn *and* met by large noise.
    """
    both = 1 + step.sigma * _tail_deviations(log_tail)
    if step.rate == 1:
        return both
    apart = step.sigma * _tail_deviations(log_tail - math.log(2))
    drawn = min(0.0, log_tail - math.log(2) - math.log(step.rate))
    return min(both, max(apart, 1 + step.sigma * _tail_deviations(drawn)))


def _sampled(loss: float, q: float) -> float:
    """log(1 − q + q·e^loss)."""
    if q == 1:
        return loss
    return math.log1p(q * math.expm1(loss)) if loss < 700 else math.log(q) + loss


def _replaced_loss(x: float, step: SampledGaussian) -> float:
    up, down = ((s * 2 * x - 1) / (2 * step.sigma**2) for s in (1, -1))
    return _sampled(up, step.rate) - _sampled(down, step.rate)


def _add_remove(step: SampledGaussian, h: float, log_tail: float) -> tuple[Masses, Masses]:
    """P = (1 − q)·N(0, σ²) + q·N(1, σ²) against Q = N(0, σ²), for one removed; Q against P for one added.

    The loss log(1 − q + q·e^u) with u = (2x − 1)/2σ² rises with x. Of a bin that begins at ε, with masses m = P and l = Q,
    b = (m − l·e^ε)/(1 − e^−h) goes to its upper end; m − l·e^ε = q·(N₁ − e^u·N₀), N_c the mass of N(c, σ²) in it. The loss for
    one added is −L under Q: its masses are the same ones times e^−ε.
    """
    sigma, q, z = step.sigma, step.rate, _tail_deviations(log_tail)
    first = math.floor(_sampled((-2 * z * sigma - 1) / (2 * sigma**2), q) / h)
    last = math.ceil(largest_loss(step, "add_remove", log_tail) / h)
    losses = np.arange(first, last + 1, dtype=np.float64) * h
    u = losses
    if q < 1:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            u = np.where(losses < 600, np.log1p(np.maximum(np.expm1(losses) / q, -1.0)), losses - math.log(q))
    x = sigma**2 * u + 0.5
    (apart, apart_off), (near, near_off) = _between(x / sigma), _between((x - 1) / sigma)
    mass = (1 - q) * (apart + apart_off) + q * (near + near_off)
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp(u[:-1])
        rest = q * (near - apart * ratio)
        off = q * (near_off + (apart_off + 4 * _UNIT * apart) * ratio + 4 * _UNIT * near + np.abs(u[:-1]) * _UNIT * apart * ratio)
    # Below log(1 − q) there is no loss: e^ε is then not 1 − q + q·e^u with any u, and what is missing of 1 − q belongs to the rest.
    nothing = np.isneginf(u[:-1])
    missing = np.maximum(-np.expm1(losses[:-1][nothing]) - q, 0.0)
    rest[nothing] += apart[nothing] * missing
    off[nothing] = q * (near_off + 4 * _UNIT * (apart + near))[nothing] + apart_off[nothing] * missing
    # Where there are no numbers for it, a bin's mass is nothing, or all of it goes up.
    most = np.clip(np.nan_to_num((rest + off) / -math.expm1(-h), nan=np.inf), 0.0, mass)
    least = np.clip(np.nan_to_num((rest - off) / -math.expm1(-h), nan=0.0), 0.0, mass)
    removed = np.zeros(len(losses))
    removed[:-1] += mass - most
    removed[1:] += most
    with np.errstate(over="ignore", invalid="ignore"):
        spread = (1 + 4 * _UNIT * (1 + np.abs(losses[:-1]))) * np.exp(-losses[:-1])
        lowered = np.clip(np.nan_to_num((mass - least) * spread, nan=np.inf), 0.0, apart + apart_off)
    added = np.zeros(len(losses))
    added[:-1] += lowered
    added[1:] += apart + apart_off - lowered
    below, above = _below(x[0] / sigma), _below(-x[-1] / sigma)
    removed[0] += (1 - q) * below + q * _below((x[0] - 1) / sigma)
    added[-1] += above
    return (
        Masses(first, removed, (1 - q) * above + q * _below((1 - x[-1]) / sigma)),
        Masses(-last, added[::-1].copy(), below),
    )


def _replace_one(step: SampledGaussian, h: float, log_tail: float) -> Masses:
    """P = (1 − q)·N(0, σ²) + q·N(1, σ²) against Q = (1 − q)·N(0, σ²) + q·N(−1, σ²); the other way round is its mirror image.

    The loss is ε at x = σ²·(ε/2 + asinh(α·sinh(ε/2))), α = e^{1/2σ²}·(1 − q)/q (dp-accounting's supplement). Of each bin
    m − l·e^ε = q·(N₁ − e^ε·N₋₁) − (1 − q)·(e^ε − 1)·N₀.
    """
    sigma, q = step.sigma, step.rate
    last = math.ceil(largest_loss(step, "replace_one", log_tail) / h)
    losses = np.arange(-last, last + 1) * h
    x = sigma**2 * (losses / 2 + _asinh_sinh(losses / 2, sigma, q))
    (here, here_off), (up_side, up_off), (down_side, down_off) = (_between((x - c) / sigma) for c in (0.0, 1.0, -1.0))
    mass = (1 - q) * (here + here_off) + q * (up_side + up_off)
    with np.errstate(over="ignore", invalid="ignore"):
        begin = np.minimum(losses[:-1], 700.0)
        ratio, excess = np.exp(begin), (1 - q) * np.expm1(begin)
        rest = q * (up_side - ratio * down_side) - excess * here
        off = q * (up_off + ratio * (down_off + (4 + np.abs(begin)) * _UNIT * down_side) + 4 * _UNIT * up_side)
        off += np.abs(excess) * (here_off + 8 * _UNIT * here)
        up = np.clip(np.nan_to_num((rest + off) / -math.expm1(-h), nan=np.inf), 0.0, mass)
    probabilities = np.zeros(len(losses))
    probabilities[:-1] += mass - up
    probabilities[1:] += up
    probabilities[0] += (1 - q) * _below(x[0] / sigma) + q * _below((x[0] - 1) / sigma)
    return Masses(-last, probabilities, (1 - q) * _below(-x[-1] / sigma) + q * _below((1 - x[-1]) / sigma))


def _asinh_sinh(half: Array, sigma: float, q: float) -> Array:
    """asinh(e^{1/2σ²}·(1 − q)/q·sinh(half)), in logarithms: neither factor needs to be a float."""
    if q == 1:
        return np.zeros_like(half)
    size = np.abs(half)
    with np.errstate(divide="ignore"):
        log_sinh = size + np.log(-np.expm1(-2 * size)) - math.log(2)
    log_argument = 1 / (2 * sigma**2) + math.log1p(-q) - math.log(q) + log_sinh
    value: Array = np.sign(half) * np.logaddexp(log_argument, np.logaddexp(0.0, 2 * log_argument) / 2)
    return value


def _between(edges: Array) -> tuple[Array, Array]:
    """Mass of the standard normal distribution between successive edges, from the nearer tail, and how far it may be off.

    scipy's Φ(−z) is right to a few units of (1 + z²): the exponent z²/2 is rounded before its exponential is taken.
    """
    from scipy import special

    low, high = edges[:-1], edges[1:]
    upper = low > 0
    near = np.where(upper, low, -high)  # of the two tails the larger begins here
    far = np.where(upper, high, -low)
    tail = special.ndtr(-near)
    mass: Array = tail - special.ndtr(-far)
    with np.errstate(invalid="ignore"):
        off = np.nan_to_num(4 * _UNIT * (1 + np.square(np.minimum(np.abs(near), 50.0))) * tail)
    return mass, off


def _below(edge: float) -> float:
    from scipy import special

    return float(special.ndtr(edge)) * (1 + 1e-12)


def _mixture(one: Masses, other: Masses, share: float) -> Masses:
    """share·one + (1 − share)·other."""
    lowest = min(one.lowest, other.lowest)
    highest = max(each.lowest + len(each.probabilities) for each in (one, other))
    probabilities = np.zeros(highest - lowest)
    for each, weight in ((one, share), (other, 1 - share)):
        start = each.lowest - lowest
        probabilities[start : start + len(each.probabilities)] += weight * each.probabilities
    return Masses(lowest, probabilities, share * one.infinity + (1 - share) * other.infinity)


_ROUNDOFF = 2.0**-53
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
    eta = 8 * _ROUNDOFF * math.log2(size + 2)
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
        cancelled = np.minimum(8 * _ROUNDOFF / np.maximum(np.abs(1 + value), 1e-9), 4 * math.sqrt(_ROUNDOFF))
        near.append(_ROUNDOFF * (40 * angle + 8 * np.abs(value) + 8 * float(rest.sum())) + cancelled * np.abs(value))
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
