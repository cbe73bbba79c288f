"""Privacy loss distributions (PLDs) of sampled Gaussians that keep their digits where dp-accounting's lose them.

Two places in dp-accounting limit how fine a grid may be. Its masses are second differences of δ(ε), divided by the grid: at
q = 1e-6 nothing but rounding is left of them. And it convolves by plain Fourier transforms, whose error of about 1e-16 per step
is absolute: with 10⁷ steps and δ = 1e-12 it reports an ε below the true one. Here the same distributions (pessimistic
"connect the dots" on a grid of losses, Doroshenko et al. 2022) are made and convolved so that errors stay *relative*:

- **Masses.** Between two grid points the mass m under P and l under Q are differences of Gaussian distribution functions, taken
  in the nearer tail. Connect-the-dots moves them to the two points such that both m and l are kept: b = (m − l·e^ε)/(1 − e^−h) of m
  goes up, the rest down. m − l·e^ε is written without the terms that cancel.
- **Composition.** With K(t) = Σ nᵢ·log E e^{tLᵢ}, the masses p(y)·e^{ty − K(t)} are a distribution around the loss that decides δ
  (t is where Chernoff's bound on δ is best). That one is convolved, and its tilt taken off after. What its rounding may hide of δ is
  estimated from the transforms themselves, with a factor of 16 to spare, and *added*: it makes ε larger, never smaller.

The result is a PLD of dp-accounting, which answers for ε and δ. :mod:`lipdp.privacy.accounting` chooses the grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Composition", "Parts", "SampledGaussian", "Scale", "composition", "scale"]

Array = npt.NDArray[np.float64]
Neighbours = Literal["add_remove", "replace_one"]

_ROUNDING = float(np.finfo(np.float64).eps)
_OUTSIDE = 1e-6  # share of δ that masses beyond the ends of the window may make up; they are charged
_SPARE = 16.0  # factor on estimates of rounding
_DOUBT = 3e-3  # share of δ that may be due to what was added for rounding, before another tilt is tried
_TILTS = 3
_FORGOTTEN = 1e-6  # share of δ in the uppermost masses that is charged as an infinite loss instead of summed one by one
_ORDERS = 14  # how many of Chernoff's bounds are asked for the window


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


Parts = Sequence[tuple[SampledGaussian, int]]
"""Steps and how many there are of each."""


class Masses(NamedTuple):
    """A distribution of losses on the grid: ``probabilities`` at (lowest, lowest + 1, …)·h, and the mass at infinity."""

    lowest: int
    probabilities: Array
    infinity: float


class Scale(NamedTuple):
    """How wide privacy losses are: the standard deviation of a step's (root mean square), the largest, and about all composed."""

    deviation: float
    largest: float
    composed: float


# --- one step -----------------------------------------------------------------------------------------------------------


def scale(parts: Parts, neighbours: Neighbours, log_tail: float) -> Scale:
    """The scale of a step's loss, from which a first grid can be chosen."""
    total = sum(count for _, count in parts)
    variance, largest = 0.0, 0.0
    for step, count in parts:
        sensitivity = 1.0 if neighbours == "add_remove" else 2.0
        # χ² of order 2; for little noise the loss itself is the scale, with its mean 1/2σ².
        spread = step.rate**2 * math.expm1(min((sensitivity / step.sigma) ** 2, 30.0))
        variance += count / total * min(spread, (sensitivity / step.sigma) ** 2 + (sensitivity / step.sigma) ** 4 / 4)
        largest = max(largest, _largest_loss(step, neighbours, log_tail))
    return Scale(math.sqrt(variance), largest, largest + 12 * math.sqrt(total * variance))


def _largest_loss(step: SampledGaussian, neighbours: Neighbours, log_tail: float) -> float:
    if step.truncation is not None:
        cut = SampledGaussian(step.sigma / 2, step.truncation[1])
        kept = _largest_loss(SampledGaussian(step.sigma, step.rate), neighbours, log_tail)
        return max(_largest_loss(cut, "replace_one", log_tail), kept)
    z = _tail_deviations(log_tail)
    if neighbours == "add_remove":
        return _sampled(1 / (2 * step.sigma**2) + z / step.sigma, step.rate)
    return _replaced_loss(1 + z * step.sigma, step)


