"""The privacy plan: everything that is decided before a single record is read."""

from __future__ import annotations

import dataclasses
import json
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lipdp.bounds import Analysis, analyse
from lipdp.bounds.operator_norm import unit_roundoff
from lipdp.errors import ConfigurationError, LipdpWarning
from lipdp.losses import Loss, as_loss
from lipdp.privacy import Accountant, Adjacency, Allocation, allocate, calibrate_noise, max_steps
from lipdp.privacy import epsilon as epsilon_of
from lipdp.privacy._checks import is_number

__all__ = ["ROUNDOFF", "Method", "ParameterGroup", "Precision", "PrivacyPlan", "groups_of", "plan"]

Method = Literal["clipless"]
Precision = Literal["float64", "float32", "tf32", "bfloat16"]
Source = Literal["proved"]

_FORMAT = 1
# u of the arithmetic inside matrix products. TF32 keeps 10 bits of the mantissa.
ROUNDOFF = {
    "float64": unit_roundoff(torch.float64),
    "float32": unit_roundoff(torch.float32),
    "tf32": 2.0**-11,
    "bfloat16": unit_roundoff(torch.bfloat16),
}


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters that are bounded and noised together.

    Attributes:
        name: the group's name (that of its parameter where it has one).
        parameters: qualified names of its parameters.
        size: number of scalars.
        sensitivity: Δ, the bound on the group's per-example gradient norm, in exact arithmetic.
        source: "proved": Δ follows from the architecture.
        noise_std: standard deviation of the noise on each scalar of the gradient *sum*, rounding slack included.
        input_norm: X, the bound on the activations that reach the group.
        cotangent_norm: G, the bound on the cotangents that reach it.
    """

    name: str
    parameters: tuple[str, ...]
    size: int
    sensitivity: float
    source: Source
    noise_std: float
    input_norm: float
    cotangent_norm: float

    def __post_init__(self) -> None:
        if not (is_number(self.sensitivity) and self.sensitivity >= 0 and is_number(self.noise_std) and self.noise_std >= 0):
            raise ConfigurationError(
                f"group {self.name!r} has sensitivity {self.sensitivity!r} and noise {self.noise_std!r}; both are finite numbers"
            )


@dataclass(frozen=True)
class PrivacyPlan:
    """What a private training run will do and what it will cost; inspectable and serialisable before any data is read.

    Every step samples each record with probability ``sampling_rate``, sums the per-example gradients, adds Gaussian noise
    of ``noise_stds`` to the sum and divides by the constant ``batch_size``. With Δ_d and s_d of the groups d, the step is one
    Gaussian mechanism of multiplier ``σ = (Σ_d Δ_d²/s_d²)^(-1/2)``; ``steps`` of them cost ``(epsilon, delta)``.

    Attributes:
        method: how sensitivities are bounded.
        dataset_size: N, a public constant; it only serves to derive q.
        batch_size: b, the *expected* batch size, a public constant.
        steps: T.
        noise_multiplier: σ.
        epsilon: ε of the whole run, by the accountant, at ``delta``.
        delta: δ.
        allocation: how the noise is divided among the groups.
        adjacency: which datasets are neighbours.
        accountant: which analysis of dp-accounting.
        precision: the arithmetic of the forward and backward passes that the slack covers.
        slack: factor (1+u)^operations on the noise, for rounding: Δ is proved in exact arithmetic.
        loss: the loss, as text.
        loss_lipschitz: L.
        output_norm: bound on the network's output, ∞ if there is none.
        groups: the parameter groups.
    """

    method: Method
    dataset_size: int
    batch_size: int
    steps: int
    noise_multiplier: float
    epsilon: float
    delta: float
    allocation: Allocation
    adjacency: Adjacency
    accountant: Accountant
    precision: Precision
    slack: float
    loss: str
    loss_lipschitz: float
    output_norm: float
    groups: tuple[ParameterGroup, ...]

    def __post_init__(self) -> None:
        _check_method(self.method, None)
        _check_counts(self.dataset_size, self.batch_size, self.steps, None)
        for name, least in (("noise_multiplier", 0.0), ("epsilon", 0.0), ("delta", 0.0), ("slack", 1.0)):
            value = getattr(self, name)
            if not (is_number(value) and value >= least):
                raise ConfigurationError(f"a plan's {name} is a finite number, at least {least:g}, not {value!r}")
        choices = {"allocation": Allocation, "adjacency": Adjacency, "accountant": Accountant, "precision": Precision}
        for name, known in choices.items():
            if getattr(self, name) not in get_args(known):
                raise ConfigurationError(f"{name}={getattr(self, name)!r} is not known; choose one of {', '.join(get_args(known))}")
        if not self.groups:
            raise ConfigurationError("a plan without parameter groups trains nothing")

    @property
    def sampling_rate(self) -> float:
        """q = b/N."""
        return self.batch_size / self.dataset_size

    @property
    def epochs(self) -> float:
        """Expected number of times each record is used."""
        return self.steps * self.sampling_rate

    @property
    def sensitivities(self) -> dict[str, float]:
        """Qualified parameter name → Δ of its group."""
        return {name: group.sensitivity for group in self.groups for name in group.parameters}

    @property
    def noise_stds(self) -> dict[str, float]:
        """Qualified parameter name → standard deviation of the noise on the gradient sum."""
        return {name: group.noise_std for group in self.groups for name in group.parameters}

    @property
    def sensitivity(self) -> float:
        """√(ΣΔ_d²): the bound on one example's whole gradient."""
        return math.sqrt(sum(group.sensitivity**2 for group in self.groups))

    @property
    def noise_energy(self) -> float:
        """Σ_d p_d·s_d²: expected squared norm of the noise of one step."""
        return sum(group.size * group.noise_std**2 for group in self.groups)

    def __str__(self) -> str:
        from lipdp.training.plan_table import render

        return render(self)

    def to_json(self) -> str:
        """The plan as JSON; :meth:`from_json` gives an equal plan back."""
        content = {"format": _FORMAT, **dataclasses.asdict(self)}
        content["output_norm"] = None if math.isinf(self.output_norm) else self.output_norm
        for group in content["groups"]:
            for field in ("input_norm", "cotangent_norm"):
                group[field] = None if math.isinf(group[field]) else group[field]
        return json.dumps(content, indent=2, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> PrivacyPlan:
        """A plan from :meth:`to_json`'s text. The engine checks it against the model again before it trusts it."""
        try:
            content: dict[str, Any] = json.loads(text)
            if content.pop("format") != _FORMAT:
                raise ConfigurationError(f"this plan was written in another format; this lipdp reads format {_FORMAT}")
            groups = tuple(
                ParameterGroup(
                    **{
                        **group,
                        "parameters": tuple(group["parameters"]),
                        "input_norm": _infinite_if_none(group["input_norm"]),
                        "cotangent_norm": _infinite_if_none(group["cotangent_norm"]),
                    }
                )
                for group in content.pop("groups")
            )
            return cls(**{**content, "output_norm": _infinite_if_none(content["output_norm"])}, groups=groups)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"this is not a plan written by PrivacyPlan.to_json(): {error}") from error


