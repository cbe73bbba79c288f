"""How much privacy a run spends, by Google's dp-accounting.

One training step releases the noised sum of per-example vectors of a random sample: a Gaussian mechanism of noise
multiplier σ (noise std ÷ per-example bound Δ) behind Poisson sampling at rate q, if nothing else is said. :func:`event`
*describes* T of them; the other functions *analyse* that description, with the accountant asked for:

- ``"pld"`` (default): privacy loss distributions, on a grid that is halved until ε no longer moves by :data:`PRECISION`; always
  pessimistic.
- ``"rdp"``: Rényi differential privacy over dp-accounting's default orders (they include Opacus'): looser.

And for the neighbours asked for:

- ``"add_remove"`` (default): one record more or less. The sum moves by at most Δ.
- ``"replace_one"``: one record changed. The sum moves by up to 2Δ, but "2Δ and the add/remove accountant" is wrong once
  Poisson samples are composed. The multiplier passed here is still s/Δ: the accountant doubles internally.

:class:`~lipdp.privacy.runs.PrivateRun` describes the general case: steps at several noise levels, with another
:class:`~lipdp.privacy.runs.Sampling`, and one-off releases (statistics, say) beside them. Gaussian ones are composed by the
accountant, exactly; the ε of pure ones is added.

dp-accounting (and with it scipy) is imported on the first call, not with this module.
"""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal, NamedTuple, get_args

from lipdp.errors import BudgetError, ConfigurationError, LipdpWarning
from lipdp.privacy._checks import is_number, positive, probability, rate, whole
from lipdp.privacy._search import MAX_NOISE, MAX_STEPS, most_steps, smallest_noise
from lipdp.privacy.loss_distribution import Composition, Parts, SampledGaussian, composition, scale
from lipdp.privacy.runs import PrivateRun, Sampling

__all__ = [
    "MAX_STEPS",
    "MOST_BINS",
    "PRECISION",
    "Accountant",
    "Adjacency",
    "calibrate_noise",
    "calibrate_run",
    "delta",
    "epsilon",
    "event",
    "gaussians_epsilon",
    "longest_run",
    "max_steps",
    "run_epsilon",
    "step_event",
]

Adjacency = Literal["add_remove", "replace_one"]
Accountant = Literal["pld", "rdp"]

PRECISION = 1e-3
"""The PLD's grid is halved until that moves ε by less than this share of it. What is left is about a third of it, and upwards."""
MOST_BINS = 1 << 22
"""Points of the largest grid that the PLD accountant goes to: about a second on one core."""

_USUAL_GRID = 1e-4  # dp-accounting's default; all grids are this times a power of two
_EASY_BINS = 1 << 18  # up to so many points no grid is left that is coarser than the usual one
_FIRST_BINS = 1 << 14
_THEIR_BINS = 120_000  # dp-accounting makes a distribution of so many points in a second
_AGREEMENT = 1e-5
_BEYOND = math.log(1e5)  # the largest losses of all steps, counted as infinite, make up this part of δ
_RDP_ROUNDING = 1e-15
_ROUGH_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256)  # whole orders cost 3 ms in all
_POISSON = Sampling()


def event(noise_multiplier: float, sampling_rate: float, steps: int) -> Any:
    """The dp-accounting ``DpEvent`` of a run: T × Poisson(q, Gaussian(σ)); no event for 0 steps."""
    sigma, q = positive("noise_multiplier", noise_multiplier), rate(sampling_rate)
    count, dp = whole("steps", steps, least=0), _dp()
    if count == 0:
        return dp.NoOpDpEvent()
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), count)