def _tail_deviations(log_mass: float) -> float:
    """z with Φ(−z) = e^log_mass."""
    from scipy import special

    return float(-special.ndtri_exp(log_mass))


def _sampled(loss: float, q: float) -> float:
    """log(1 − q + q·e^loss)."""
    if q == 1:
        return loss
    return math.log1p(q * math.expm1(loss)) if loss < 700 else math.log(q) + loss


def _replaced_loss(x: float, step: SampledGaussian) -> float:
    up, down = ((s * 2 * x - 1) / (2 * step.sigma**2) for s in (1, -1))
    return _sampled(up, step.rate) - _sampled(down, step.rate)


def _masses(step: SampledGaussian, neighbours: Neighbours, h: float, log_tail: float) -> tuple[Masses, ...]:
    """The distributions of a step's loss: for a record removed and for one added, or for one replaced (both ways the same)."""
    if step.truncation is not None:
        cut, stays = step.truncation
        kept = _masses(SampledGaussian(step.sigma, step.rate), neighbours, h, log_tail)
        (swapped,) = _masses(SampledGaussian(step.sigma / 2, stays), "replace_one", h, log_tail)
        return tuple(_mixture(swapped, each, cut) for each in kept)
    return _add_remove(step, h, log_tail) if neighbours == "add_remove" else (_replace_one(step, h, log_tail),)


def _add_remove(step: SampledGaussian, h: float, log_tail: float) -> tuple[Masses, Masses]:
    """P = (1 − q)·N(0, σ²) + q·N(1, σ²) against Q = N(0, σ²), for one removed; Q against P for one added.

    The loss log(1 − q + q·e^u) with u = (2x − 1)/2σ² rises with x. m − l·e^ε = q·(N₁ − e^u·N₀) of each bin, N_c the mass of
    N(c, σ²) in it: no terms of size 1 that cancel are left. The distribution for one added is that of −L under Q, so its masses
    are the same ones times e^−ε.
    """
    sigma, q, z = step.sigma, step.rate, _tail_deviations(log_tail)
    first = math.floor(_sampled((-2 * z * sigma - 1) / (2 * sigma**2), q) / h)
    last = math.ceil(_sampled(1 / (2 * sigma**2) + z / sigma, q) / h)
    losses = np.arange(first, last + 1) * h
    u = losses
    if q < 1:
        with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
            u = np.where(losses < 600, np.log1p(np.maximum(np.expm1(losses) / q, -1.0)), losses - math.log(q))
    x = sigma**2 * u + 0.5
    apart, near = _between(x / sigma), _between((x - 1) / sigma)
    mass = (1 - q) * apart + q * near
    with np.errstate(over="ignore", invalid="ignore"):
        rest = q * (near - apart * np.exp(u[:-1]))
    # Below log(1 − q) there is no loss: e^ε is then not 1 − q + q·e^u with any u, and what is missing of 1 − q belongs to the rest.
    nothing = np.isneginf(u[:-1])
    rest[nothing] += apart[nothing] * np.maximum(-np.expm1(losses[:-1][nothing]) - q, 0.0)
    up = np.clip(np.nan_to_num(rest / -math.expm1(-h), nan=0.0), 0.0, mass)
    down = mass - up
    removed = np.zeros(len(losses))
    removed[:-1] += down
    removed[1:] += up
    # e^−ε times them, in a form that does not underflow where the mass itself does not; the bin's mass under Q is kept exactly.
    with np.errstate(over="ignore", invalid="ignore"):
        lowered = np.clip(np.nan_to_num(down * np.exp(-losses[:-1]), nan=0.0), 0.0, apart)
    added = np.zeros(len(losses))
    added[:-1] += lowered
    added[1:] += apart - lowered
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
    sigma, q, z = step.sigma, step.rate, _tail_deviations(log_tail)
    last = math.ceil(_replaced_loss(1 + z * sigma, step) / h)
    losses = np.arange(-last, last + 1) * h
    x = sigma**2 * (losses / 2 + _asinh_sinh(losses / 2, sigma, q))
    here, up_side, down_side = (_between((x - c) / sigma) for c in (0.0, 1.0, -1.0))
    mass = (1 - q) * here + q * up_side
    with np.errstate(over="ignore", invalid="ignore"):
        ratio = np.exp(np.minimum(losses[:-1], 700.0))
        up = (q * (up_side - ratio * down_side) - (1 - q) * np.expm1(np.minimum(losses[:-1], 700.0)) * here) / -math.expm1(-h)
    up = np.clip(np.nan_to_num(up, nan=0.0), 0.0, mass)
    found = np.zeros(len(losses))
    found[:-1] += mass - up
    found[1:] += up
    found[0] += (1 - q) * _below(x[0] / sigma) + q * _below((x[0] - 1) / sigma)
    return Masses(-last, found, (1 - q) * _below(-x[-1] / sigma) + q * _below((1 - x[-1]) / sigma))


