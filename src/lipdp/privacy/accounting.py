"""How much privacy a run spends, by Google's dp-accounting.

One training step releases the noised sum of per-example vectors of a random sample: a Gaussian mechanism of noise
multiplier σ (noise std ÷ per-example bound Δ) behind Poisson sampling at rate q, if nothing else is said. :func:`event`
*describes* T of them; the other functions *analyse* that description, with the accountant asked for:

- ``"pld"`` (default): privacy loss distributions, on a grid that is halved until ε no longer moves by 0.1%; always pessimistic,
  rounding included. Where dp-accounting's usual grid of 1e-4 will do, it is that. See :mod:`lipdp.privacy._analyses`.
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

import math
from collections.abc import Callable, Sequence
from functools import lru_cache, wraps
from types import ModuleType
from typing import Any, Literal, ParamSpec, TypeVar, get_args

from lipdp._checks import one_of, positive, probability, rate, whole
from lipdp.errors import ConfigurationError
from lipdp.privacy.runs import PrivateRun, Sampling

Adjacency = Literal["add_remove", "replace_one"]
Accountant = Literal["pld", "rdp"]

POISSON = Sampling()
P = ParamSpec("P")
R = TypeVar("R")


def reckoned(function: Callable[P, R]) -> Callable[P, R]:
    """Numbers that floating point has no room for (a noise of 1e-300, say) are refused in words."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except (OverflowError, ZeroDivisionError) as error:
            raise ConfigurationError(
                f"the cost of this run can't be computed ({error}): its noise multiplier, epsilon or sampling rate is too large or "
                "too small for floating point. Use numbers of an ordinary size."
            ) from error

    return call


def event(noise_multiplier: float, sampling_rate: float, steps: int) -> Any:
    """The dp-accounting ``DpEvent`` of a run: T × Poisson(q, Gaussian(σ)); no event for 0 steps.

    Args:
        noise_multiplier: σ, the noise's std ÷ the bound Δ on one record's part of the sum; above 0.
        sampling_rate: q, the probability that a record is in a step's sample.
        steps: T, 0 or more.
    """
    sigma, q = positive("noise_multiplier", noise_multiplier), rate(sampling_rate)
    count, dp = whole("steps", steps, least=0), dp_library()
    if count == 0:
        return dp.NoOpDpEvent()
    return dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(q, dp.GaussianDpEvent(sigma)), count)


def step_event(run: PrivateRun, noise_multiplier: float) -> Any:
    """The dp-accounting ``DpEvent`` of one step of the run with this noise, as its sampling says.

    For "fixed_size" the multiplier is halved: dp-accounting means the noise against the sensitivity to *replacing* a record there.
    """
    dp, how = dp_library(), run.sampling
    if how.scheme == "truncated_poisson":
        return dp.dp_event.TruncatedSubsampledGaussianDpEvent(how.dataset_size, run.sampling_rate, how.batch_size, noise_multiplier)
    if how.scheme == "fixed_size":
        return dp.SampledWithoutReplacementDpEvent(how.dataset_size, how.batch_size, dp.GaussianDpEvent(noise_multiplier / 2))
    return dp.PoissonSampledDpEvent(run.sampling_rate, dp.GaussianDpEvent(noise_multiplier))


@reckoned
def epsilon(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    sampling: Sampling = POISSON,
) -> float:
    """The ε that T steps spend at this δ: min{ε : P(S) ≤ e^ε·P'(S) + δ for all neighbours and all S}; 0 for 0 steps.

    An upper bound, within about 0.1% of the smallest (a warning says where it may be more).

    Args:
        noise_multiplier: σ, the noise's std ÷ the bound Δ on one record's part of the sum; s/Δ for either adjacency.
        sampling_rate: q, the probability that a record is in a step's sample.
        steps: T, 0 or more.
        delta: δ, between 0 and 1.
        accountant: "pld" or "rdp", which is looser and does not know every sampling and adjacency; see the top of the module.
        adjacency: neighbours differ in one record more or less ("add_remove"), or in one that is changed ("replace_one").
        sampling: how the records of a step are drawn; Poisson by default.
    """
    run = PrivateRun(sampling_rate, ((noise_multiplier, steps),), sampling=sampling)
    return run_epsilon(run, delta, accountant, adjacency)


