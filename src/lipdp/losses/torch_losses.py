"""torch's own losses, wrapped."""

from __future__ import annotations

import math

from torch import nn

from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.losses.base import Loss
from lipdp.losses.classification import BCE, CrossEntropy
from lipdp.losses.regression import MAE, MSE, Huber, SmoothL1

_KNOWN = (
    nn.CrossEntropyLoss,
    nn.BCEWithLogitsLoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.MSELoss,
)


def as_loss(loss: object) -> Loss:
    """Return `loss` if it is one of lipdp's, or the lipdp loss equal to a known torch loss with `reduction="none"`.

    Losses that torch computes element by element are summed over the K outputs of an example. `MSELoss` has no bound
    on its targets, hence the constant ∞: fine for clipping, and for a proved sensitivity there is `MSE(target_norm)`.
    """
    if isinstance(loss, Loss):
        return loss
    if isinstance(loss, type) and issubclass(loss, nn.Module):
        raise UnsupportedError(f"{loss.__name__} is a class, not a loss: pass an instance of it.")
    if type(loss) not in _KNOWN:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise UnsupportedError(
            f"{name} is not a loss whose Lipschitz constant is known. Use one of lipdp.losses, one of torch's "
            f"{', '.join(known.__name__ for known in _KNOWN)} with reduction='none', or subclass lipdp.losses.Loss: "
            "define forward(outputs, targets), one value per example, and the property `lipschitz`, a bound on the "
            "2-norm of that value's gradient in the outputs."
        )
    assert isinstance(loss, _KNOWN)
    if loss.reduction != "none":
        raise ConfigurationError(
            f"{type(loss).__name__}(reduction={loss.reduction!r}) mixes the examples of a batch. Make it with "
            "reduction='none': lipdp sums over examples itself."
        )
    if isinstance(loss, nn.CrossEntropyLoss):
        return CrossEntropy(
            label_smoothing=loss.label_smoothing,
            class_weights=loss.weight,
            reduction="none",
            ignore_index=loss.ignore_index,
        )
    if isinstance(loss, nn.BCEWithLogitsLoss):
        if loss.weight is not None:
            raise UnsupportedError(
                "BCEWithLogitsLoss(weight=…) weights positions of the batch, so an example's value depends on where it "
                "stands. Drop it; pos_weight is supported."
            )
        return BCE(pos_weight=1.0 if loss.pos_weight is None else loss.pos_weight, reduction="sum")
    if isinstance(loss, nn.L1Loss):
        return MAE(reduction="sum")
    if isinstance(loss, nn.SmoothL1Loss):
        return SmoothL1(beta=loss.beta, reduction="sum")
    if isinstance(loss, nn.HuberLoss):
        return Huber(delta=loss.delta, reduction="sum")
    return MSE(target_norm=math.inf, reduction="sum")
