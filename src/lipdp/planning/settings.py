"""What a user may ask of a plan, and the checks that refuse what can't be meant."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch.nn.parameter import UninitializedParameter

from lipdp._checks import instance, is_number, one_of, positive
from lipdp._numerics import unit_roundoff
from lipdp._sums import MOST_ROWS, sum_slack
from lipdp.bounds import Analysis
from lipdp.errors import ConfigurationError, LipdpNotice
from lipdp.losses import Loss

Method = Literal["clipless", "naive", "multiloss", "reweight", "ghost", "bookkeeping", "mixed"]
Precision = Literal["float64", "float32", "tf32", "bfloat16"]
Source = Literal["proved", "clipped"]
STATISTICS = "statistics"
"""Name of the one-off release that :class:`lipdp.nn.Standardize` is set from."""

# u of the arithmetic inside matrix products. TF32 keeps 10 bits of the mantissa.
ROUNDOFF = {
    "float64": unit_roundoff(torch.float64),
    "float32": unit_roundoff(torch.float32),
    "tf32": 2.0**-11,
    "bfloat16": unit_roundoff(torch.bfloat16),
}
# u of the sums inside matrix products: tensor cores cut off instead of rounding. Half precision is added up in float32.
_INSIDE = {"float64": ROUNDOFF["float64"], "float32": ROUNDOFF["float32"], "tf32": 2.0**-22, "bfloat16": 2.0**-22}
# u of a microbatch's sum as autograd hands it on.
_STORED = {**ROUNDOFF, "tf32": ROUNDOFF["float32"]}
# Seats beyond the records, where all of them are in every batch: a neighbouring dataset has one record more.
_SPARE = 2
# Seats of a Poisson batch above its mean, in standard deviations.
_DEVIATIONS = 2
# Of a clipped gradient, whose norm is measured with all margins: its factor and the product with it.
_SCALED = 16


def usual_seats(batch_size: int, *, whole: bool) -> int:
    """How many seats a step has: a public number. ``whole``: all records are in every batch."""
    return batch_size + _SPARE if whole else batch_size + math.ceil(_DEVIATIONS * math.sqrt(batch_size))


def most_rows(precision: str, batch_size: int, sampling_rate: float) -> int:
    """Records of a microbatch at most: its sum is rounded as a whole, in bfloat16 coarsely."""
    return min(16 if precision == "bfloat16" else MOST_ROWS, usual_seats(batch_size, whole=sampling_rate == 1))


def proved_rounding(analysis: Analysis, precision: str, rows: int, *, convolutions: bool) -> dict[str, float]:
    """What rounding can add to a proved Δ, relative to it, and where; ``rows``: records of a microbatch."""
    uses = max((row.uses for row in analysis.parameters), default=1)
    inside, stored = _INSIDE[precision], _STORED[precision]
    sums = sum_slack(inside, stored, rows=rows, roundings=2 + uses, convolutions=convolutions)
    return {"passes": analysis.slack(ROUNDOFF[precision]) - 1, "sums": sums}


def clipped_rounding(method: str, precision: str, rows: int) -> dict[str, float]:
    """What rounding can add to a clipped gradient, relative to C, and where; loops add up single gradients in float64."""
    alone = method in ("naive", "multiloss")
    return {"scaling": _SCALED * ROUNDOFF["float32"], "sums": sum_slack(0.0 if alone else _INSIDE[precision], rows=rows)}


def has_convolutions(model: torch.nn.Module) -> bool:
    """Whether a trained parameter is a kernel."""
    return any(p.requires_grad and p.ndim > 2 for p in model.parameters())


def rounding_of(
    model: torch.nn.Module, method: str, precision: str, analysis: Analysis | None, batch_size: int, sampling_rate: float
) -> dict[str, float]:
    """What rounding can add to a step's sensitivity, relative to it, and where: the worst case, by the lengths of all sums."""
    rows = most_rows(precision, batch_size, sampling_rate)
    proved = {} if analysis is None else proved_rounding(analysis, precision, rows, convolutions=has_convolutions(model))
    clipped = {} if method == "clipless" else clipped_rounding(method, precision, rows)
    return {name: max(proved.get(name, 0.0), clipped.get(name, 0.0)) for name in (*proved, *clipped)}


def rows_within(slack: Callable[[int], float], most: float) -> int:
    """The largest microbatch, in records, whose rounding a slack covers; ``slack`` grows with the number of records."""
    least, beyond = 1, MOST_ROWS + 1
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if slack(middle) <= most else (least, middle)
    return least


def slack_of(rounding: Mapping[str, float]) -> float:
    """The factor on the noise that covers all of it."""
    return math.prod(1 + part for part in rounding.values())


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
    return asked if ROUNDOFF[one_of("precision", asked, ROUNDOFF)] >= ROUNDOFF[native] else native  # type: ignore[return-value]


def check_model(model: object, *, values: bool = True) -> None:
    """Refuse what is no model, and one whose weights are not there yet.

    Args:
        model: that was given.
        values: whether its weights are looked at; where gradients are clipped, a plan does with their shapes.
    """
    instance(
        "model",
        model,
        torch.nn.Module,
        "give a torch.nn.Module that was made, not its class or its name; of what lipdp.convert gave, its .model",
    )
    assert isinstance(model, torch.nn.Module)
    for name, held in model.named_parameters():
        if isinstance(held, UninitializedParameter):
            raise ConfigurationError(
                f"{name} has no shape yet (a lazy layer): let the model see a made-up batch first, model(torch.zeros(1, …))"
            )
        if values and held.device.type == "meta":
            raise ConfigurationError(
                f"{name} is on the meta device, where it has no values: model.to_empty(device='cpu'), and set the weights then"
            )


_ENDS = {
    "Softmax": ("CrossEntropy", "CrossEntropyLoss"),
    "LogSoftmax": ("CrossEntropy", "CrossEntropyLoss"),
    "Sigmoid": ("BCE", "BCEWithLogitsLoss"),
}


def note_squashed(model: torch.nn.Module, loss: object) -> None:
    """Say where a network ends in what its loss does itself: gradients all but vanish, and the noise stays."""
    last = model
    while isinstance(last, torch.nn.Sequential) and len(last):
        last = last[-1]
    if type(loss).__name__ in _ENDS.get(type(last).__name__, ()):
        warnings.warn(
            f"the network ends in {type(last).__name__}, and {type(loss).__name__} applies one itself: leave it out, or little is "
            "learned",
            LipdpNotice,
            stacklevel=3,
        )


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
    if batch_size > dataset_size:
        raise ConfigurationError(
            f"batch_size={batch_size} is larger than dataset_size={dataset_size}: the sampling rate would exceed 1. Use at most "
            f"{dataset_size}."
        )
    if steps is not None and epochs is not None:
        raise ConfigurationError("give either epochs or steps, not both")
    if epochs is not None:
        positive("epochs", epochs)


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
