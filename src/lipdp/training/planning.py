"""Making a plan: sensitivities from the model, noise and length from the budget."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from lipdp.bounds import Analysis, analyse
from lipdp.bounds.operator_norm import unit_roundoff
from lipdp.clipping import check_supported
from lipdp.errors import ConfigurationError, LipdpWarning
from lipdp.losses import Loss, as_loss
from lipdp.privacy import Accountant, Adjacency, Allocation, allocate, calibrate_noise, max_steps
from lipdp.privacy import epsilon as epsilon_of
from lipdp.privacy._checks import is_number
from lipdp.training.plan import (
    CLIPPED_GROUP,
    ROUNDOFF,
    Method,
    ParameterGroup,
    Precision,
    PrivacyPlan,
    check_counts,
    check_method,
    describe_loss,
)

__all__ = ["clipping_slack", "groups_of", "per_example_loss", "plan"]

# Rounding of an example's norm, of its clip factor and of the product: sums of many terms, in blocks.
_CLIPPING_OPERATIONS = 64


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
    max_grad_norm: float | None = None,
    allocation: Allocation = "global",
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    precision: Precision | None = None,
    input_shape: Sequence[int] | None = None,
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
            "bookkeeping" (the fastest), "ghost", "reweight", "multiloss", "naive"; see :mod:`lipdp.clipping`.
        max_grad_norm: C, the norm that clipping methods clip each example's gradient to.
        allocation: "global", "per_layer" or "optimal", see :func:`lipdp.privacy.allocate`.
        adjacency: "add_remove" (default) or "replace_one".
        accountant: "pld" (default) or "rdp".
        precision: arithmetic of the passes ("float32" unless the model's parameters are of another type). Coarser
            arithmetic needs more slack; the engine never computes more coarsely than the plan says.
        input_shape: shape of one example, where the model has no :class:`lipdp.nn.BoundedInput`.

    Example:
        >>> import lipdp
        >>> from lipdp import nn, losses
        >>> model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3, bias=False))
        >>> p = lipdp.plan(model, losses.CrossEntropy(), dataset_size=1000, batch_size=100, delta=1e-5,
        ...                noise_multiplier=2.0, steps=50)
        >>> 1.5 < p.epsilon < 3.5
        True
    """
    check_method(method, max_grad_norm)
    check_counts(dataset_size, batch_size, steps, epochs)
    _check_privacy(epsilon, delta, dataset_size, noise_multiplier)
    q = batch_size / dataset_size
    length = steps if steps is not None else None if epochs is None else math.ceil(epochs / q - 1e-9)

    def solve() -> tuple[float, int, float]:
        return _solve(epsilon, noise_multiplier, length, q, delta, accountant, adjacency)

    if method == "clipless":
        known = as_loss(loss)
        analysis = analyse(model, known, input_shape=None if input_shape is None else tuple(input_shape))
        arithmetic = _precision(precision, analysis.roundoff)
        slack = analysis.slack(ROUNDOFF[arithmetic])
        sigma, length, spent = solve()
        groups = groups_of(analysis, sigma, slack, allocation)
        lipschitz, output_norm = analysis.loss_lipschitz, analysis.output.norm
    else:
        known = per_example_loss(loss)
        check_supported(model)
        assert max_grad_norm is not None
        arithmetic = _precision(precision, _roundoff(model))
        slack = clipping_slack(arithmetic)
        sigma, length, spent = solve()
        groups = (_clipped_group(model, max_grad_norm, sigma * slack),)
        lipschitz, output_norm = math.inf, math.inf
    return PrivacyPlan(
        method=method,
        dataset_size=dataset_size,
        batch_size=batch_size,
        steps=length,
        noise_multiplier=sigma,
        epsilon=spent,
        delta=delta,
        allocation=allocation,
        adjacency=adjacency,
        accountant=accountant,
        precision=arithmetic,
        slack=slack,
        loss=describe_loss(known),
        loss_lipschitz=lipschitz,
        output_norm=output_norm,
        groups=groups,
        max_grad_norm=max_grad_norm,
    )


def per_example_loss(loss: Any) -> Any:
    """A loss for clipping methods: anything that returns one value per example."""
    if not callable(loss):
        raise ConfigurationError(f"a loss is called with outputs and targets; {type(loss).__name__} can't be called")
    if getattr(loss, "reduction", "none") != "none" and not isinstance(loss, Loss):
        raise ConfigurationError(
            f"{type(loss).__name__} has reduction={loss.reduction!r}, which mixes the examples of a batch. Use reduction='none': "
            "lipdp sums over examples itself."
        )
    return loss


