"""The privacy loss of many steps: convolutions whose rounding is known, however many steps and however small δ.

dp-accounting convolves by plain Fourier transforms. Their error is absolute, and grows with the steps: at 10⁷ steps and δ = 1e-12
it is larger than δ, and the ε that comes out may be *below* the true one. Here the masses are tilted first. With
K(t) = Σ nᵢ·log E e^{tLᵢ}, the masses p(y)·e^{ty − K(t)} are a distribution around the loss that decides δ (t is where Chernoff's
bound on δ is best). That one is convolved, and its tilt taken off afterwards.

**What rounding may hide of δ is added to it**, so that ε is an upper bound. With u = 2⁻⁵³, w_i the tilted masses of a step (their
transform is at most 1 in size), N the length of the transforms, v the result, and Euclidean norms:

- Each coefficient is c_i = 1 + s_i, s_i = Σ w_i·(e^{iθ} − 1). Next to the mean, where the mass is, terms are summed up by sines,
  to 40u·Σ w|θ| (angles are reduced in whole numbers; no sum has more than some 30 additions in a row). With 8u·(1 + 1/|c_i|)·|s_i|
  for its logarithm that is off_i, and a product of powers |c_i|^n_i is off by Σ n_i·off_i/(|c_i| + off_i) of
  Π(|c_i| + off_i)^n_i. What that does to δ(ε) = Σ_{y > ε} v(y)·e^{K − ty}·(1 − e^{ε − y}) follows from the transform of this
  weight, which falls as 1/ω².
- The masses r_i further out go through a transform. Of length N, it is right to η·‖·‖, η = 8u·log₂N (Higham, *Accuracy and
  Stability*, Theorem 24.2: its factor is below 7). So the s_i are off by √N·η·‖r_i‖ as a vector, powers by n_i times that (and by
  what powers of numbers a little above 1 are above 1), and v, by Parseval, by n_i·η·‖r_i‖. The way back costs η·‖v‖. By Cauchy and
  Schwarz δ is off by these times ‖e^{K − ty}‖ over y > ε.
- The tilted masses themselves, and K, are off relatively, by a few units times the largest exponent: that factor to the power n_i
  goes on the masses. What is above the window counts as infinite; what wraps around only adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lipdp.privacy._step_losses import MISPLACED, Array, Masses, Neighbours, SampledGaussian, convolve, fast_length, step_masses

Parts = Sequence[tuple[SampledGaussian, int]]
"""Steps and how many there are of each."""

_UNIT = 2.0**-53
_OUTSIDE = 1e-7  # share of δ that masses beyond the ends of the window may make up; they are charged
_DOUBT = 1e-3  # share of ε that may be due to what was added for rounding, before another tilt is tried
_MUCH_DOUBT = 3e-3  # the same, before a tilt is tried whose window is more than twice as long
_EXCESS = 3e-3  # share of δ that may be due to masses from outside the window
_TILTS = (0.25, 0.35, 0.5, 0.7, 1.0)  # shares of the tilt that keeps most digits: less of it is mostly enough
_ORDERS = 7  # how many of Chernoff's bounds are asked for the window
_LONGEST = 1 << 22  # of several windows, those that are longer are left out
_PIECE = 1 << 15  # losses that are looked at together


class _Direction:
    """The parts for one kind of neighbour, with their cumulant function K(t) = Σ nᵢ·log Σ p·e^{t·loss}."""

    def __init__(self, masses: Sequence[Masses], counts: Sequence[int], h: float) -> None:
        self.h, self.counts, self.masses = h, counts, masses
        self.losses = [(np.arange(len(m.probabilities)) + m.lowest) * h for m in masses]
        with np.errstate(divide="ignore"):
            self.logs = [np.log(m.probabilities) for m in masses]

    def cumulant(self, t: float) -> float:
        return sum(n * _log_sum(log + t * loss) for n, log, loss in zip(self.counts, self.logs, self.losses, strict=True))

    def weights(self, t: float) -> list[Array]:
        """The tilted masses of each part; each sums to 1."""
        weights = []
        for log, loss in zip(self.logs, self.losses, strict=True):
            raised = log + t * loss
            raised -= raised.max()
            weight = np.exp(raised)
            weights.append(weight / weight.sum())
        return weights

    def inexactness(self, t: float) -> float:
        """By how much, relatively, composed masses may be off for what was rounded in tilting each step's, and back."""
        total = 0.0
        for n, log, loss in zip(self.counts, self.logs, self.losses, strict=True):
            exponents = 745.0 + abs(t) * float(np.abs(loss).max()) if len(log) else 0.0
            total += n * _UNIT * (32 + 8 * exponents)
        return total

    def spread(self, weights: Sequence[Array]) -> tuple[float, float]:
        """Mean and standard deviation of the composed, tilted loss."""
        mean = variance = 0.0
        for n, weight, loss in zip(self.counts, weights, self.losses, strict=True):
            middle = float(weight @ loss)
            mean += n * middle
            variance += n * float(weight @ (loss - middle) ** 2)
        return mean, math.sqrt(variance)

    @property
    def alone(self) -> _Upper | None:
        """A single step's own distribution; None where there are more."""
        if sum(self.counts) > 1:
            return None
        (one,) = self.masses
        kept = max(0, -one.lowest)  # negative losses matter to no ε
        nothing = np.zeros(1)
        return _Upper(self.h, one.lowest + kept, one.probabilities[kept:], one.infinity, nothing, 0.0, (0.0, 0.0), 0.0)

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

        least = optimize.minimize_scalar(at, bounds=(-7.0, 9.0), method="bounded", options={"xatol": 0.02})
        return math.exp(float(least.x) - unit)


