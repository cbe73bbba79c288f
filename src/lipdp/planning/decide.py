"""Making a plan: sensitivities from the model, noise and length from the budget."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lipdp import nn
from lipdp._checks import is_number, positive, probability, whole
from lipdp._texts import brief, upwards
from lipdp.bounds import Analysis
from lipdp.clipping.support import planned_notes
from lipdp.errors import ConfigurationError, LipdpError, LipdpNotice, LipdpWarning
from lipdp.losses import as_loss
from lipdp.planning.grouping import adaptive_names, clip_layers, clips_of, make_groups, weights_by_group
from lipdp.planning.phases import Clipping, NoiseSettings, Phase, Schedule, make_phases, segments, with_earlier_names
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import (
    STATISTICS,
    Method,
    Precision,
    check_counts,
    check_method,
    check_model,
    choose_precision,
    describe_loss,
    model_roundoff,
    note_squashed,
    per_example_loss,
    rounding_of,
    slack_of,
)
from lipdp.privacy import (
    Accountant,
    Adjacency,
    Allocation,
    PrivateRun,
    Release,
    Sampling,
    calibrate_noise,
    calibrate_run,
    longest_run,
    run_epsilon,
)
from lipdp.privacy.moments import moment_stds
from lipdp.privacy.runs import Scheme

# Share of δ that the noise's distance from exact noise may make up, and an ε from which on it makes no difference.
_NEGLIGIBLE, _VACUOUS = 1e-3, 30.0


def plan(
    model: torch.nn.Module,
    loss: Any,
    *,
    dataset_size: int,
    batch_size: int,
    delta: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    method: Method = "clipless",
    max_grad_norm: float | Mapping[str, float] | None = None,
    clipping: Clipping | None = None,
    schedule: Schedule | None = None,
    statistics_budget: float | None = None,
    releases: Sequence[Release] = (),
    allocation: Allocation | Mapping[str, float] = "global",
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    precision: Precision | None = None,
    input_shape: Sequence[int] | None = None,
    sampling: Scheme = "poisson",
    largest_batch: int | None = None,
    **earlier: Any,
) -> PrivacyPlan:
    """Decide a private training run: its sensitivities, noise, length and cost. No data are read.

    Give two of: how much privacy (``epsilon``), how much noise (``noise_multiplier``), how long (``epochs`` or ``steps``).
    The third follows: noise is calibrated to the budget; or the budget computed; or the *largest* number of steps found
    that fits.

    Args:
        model: the model, with layers that have rules (:mod:`lipdp.bounds`), in the mode it will be trained in.
        loss: a loss of :mod:`lipdp.losses`, or a torch loss with ``reduction="none"`` that lipdp knows; for clipping methods
            anything that returns one value per example.
        dataset_size: N, a public constant.
        batch_size: expected batch size b, a public constant; q = b/N.
        delta: δ; below 1/N, or the guarantee allows publishing a record outright.
        epsilon: the target ε, an upper limit.
        noise_multiplier: σ of the whole step (not per layer).
        epochs: length as expected passes over the data; T = ⌈epochs·N/b⌉.
        steps: length T.
        method: "clipless": sensitivities proved from the architecture. Or a clipping method, which enforces one:
            "bookkeeping" (the fastest), "ghost", "reweight", "multiloss", "naive"; see :mod:`lipdp.clipping`. Or "mixed":
            proved where there is a proof, the other parameters clipped together (by book-keeping).
        max_grad_norm: C, the norm that clipping methods clip each example's gradient to; C_g by group for other styles.
        clipping: how gradients are clipped, beside that norm: style, groups, normalisation, adaptive norms; see
            :class:`lipdp.Clipping`.
        schedule: what changes during the run: factors on clipping norms and noise, layers that are frozen on the way; see
            :class:`lipdp.Schedule`.
        statistics_budget: share of ε set aside for the statistics of :class:`lipdp.nn.Standardize`: alone they would be
            (share·ε, δ)-private; composed with the training the whole is still (ε, δ).
        releases: other one-off releases to pay for, see :class:`lipdp.privacy.Release`.
        allocation: "global", "per_layer" or "optimal", see :func:`lipdp.privacy.allocate`; or weights by parameter prefix: the
            noise of each group is proportional to its weight.
        adjacency: "add_remove" (default) or "replace_one".
        accountant: "pld" (default) or "rdp".
        precision: arithmetic of the passes ("float32" unless the model's parameters are of another type). Coarser
            arithmetic needs more slack; the engine never computes more coarsely than the plan says.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.
        sampling: how ``engine.batches`` and ``fit`` draw the records of a step. "poisson" (default); "truncated_poisson": no batch
            has more than ``largest_batch`` records, for a fixed memory; "fixed_size": every batch has ``batch_size`` records, drawn
            without replacement (with ``adjacency="replace_one"`` and ``accountant="rdp"``, for which dp-accounting has it).
        largest_batch: for "truncated_poisson"; by default six standard deviations above ``batch_size``, which costs next to none.
        earlier: fields of ``clipping`` and ``schedule`` under their old names (``clipping_style``, ``clip_schedule``, …): they
            still work, and say what they are called now.

    Example:
        >>> import lipdp
        >>> from lipdp import nn, losses
        >>> model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3, bias=False))
        >>> p = lipdp.plan(model, losses.CrossEntropy(), dataset_size=1000, batch_size=100, delta=1e-5,
        ...                noise_multiplier=2.0, steps=50)
        >>> 1.5 < p.epsilon < 3.5
        True
    """
    check_model(model, values=method in ("clipless", "mixed"))
    clipping, schedule = with_earlier_names(clipping, schedule, earlier)
    adaptive = clipping.adaptive
    check_method(method, max_grad_norm)
    # numpy's numbers, too, become what JSON can hold.
    dataset_size, batch_size = whole("dataset_size", dataset_size), whole("batch_size", batch_size)
    steps = None if steps is None else whole("steps", steps)
    check_counts(dataset_size, batch_size, steps, epochs)
    epsilon = None if epsilon is None else positive("epsilon", epsilon)
    noise_multiplier = None if noise_multiplier is None else positive("noise_multiplier", noise_multiplier)
    delta = probability(delta)
    if delta >= 1 / dataset_size:
        warnings.warn(
            f"delta={brief(delta)} is not below 1/dataset_size={1 / dataset_size:g}: such a guarantee allows publishing a random "
            "record outright. Use a delta well below it.",
            LipdpWarning,
            stacklevel=2,
        )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    if not trained:
        raise ConfigurationError("the model has no trainable parameters: there is nothing to train")
    note_squashed(model, loss)
    shape = None if input_shape is None else tuple(input_shape)
    groups, analysis = make_groups(model, loss, method, max_grad_norm=max_grad_norm, clipping=clipping, input_shape=shape)
    arithmetic = choose_precision(precision, model_roundoff(model) if analysis is None else analysis.roundoff)
    rounding = rounding_of(model, method, arithmetic, analysis, batch_size, batch_size / dataset_size)
    slack = slack_of(rounding)
    paid = _paid_releases(statistics_budget, releases, epsilon, delta, accountant, adjacency)
    q = batch_size / dataset_size
    sampler = _sampler(sampling, dataset_size, batch_size, largest_batch)
    length = steps if steps is not None else None if epochs is None else math.ceil(epochs / q - 1e-9)

    def phases(count: int) -> tuple[Phase, ...]:
        return make_phases(count, trained, clip=schedule.clip, noise=schedule.noise, freeze=schedule.freeze)

    def run(sigma: float, count: int) -> PrivateRun:
        return PrivateRun(q, segments(phases(count), count, sigma), paid, sampler)

    sigma, length, spent = _solve(epsilon, noise_multiplier, length, delta, accountant, adjacency, run)
    clips = clips_of(model, groups, method, clipping, scheduled=schedule.clip is not None)
    if analysis is not None and clips:  # refuses a layer whose norm could change without its bounds
        analysis.at_limits({name: value for name, value in clips if name in clip_layers(model)})
    followed = () if adaptive is None else adaptive_names(model, groups, clips)
    if adaptive is not None:
        adaptive = adaptive.completed(batch_size, sigma, len(followed))
    weights = None if isinstance(allocation, str) else weights_by_group(groups, allocation)
    kind: Allocation = allocation if isinstance(allocation, str) else "weights"
    settings = NoiseSettings(sigma, slack, kind, weights, adaptive, counts=len(followed))
    stds = settings.stds({group.name: group.sensitivity for group in groups}, {group.name: group.size for group in groups})
    decided = PrivacyPlan(
        method=method,
        dataset_size=dataset_size,
        batch_size=batch_size,
        steps=length,
        noise_multiplier=sigma,
        epsilon=spent,
        delta=delta,
        allocation=settings.allocation,
        adjacency=adjacency,
        accountant=accountant,
        precision=arithmetic,
        slack=slack,
        rounding=tuple(rounding.items()),
        loss=describe_loss(as_loss(loss) if analysis is not None else per_example_loss(loss)),
        loss_lipschitz=math.inf if analysis is None else analysis.loss_lipschitz,
        output_norm=math.inf if analysis is None else analysis.output.norm,
        groups=tuple(dataclasses.replace(group, noise_std=stds[group.name]) for group in groups),
        max_grad_norm=None if method == "clipless" else math.hypot(*(g.sensitivity for g in groups if g.source == "clipped")),
        clipping_style=clipping.style,
        clip=clipping.clip,
        stability=clipping.stability,
        noise_weights=() if weights is None else tuple(weights.items()),
        phases=phases(length),
        clips=clips,
        adaptive_clips=followed,
        adaptive=adaptive,
        releases=paid,
        sampling=sampler.scheme,
        largest_batch=sampler.batch_size if sampler.scheme == "truncated_poisson" else None,
        notes=(
            *(() if method == "clipless" else planned_notes(model, method)),
            *(() if analysis is None else _notes(model, analysis, paid, dataset_size)),
        ),
    )
    _check_phases(decided, settings, analysis, next(p.dtype for p in model.parameters() if p.requires_grad))
    if decided.signal_to_noise < 1:
        warnings.warn(
            f"this run can't learn: even if all records pulled the same way, the signal of all its {length:,} steps would be "
            f"{decided.signal_to_noise:.2g} of their noise. Take larger batches, fewer parameters, or a larger epsilon.",
            LipdpNotice,
            stacklevel=2,
        )
    if spent < _VACUOUS and decided.noise_distance > _NEGLIGIBLE * delta:
        raise ConfigurationError(
            f"at delta={brief(delta)} and epsilon={upwards(spent)}, what the noise itself may add to delta "
            f"({brief(decided.noise_distance, 2)}: its distance from exact Gaussian noise, times e^epsilon) is more than "
            f"{_NEGLIGIBLE:g} of it. Ask for a smaller epsilon (more noise, fewer steps) or for a larger delta."
        )
    return decided


def _sampler(scheme: Scheme, dataset_size: int, batch_size: int, largest: int | None) -> Sampling:
    """How records are drawn, with the sizes that the analysis needs."""
    if scheme == "poisson" and largest is None:
        return Sampling()
    if scheme == "truncated_poisson":
        usual = min(dataset_size, batch_size + math.ceil(6 * math.sqrt(batch_size)))
        return Sampling(scheme, dataset_size, usual if largest is None else whole("largest_batch", largest))
    if largest is not None:
        raise ConfigurationError(f"largest_batch is for sampling='truncated_poisson'; sampling={scheme!r} has none. Leave it out.")
    return Sampling(scheme, dataset_size, batch_size)


def _check_phases(decided: PrivacyPlan, settings: NoiseSettings, analysis: Analysis | None, dtype: torch.dtype) -> None:
    """Refuse now what the run would stumble on when it gets there: a phase whose noise no floating-point number can hold."""
    limits = torch.finfo(torch.promote_types(dtype, torch.float32))
    enforced = {group.name for group in decided.groups if group.source == "clipped"}
    for phase in decided.phases:
        clips = {name: value * phase.clip for name, value in decided.clips}
        inner = {name: norm for name, norm in clips.items() if name not in enforced}
        proved = analysis.at_limits(inner) if analysis is not None and inner else {}
        live, present = {}, {}
        for group in decided.groups:
            if not set(group.parameters) <= set(phase.frozen):
                live[group.name] = group.size
                bound = proved if group.source == "proved" else clips
                present[group.name] = bound.get(group.name, group.sensitivity)
        factors = f"the schedules' factors in the phase from step {phase.start} on (clip {phase.clip:g}, noise {phase.noise:g})"
        try:
            stds = settings.stds(present, live, phase.noise)
        except LipdpError as error:
            raise ConfigurationError(f"{factors} can't be meant: {error}") from error
        outside = [name for name, c in clips.items() if not limits.tiny <= c <= limits.max]
        outside += [name for name, std in stds.items() if present[name] > 0 and not limits.tiny <= std <= limits.max]
        if outside:
            raise ConfigurationError(
                f"{factors} leave {outside[0]!r} with a clipping norm or noise out of the range of {limits.dtype}. Use factors "
                "nearer to 1."
            )


def _notes(model: torch.nn.Module, analysis: Analysis, paid: Sequence[Release], dataset_size: int) -> tuple[tuple[str, str], ...]:
    """What the program is and holds, how tight bounds are where there is a choice, and how much noise statistics will have."""
    tightness = [(note.layer, str(note)) for note in analysis.convolution_notes()]
    amounts = [release.amount for release in paid if release.name == STATISTICS]
    program = [("program", text) for text in analysis.program.summary()]
    return (*program, *tightness, *(note for amount in amounts for note in _statistics(model, analysis, amount, dataset_size)))


def _statistics(model: torch.nn.Module, analysis: Analysis, multiplier: float, dataset_size: int) -> Iterator[tuple[str, str]]:
    """(layer, what will be released for it and with which noise)."""
    shapes = {row.where: row.output for row in analysis.layers}
    for name, layer in model.named_modules():
        shape = shapes.get(f"layer '{name}' ({type(layer).__name__})")
        if isinstance(layer, nn.Standardize) and shape is not None:
            stds = moment_stds(layer.radius, math.prod(shape[1:]), multiplier, layer.mean_share, layer.channels)
            each = [f"{std / dataset_size:.3g} on each {what}" for what, std in zip(("mean", "mean square"), stds, strict=True)]
            yield name, f"statistics of {layer.channels} channels, released with noise {' and '.join(each[: layer.moments])}"


def _paid_releases(
    share: float | None,
    others: Sequence[Release],
    epsilon: float | None,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
) -> tuple[Release, ...]:
    """The one-off releases, with the statistics' noise calibrated to their share of ε."""
    if share is None:
        return tuple(others)
    if not (is_number(share) and 0 < share < 1):
        raise ConfigurationError(f"statistics_budget is a share of epsilon, between 0 and 1, not {share!r}")
    if epsilon is None:
        raise ConfigurationError(
            "statistics_budget is a share of epsilon: give epsilon, or say the noise yourself with "
            f"releases=[lipdp.privacy.Release({STATISTICS!r}, 'gaussian', multiplier)]"
        )
    # Of all records, for which only losses are known where records are replaced, whatever the steps are analysed by.
    tight: Accountant = "pld" if adjacency == "replace_one" else accountant
    multiplier = calibrate_noise(
        epsilon=share * epsilon, delta=delta, sampling_rate=1.0, steps=1, accountant=tight, adjacency=adjacency
    )
    return (Release(STATISTICS, "gaussian", multiplier), *others)