def _asinh_sinh(half: Array, sigma: float, q: float) -> Array:
    """asinh(e^{1/2σ²}·(1 − q)/q·sinh(half)), in logarithms: neither factor needs to be a float."""
    if q == 1:
        return np.zeros_like(half)
    size = np.abs(half)
    with np.errstate(divide="ignore"):
        log_sinh = size + np.log(-np.expm1(-2 * size)) - math.log(2)
    log_argument = 1 / (2 * sigma**2) + math.log1p(-q) - math.log(q) + log_sinh
    found: Array = np.sign(half) * np.logaddexp(log_argument, np.logaddexp(0.0, 2 * log_argument) / 2)
    return found


def _between(edges: Array) -> Array:
    """Mass of the standard normal distribution between successive edges, from the nearer tail."""
    from scipy import special

    low, high = edges[:-1], edges[1:]
    found: Array = np.where(low > 0, special.ndtr(-low) - special.ndtr(-high), special.ndtr(high) - special.ndtr(low))
    return found


def _below(edge: float) -> float:
    from scipy import special

    return float(special.ndtr(edge))


def _mixture(one: Masses, other: Masses, share: float) -> Masses:
    """share·one + (1 − share)·other."""
    lowest = min(one.lowest, other.lowest)
    highest = max(each.lowest + len(each.probabilities) for each in (one, other))
    found = np.zeros(highest - lowest)
    for each, weight in ((one, share), (other, 1 - share)):
        start = each.lowest - lowest
        found[start : start + len(each.probabilities)] += weight * each.probabilities
    return Masses(lowest, found, share * one.infinity + (1 - share) * other.infinity)


# --- many steps -----------------------------------------------------------------------------------------------------------