def step_event(run: PrivateRun, noise_multiplier: float) -> Any:
    """The dp-accounting ``DpEvent`` of one step of the run with this noise, as its sampling says.

    For "fixed_size" the multiplier is halved: dp-accounting means the noise against the sensitivity to *replacing* a record there.
    """
    dp, how = _dp(), run.sampling
    if how.scheme == "truncated_poisson":
        return dp.dp_event.TruncatedSubsampledGaussianDpEvent(
            how.dataset_size, run.sampling_rate, how.batch_size, noise_multiplier
        )
    if how.scheme == "fixed_size":
        return dp.SampledWithoutReplacementDpEvent(how.dataset_size, how.batch_size, dp.GaussianDpEvent(noise_multiplier / 2))
    return dp.PoissonSampledDpEvent(run.sampling_rate, dp.GaussianDpEvent(noise_multiplier))


def epsilon(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    sampling: Sampling = _POISSON,
) -> float:
    """The ε that T steps spend at this δ: min{ε : P(S) ≤ e^ε·P'(S) + δ for all neighbours and all S}; 0 for 0 steps."""
    run = PrivateRun(sampling_rate, ((noise_multiplier, steps),), sampling=sampling)
    return run_epsilon(run, delta, accountant, adjacency)


def run_epsilon(run: PrivateRun, delta: float, accountant: Accountant = "pld", adjacency: Adjacency = "add_remove") -> float:
    """The ε of a whole run at this δ: its Gaussian parts composed by the accountant, plus Σε of its pure releases."""
    d, how = probability(delta), _analysis(accountant, adjacency, run.sampling)
    idle = run.steps == 0 and not run.gaussian_releases
    return run.pure_epsilon + (0.0 if idle else _figure(run, d, *how).told("epsilon"))


def delta(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    epsilon: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    sampling: Sampling = _POISSON,
) -> float:
    """The δ that T steps spend at this ε: sup over neighbours and S of P(S) − e^ε·P'(S); 0 for 0 steps.

    Its grid is halved until that moves δ by less than 1%.
    """
    budget, how = positive("epsilon", epsilon), _analysis(accountant, adjacency, sampling)
    run = PrivateRun(sampling_rate, ((noise_multiplier, steps),), sampling=sampling)
    return _delta(run, budget, *how).told("delta") if run.steps else 0.0


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    tolerance: float = 1e-5,
    sampling: Sampling = _POISSON,
) -> float:
    """The smallest noise multiplier whose T steps cost at most (ε, δ): min{σ : ε(σ, q, T, δ) ≤ ε}.

    The returned σ has been fed to :func:`epsilon` and fits, and σ/(1 + tolerance) has been seen not to fit, so the
    answer is within that relative tolerance of the smallest (it does not look below 1e-3).
    BudgetError when not even σ = 1e8 fits.
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
    """
    target, d = positive("epsilon", epsilon), probability(delta)
    if not (is_number(tolerance) and 1e-9 <= tolerance < 1):
        raise ConfigurationError(f"tolerance is {tolerance!r}: a relative precision between 1e-9 and 1; leave it at 1e-5.")
    one = describe(1.0)
    how = _analysis(accountant, adjacency, one.sampling)
    if one.steps > MAX_STEPS:
        raise ConfigurationError(
            f"steps is {one.steps}: more than {MAX_STEPS:,} can't be accounted for in reasonable time. Use fewer."
        )
    _refuse_dear_releases(one, target, d, *how)
    left = target - one.pure_epsilon
    guess, slope = 1.0, -1.5
    # About where it is, then on a coarse grid, then as it will be reported.
    for cost, precision in ((_guess, 0.02), (_first_epsilon, 1e-3)):
        near, steepness = smallest_noise(lambda s, cost=cost: cost(describe(s), d, *how), left, guess, slope, precision)
        if math.isfinite(near):  # else beyond that estimate, which says nothing of the next
            guess, slope = near, steepness
    found, _ = smallest_noise(lambda s: _epsilon(describe(s), d, *how), left, guess, slope, tolerance)
    if math.isinf(found):
        raise BudgetError(
            f"No noise multiplier up to {MAX_NOISE:g} brings {one.steps} steps at sampling_rate={one.sampling_rate:g} under "
            f"epsilon={target:g} at delta={d:g} with the {how[0]} accountant: its numerical floor is higher. Ask for a larger "
            "epsilon or delta, for fewer steps, or for the other accountant."
        )
    _figure(describe(found), d, *how).told("epsilon")
    return found