@reckoned
def run_epsilon(run: PrivateRun, delta: float, accountant: Accountant = "pld", adjacency: Adjacency = "add_remove") -> float:
    """The ε of a whole run at this δ: its Gaussian parts composed by the accountant, plus Σε of its pure releases.

    Args:
        run: its steps and one-off releases.
        delta: δ, between 0 and 1; all of it is for the Gaussian parts.
        accountant: see :func:`epsilon`.
        adjacency: see :func:`epsilon`.
    """
    d, how = probability(delta), checked_analysis(accountant, adjacency, run.sampling)
    idle = run.steps == 0 and not run.gaussian_releases
    return run.pure_epsilon + (0.0 if idle else figure(run, d, *how).told("epsilon"))


@reckoned
def privacy_profile(
    run: PrivateRun,
    epsilons: Sequence[float],
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    *,
    coarse: bool = False,
) -> list[float]:
    """δ(ε) of a whole run at many ε ≥ 0 at once, by dp-accounting; those below the ε of its pure releases have δ = 1.

    Args:
        run: what is released.
        epsilons: where δ is wanted.
        accountant: see :func:`epsilon`.
        adjacency: see :func:`epsilon`.
        coarse: on a grid of 1e-3 instead of 1e-4: ten times as fast, and a little larger.
    """
    how, pure = checked_analysis(accountant, adjacency, run.sampling), run.pure_epsilon
    if run.steps == 0 and not run.gaussian_releases:
        return [0.0 if e >= pure else 1.0 for e in epsilons]
    beyond = [e - pure for e in epsilons if e >= pure]
    if how[0] == "rdp":
        from lipdp.privacy import _analyses

        deltas = iter([_analyses.run_delta(run, e) for e in beyond])
    else:
        deltas = iter(map(float, _losses(run, adjacency, 1e-3 if coarse else 1e-4).get_delta(beyond)) if beyond else ())
    return [next(deltas) if e >= pure else 1.0 for e in epsilons]


@lru_cache(maxsize=4)  # a composed distribution is some megabytes
def _losses(run: PrivateRun, adjacency: Adjacency, grid: float) -> Any:
    """dp-accounting's own accountant of privacy losses that has seen the Gaussian parts of the run."""
    dp = dp_library()
    relation = dp.NeighboringRelation
    ledger = dp.pld.PLDAccountant(relation.ADD_OR_REMOVE_ONE if adjacency == "add_remove" else relation.REPLACE_ONE, grid)
    for sigma, steps in run.segments:
        if steps:
            ledger.compose(step_event(run, sigma), steps)
    for sigma in run.gaussian_releases:
        ledger.compose(event(sigma, 1.0, 1))  # every record is in it: the event that also doubles for replace-one
    return ledger


@reckoned
def delta(
    *,
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    epsilon: float,
    accountant: Accountant = "pld",
    adjacency: Adjacency = "add_remove",
    sampling: Sampling = POISSON,
) -> float:
    """The δ that T steps spend at this ε: sup over neighbours and S of P(S) − e^ε·P'(S); 0 for 0 steps.

    Its grid is halved until that moves δ by less than 1%.

    Args:
        noise_multiplier: σ, see :func:`epsilon`.
        sampling_rate: q, the probability that a record is in a step's sample.
        steps: T, 0 or more.
        epsilon: ε, above 0.
        accountant: see :func:`epsilon`.
        adjacency: see :func:`epsilon`.
        sampling: how the records of a step are drawn; Poisson by default.
    """
    budget, how = positive("epsilon", epsilon), checked_analysis(accountant, adjacency, sampling)
    run = PrivateRun(sampling_rate, ((noise_multiplier, steps),), sampling=sampling)
    if not run.steps:
        return 0.0
    from lipdp.privacy import _analyses

    return (
        _analyses.run_delta(run, budget)
        if how[0] == "rdp"
        else _analyses.parts_delta(gaussian_parts(run), budget, how[1]).told("delta")
    )