class _Tilted:
    """The parts of one direction, with their cumulant function K(t) = Σ nᵢ·log Σ p·e^{t·loss}."""

    def __init__(self, masses: Sequence[Masses], counts: Sequence[int], h: float) -> None:
        self.h, self.counts, self.masses = h, counts, masses
        self.losses = [(np.arange(len(m.probabilities)) + m.lowest) * h for m in masses]
        with np.errstate(divide="ignore"):
            self.logs = [np.log(m.probabilities) for m in masses]

    def cumulant(self, t: float) -> float:
        return sum(n * _log_sum(log + t * loss) for n, log, loss in zip(self.counts, self.logs, self.losses, strict=True))

    def weights(self, t: float) -> list[Array]:
        """The tilted masses of each part; each sums to 1."""
        found = []
        for log, loss in zip(self.logs, self.losses, strict=True):
            raised = log + t * loss
            raised -= raised.max()
            weight = np.exp(raised)
            found.append(weight / weight.sum())
        return found

    def spread(self, weights: Sequence[Array]) -> tuple[float, float]:
        """Mean and standard deviation of the composed, tilted loss."""
        mean = variance = 0.0
        for n, weight, loss in zip(self.counts, weights, self.losses, strict=True):
            middle = float(weight @ loss)
            mean += n * middle
            variance += n * float(weight @ (loss - middle) ** 2)
        return mean, math.sqrt(variance)

    @property
    def alone(self) -> Any:
        """A single step's distribution, as dp-accounting's; None where there are more."""
        from dp_accounting.pld import pld_pmf

        if sum(self.counts) > 1:
            return None
        (one,) = self.masses
        kept = max(0, -one.lowest)  # negative losses, which may be too many for floats, matter to no ε
        return pld_pmf.DensePLDPmf(self.h, one.lowest + kept, one.probabilities[kept:], one.infinity, True)

    @property
    def infinity(self) -> float:
        return -math.expm1(sum(n * math.log1p(-m.infinity) for n, m in zip(self.counts, self.masses, strict=True)))

    @property
    def ends(self) -> tuple[int, int]:
        """The lowest and the highest composed loss, in grid steps."""
        low = sum(n * m.lowest for n, m in zip(self.counts, self.masses, strict=True))
        high = sum(n * (m.lowest + len(m.probabilities) - 1) for n, m in zip(self.counts, self.masses, strict=True))
        return low, high

    def best_tilt(self, bound: Callable[[float, float], float]) -> float:
        """The t > 0 that minimises ``bound(t, K(t))``."""
        from scipy import optimize

        _, deviation = self.spread(self.weights(0.0))
        unit = math.log(max(deviation, self.h))

        def at(log_t: float) -> float:
            t = math.exp(log_t - unit)
            return bound(t, self.cumulant(t))

        found = optimize.minimize_scalar(at, bounds=(-7.0, 9.0), method="bounded", options={"xatol": 0.02})
        return math.exp(float(found.x) - unit)


    def tilt_towards(self, loss: float, most: float) -> float:
        """The t ≥ 0, at most half of ``most``, at which the mean of the tilted loss is about ``loss``."""
        low, high = 0.0, most / 2
        for _ in range(8):
            middle = math.sqrt(low * high) if low else high / 8
            low, high = (low, middle) if self.spread(self.weights(middle))[0] > loss else (middle, high)
        return high


def _kernel(t: float) -> float:
    """log max_y e^{−ty}·(1 − e^−y), so that δ(ε) ≤ e^{K(t) + kernel(t) − tε}: Chernoff's bound of δ rather than of a tail."""
    return -t * math.log1p(1 / t) - math.log1p(t)


def _log_sum(logs: Array) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


class _Upper:
    """The composed losses from ``first``·h on, their masses, and the mass at infinity.

    Rounding moves Σ v(loss)·mass by about ``rough``·‖v·e^{K − t·loss}‖: errors of a transform's coefficients are independent.
    """

    def __init__(
        self, h: float, first: int, masses: Array, infinity: float, untilt: Array, rough: float, outside: float
    ) -> None:
        self.h, self.first, self.masses, self.infinity = h, first, masses, infinity
        self._untilt, self._rough, self._outside = untilt, rough, outside

    def doubt(self, loss: float) -> float:
        """What rounding may hide of δ at an ε of ``loss``."""
        return self._rough * float(np.linalg.norm(self._untilt[self._place(loss) :]))

    def excess(self, loss: float) -> float:
        """By how much δ may be too large, at an ε of ``loss``, for masses from outside the window that appear in it."""
        return 2 * self._outside * float(self._untilt[min(self._place(loss), len(self._untilt) - 1)])

    def _place(self, loss: float) -> int:
        return max(0, math.floor(loss / self.h) - self.first)

    def distribution(self, doubt: float, forgotten: float) -> Any:
        """As dp-accounting's, with ``doubt`` more at infinity, and the uppermost masses of ``forgotten`` in all with it."""
        from dp_accounting.pld import pld_pmf

        tops = np.maximum.accumulate(np.cumsum(self.masses[::-1]))
        dropped = min(int(np.searchsorted(tops, forgotten)), len(tops) - 1)
        infinity = self.infinity + doubt + (float(tops[dropped - 1]) if dropped else 0.0)
        return pld_pmf.DensePLDPmf(self.h, self.first, self.masses[: len(tops) - dropped], min(infinity, 1.0), True)