def _refuse_dear_releases(run: PrivateRun, target: float, d: float, accountant: Accountant, adjacency: Adjacency) -> None:
    alone = run_epsilon(PrivateRun(run.sampling_rate, (), run.releases, run.sampling), d, accountant, adjacency)
    if alone >= target:
        raise BudgetError(
            f"the releases beside the training ({', '.join(release.name for release in run.releases)}) cost epsilon {alone:.4g} "
            f"alone, which leaves nothing of {target:g} for the training. Give them a smaller share."
        )


def max_steps(
    *,
    epsilon: float,
    delta: float,
    noise_multiplier: float,
    sampling_rate: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    sampling: Sampling = _POISSON,
) -> int:
    """The largest number of steps that costs at most (ε, δ): max{T : ε(σ, q, T, δ) ≤ ε}.

    T has been seen to fit and T + 1 not to. BudgetError when even one step is too many; ConfigurationError when more
    than :data:`MAX_STEPS` fit, for then the budget is no limit and the length of the run has to be said.
    """
    sigma, q = positive("noise_multiplier", noise_multiplier), rate(sampling_rate)
    return longest_run(
        lambda steps: PrivateRun(q, ((sigma, steps),), sampling=sampling),
        epsilon=epsilon,
        delta=delta,
        accountant=accountant,
        adjacency=adjacency,
    )


def longest_run(
    describe: Callable[[int], PrivateRun],
    *,
    epsilon: float,
    delta: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
) -> int:
    """The largest T for which the run ``describe(T)`` costs at most (ε, δ); see :func:`max_steps`."""
    target, d = positive("epsilon", epsilon), probability(delta)
    one = describe(1)
    how = _analysis(accountant, adjacency, one.sampling)
    _refuse_dear_releases(one, target, d, *how)
    left = target - one.pure_epsilon
    guess = most_steps(lambda n: _guess(describe(n), d, *how), left, 1, precision=0.02)
    guess = most_steps(lambda n: _first_epsilon(describe(n), d, *how), left, guess, precision=1e-3)
    found = most_steps(lambda n: _epsilon(describe(n), d, *how), left, guess)
    sigma, q = one.segments[0][0], one.sampling_rate
    if found == 0:
        raise BudgetError(
            f"Even one step costs epsilon={run_epsilon(one, d, *how):.4g} at delta={d:g}, noise_multiplier="
            f"{sigma:g}, sampling_rate={q:g}: above the budget of {target:g}. Raise the noise multiplier or epsilon, or "
            "lower the sampling rate; calibrate_noise finds the noise for a given number of steps."
        )
    if found >= MAX_STEPS:
        raise ConfigurationError(
            f"At least {MAX_STEPS:,} steps fit in epsilon={target:g} with noise_multiplier={sigma:g}, sampling_rate="
            f"{q:g}: the budget does not limit the run. Give the number of steps, and calibrate_noise finds less noise."
        )
    return found


# --- privacy loss distributions -----------------------------------------------------------------------------------------


class _Figure(NamedTuple):
    """An upper bound, and how far the last halving of its grid moved it where that was too far."""

    value: float
    moved: float = 0.0

    def told(self, what: str) -> float:
        """The value, with a warning where it may be loose."""
        if self.moved:
            warnings.warn(
                f"{what} {self.value:.6g} may be larger than it need be: on the largest grid that is tried ({MOST_BINS:,} points at "
                f"most) halving it still moved {what} by {self.moved:.2%}. It is an upper bound all the same.",
                LipdpWarning,
                stacklevel=3,
            )
        return self.value


@lru_cache(maxsize=4096)
def _figure(run: PrivateRun, d: float, accountant: Accountant, adjacency: Adjacency) -> _Figure:
    return _Figure(_rdp_epsilon(run, d)) if accountant == "rdp" else _gaussians(_parts(run), d, adjacency)