def _solve(
    epsilon: float | None,
    sigma: float | None,
    steps: int | None,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
    run: Callable[[float, int], PrivateRun],
) -> tuple[float, int, float]:
    """(σ, T, ε) from two of them."""
    if (epsilon is None) + (sigma is None) + (steps is None) > 1:
        raise ConfigurationError(
            "give two of: epsilon, noise_multiplier, and a length (epochs or steps). The third follows from them."
        )
    if sigma is None:
        assert epsilon is not None
        assert steps is not None
        length = steps
        sigma = calibrate_run(lambda s: run(s, length), epsilon=epsilon, delta=delta, accountant=accountant, adjacency=adjacency)
    elif steps is None:
        assert epsilon is not None
        noise = sigma
        steps = longest_run(lambda n: run(noise, n), epsilon=epsilon, delta=delta, accountant=accountant, adjacency=adjacency)
    spent = run_epsilon(run(sigma, steps), delta, accountant, adjacency)
    if math.isinf(spent):
        raise ConfigurationError(
            f"noise_multiplier={sigma:g} and {steps} steps have no finite epsilon at delta={brief(delta)} with the {accountant} "
            "accountant. Use a larger delta, more noise, or the other accountant."
        )
    if epsilon is not None and spent > epsilon:
        raise ConfigurationError(
            f"noise_multiplier={sigma:g} and {steps} steps cost epsilon {upwards(spent)}, more than the {brief(epsilon)} asked "
            "for. Leave one of the three out, and it will be chosen to fit."
        )
    return sigma, steps, spent
