"""The privacy plan: everything that is decided before a single record is read."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from lipdp.bounds.operator_norm import unit_roundoff
from lipdp.errors import ConfigurationError
from lipdp.privacy import Accountant, Adjacency, Allocation
from lipdp.privacy._checks import is_number

__all__ = [
    "CLIPPED_GROUP",
    "ROUNDOFF",
    "Method",
    "ParameterGroup",
    "Precision",
    "PrivacyPlan",
    "check_counts",
    "check_method",
    "describe_loss",
]

Method = Literal["clipless", "naive", "multiloss", "reweight", "ghost", "bookkeeping"]
Precision = Literal["float64", "float32", "tf32", "bfloat16"]
Source = Literal["proved", "clipped"]

CLIPPED_GROUP = "all parameters"

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
        source: "proved": Δ follows from the architecture; "clipped": every example's gradient is clipped to Δ.
        noise_std: standard deviation of the noise on each scalar of the gradient *sum*, rounding slack included.
        input_norm: X, the bound on the activations that reach the group (∞ where nothing is proved).
        cotangent_norm: G, the bound on the cotangents that reach it (∞ where nothing is proved).
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
        loss_lipschitz: L, ∞ where it is not known (clipping does not need it).
        output_norm: bound on the network's output, ∞ if there is none.
        groups: the parameter groups.
        max_grad_norm: C, for clipping methods.
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
    max_grad_norm: float | None = None

    def __post_init__(self) -> None:
        check_method(self.method, self.max_grad_norm)
        check_counts(self.dataset_size, self.batch_size, self.steps, None)
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
        for field in ("output_norm", "loss_lipschitz"):
            content[field] = None if math.isinf(content[field]) else content[field]
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
            unbounded = {field: _infinite_if_none(content[field]) for field in ("output_norm", "loss_lipschitz")}
            return cls(**{**content, **unbounded}, groups=groups)
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"this is not a plan written by PrivacyPlan.to_json(): {error}") from error


def _infinite_if_none(value: float | None) -> float:
    return math.inf if value is None else value


def check_method(method: str, max_grad_norm: float | None) -> None:
    """Refuse an unknown method, and a clipping norm that is missing or has no meaning."""
    if method not in get_args(Method):
        raise ConfigurationError(f"method={method!r} is not available in this version; available: {', '.join(get_args(Method))}")
    if method == "clipless" and max_grad_norm is not None:
        raise ConfigurationError("max_grad_norm has no meaning for method='clipless': its sensitivities are proved, not clipped")
    if method != "clipless" and not (is_number(max_grad_norm) and max_grad_norm is not None and max_grad_norm > 0):
        raise ConfigurationError(
            f"method={method!r} clips every example's gradient to max_grad_norm, a positive finite number, not {max_grad_norm!r}. "
            "Pass max_grad_norm=1.0, for example."
        )


def check_counts(dataset_size: int, batch_size: int, steps: int | None, epochs: float | None) -> None:
    """Refuse sizes and lengths that can't be meant."""
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


def describe_loss(loss: Any) -> str:
    """How a plan names a loss: the engine compares it."""
    return str(loss) if isinstance(loss, torch.nn.Module) else str(getattr(loss, "__qualname__", type(loss).__qualname__))