def _infinite_if_none(value: float | None) -> float:
    return math.inf if value is None else value


def plan(
    model: torch.nn.Module,
    loss: Loss | torch.nn.Module,
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
        loss: a loss of :mod:`lipdp.losses`, or a torch loss with ``reduction="none"`` that lipdp knows.
        dataset_size: N, a public constant.
        batch_size: expected batch size b, a public constant; q = b/N.
        delta: δ; below 1/N, or the guarantee allows publishing a record outright.
        epsilon: the target ε, an upper limit.
        noise_multiplier: σ of the whole step (not per layer).
        epochs: length as expected passes over the data; T = ⌈epochs·N/b⌉.
        steps: length T.
        method: "clipless": sensitivities proved from the architecture.
        max_grad_norm: only for clipping methods.
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
    _check_method(method, max_grad_norm)
    _check_counts(dataset_size, batch_size, steps, epochs)
    _check_privacy(epsilon, delta, dataset_size, noise_multiplier)
    known = as_loss(loss)
    analysis = analyse(model, known, input_shape=None if input_shape is None else tuple(input_shape))
    arithmetic = _precision(precision, analysis)
    q = batch_size / dataset_size
    length = steps if steps is not None else None if epochs is None else math.ceil(epochs / q - 1e-9)
    sigma, length, spent = _solve(epsilon, noise_multiplier, length, q, delta, accountant, adjacency)
    slack = analysis.slack(ROUNDOFF[arithmetic])
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
        loss=str(known),
        loss_lipschitz=analysis.loss_lipschitz,
        output_norm=analysis.output.norm,
        groups=groups_of(analysis, sigma, slack, allocation),
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


def _check_method(method: str, max_grad_norm: float | None) -> None:
    if method not in get_args(Method):
        raise ConfigurationError(f"method={method!r} is not available in this version; available: {', '.join(get_args(Method))}")
    if max_grad_norm is not None:
        raise ConfigurationError("max_grad_norm has no meaning for method='clipless': its sensitivities are proved, not clipped")


def _check_counts(dataset_size: int, batch_size: int, steps: int | None, epochs: float | None) -> None:
    for name, value in (("dataset_size", dataset_size), ("batch_size", batch_size)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigurationError(f"{name} must be a whole number of at least 1, not {value!r}")
    if batch_size > dataset_size:
        raise ConfigurationError(
            f"batch_size={batch_size} is larger than dataset_size={dataset_size}: the sampling rate would exceed 1. Use at most "
            f"{dataset_size}."
        )
    if steps is not None and epochs is not None:
        raise ConfigurationError("give either epochs or steps, not both")
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ConfigurationError(f"steps must be a whole number of at least 1, not {steps!r}")
    if epochs is not None and not (is_number(epochs) and epochs > 0):
        raise ConfigurationError(f"epochs must be positive, not {epochs!r}")


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


def _precision(asked: str | None, analysis: Analysis) -> Precision:
    native: Precision = (
        "float64"
        if analysis.roundoff <= ROUNDOFF["float64"]
        else "float32"
        if analysis.roundoff <= ROUNDOFF["float32"]
        else "bfloat16"
    )
    if asked is None:
        return native
    if asked not in ROUNDOFF:
        raise ConfigurationError(f"precision={asked!r} is not known; choose one of {', '.join(ROUNDOFF)}")
    return asked if ROUNDOFF[asked] >= ROUNDOFF[native] else native  # type: ignore[return-value]
