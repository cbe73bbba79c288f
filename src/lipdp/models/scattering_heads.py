"""Networks on scattering features: a fixed front that needs no privacy, and a head of plain weights between boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

from lipdp import nn
from lipdp.models.heads import hidden_layers, logit_layers
from lipdp.models.registry import register
from lipdp.models.scattering_front import FrontOptions, scattering_front

__all__ = ["scattering_linear", "scattering_mlp"]


@register("scattering-linear")
def scattering_linear(
    input_shape: tuple[int, ...], classes: int, *, clip: float | None = 0.3, normalise: bool = False, **front: Unpack[FrontOptions]
) -> nn.Sequential:
    """A linear layer, from zero and without constraints, on normalised scattering features: Δ = clip.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        clip: bound C on the norm of the logits' gradient; ``None`` for none, where examples' gradients are clipped instead.
        normalise: bring the logits' gradients to norm C instead of only shortening long ones.
        front: see :func:`~lipdp.models.scattering_front.scattering_front`.
    """
    layers, features = scattering_front(input_shape, **front)
    return nn.Sequential(*layers, *logit_layers(features, classes, clip, normalise))


@register("scattering-mlp")
def scattering_mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (512,),
    clip: float | None = 0.2,
    hidden_clip: float | None = 0.2,
    normalise: bool = False,
    init: float = 1.0,
    **front: Unpack[FrontOptions],
) -> nn.Sequential:
    """`scattering-linear` with hidden ReLU layers, each between boundaries: Δ = hidden_clip for theirs, clip for the last.

    Activations are projected on the unit ball behind each ReLU, and cotangents clipped where they reach each layer's output, so
    no weight needs a constraint.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        hidden: widths of the hidden layers.
        clip: bound on the norm of the logits' gradient; ``None`` for none, where examples' gradients are clipped instead.
        hidden_clip: bound on the norm of the gradient at the outputs of hidden layers, before their ReLU; ``None`` likewise.
        normalise: bring both to these norms instead of only shortening long ones.
        init: standard deviation of the hidden layers' first weights. At 1, a unit input gives activations of norm about
            √(width/2), which the ball makes unit again.
        front: see :func:`~lipdp.models.scattering_front.scattering_front`.
    """
    layers, features = scattering_front(input_shape, **front)
    between, width = hidden_layers(features, hidden, hidden_clip, normalise, init)
    return nn.Sequential(*layers, *between, *logit_layers(width, classes, clip, normalise))