def _kernel(t: float) -> float:
    """log max_y e^{−ty}·(1 − e^−y), so that δ(ε) ≤ e^{K(t) + kernel(t) − tε}: Chernoff's bound of δ rather than of a tail."""
    return -t * math.log1p(1 / t) - math.log1p(t)


def _log_sum(logs: Array) -> float:
    top = float(logs.max())
    return top + math.log(float(np.exp(logs - top).sum()))


class Known(NamedTuple):
    """Of a direction: a bound on ε (or δ) from earlier grids, which tilt, and which share of it, served there (0: none yet), and
    how much of the bound is there because of rounding, relatively."""

    bound: float = math.inf
    tilt: float = 0.0
    share: float = 0.0
    rounding: float = 0.0


_UNKNOWN = Known()


class _Window(NamedTuple):
    """Grid steps between which all of the tilted mass lies but e^log_outside at each end, by Chernoff's bounds.

    Attributes:
        tilt: t.
        cumulant: K(t).
        log_outside: as above.
        first: the lowest grid step.
        last: the highest.
    """

    tilt: float
    cumulant: float
    log_outside: float
    first: int
    last: int


class _Upper(NamedTuple):
    """The composed losses from ``first``·h on.

    Attributes:
        h: the grid.
        first: the first loss, in grid steps.
        masses: their masses.
        infinity: the mass at infinity.
        untilt: e^{K − t·loss} of each.
        error: norm of the error of the tilted masses.
        smooth: what other errors of theirs do to δ(ε), in units of e^{K − tε}, and of e^{K − t·loss} at the last loss.
        outside: tilted mass beyond either end of the window.
    """

    h: float
    first: int
    masses: Array
    infinity: float
    untilt: Array
    error: float
    smooth: tuple[float, float]
    outside: float

    def doubt(self, loss: float) -> float:
        """What rounding may hide of δ at an ε of ``loss``."""
        untilt, (start, end) = self.untilt[self._place(loss) :], self.smooth
        if not len(untilt):
            return 0.0
        return self.error * float(np.linalg.norm(untilt)) + start * float(untilt[0]) + end * float(untilt[-1])

    def excess(self, loss: float) -> float:
        """By how much δ may be too large, at an ε of ``loss``, for masses from outside the window that appear in it."""
        return 2 * self.outside * float(self.untilt[min(self._place(loss), len(self.untilt) - 1)])

    def _place(self, loss: float) -> int:
        return max(0, math.floor(loss / self.h) - self.first)

    def epsilon(self, delta: float, doubt: float = 0.0) -> float:
        """The smallest ε with δ(ε) + ``doubt`` ≤ ``delta``, at least 0 and the first loss; ∞ where there is none.

        δ(ε) = m∞ + Σ_{l > ε} m(l)·(1 − e^{ε − l}). At the losses themselves it is found by sums from above; between two of them,
        with S and R the sums of m and m·e^−l above, it is S − e^ε·R.
        """
        least = max(0.0, self.first * self.h)
        if self.infinity + doubt >= delta:
            return math.inf
        wanted = delta - self.infinity - doubt
        highest = (self.first + len(self.masses) - 1) * self.h
        if self.h > 50:  # e^{ε − l} is nothing: the loss above which there is less mass
            place = int(np.count_nonzero(np.maximum.accumulate(np.cumsum(self.masses[::-1])) > wanted))
            return max(least, (self.first + place - 1) * self.h)
        # From above, a piece at a time: exponentials are relative to its lowest loss.
        above, lower = 0.0, 0.0  # Σ m and Σ m·e^{loss − l} beyond the present loss
        piece = min(_PIECE, 1 + int(600 / self.h))
        for stop in range(len(self.masses), 0, -piece):
            start = max(0, stop - piece)
            decay = np.exp(-self.h * np.arange(stop - start))  # e^{−(l − lowest)}
            masses, base = self.masses[start:stop], (self.first + start) * self.h
            upper = above + np.cumsum(masses[::-1])[::-1]
            lower *= math.exp(-self.h * (stop - start))
            rest = lower + np.cumsum((masses * decay)[::-1])[::-1]
            # δ at each loss of the piece; the loss's own mass has no part in it.
            beyond = np.flatnonzero(upper - rest / decay > wanted)
            if len(beyond):
                place = int(beyond[-1])  # ε is above this loss, and at most the next one
                over = (float(upper[place + 1]), float(rest[place + 1])) if place + 1 < stop - start else (above, lower)
                crossing = math.inf if over[1] == 0 else math.log((over[0] - wanted) / over[1]) if over[0] > wanted else 0.0
                return max(least, min(base + max(crossing, place * self.h), base + (place + 1) * self.h, highest))
            above, lower = float(upper[0]), float(rest[0])
        return least

    def delta(self, epsilon: float) -> float:
        """δ at ε, at least the first loss."""
        start = min(len(self.masses), max(0, math.floor(epsilon / self.h) + 1 - self.first))
        losses = (self.first + np.arange(start, len(self.masses))) * self.h
        return self.infinity + float(self.masses[start:] @ -np.expm1(np.minimum(epsilon - losses, 0.0)))


