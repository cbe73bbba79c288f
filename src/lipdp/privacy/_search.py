"""Searches for the noise and the number of steps that a budget allows.

ε is close to a power law in the noise and in the number of steps: secants in logarithms find the place in a few calls
of an accountant. Brackets of values that were really computed decide the answer; the secants only choose where to look.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

MIN_NOISE, MAX_NOISE = 1e-3, 1e8
MAX_STEPS = 10_000_000
"""The longest run that :func:`lipdp.privacy.max_steps` looks for."""


def smallest_noise(
    cost: Callable[[float], float], target: float, guess: float, slope: float, tolerance: float
) -> tuple[float, float]:
    """The smallest x with cost(x) ≤ target, for a falling cost, and d log(cost)/d log(x) there.

    It stops looking at MIN_NOISE, and returns inf where MAX_NOISE is too little.
    """
    low, high = 0.0, math.inf  # too little noise; enough
    x, last = guess, (math.nan, math.nan)
    for turn in range(200):
        value = cost(x)
        low, high = (low, x) if value <= target else (x, high)
        if high <= max(low * (1 + tolerance), MIN_NOISE) or low >= MAX_NOISE:
            break
        if 0 < value < math.inf and 0 < last[1] < math.inf and abs(math.log(last[0] / x)) > 1e-12:
            fresh = math.log(last[1] / value) / math.log(last[0] / x)
            slope = min(max(fresh, 2 * slope), slope / 2) if fresh < 0 else slope  # no wild turns
        step = math.log(target / value) / slope if 0 < value < math.inf else math.copysign(2.0, value - target)
        down = -0.7 if x < 5 else -2.0  # gently: a PLD with little noise is slow
        last, aim = (x, value), x * math.exp(min(max(step, down), 2.0))
        x = aim * (1 + tolerance / 3) if aim * (1 + tolerance / 3) < high else aim * (1 - tolerance / 3)
        if not low < x < high or (turn % 2 and turn > 5):  # a curve that secants do not fit: halve the bracket
            x = math.sqrt(low * high) if low > 0 and high < math.inf else aim
    return high, slope


def most_steps(cost: Callable[[int], float], target: float, guess: int, precision: float = 0.0) -> int:
    """The largest n in 0…MAX_STEPS with cost(n) ≤ target, for a rising cost with cost(0) = 0; to a relative ``precision``."""
    low, high = 0, MAX_STEPS + 1  # fits; does not
    n, slope, last = min(max(guess, 1), MAX_STEPS), 0.6, (0, math.nan)
    for turn in itertools.count():
        value = cost(n)
        low, high = (n, high) if value <= target else (low, n)
        if high - low <= max(1, precision * low):
            break
        if 0 < value < math.inf and 0 < last[1] < math.inf and last[0] != n:
            fresh = math.log(last[1] / value) / math.log(last[0] / n)
            slope = min(max(fresh, slope / 2), 2 * slope) if fresh > 0 else slope
        step = math.log(target / value) / slope if 0 < value < math.inf else math.copysign(1.4, target - value)
        last, aim = (n, value), math.floor(n * math.exp(min(max(step, -1.4), 1.4)))
        if turn % 2 and turn > 5:
            aim = math.isqrt(max(low, 1) * high)
        n = min(max(aim, low + 1), high - 1)
    return low