class Composition:
    """The composed privacy loss of some parts on one grid, in one direction after the other.

    Attributes:
        h: the grid.
        bins: the longest array that it needed.
    """

    def __init__(self, directions: Sequence[_Tilted], h: float) -> None:
        self.h, self._directions = h, directions
        self.bins = max(len(log) for each in directions for log in each.logs)

    def epsilon(self, delta: float, known: dict[int, float]) -> float:
        """The smallest ε at δ that this grid can show, or another: ``known`` has bounds by direction, and gets these."""
        return self._worst(known, lambda direction: self._epsilon(direction, delta))

    def delta(self, epsilon: float, known: dict[int, float]) -> float:
        """The smallest δ at ε that this grid can show, or another; ``known`` as for ε."""
        return self._worst(known, lambda direction: self._delta(direction, epsilon))

    def _worst(self, known: dict[int, float], measure: Callable[[_Tilted], float]) -> float:
        worst = 0.0
        order = sorted(range(len(self._directions)), key=lambda number: -known.get(number, math.inf))
        for number in order:
            if known.get(number, math.inf) > worst:  # else another direction decides, however fine the grid
                known[number] = min(known.get(number, math.inf), measure(self._directions[number]))
                worst = max(worst, known[number])
        return worst

    def _epsilon(self, direction: _Tilted, delta: float) -> float:
        if direction.infinity >= delta:
            return math.inf
        if direction.alone is not None:
            return max(0.0, float(direction.alone.get_epsilon_for_delta(delta)))
        t = direction.best_tilt(lambda t, k: (k + _kernel(t) - math.log(delta)) / t)
        found = centre = max(0.0, (direction.cumulant(t) + _kernel(t) - math.log(delta)) / t)
        for _ in range(_TILTS):
            upper = self._upper(direction, t, centre, 0.0, delta)
            begin = upper.first * self.h
            low = max(float(upper.distribution(0.0, _FORGOTTEN * delta).get_epsilon_for_delta(delta)), begin)
            doubt = upper.doubt(low)  # at a larger ε there is less
            if doubt < delta:
                high = max(float(upper.distribution(doubt, _FORGOTTEN * delta).get_epsilon_for_delta(delta)), begin)
                found = min(found, high)
            if doubt + upper.excess(low) <= _DOUBT * delta and (begin <= 0 or low > begin):
                break
            # Where losses are heavy-tailed, this bound is far above ε.
            centre, t = low, direction.tilt_towards(low, t)
        return found

    def _delta(self, direction: _Tilted, epsilon: float) -> float:
        if direction.alone is not None:
            return float(direction.alone.get_delta_for_epsilon(epsilon))
        t = direction.best_tilt(lambda t, k: k + _kernel(t) - t * epsilon)
        found = min(1.0, math.exp(min(direction.cumulant(t) + _kernel(t) - t * epsilon, 0.0)) + direction.infinity)
        for _ in range(_TILTS):
            upper = self._upper(direction, t, epsilon, epsilon, 1e-3 * found)
            if upper.first * self.h <= epsilon:
                doubt = upper.doubt(epsilon)
                found = min(found, float(upper.distribution(doubt, 0.0).get_delta_for_epsilon(epsilon)))
                if doubt + upper.excess(epsilon) <= _DOUBT * found:
                    break
            t = direction.tilt_towards(epsilon, t)
        return found

    def _upper(self, direction: _Tilted, t: float, centre: float, least: float, delta: float) -> _Upper:
        """The composed distribution above ``least``, made with the tilt t, for a δ of about ``delta`` at a loss of ``centre``."""
        weights, whole = direction.weights(t), direction.cumulant(t)
        log_outside = min(math.log(_OUTSIDE), math.log(_OUTSIDE * delta) - (whole - t * centre))
        first, last = self._window(direction, weights, t, whole, log_outside)
        size = _fast_length(max(last - first + 1, *(len(weight) for weight in weights)))
        self.bins = max(self.bins, size)
        tilted, start, rough, relative = _convolve(weights, [m.lowest for m in direction.masses], direction.counts, size)
        # Where e^{K(t) − t·loss} is above e^300 there are no floats for it.
        cut = max(first, math.floor(least / self.h), math.ceil((whole - 300.0) / t / self.h))
        infinity = direction.infinity + math.exp(min(log_outside + whole - t * self.h * last, 0.0))
        if cut > last:
            return _Upper(self.h, max(last, 0), np.zeros(1), infinity, np.zeros(1), 0.0, 0.0)
        untilt = np.exp(whole - t * self.h * np.arange(cut, last + 1))
        masses = _from(tilted, (cut - start) % size, last - cut + 1)
        masses *= untilt * (1 + relative)
        return _Upper(self.h, cut, masses, infinity, untilt, rough, math.exp(log_outside))

    def _window(
        self, direction: _Tilted, weights: Sequence[Array], t: float, whole: float, log_outside: float
    ) -> tuple[int, int]:
        """Grid steps between which all of the tilted mass lies but e^log_outside at each end, by Chernoff's bounds."""
        mean, deviation = direction.spread(weights)
        low, high = direction.ends
        # Orders for what is made up of many small losses, to those for a single large one.
        widest = max(deviation, *(loss[-1] for loss in direction.losses))
        for a in np.geomspace(2 / widest, 32 / max(deviation, self.h), _ORDERS):
            up = (direction.cumulant(t + a) - whole - log_outside) / a
            down = (direction.cumulant(t - a) - whole - log_outside) / a
            high = min(high, math.ceil(up / self.h) + 1)
            low = max(low, math.floor(-down / self.h) - 1)
        return min(low, math.floor(mean / self.h)), max(high, math.ceil(mean / self.h))


