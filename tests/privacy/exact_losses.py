"""δ(ε) of composed sampled Gaussians without any grid of losses: a reference for accountants.

With K(z) = log E e^{zL} of one step's privacy loss L, and any t > 0,

    δ(ε) = 1/2πi · ∫_{t−i∞}^{t+i∞} e^{T·K(z) − zε} / (z(1 + z)) dz,

as E[1 − e^{ε−L}]₊ is the inverse Laplace transform of e^{TK} with this kernel (Alghamdi et al. 2023, "The saddle-point method in
differential privacy"). K is an integral over the noise, up to where what is beyond is nothing against δ. Nothing is rounded to a
grid of losses, and all is relative to the value at t, so tiny δ keep their digits. One step and full batches have closed forms.
Where losses are rare and large that converges slowly (ArithmeticError). There :func:`fine_grid_epsilon` has a plain, fine grid:
each loss is shared by the two nearest points so that its mean is kept (an estimate, right to second order, no bound), and
transforms are taken in numpy's longest floats.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy import optimize, special

DIRECTIONS = {"add_remove": ("remove", "add"), "replace_one": ("replace",)}


def log_delta(sigma: float, q: float, steps: int, epsilon: float, delta: float, adjacency: str = "add_remove") -> float:
    """log δ(ε) of T steps, the larger of the two directions; to within 1e-6·``delta``, the δ that is expected."""
    if q == 1:
        return _full_batch(sigma / math.sqrt(steps) / (1 if adjacency == "add_remove" else 2), epsilon)
    if steps == 1:
        return max(_one_step(sigma, q, epsilon, direction) for direction in DIRECTIONS[adjacency])
    log_tail = math.log(1e-6 * delta / steps)
    return max(_many_steps(sigma, q, steps, epsilon, direction, log_tail) for direction in DIRECTIONS[adjacency])


def exact_epsilon(sigma: float, q: float, steps: int, delta: float, near: float, adjacency: str = "add_remove") -> float:
    """ε at δ, from a value near it."""

    def excess(epsilon: float) -> float:
        return log_delta(sigma, q, steps, epsilon, delta, adjacency) - math.log(delta)

    return _crossing(excess, near)


def exact_sigma(epsilon: float, q: float, steps: int, delta: float, near: float, adjacency: str = "add_remove") -> float:
    """σ for (ε, δ), from a value near it."""

    def excess(sigma: float) -> float:
        return log_delta(sigma, q, steps, epsilon, delta, adjacency) - math.log(delta)

    return _crossing(excess, near)


def _crossing(excess: Callable[[float], float], near: float) -> float:
    low, high = near / 1.002, near * 1.002
    while excess(low) <= 0:
        low, high = low / 1.05, low
    while excess(high) > 0:
        low, high = high, high * 1.05
    return float(optimize.brentq(excess, low, high, rtol=1e-7))


def _full_batch(sigma: float, epsilon: float) -> float:
    """Balle & Wang (2018): Φ(1/2σ − εσ) − e^ε·Φ(−1/2σ − εσ)."""
    first = special.log_ndtr(1 / (2 * sigma) - epsilon * sigma)
    second = epsilon + special.log_ndtr(-1 / (2 * sigma) - epsilon * sigma)
    return float(first + np.log1p(-np.exp(min(second - first, -1e-300))))


def _one_step(sigma: float, q: float, epsilon: float, direction: str) -> float:
    """P(L > ε) − e^ε·Q(L > ε), where L is above ε from some x on (below it, for one added)."""
    if direction == "add":
        if epsilon >= -math.log1p(-q):
            return -math.inf
        x = sigma**2 * math.log1p(math.expm1(-epsilon) / q) + 0.5
        upper = special.log_ndtr(x / sigma)
        mixed = np.logaddexp(math.log1p(-q) + special.log_ndtr(x / sigma), math.log(q) + special.log_ndtr((x - 1) / sigma))
    elif direction == "remove":
        x = sigma**2 * (math.log1p(math.expm1(epsilon) / q) if epsilon < 600 else epsilon - math.log(q)) + 0.5
        upper = np.logaddexp(math.log1p(-q) + special.log_ndtr(-x / sigma), math.log(q) + special.log_ndtr((1 - x) / sigma))
        mixed = special.log_ndtr(-x / sigma)
    else:
        x = _replaced_place(sigma, q, epsilon)
        rest = math.log1p(-q) + special.log_ndtr(-x / sigma)
        upper = np.logaddexp(rest, math.log(q) + special.log_ndtr((1 - x) / sigma))
        mixed = np.logaddexp(rest, math.log(q) + special.log_ndtr((-1 - x) / sigma))
    return float(upper + np.log1p(-np.exp(min(epsilon + mixed - upper, -1e-300))))


def _replaced_place(sigma: float, q: float, epsilon: float) -> float:
    def loss(x: float) -> float:
        return float(_log_ratio(np.array([x]), sigma, q)[0] - _log_ratio(np.array([-x]), sigma, q)[0])

    high = 1.0
    while loss(high) < epsilon:
        high *= 2
    return float(optimize.brentq(lambda x: loss(x) - epsilon, 0.0, high, xtol=1e-14))


def _log_ratio(x: np.ndarray, sigma: float, q: float) -> np.ndarray:
    """log(1 − q + q·e^{(2x − 1)/2σ²})."""
    u = (2 * x - 1) / (2 * sigma**2)
    return np.where(u < 600, np.log1p(q * np.expm1(np.minimum(u, 600.0))), math.log(q) + u)


class _Step:
    """K of one step in one direction, over noise whose tails beyond are e^log_tail; for imaginary parts up to ``highest``."""

    def __init__(self, sigma: float, q: float, direction: str, log_tail: float, highest: float) -> None:
        z = -special.ndtri_exp(log_tail)
        low, high = -z * sigma - (direction == "replace"), z * sigma + (direction != "add")
        # Pieces over which neither the density nor e^{iy·loss} turns much.
        fine = np.linspace(low, high, 20_001)
        turns = fine / sigma + highest / 8 * (_log_ratio(fine, sigma, q) - (direction == "replace") * _log_ratio(-fine, sigma, q))
        pieces = math.ceil(turns[-1] - turns[0]) + 4
        edges = np.interp(np.linspace(turns[0], turns[-1], pieces + 1), turns, fine)
        nodes, weights = special.roots_legendre(16)
        half = (np.diff(edges) / 2)[:, None]
        x = (edges[:-1, None] + half + half * nodes).ravel()
        self.weight = (weights * half).ravel() * np.exp(-(x**2) / (2 * sigma**2)) / (sigma * math.sqrt(2 * math.pi))
        self.direction, self.loss, self.mirrored = direction, _log_ratio(x, sigma, q), _log_ratio(-x, sigma, q)
        outside = [special.ndtr(low / sigma) + special.ndtr(-high / sigma)]
        outside += [special.ndtr((low - c) / sigma) + special.ndtr((c - high) / sigma) for c in (1, -1)]
        self.lost = outside[0]
        # E e^loss is 1 over all noise: this is what is outside of it.
        self.first, self.first_mirrored = (q * (outside[0] - each) for each in outside[1:])

    def __call__(self, z: np.ndarray) -> np.ndarray:
        """K(z). Terms of first order are taken from what they sum to, so that small q leave digits."""
        found = np.empty(len(z), dtype=complex)
        rows = max(1, 2_000_000 // len(self.loss))
        with np.errstate(divide="ignore"):
            log_weight = np.log(self.weight)
        for start in range(0, len(z), rows):
            part = z[start : start + rows, None]
            if self.direction == "replace":
                power = (1 + part) * self.loss - part * self.mirrored
                first = (1 + part) * np.expm1(self.loss) - part * np.expm1(self.mirrored)
                known = (1 + part) * self.first - part * self.first_mirrored
            else:
                order = 1 + part if self.direction == "remove" else -part
                power, first, known = order * self.loss, order * np.expm1(self.loss), order * self.first
            top = float((power.real + log_weight).max())
            if top < 0:
                small = power.real < 20
                second = np.where(
                    small, np.expm1(np.where(small, power, 0)) * self.weight, np.exp(power + log_weight) - self.weight
                )
                found[start : start + rows] = np.log1p((second - first * self.weight).sum(1) + known[:, 0] - self.lost)
            else:
                found[start : start + rows] = np.log(np.exp(power + log_weight - top).sum(1)) + top
        return found


def _many_steps(sigma: float, q: float, steps: int, epsilon: float, direction: str, log_tail: float) -> float:
    if direction == "add" and epsilon >= -steps * math.log1p(-q):
        return -math.inf
    real = _Step(sigma, q, direction, log_tail, 0.0)

    def whole(t: float) -> float:
        return steps * float(real(np.array([t + 0j]))[0].real)

    def height(log_t: float) -> float:
        t = math.exp(log_t)
        return whole(t) - t * epsilon - log_t - math.log1p(t)

    t = math.exp(optimize.minimize_scalar(height, bounds=(-9.0, 16.0), method="bounded", options={"xatol": 1e-2}).x)
    near = 0.01 * t
    curvature = (whole(t + near) - 2 * whole(t) + whole(t - near)) / near**2
    spread = math.sqrt(max(curvature, 0.0)) + 1 / t
    gap = 2 * math.pi / (epsilon + 50 * spread)
    base, before, most = whole(t) - t * epsilon, math.nan, 10 / spread
    for last in (False, False, False, True):
        most = 140 / spread if last else most
        y = np.arange(math.ceil(most / gap) + 1) * gap
        z = t + 1j * y
        powers = np.exp(steps * _Step(sigma, q, direction, log_tail, float(y[-1]))(z) - whole(t))
        # A constant in the place of e^{TK} contributes nothing for ε > 0: take off what is left at the end, where losses are 0.
        terms = ((powers - powers[-1]) * np.exp(-1j * y * epsilon) / (z * (1 + z))).real
        value = _sum(terms) * gap / math.pi
        if value > 0 and abs(value / before - 1) < 1e-7:
            return base + math.log(value)
        if last:  # it decays slowly: smooth δ(ε)·e^{tε} by two normal distributions, and extrapolate to none
            wide, narrow = (_sum(terms * np.exp(-((w * spread * y) ** 2) / 2)) for w in (0.05 * math.sqrt(2), 0.05))
            value = (2 * narrow - wide) * gap / math.pi
        before, most = value, 2 * most
    if not value > 0 or spread > epsilon:
        raise ArithmeticError("losses are rare and large: the integral converges too slowly")
    return base + math.log(value)


def _sum(terms: np.ndarray) -> float:
    return float(terms.sum() - terms[0] / 2)


def fine_grid_epsilon(sigma: float, q: float, steps: int, delta: float, bits: int = 22) -> float:
    """ε at δ for one record removed, on a grid of 2^bits points; masses times e^{t·loss} are convolved.

    t is half of the one at which Chernoff's bound on ε is best: with t = 4 for all, δ = 1e-12 after 10⁷ steps left two digits of ε.
    """
    from scipy import fft

    x = np.linspace(-14 * sigma, 15 * sigma + 1, 1 << 21)
    weight = (1 - q) * np.exp(-(x**2) / (2 * sigma**2)) + q * np.exp(-((x - 1) ** 2) / (2 * sigma**2))
    loss = _log_ratio(x, sigma, q)
    weight /= weight.sum()
    kept = steps * np.cumsum(weight[::-1])[::-1] > 1e-5 * delta  # beyond: infinite
    infinity, loss, weight = steps * weight[~kept].sum(), loss[kept], weight[kept]
    tilt = _half_of_best_tilt(weight, loss, steps, delta)
    weight = weight * np.exp(tilt * loss)
    log_total, weight = steps * math.log(weight.sum()), weight / weight.sum()
    mean = float(weight @ loss)
    deviation = math.sqrt(steps * float(weight @ (loss - mean) ** 2))
    low, size = -14 * deviation, 1 << bits
    h = (max(14 * deviation, 1.5 * float(loss[-1])) - low) / size
    place = (loss - mean) / h
    below = np.floor(place).astype(np.int64)
    masses = np.zeros(size, dtype=np.longdouble)
    for point, share in ((below, 1 - (place - below)), (below + 1, place - below)):
        np.add.at(masses, point % size, (weight * share).astype(np.longdouble))
    coefficients = np.log(fft.rfft(masses))
    composed = np.asarray(fft.irfft(np.exp(steps * coefficients), size), dtype=np.float64)
    first = math.floor(low / h)
    losses = steps * mean + h * (first + np.arange(size))
    composed = np.roll(composed, -(first % size))[losses > 0]
    losses = losses[losses > 0]
    composed *= np.exp(log_total - tilt * losses)
    above, lower = np.cumsum(composed[::-1])[::-1], np.cumsum((composed * np.exp(-losses))[::-1])[::-1]
    place = int(np.flatnonzero(infinity + above - np.exp(losses) * lower > delta)[-1]) + 1
    return math.log((infinity + above[place] - delta) / lower[place])


def _half_of_best_tilt(weight: np.ndarray, loss: np.ndarray, steps: int, delta: float) -> float:
    def bound(log_t: float) -> float:
        power = math.exp(log_t) * loss
        top = float(power.max())
        return (steps * (top + math.log(float(weight @ np.exp(power - top)))) - math.log(delta)) / math.exp(log_t)

    return math.exp(optimize.minimize_scalar(bound, bounds=(-7.0, 12.0), method="bounded", options={"xatol": 0.05}).x) / 2
