"""How much privacy a run spends: thin, validated calls to Google's dp-accounting.

One training step releases the noised sum of per-example vectors of a Poisson sample: a Gaussian mechanism of noise
multiplier σ (noise std ÷ per-example bound Δ) behind Poisson sampling at rate q. :func:`event` *describes* T of
them; the other functions *analyse* that description, with the accountant asked for:

- ``"pld"`` (default): privacy loss distributions, tight up to a discretisation of 1e-4 that is always pessimistic.
- ``"rdp"``: Rényi differential privacy over dp-accounting's default orders (they include Opacus'): looser.

And for the neighbours asked for:

- ``"add_remove"`` (default): one record more or less. The sum moves by at most Δ.
- ``"replace_one"``: one record changed. The sum moves by up to 2Δ, but "2Δ and the add/remove accountant" is wrong once
  Poisson samples are composed. The multiplier passed here is still s/Δ: the PLD accountant doubles internally.

:class:`~lipdp.privacy.runs.PrivateRun` describes the general case: steps at several noise levels and one-off releases
(statistics, say) beside them. Gaussian ones are composed by the accountant, exactly; the ε of pure ones is added.

dp-accounting (and with it scipy) is imported on the first call, not with this module.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal, get_args

from lipdp._checks import is_number, positive, probability, rate, whole
from lipdp.errors import BudgetError, ConfigurationError
from lipdp.privacy._search import MAX_NOISE, MAX_STEPS, most_steps, smallest_noise
from lipdp.privacy.runs import PrivateRun

__all__ = [
    "MAX_STEPS",
    "Accountant",
    "Adjacency",
    "calibrate_noise",
    "calibrate_run",
    "delta",
    "epsilon",
    "event",
    "longest_run",
    "max_steps",
    "privacy_profile",
    "run_epsilon",
]

Adjacency = Literal["add_remove", "replace_one"]
Accountant = Literal["pld", "rdp"]

_FINE, _COARSE = 1e-4, 1e-3  # PLD discretisation: dp-accounting's default, and a ten times faster one for first guesses
_MAX_LOSS = 5_000.0  # the widest privacy loss a PLD is built for: 5e7 bins, about 5 GB
_ROUGH_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 96, 128, 256)  # whole orders cost 3 ms in all


def event(noise_multiplier: float, sampling_rate: float, steps: int) -> Any:
    """The dp-accounting ``DpEvent`` of a run: T × Poisson(q, Gaussian(σ)); no event for 0 steps."""
    sigma, q = positive("noise_multiplier", noise_multiplier), rate(sampling_rate)
    count, dp = whole("steps", steps, least=0), _dp()
    if count == 0:
        return dp.NoOpDpEvent()
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), count)


def epsilon(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
) -> float:
    """The ε that T steps spend at this δ: min{ε : P(S) ≤ e^ε·P'(S) + δ for all neighbours and all S}; 0 for 0 steps.

    It is dp-accounting's own value, and ``inf`` where the accountant has no finite one (PLD below δ ≈ 1e-15 per run).
    """
    return run_epsilon(PrivateRun(sampling_rate, ((noise_multiplier, steps),)), delta, accountant, adjacency)


def run_epsilon(run: PrivateRun, delta: float, accountant: Accountant = "pld", adjacency: Adjacency = "add_remove") -> float:
    """The ε of a whole run at this δ: its Gaussian parts composed by the accountant, plus Σε of its pure releases."""
    d, how = probability(delta), _analysis(accountant, adjacency)
    idle = run.steps == 0 and not run.gaussian_releases
    return run.pure_epsilon + (0.0 if idle else _epsilon(run, d, *how))


def privacy_profile(
    run: PrivateRun,
    epsilons: Sequence[float],
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    *,
    coarse: bool = False,
) -> list[float]:
    """δ(ε) of a whole run at many ε ≥ 0 at once; those below the ε of its pure releases have δ = 1.

    ``coarse``: ten times as fast, and a little larger.
    """
    how, pure = _analysis(accountant, adjacency), run.pure_epsilon
    if run.steps == 0 and not run.gaussian_releases:
        return [0.0 if e >= pure else 1.0 for e in epsilons]
    composed = _compose(run, *how, _COARSE) if coarse else _composed(run, *how)
    beyond = [e - pure for e in epsilons if e >= pure]
    if accountant == "pld":
        found = iter(map(float, composed.get_delta(beyond)) if beyond else ())
    else:
        found = (float(composed.get_delta(e)) for e in beyond)
    return [next(found) if e >= pure else 1.0 for e in epsilons]


def delta(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    epsilon: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
) -> float:
    """The δ that T steps spend at this ε: sup over neighbours and S of P(S) − e^ε·P'(S); 0 for 0 steps."""
    budget, analysis = positive("epsilon", epsilon), _analysis(accountant, adjacency)
    run = PrivateRun(sampling_rate, ((noise_multiplier, steps),))
    return float(_composed(run, *analysis).get_delta(budget)) if run.steps else 0.0


def calibrate_noise(
    *,
    epsilon: float,
    delta: float,
    sampling_rate: float,
    steps: int,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    tolerance: float = 1e-5,
) -> float:
    """The smallest noise multiplier whose T steps cost at most (ε, δ): min{σ : ε(σ, q, T, δ) ≤ ε}.

    The returned σ has been fed to :func:`epsilon` and fits, and σ/(1 + tolerance) has been seen not to fit, so the
    answer is within that relative tolerance of the smallest (it does not look below 1e-3).
    BudgetError when not even σ = 1e8 fits: a PLD's pessimistic rounding leaves a floor under ε for millions of steps,
    and no finite ε below δ ≈ 1e-15.
    """
    count, q = whole("steps", steps), rate(sampling_rate)
    return calibrate_run(
        lambda sigma: PrivateRun(q, ((sigma, count),)),
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
    target, d, how = positive("epsilon", epsilon), probability(delta), _analysis(accountant, adjacency)
    if not (is_number(tolerance) and 1e-9 <= tolerance < 1):
        raise ConfigurationError(f"tolerance is {tolerance!r}: a relative precision between 1e-9 and 1; leave it at 1e-5.")
    one = describe(1.0)
    if one.steps > MAX_STEPS:
        raise ConfigurationError(
            f"steps is {one.steps}: more than {MAX_STEPS:,} can't be accounted for in reasonable time. Use fewer."
        )
    _refuse_dear_releases(one, target, d, *how)
    left = target - one.pure_epsilon
    passes = [(lambda s: _rough(describe(s), d, how[1]), 0.01)]
    if how[0] == "pld":
        passes.append((lambda s: _measure(describe(s), d, *how, _COARSE), 1e-3))
    guess, slope = 1.0, -1.5
    for cost, precision in passes:
        found, steepness = smallest_noise(cost, left, guess, slope, precision)
        if math.isfinite(found):  # else beyond that accountant, which says nothing of the next
            guess, slope = found, steepness
    found, _ = smallest_noise(lambda s: _epsilon(describe(s), d, *how), left, guess, slope, tolerance)
    if math.isinf(found):
        raise BudgetError(
            f"No noise multiplier up to {MAX_NOISE:g} brings {one.steps} steps at sampling_rate={one.sampling_rate:g} under "
            f"epsilon={target:g} at delta={d:g} with the {how[0]} accountant: its numerical floor is higher. Ask for a larger "
            "epsilon or delta, for fewer steps, or for the other accountant."
        )
    return found


def _refuse_dear_releases(run: PrivateRun, target: float, d: float, accountant: Accountant, adjacency: Adjacency) -> None:
    alone = run_epsilon(PrivateRun(run.sampling_rate, (), run.releases), d, accountant, adjacency)
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
) -> int:
    """The largest number of steps that costs at most (ε, δ): max{T : ε(σ, q, T, δ) ≤ ε}.

    T has been seen to fit and T + 1 not to. BudgetError when even one step is too many; ConfigurationError when more
    than :data:`MAX_STEPS` fit, for then the budget is no limit and the length of the run has to be said.
    """
    sigma, q = positive("noise_multiplier", noise_multiplier), rate(sampling_rate)
    return longest_run(
        lambda steps: PrivateRun(q, ((sigma, steps),)), epsilon=epsilon, delta=delta, accountant=accountant, adjacency=adjacency
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
    target, d, how = positive("epsilon", epsilon), probability(delta), _analysis(accountant, adjacency)
    one = describe(1)
    _refuse_dear_releases(one, target, d, *how)
    left = target - one.pure_epsilon
    guess = most_steps(lambda n: _rough(describe(n), d, how[1]), left, 1)
    if how[0] == "pld":  # a coarser grid costs more epsilon, so what fits there fits
        guess = most_steps(lambda n: _measure(describe(n), d, *how, _COARSE), left, guess)
    found = guess if guess >= MAX_STEPS else most_steps(lambda n: _epsilon(describe(n), d, *how), left, guess)
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


# --- analysis ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _epsilon(run: PrivateRun, d: float, accountant: Accountant, adjacency: Adjacency) -> float:
    return float(_composed(run, accountant, adjacency).get_epsilon(d))


def _measure(run: PrivateRun, d: float, accountant: Accountant, adjacency: Adjacency, interval: float) -> float:
    return float(_compose(run, accountant, adjacency, interval).get_epsilon(d))


@lru_cache(maxsize=4)  # a composed PLD is some megabytes
def _composed(run: PrivateRun, accountant: Accountant, adjacency: Adjacency) -> Any:
    return _compose(run, accountant, adjacency, _FINE)


def _compose(run: PrivateRun, accountant: Accountant, adjacency: Adjacency, interval: float) -> Any:
    """An accountant that has seen the Gaussian parts of the run."""
    dp = _dp()
    if accountant == "rdp":
        ledger = dp.rdp.RdpAccountant()
    else:
        for sigma, steps in run.segments:
            _refuse_huge(sigma if adjacency == "add_remove" else sigma / 2, run.sampling_rate, steps)
        relation = dp.NeighboringRelation
        chosen = relation.ADD_OR_REMOVE_ONE if adjacency == "add_remove" else relation.REPLACE_ONE
        ledger = dp.pld.PLDAccountant(chosen, interval)
    with _quiet():
        for part in _events(run):
            ledger.compose(part)
    return ledger


def _events(run: PrivateRun, scale: float = 1.0) -> Iterator[Any]:
    for sigma, steps in run.segments:
        if steps:
            yield event(sigma * scale, run.sampling_rate, steps)
    for sigma in run.gaussian_releases:
        yield event(sigma * scale, 1.0, 1)  # every record is in it: the event that also doubles for replace-one


def _rough(run: PrivateRun, d: float, adjacency: Adjacency) -> float:
    """An ε to start a search from: RDP at whole orders; for replace-one (a guess only) at twice the sensitivity."""
    ledger = _dp().rdp.RdpAccountant(_ROUGH_ORDERS)
    for part in _events(run, 1.0 if adjacency == "add_remove" else 0.5):
        ledger.compose(part)
    return float(ledger.get_epsilon(d))


def _refuse_huge(sigma: float, q: float, steps: int) -> None:
    """A PLD is an array over the privacy loss. One step's loss reaches 1/2σ² + 8/σ; the composed one is about
    T·KL wide, and KL ≤ min(q/2σ², log(1 + q²(e^{1/σ²} − 1))), the second being the Rényi divergence of order 2."""
    kl = q / (2 * sigma**2) if sigma < 0.1 else min(q / (2 * sigma**2), math.log1p(q**2 * math.expm1(sigma**-2)))
    loss = 1 / (2 * sigma**2) + 8 / sigma + steps * kl
    if loss > _MAX_LOSS:
        raise ConfigurationError(
            f"noise_multiplier={sigma:g} (against the sensitivity) with sampling_rate={q:g} and {steps} steps: the PLD "
            f"accountant would need about {loss * 1e4:.1g} bins of memory for a run that is hardly private. Add noise "
            "(lower the epsilon or delta to calibrate for), or take accountant='rdp', which works for any noise."
        )


# --- the library and the choices ------------------------------------------------------------------------------------


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


def _analysis(accountant: Accountant, adjacency: Adjacency) -> tuple[Accountant, Adjacency]:
    if accountant not in get_args(Accountant):
        raise ConfigurationError(f"accountant is {accountant!r}: choose one of {', '.join(get_args(Accountant))}.")
    if adjacency not in get_args(Adjacency):
        raise ConfigurationError(f"adjacency is {adjacency!r}: choose one of {', '.join(get_args(Adjacency))}.")
    if (accountant, adjacency) == ("rdp", "replace_one"):
        raise ConfigurationError(
            "accountant='rdp' with adjacency='replace_one' is refused: dp-accounting's RDP has no Poisson-sampled "
            "Gaussian for replace-one neighbours, and doubling the sensitivity under add/remove is wrong under "
            "composition. Take accountant='pld', which analyses replace-one itself, or adjacency='add_remove'."
        )
    return accountant, adjacency