def _fast_length(least: int) -> int:
    from scipy import fft

    return int(fft.next_fast_len(least, real=True))


def _from(values: Array, first: int, count: int) -> Array:
    """``count`` of the values from ``first`` on, around the end, as a copy."""
    return np.concatenate((values[first : first + count], values[: max(0, first + count - len(values))]))


def _convolve(
    weights: Sequence[Array], lowest: Sequence[int], counts: Sequence[int], size: int
) -> tuple[Array, int, float, float]:
    """The convolution of all weights, each with itself ``counts`` times, modulo ``size``.

    Returns it, the place of its first entry, and what rounding does to it: the largest error of a coefficient of its transform,
    over √size, and the relative error of the whole. A transform's coefficients are right to about u·√log₂(size)·‖w‖, independently
    of one another; powers multiply that by their exponents.
    """
    from scipy import fft

    logs: Array = np.zeros(size // 2 + 1)
    transforms, start = [], 0
    for weight, low, n in zip(weights, lowest, counts, strict=True):
        # Around its mean the weight's transform turns slowly: its angle keeps its digits when it is multiplied.
        middle = round(float(weight @ np.arange(len(weight))))
        padded = np.zeros(size)
        padded[: len(weight) - middle] = weight[middle:]
        if middle:
            padded[-middle:] = weight[:middle]
        transform = fft.rfft(padded)
        with np.errstate(divide="ignore"):
            logs += n / 2 * np.log(transform.real**2 + transform.imag**2)
        transforms.append(transform)
        start += n * (low + middle)
    seen = np.flatnonzero(logs > -80.0)
    sizes, angles, errors = np.exp(logs[seen]), np.zeros(len(seen)), np.zeros(len(seen))
    unit = _SPARE * _ROUNDING * math.sqrt(math.log2(size + 1))
    for weight, transform, n in zip(weights, transforms, counts, strict=True):
        kept = transform[seen]
        angles += n * np.angle(kept)
        errors += n * unit * float(np.linalg.norm(weight)) / np.abs(kept)
    product = np.zeros(size // 2 + 1, dtype=np.complex128)
    product[seen] = sizes * np.exp(1j * angles)
    rough = (float(np.max(sizes * errors)) + unit * math.sqrt(2 / size) * float(np.linalg.norm(sizes))) / math.sqrt(size)
    return fft.irfft(product, size), start, rough, _SPARE * _ROUNDING * sum(counts)


def composition(parts: Parts, neighbours: Neighbours, h: float, log_tail: float) -> Composition:
    """The composed privacy loss of ``parts`` on a grid of ``h``; a step's losses beyond a tail of e^log_tail count as infinite."""
    found = [_masses(step, neighbours, h, log_tail) for step, _ in parts]
    counts = [count for _, count in parts]
    directions = [[each[number] for each in found] for number in range(len(found[0]))]
    return Composition([_Tilted(direction, counts, h) for direction in directions], h)