class Composition:
    """The composed privacy loss of some parts on one grid, in one direction after the other.

    Attributes:
        h: the grid.
        bins: the longest array that it needed.
        misplaced: what is to be added to ε, for points of the grid that are a little off.
        rounding: how much of the last ε is there because of rounding, relatively.
    """

    def __init__(self, directions: Sequence[_Direction], h: float, misplaced: float) -> None:
        self.h, self._directions, self.misplaced = h, directions, misplaced
        self.bins = max(len(log) for each in directions for log in each.logs)
        self.rounding = 0.0

    def epsilon(self, delta: float, known: dict[int, Known]) -> float:
        """The smallest ε at δ that this grid can show, or another: ``known`` has bounds by direction, and gets these."""
        within = delta * (1 - 1e-9)  # sums of masses are rounded, too
        return self._worst(known, lambda direction, before: self._epsilon(direction, within, before), self.misplaced)

    def delta(self, epsilon: float, known: dict[int, Known]) -> float:
        """The smallest δ at ε that this grid can show, or another; ``known`` as for ε."""
        least = max(0.0, epsilon - self.misplaced)
        return min(1.0, self._worst(known, lambda direction, before: self._delta(direction, least, before), 0.0) * (1 + 1e-9))

    def _worst(self, known: dict[int, Known], measure: Callable[[_Direction, Known], Known], more: float) -> float:
        worst = 0.0
        order = sorted(range(len(self._directions)), key=lambda number: -known.get(number, _UNKNOWN).bound)
        for number in order:
            before = known.get(number, _UNKNOWN)
            if before.bound > worst:  # else another direction decides, however fine the grid
                now = measure(self._directions[number], before)
                better = now.bound + more <= before.bound
                known[number] = now._replace(bound=now.bound + more) if better else before
                if known[number].bound > worst:
                    worst, self.rounding = known[number].bound, known[number].rounding
        return worst

    def _epsilon(self, direction: _Direction, delta: float, before: Known) -> Known:
        if direction.infinity >= delta:
            return before._replace(bound=math.inf)
        if direction.alone is not None:
            return before._replace(bound=direction.alone.epsilon(delta))
        t = before.tilt or direction.best_tilt(lambda t, k: (k + _kernel(t) - math.log(delta)) / t)
        room = delta - direction.infinity
        least = max(0.0, (direction.cumulant(t) + direction.inexactness(t) + _kernel(t) - math.log(room)) / t)
        share, rounding, centre = before.share, 1.0, min(least, before.bound)
        too_rough, shortest = 0.0, _LONGEST  # the largest tilt at which only rounding was too much; the shortest window tried
        for window in self._windows(direction, t, centre, delta, share):
            length = window.last - window.first
            if window.tilt <= too_rough or (rounding <= _MUCH_DOUBT and length > 2 * shortest):
                continue
            shortest = min(shortest, length)
            upper = self._upper(direction, window, 0.0)
            begin, low = max(0.0, upper.first * self.h), upper.epsilon(delta)
            doubt = upper.doubt(low) if low < math.inf else math.inf  # at a larger ε there is less
            if doubt < delta:
                high = upper.epsilon(delta, doubt)
                if high < least:
                    least, share, rounding = high, window.tilt / t, (high - low) / high if high else 0.0
                if upper.excess(low) <= _EXCESS * delta and (begin == 0 or low > begin):
                    if high - low <= _DOUBT * high:
                        break
                    too_rough = max(too_rough, window.tilt)
        return Known(least, t, share, rounding)

    def _delta(self, direction: _Direction, epsilon: float, before: Known) -> Known:
        if direction.alone is not None:
            return before._replace(bound=direction.alone.delta(epsilon))
        t = before.tilt or direction.best_tilt(lambda t, k: k + _kernel(t) - t * epsilon)
        chernoff = direction.cumulant(t) + direction.inexactness(t) + _kernel(t) - t * epsilon
        least, share = min(1.0, math.exp(min(chernoff, 0.0)) + direction.infinity), before.share
        for window in self._windows(direction, t, epsilon, max(1e-3 * least, 1e-300), share):
            upper = self._upper(direction, window, epsilon)
            if upper.first * self.h <= epsilon:
                doubt = upper.doubt(epsilon)
                least, share = min(least, upper.delta(epsilon) + doubt), window.tilt / t
                if doubt + upper.excess(epsilon) <= _EXCESS * least:
                    break
        return Known(least, t, share)

    def _windows(self, direction: _Direction, t: float, centre: float, delta: float, share: float) -> Iterator[_Window]:
        """Windows for some tilts: the one that did before, then the smallest; heavy tails are long at some, and not at others."""
        if share:
            yield self._window(direction, share * t, centre, delta)
        windows = [self._window(direction, part * t, centre, delta) for part in _TILTS if part != share]
        windows.sort(key=lambda window: window.last - window.first)
        yield from (window for place, window in enumerate(windows) if window.last - window.first < _LONGEST or not (place or share))

    def _upper(self, direction: _Direction, window: _Window, least: float) -> _Upper:
        """The composed distribution in the window, above ``least``."""
        t, whole, first, last = window.tilt, window.cumulant, window.first, window.last
        weights = direction.weights(t)
        size = fast_length(max(last - first + 1, *(len(weight) for weight in weights)))
        self.bins = max(self.bins, size)
        result = convolve(weights, [m.lowest for m in direction.masses], direction.counts, size)
        # Where e^{K(t) − t·loss} is above e^300 there are no floats for it.
        cut = max(first, math.floor(least / self.h), math.ceil((whole - 300.0) / t / self.h))
        inexact = math.exp(direction.inexactness(t))
        infinity = direction.infinity + inexact * math.exp(min(window.log_outside + whole - t * self.h * last, 0.0))
        if cut > last:
            return _Upper(self.h, max(last, 0), np.zeros(1), infinity, np.zeros(1), 0.0, (0.0, 0.0), 0.0)
        untilt = inexact * np.exp(whole - t * self.h * np.arange(cut, last + 1))
        masses = _from(result.masses, (cut - result.start) % size, last - cut + 1) * untilt
        smooth = result.weighted(t, self.h)
        return _Upper(self.h, cut, masses, infinity, untilt, result.error, smooth, math.exp(window.log_outside))

    def _window(self, direction: _Direction, t: float, centre: float, delta: float) -> _Window:
        """The window for the tilt t, such that what is outside makes up little of a δ of ``delta`` at a loss of ``centre``."""
        whole = direction.cumulant(t)
        log_outside = min(math.log(_OUTSIDE), math.log(_OUTSIDE * delta) - (whole - t * centre))
        mean, deviation = direction.spread(direction.weights(t))
        low, high = direction.ends
        # Orders for what is made up of many small losses, to those for a single large one.
        widest = max(deviation, self.h, *(loss[-1] for loss in direction.losses))
        for a in np.geomspace(2 / widest, 32 / max(deviation, self.h), _ORDERS):
            up = (direction.cumulant(t + a) - whole - log_outside) / a
            down = (direction.cumulant(t - a) - whole - log_outside) / a
            high = min(high, math.ceil(up / self.h) + 1)
            low = max(low, math.floor(-down / self.h) - 1)
        return _Window(t, whole, log_outside, min(low, math.floor(mean / self.h)), max(high, math.ceil(mean / self.h)))


def _from(values: Array, first: int, count: int) -> Array:
    """``count`` of the values from ``first`` on, around the end, as a copy."""
    return np.concatenate((values[first : first + count], values[: max(0, first + count - len(values))]))


def compose_losses(parts: Parts, neighbours: Neighbours, h: float, log_tail: float) -> Composition:
    """The composed privacy loss of ``parts`` on a grid of ``h``; a step's losses beyond a tail of e^log_tail count as infinite."""
    steps = [step_masses(step, neighbours, h, log_tail) for step, _ in parts]
    counts = [count for _, count in parts]
    directions = [[each[number] for each in steps] for number in range(len(steps[0]))]
    largest = [max(abs(m.lowest), abs(m.lowest + len(m.probabilities))) * h for m in (each[0] for each in steps)]
    misplaced = MISPLACED * sum(n * (step.rate + most) for (step, n), most in zip(parts, largest, strict=True))
    return Composition([_Direction(direction, counts, h) for direction in directions], h, misplaced)
