"""What a user may ask of a plan, and the checks that refuse what can't be meant."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch

from lipdp.bounds.operator_norm import unit_roundoff
from lipdp.errors import ConfigurationError
from lipdp.losses import Loss
from lipdp.privacy._checks import is_number

__all__ = [
    "ROUNDOFF",
    "Method",
    "Precision",
    "Source",
    "check_counts",
    "check_method",
    "choose_precision",
    "clipping_slack",
    "describe_loss",
    "model_roundoff",
    "per_example_loss",
]

Method = Literal["clipless", "naive", "multiloss", "reweight", "ghost", "bookkeeping", "mixed"]
Precision = Literal["float64", "float32", "tf32", "bfloat16"]
Source = Literal["proved", "clipped"]

# u of the arithmetic inside matrix products. TF32 keeps 10 bits of the mantissa.
ROUNDOFF = {
    "float64": unit_roundoff(torch.float64),
    "float32": unit_roundoff(torch.float32),
    "tf32": 2.0**-11,
    "bfloat16": unit_roundoff(torch.bfloat16),
}
# Rounding of an example's norm, of its clip factor and of the product: sums of many terms, in blocks.
_CLIPPING_OPERATIONS = 64


def clipping_slack(precision: str) -> float:
    """(1+u)^64: what rounding may add to a clipped gradient's norm."""
    return float((1 + ROUNDOFF[precision]) ** _CLIPPING_OPERATIONS)


def model_roundoff(model: torch.nn.Module) -> float:
    """u of the model's coarsest floating-point type."""
    return max((unit_roundoff(p.dtype) for p in model.parameters() if p.is_floating_point()), default=ROUNDOFF["float32"])


def choose_precision(asked: str | None, roundoff: float) -> Precision:
    """The arithmetic asked for, but never finer than the model's own numbers."""
    native: Precision = (
        "float64" if roundoff <= ROUNDOFF["float64"] else "float32" if roundoff <= ROUNDOFF["float32"] else "bfloat16"
    )
    if asked is None:
        return native
    if asked not in ROUNDOFF:
        raise ConfigurationError(f"precision={asked!r} is not known; choose one of {', '.join(ROUNDOFF)}")
    return asked if ROUNDOFF[asked] >= ROUNDOFF[native] else native  # type: ignore[return-value]


def check_method(method: str, max_grad_norm: float | Mapping[str, float] | None) -> None:
    """Refuse an unknown method, and a clipping norm that is missing or has no meaning."""
    if method not in get_args(Method):
        raise ConfigurationError(f"method={method!r} is not available in this version; available: {', '.join(get_args(Method))}")
    if method == "clipless" and max_grad_norm is not None:
        raise ConfigurationError("max_grad_norm has no meaning for method='clipless': its sensitivities are proved, not clipped")
    norms = list(max_grad_norm.values()) if isinstance(max_grad_norm, Mapping) else [max_grad_norm]
    if method != "clipless" and not all(is_number(norm) and norm is not None and norm > 0 for norm in norms):
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


def describe_loss(loss: Any) -> str:
    """How a plan names a loss: the engine compares it."""
    return str(loss) if isinstance(loss, torch.nn.Module) else str(getattr(loss, "__qualname__", type(loss).__qualname__))