# --- analysis ---------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def figure(run: PrivateRun, d: float, accountant: Accountant, adjacency: Adjacency) -> Any:
    """ε of the Gaussian parts, with how loose it may be."""
    dp_library()
    from lipdp.privacy import _analyses

    if accountant == "rdp":
        return _analyses.Figure(_analyses.run_epsilon(run, d))
    return _analyses.parts_epsilon(gaussian_parts(run), d, adjacency)


def gaussian_parts(run: PrivateRun) -> tuple[tuple[Any, int], ...]:
    """The Gaussian steps and releases of a run, equal ones counted together; all full-batch ones are one Gaussian.

    n full-batch Gaussians of σ are one of σ/√n, whichever the neighbours: their losses are normal, and add up.
    """
    from lipdp.privacy._step_losses import SampledGaussian

    counts: dict[SampledGaussian, int] = {}
    power = math.fsum(sigma**-2 for sigma in run.gaussian_releases)
    truncation = _truncation(run.sampling_rate, run.sampling)
    for sigma, steps in run.segments:
        step = SampledGaussian(sigma, run.sampling_rate, truncation)
        if run.sampling_rate == 1 and truncation is None:
            power += steps * sigma**-2
        elif steps:
            counts[step] = counts.get(step, 0) + steps
    if power:
        counts[SampledGaussian(power**-0.5 * (1 - 1e-14), 1.0)] = 1
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


# --- the library and the choices ------------------------------------------------------------------------------------


def dp_library() -> ModuleType:
    """dp-accounting, or in words that it is not installed."""
    try:
        import dp_accounting
        import dp_accounting.pld
        import dp_accounting.rdp
    except ImportError as error:
        raise ConfigurationError(
            "Privacy accounting needs dp-accounting, which can't be imported here: pip install dp-accounting."
        ) from error
    return dp_accounting  # type: ignore[no-any-return]


def checked_analysis(accountant: Accountant, adjacency: Adjacency, sampling: Sampling) -> tuple[Accountant, Adjacency]:
    """The two, where dp-accounting has an analysis of this sampling by that accountant for those neighbours."""
    one_of("accountant", accountant, get_args(Accountant))
    one_of("adjacency", adjacency, get_args(Adjacency))
    if sampling.scheme == "fixed_size":
        if (accountant, adjacency) != ("rdp", "replace_one"):
            raise ConfigurationError(
                f"sampling 'fixed_size' with accountant={accountant!r} and adjacency={adjacency!r} is refused: dp-accounting "
                "analyses samples without replacement by Rényi divergences, for replaced records, only (one record more or less "
                "changes every other record's chance). Take accountant='rdp' and adjacency='replace_one'."
            )
    elif sampling.scheme == "truncated_poisson":
        if accountant != "pld":
            raise ConfigurationError(
                "sampling 'truncated_poisson' with accountant='rdp' is refused: dp-accounting has no Rényi analysis of it. Take "
                "accountant='pld'."
            )
    elif (accountant, adjacency) == ("rdp", "replace_one"):
        raise ConfigurationError(
            "accountant='rdp' with adjacency='replace_one' is refused: dp-accounting's RDP has no Poisson-sampled "
            "Gaussian for replace-one neighbours, and doubling the sensitivity under add/remove is wrong under "
            "composition. Take accountant='pld', which analyses replace-one itself, or adjacency='add_remove'."
        )
    return accountant, adjacency