def clipping_slack(precision: str) -> float:
    """(1+u)^64: what rounding may add to a clipped gradient's norm."""
    return float((1 + ROUNDOFF[precision]) ** _CLIPPING_OPERATIONS)


def _roundoff(model: torch.nn.Module) -> float:
    return max((unit_roundoff(p.dtype) for p in model.parameters() if p.is_floating_point()), default=ROUNDOFF["float32"])


def _clipped_group(model: torch.nn.Module, max_grad_norm: float, std_per_norm: float) -> ParameterGroup:
    trained = {name: p.numel() for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigurationError("the model has no trainable parameters: there is nothing to train")
    return ParameterGroup(
        name=CLIPPED_GROUP,
        parameters=tuple(trained),
        size=sum(trained.values()),
        sensitivity=float(max_grad_norm),
        source="clipped",
        noise_std=float(max_grad_norm) * std_per_norm,
        input_norm=math.inf,
        cotangent_norm=math.inf,
    )


def groups_of(analysis: Analysis, noise_multiplier: float, slack: float, allocation: Allocation) -> tuple[ParameterGroup, ...]:
    """One group per parameter, each proved, with its share of the noise."""
    if not analysis.parameters:
        raise ConfigurationError("the model has no trainable parameters: there is nothing to train")
    sizes = {row.name: row.size for row in analysis.parameters}
    stds = allocate(analysis.sensitivities, sizes, noise_multiplier, allocation)
    return tuple(
        ParameterGroup(
            name=row.name,
            parameters=(row.name,),
            size=row.size,
            sensitivity=row.sensitivity,
            source="proved",
            noise_std=stds[row.name] * slack,
            input_norm=row.input_norm,
            cotangent_norm=row.cotangent_norm,
        )
        for row in analysis.parameters
    )


def _solve(
    epsilon: float | None,
    sigma: float | None,
    steps: int | None,
    q: float,
    delta: float,
    accountant: Accountant,
    adjacency: Adjacency,
) -> tuple[float, int, float]:
    """(σ, T, ε) from two of them."""
    if (epsilon is None) + (sigma is None) + (steps is None) > 1:
        raise ConfigurationError(
            "give two of: epsilon, noise_multiplier, and a length (epochs or steps). The third follows from them."
        )
    if sigma is None:
        assert epsilon is not None
        assert steps is not None
        sigma = calibrate_noise(
            epsilon=epsilon, delta=delta, sampling_rate=q, steps=steps, accountant=accountant, adjacency=adjacency
        )
    elif steps is None:
        assert epsilon is not None
        steps = max_steps(
            epsilon=epsilon, delta=delta, noise_multiplier=sigma, sampling_rate=q, accountant=accountant, adjacency=adjacency
        )
    spent = epsilon_of(
        noise_multiplier=sigma, sampling_rate=q, steps=steps, delta=delta, accountant=accountant, adjacency=adjacency
    )
    if math.isinf(spent):
        raise ConfigurationError(
            f"noise_multiplier={sigma:g} and {steps} steps have no finite epsilon at delta={delta:g} with the {accountant} "
            "accountant. Use a larger delta, more noise, or the other accountant."
        )
    if epsilon is not None and spent > epsilon:
        raise ConfigurationError(
            f"noise_multiplier={sigma:g} and {steps} steps cost epsilon {spent:.4g}, more than the {epsilon:g} asked for. Leave "
            "one of the three out, and it will be chosen to fit."
        )
    return sigma, steps, spent


def _check_privacy(epsilon: float | None, delta: float, dataset_size: int, noise_multiplier: float | None) -> None:
    for name, value in (("epsilon", epsilon), ("noise_multiplier", noise_multiplier)):
        if value is not None and not (is_number(value) and value > 0):
            raise ConfigurationError(f"{name} must be a positive finite number, not {value!r}")
    if not (is_number(delta) and 0 < delta < 1):
        raise ConfigurationError(f"delta must lie between 0 and 1, not {delta!r}")
    if delta >= 1 / dataset_size:
        warnings.warn(
            f"delta={delta:g} is not below 1/dataset_size={1 / dataset_size:g}: such a guarantee allows publishing a random record "
            "outright. Use a delta well below it.",
            LipdpWarning,
            stacklevel=3,
        )


def _precision(asked: str | None, roundoff: float) -> Precision:
    native: Precision = (
        "float64" if roundoff <= ROUNDOFF["float64"] else "float32" if roundoff <= ROUNDOFF["float32"] else "bfloat16"
    )
    if asked is None:
        return native
    if asked not in ROUNDOFF:
        raise ConfigurationError(f"precision={asked!r} is not known; choose one of {', '.join(ROUNDOFF)}")
    return asked if ROUNDOFF[asked] >= ROUNDOFF[native] else native  # type: ignore[return-value]