def _epsilon(run: PrivateRun, d: float, accountant: Accountant, adjacency: Adjacency) -> float:
    return _figure(run, d, accountant, adjacency).value


def gaussians_epsilon(parts: Parts, delta: float, adjacency: Adjacency = "add_remove") -> float:
    """ε at δ of sampled Gaussian steps, at any rates, by their privacy loss distributions (:mod:`lipdp.privacy.loss_distribution`).

    The grid is halved until that moves ε by less than :data:`PRECISION`. Every grid rounds up, so what is left of the error makes
    ε larger. At :data:`MOST_BINS` points halving ends, and a warning says how far it got. Where dp-accounting's usual grid of 1e-4
    is the one that is reached, and its own PLD agrees to 1e-5, ε is dp-accounting's own figure.
    """
    return _gaussians(parts, probability(delta), _analysis("pld", adjacency, _POISSON)[1]).told("epsilon")


def _gaussians(parts: Parts, d: float, adjacency: Adjacency) -> _Figure:
    _dp()
    found, h = _refined(parts, adjacency, _log_tail(parts, d), lambda composed, known: composed.epsilon(d, known), PRECISION)
    figure = _library_figure(parts, adjacency, h, lambda ledger: float(ledger.get_epsilon(d)))
    return _Figure(max(figure, found.value)) if abs(figure - found.value) <= _AGREEMENT * found.value else found


def _delta(run: PrivateRun, budget: float, accountant: Accountant, adjacency: Adjacency) -> _Figure:
    dp = _dp()
    if accountant == "rdp":
        ledger = _rdp_ledger(run)
        return _Figure(float(dp.rdp.rdp_privacy_accountant.compute_delta(ledger.orders, _rounded_up(ledger, run), budget)[0]))
    parts, log_tail = _parts(run), -60.0 - math.log(run.steps)
    found, h = _refined(parts, adjacency, log_tail, lambda composed, known: composed.delta(budget, known), 0.01)
    figure = _library_figure(parts, adjacency, h, lambda ledger: float(ledger.get_delta(budget)))
    return _Figure(max(figure, found.value)) if abs(figure - found.value) <= max(1e-3 * found.value, 1e-12) else found


def _log_tail(parts: Parts, d: float) -> float:
    return math.log(d) - math.log(sum(count for _, count in parts)) - _BEYOND


def _parts(run: PrivateRun) -> Parts:
    """The Gaussian steps and releases of a run, equal ones counted together; all full-batch ones are one Gaussian.

    n full-batch Gaussians of σ are one of σ/√n, whichever the neighbours: their losses are normal, and add up.
    """
    counts: dict[SampledGaussian, int] = {}
    precision = sum(sigma**-2 for sigma in run.gaussian_releases)
    truncation = _truncation(run.sampling_rate, run.sampling)
    for sigma, steps in run.segments:
        step = SampledGaussian(sigma, run.sampling_rate, truncation)
        if run.sampling_rate == 1 and truncation is None:
            precision += steps * sigma**-2
        elif steps:
            counts[step] = counts.get(step, 0) + steps
    if precision:
        counts[SampledGaussian(precision**-0.5, 1.0)] = 1
    return tuple(counts.items())


def _truncation(q: float, sampling: Sampling) -> tuple[float, float] | None:
    """(P(cut | a record was drawn), P(it stays | cut)), as dp-accounting has them; None where a sample is never cut."""
    if sampling.scheme != "truncated_poisson":
        return None
    from scipy import stats

    records, most = sampling.dataset_size, sampling.batch_size
    assert records is not None
    assert most is not None
    cut = float(stats.binom.sf(most - 1, records - 1, q))
    return None if cut == 0 else (cut, min(1.0, float(stats.binom.sf(most, records, q)) * most / cut / records))


