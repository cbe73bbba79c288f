"""The noise and the number of steps that a budget allows, by search over what :mod:`lipdp.privacy.accounting` says they cost.

ε is close to a power law in the noise and in the number of steps: secants in logarithms find the place in a few calls
of an accountant. Brackets of values that were really computed decide the answer; the secants only choose where to look.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from lipdp._checks import is_number, positive, probability, rate, whole
from lipdp._texts import brief, upwards
from lipdp.errors import BudgetError, ConfigurationError
from lipdp.privacy._analyses import FEW_ORDERS, grid_epsilon
from lipdp.privacy._analyses import run_epsilon as rdp_epsilon
from lipdp.privacy.accounting import (
    POISSON,
    Accountant,
    Adjacency,
    checked_analysis,
    dp_library,
    figure,
    gaussian_parts,
    reckoned,
    run_epsilon,
)
from lipdp.privacy.runs import PrivateRun, Sampling

MIN_NOISE, MAX_NOISE = 1e-3, 1e8
MAX_STEPS = 10_000_000
"""The longest run that :func:`lipdp.privacy.max_steps` looks for."""


@reckoned
def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    tolerance: float = 1e-5,
    sampling: Sampling = POISSON,
) -> float:
    """The smallest noise multiplier whose T steps cost at most (ε, δ): min{σ : ε(σ, q, T, δ) ≤ ε}.

    The returned σ has been fed to :func:`epsilon` and fits, and σ/(1 + tolerance) has been seen not to fit, so the
    answer is within that relative tolerance of the smallest (it does not look below 1e-3). Where ε itself is loose, which a warning
    says, it is not sought more exactly than that.
    BudgetError when not even σ = 1e8 fits.

    Args:
        epsilon: the ε that may be spent, above 0.
        delta: δ, between 0 and 1.
        sampling_rate: q, the probability that a record is in a step's sample.
        steps: T, at least 1.
        accountant: see :func:`epsilon`.
        adjacency: see :func:`epsilon`.
        tolerance: how far above the smallest σ the answer may be, relative to it; from 1e-9 to below 1.
        sampling: how the records of a step are drawn; Poisson by default.
    """
    count, q = whole("steps", steps), rate(sampling_rate)
    return calibrate_run(
        lambda sigma: PrivateRun(q, ((sigma, count),), sampling=sampling),
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        adjacency=adjacency,
        tolerance=tolerance,
    )


@reckoned
def calibrate_run(
    describe: Callable[[float], PrivateRun],
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    tolerance: float = 1e-5,
) -> float:
    """The smallest σ for which the run ``describe(σ)`` costs at most (ε, δ); see :func:`calibrate_noise`.

    The cost has to fall as σ grows; what does not depend on σ (one-off releases) must leave something of the budget.

    Args:
        describe: the run at a noise multiplier σ; it is called for many of them.
        epsilon: the ε that the whole run may spend, one-off releases included.
        delta: δ, between 0 and 1.
        accountant: see :func:`epsilon`.
        adjacency: see :func:`epsilon`.
        tolerance: how far above the smallest σ the answer may be, relative to it; from 1e-9 to below 1.
    """
    target, d = positive("epsilon", epsilon), probability(delta)
    if not (is_number(tolerance) and 1e-9 <= tolerance < 1):
        raise ConfigurationError(f"tolerance is {tolerance!r}: a relative precision between 1e-9 and 1; leave it at 1e-5.")
    one = describe(1.0)
    how = checked_analysis(accountant, adjacency, one.sampling)
    if one.steps > MAX_STEPS:
        raise ConfigurationError(
            f"steps is {one.steps}: more than {MAX_STEPS:,} can't be accounted for in reasonable time. Use fewer."
        )
    _refuse_dear_releases(one, target, d, *how)
    left = target - one.pure_epsilon
    guess, slope = 1.0, -1.5
    # About where it is, then on a coarse grid, then as it will be reported.
    coarse: tuple[tuple[Callable[[float], float], float], ...] = (
        (lambda s: _guess(describe(s), d, how[1]), 0.02),
        (lambda s: _first_epsilon(describe(s), d, *how), 1e-3),
    )
    for cost, precision in coarse:
        near, steepness = smallest_noise(cost, left, guess, slope, precision)
        if math.isfinite(near):  # else beyond that estimate, which says nothing of the next
            guess, slope = near, steepness
    guess, slope = _nearer(describe, d, how, left, guess, slope)
    tolerance = max(tolerance, figure(describe(guess), d, *how).loose / 4)
    sigma, _ = smallest_noise(lambda s: figure(describe(s), d, *how).value, left, guess, slope, tolerance)
    if math.isinf(sigma):
        raise BudgetError(
            f"No noise multiplier up to {MAX_NOISE:g} brings {one.steps} steps at sampling_rate={one.sampling_rate:g} under "
            f"epsilon={brief(target)} at delta={brief(d)} with the {how[0]} accountant: its numerical floor is higher. Ask for a "
            "larger epsilon or delta, for fewer steps, or for the other accountant."
        )
    figure(describe(sigma), d, *how).told("epsilon")
    return sigma


def _nearer(
    describe: Callable[[float], PrivateRun], d: float, how: tuple[Accountant, Adjacency], left: float, guess: float, slope: float
) -> tuple[float, float]:
    """A better σ to start from, where the grid that is needed there is a fine one: sought on one that is coarser.

    What is coarse about that one is a factor of ε that hardly depends on σ.
    """
    here = figure(describe(guess), d, *how)
    if how[0] == "rdp" or not (here.grid and 0 < here.value < math.inf) or abs(here.value / left - 1) < 1e-3:
        return guess, slope

    def cost(sigma: float) -> float:
        return grid_epsilon(gaussian_parts(describe(sigma)), d, how[1], 4 * here.grid)

    factor = here.value / cost(guess)
    near, steepness = smallest_noise(lambda s: factor * cost(s), left, guess, slope, 1e-3)
    return (near, steepness) if math.isfinite(near) else (guess, slope)


def _refuse_dear_releases(run: PrivateRun, target: float, d: float, accountant: Accountant, adjacency: Adjacency) -> None:
    alone = run_epsilon(PrivateRun(run.sampling_rate, (), run.releases, run.sampling), d, accountant, adjacency)
    if alone >= target:
        raise BudgetError(
            f"the releases beside the training ({', '.join(release.name for release in run.releases)}) cost epsilon "
            f"{upwards(alone)} alone, which leaves nothing of {target:g} for the training. Give them a smaller share."
        )


@reckoned
def max_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    sampling: Sampling = POISSON,
) -> int:
    """The largest number of steps that costs at most (ε, δ): max{T : ε(σ, q, T, δ) ≤ ε}.

    T has been seen to fit and T + 1 not to. BudgetError when even one step is too many; ConfigurationError when more
    than :data:`MAX_STEPS` fit, for then the budget is no limit and the length of the run has to be said.

    Args:
        epsilon: the ε that may be spent, above 0.
        delta: δ, between 0 and 1.
        noise_multiplier: σ, see :func:`epsilon`.
        sampling_rate: q, the probability that a record is in a step's sample.
        accountant: see :func:`epsilon`.
        adjacency: see :func:`epsilon`.
        sampling: how the records of a step are drawn; Poisson by default.
    """
    sigma, q = positive("noise_multiplier", noise_multiplier), rate(sampling_rate)
    return longest_run(
        lambda steps: PrivateRun(q, ((sigma, steps),), sampling=sampling),
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        adjacency=adjacency,
    )


@reckoned
def longest_run(
    describe: Callable[[int], PrivateRun],
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
) -> int:
    """The largest T for which the run ``describe(T)`` costs at most (ε, δ); see :func:`max_steps`.

    Args:
        describe: the run of so many steps; it is called for many lengths, and a longer one has to cost more.
        epsilon: the ε that the whole run may spend, one-off releases included.
        delta: δ, between 0 and 1.
        accountant: see :func:`epsilon`.
        adjacency: see :func:`epsilon`.
    """
    target, d = positive("epsilon", epsilon), probability(delta)
    one = describe(1)
    how = checked_analysis(accountant, adjacency, one.sampling)
    _refuse_dear_releases(one, target, d, *how)
    left = target - one.pure_epsilon
    guess = most_steps(lambda n: _guess(describe(n), d, how[1]), left, 1, precision=0.02)
    guess = most_steps(lambda n: _first_epsilon(describe(n), d, *how), left, guess, precision=1e-3)
    most = most_steps(lambda n: figure(describe(n), d, *how).value, left, guess)
    sigma, q = one.segments[0][0], one.sampling_rate
    if most == 0:
        raise BudgetError(
            f"Even one step costs epsilon={upwards(run_epsilon(one, d, *how))} at delta={brief(d)}, noise_multiplier="
            f"{sigma:g}, sampling_rate={q:g}: above the budget of {brief(target)}. Raise the noise multiplier or epsilon, or "
            "lower the sampling rate; calibrate_noise finds the noise for a given number of steps."
        )
    if most >= MAX_STEPS:
        raise ConfigurationError(
            f"At least {MAX_STEPS:,} steps fit in epsilon={brief(target)} with noise_multiplier={sigma:g}, sampling_rate="
            f"{q:g}: the budget does not limit the run. Give the number of steps, and calibrate_noise finds less noise."
        )
    return most


def _first_epsilon(run: PrivateRun, d: float, accountant: Accountant, adjacency: Adjacency) -> float:
    """ε on the first grid alone, or at few orders: an upper bound."""
    return rdp_epsilon(run, d, FEW_ORDERS) if accountant == "rdp" else grid_epsilon(gaussian_parts(run), d, adjacency)


def _guess(run: PrivateRun, d: float, adjacency: Adjacency) -> float:
    """About ε, by the central limit theorem: n steps are like one Gaussian of σ² = 1/Σ nᵢqᵢ²(e^{1/σᵢ²} − 1). It bounds nothing."""
    import numpy as np

    sensitivity = 1.0 if adjacency == "add_remove" else 2.0
    energy = sum(sigma**-2 for sigma in run.gaussian_releases) * sensitivity**2
    for sigma, steps in run.segments:
        power = (sensitivity / sigma) ** 2
        energy += steps * (power if run.sampling_rate == 1 else run.sampling_rate**2 * math.expm1(min(power, 30.0)))
    with np.errstate(all="ignore"):
        return float(dp_library().get_epsilon_gaussian(energy**-0.5, d))


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