def _refined(
    parts: Parts,
    adjacency: Adjacency,
    log_tail: float,
    measure: Callable[[Composition, dict[int, float]], float],
    precision: float,
) -> tuple[_Figure, float]:
    """The measure on the first grid that is fine enough, and that grid.

    Fine enough is a grid if halving led to it and hardly moved the measure, or if halving it would hardly: errors fall as h², so
    the next move is foretold by the last two.
    """
    h, known = _first_grid(parts, adjacency, log_tail), dict[int, float]()
    before = moved = math.inf
    while True:
        composed = composition(parts, adjacency, h, log_tail)
        value = measure(composed, known)
        earlier, moved = moved, (before - value) / value if value else before
        settled = moved <= precision or (moved < earlier < math.inf and moved * moved / earlier <= precision)
        if math.isinf(value) or (settled and (h <= _USUAL_GRID or composed.bins > _EASY_BINS)):
            return _Figure(value), h
        if 2 * composed.bins > MOST_BINS:
            return _Figure(value, moved), h
        before, h = value, h / 2


def _first_grid(parts: Parts, adjacency: Adjacency, log_tail: float) -> float:
    """The usual grid times a power of two: about an eighth of a step's standard deviation, with not too many points.

    Twice the usual one where that would be coarser, and the usual one has not too many points either.
    """
    width = scale(parts, adjacency, log_tail)
    wanted = max(width.deviation / 8, width.largest / _FIRST_BINS)
    if width.composed <= _EASY_BINS * _USUAL_GRID:
        wanted = min(wanted, 2 * _USUAL_GRID)
    return float(_USUAL_GRID * 2.0 ** math.floor(math.log2(wanted / _USUAL_GRID) + 1e-9))


def _library_figure(parts: Parts, adjacency: Adjacency, h: float, ask: Callable[[Any], float]) -> float:
    """What dp-accounting's own PLD accountant answers for these parts, where it has its usual grid and is quick; otherwise ∞."""
    if h != _USUAL_GRID or len(parts) > 2 or scale(parts, adjacency, -50.0).largest > _THEIR_BINS * h:
        return math.inf
    if any(step.truncation is not None for step, _ in parts):
        return math.inf
    relation = _dp().NeighboringRelation
    chosen = relation.ADD_OR_REMOVE_ONE if adjacency == "add_remove" else relation.REPLACE_ONE
    ledger = _dp().pld.PLDAccountant(chosen, h)
    for step, count in parts:
        ledger.compose(event(step.sigma, step.rate, count))
    return ask(ledger)


# --- where searches begin -------------------------------------------------------------------------------------------------


def _first_epsilon(run: PrivateRun, d: float, accountant: Accountant, adjacency: Adjacency) -> float:
    """ε on the first grid alone, or at few orders: an upper bound."""
    if accountant == "rdp":
        return _rdp_epsilon(run, d, _ROUGH_ORDERS)
    parts = _parts(run)
    log_tail = _log_tail(parts, d)
    return composition(parts, adjacency, _first_grid(parts, adjacency, log_tail), log_tail).epsilon(d, {})


def _guess(run: PrivateRun, d: float, accountant: Accountant, adjacency: Adjacency) -> float:
    """About ε, by the central limit theorem: n steps are like one Gaussian of σ² = 1/Σ nᵢqᵢ²(e^{1/σᵢ²} − 1). It bounds nothing."""
    sensitivity = 1.0 if adjacency == "add_remove" else 2.0
    energy = sum(sigma**-2 for sigma in run.gaussian_releases) * sensitivity**2
    for sigma, steps in run.segments:
        power = (sensitivity / sigma) ** 2
        energy += steps * (power if run.sampling_rate == 1 else run.sampling_rate**2 * math.expm1(min(power, 30.0)))
    import numpy as np

    with np.errstate(all="ignore"):
        return float(_dp().get_epsilon_gaussian(energy**-0.5, d))


# --- Rényi divergences ----------------------------------------------------------------------------------------------------


def _rdp_epsilon(run: PrivateRun, d: float, orders: Sequence[float] | None = None) -> float:
    ledger = _rdp_ledger(run, orders)
    return float(_dp().rdp.compute_epsilon(ledger.orders, _rounded_up(ledger, run), d)[0])


def _rdp_ledger(run: PrivateRun, orders: Sequence[float] | None = None) -> Any:
    """dp-accounting's RDP accountant that has seen the Gaussian parts of the run."""
    dp = _dp()
    fixed = run.sampling.scheme == "fixed_size"
    relation = dp.NeighboringRelation.REPLACE_ONE if fixed else dp.NeighboringRelation.ADD_OR_REMOVE_ONE
    ledger = dp.rdp.RdpAccountant(orders, relation)
    counts: dict[float, int] = {}
    for sigma, steps in run.segments:
        counts[sigma] = counts.get(sigma, 0) + steps
    with _quiet():
        for sigma, steps in counts.items():
            if steps:
                ledger.compose(step_event(run, sigma), steps)
        for sigma in run.gaussian_releases:
            ledger.compose(dp.GaussianDpEvent(sigma / 2 if fixed else sigma))
    return ledger


def _rounded_up(ledger: Any, run: PrivateRun) -> Any:
    """Its divergences, each with what rounding may have taken from it: at small q they are logarithms of sums near 1."""
    import numpy as np

    return np.maximum(ledger.rdp, 0.0) + (run.steps + 1) * _RDP_ROUNDING


# --- the library and the choices ------------------------------------------------------------------------------------------


def _dp() -> ModuleType:
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigurationError(
            "Privacy accounting needs dp-accounting, which can't be imported here: pip install dp-accounting."
        ) from error
    return dp_accounting  # type: ignore[no-any-return]


@contextmanager
def _quiet() -> Iterator[None]:
    """Drops dp-accounting's log line about orders it leaves out: sound (fewer orders only raise ε), and frequent."""

    def wanted(record: logging.LogRecord) -> bool:
        return "failed to converge" not in str(record.msg)

    logger = logging.getLogger("absl")
    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def _analysis(accountant: Accountant, adjacency: Adjacency, sampling: Sampling) -> tuple[Accountant, Adjacency]:
    """The two, where dp-accounting has an analysis of this sampling by that accountant for those neighbours."""
    if accountant not in get_args(Accountant):
        raise ConfigurationError(f"accountant is {accountant!r}: choose one of {', '.join(get_args(Accountant))}.")
    if adjacency not in get_args(Adjacency):
        raise ConfigurationError(f"adjacency is {adjacency!r}: choose one of {', '.join(get_args(Adjacency))}.")
    if not isinstance(sampling, Sampling):
        raise ConfigurationError(f"sampling is {sampling!r}: a lipdp.privacy.Sampling, e.g. Sampling('fixed_size', 60_000, 600).")
    if sampling.scheme == "fixed_size":
        if (accountant, adjacency) != ("rdp", "replace_one"):
            raise ConfigurationError(
                f"sampling='fixed_size' with accountant={accountant!r} and adjacency={adjacency!r} is refused: dp-accounting "
                "analyses samples without replacement by Rényi divergences, for replaced records, only (one record more or less "
                "changes every other record's chance). Take accountant='rdp' and adjacency='replace_one'."
            )
    elif sampling.scheme == "truncated_poisson":
        if accountant != "pld":
            raise ConfigurationError(
                "sampling='truncated_poisson' with accountant='rdp' is refused: dp-accounting has no Rényi analysis of it. Take "
                "accountant='pld'."
            )
    elif (accountant, adjacency) == ("rdp", "replace_one"):
        raise ConfigurationError(
            "accountant='rdp' with adjacency='replace_one' is refused: dp-accounting's RDP has no Poisson-sampled "
            "Gaussian for replace-one neighbours, and doubling the sensitivity under add/remove is wrong under "
            "composition. Take accountant='pld', which analyses replace-one itself, or adjacency='add_remove'."
        )
    return accountant, adjacency
