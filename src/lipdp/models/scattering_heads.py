"""Networks on scattering features: a fixed front that needs no privacy, and a head of plain weights between boundaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.models.registry import register
from lipdp.models.scattering_front import FrontOptions, scattering_front

__all__ = ["scattering_linear", "scattering_mlp"]


def _logits(features: int, classes: int, clip: float, normalise: bool) -> list[torch.nn.Module]:
    layer = torch.nn.Linear(features, classes, bias=False)
    torch.nn.init.zeros_(layer.weight)
    return [layer, nn.ClipGradient(clip, normalise=normalise)]


@register("scattering-linear")
def scattering_linear(
    input_shape: tuple[int, ...], classes: int, *, clip: float = 0.3, normalise: bool = False, **front: Unpack[FrontOptions]
) -> nn.Sequential:
    """A linear layer, from zero and without constraints, on normalised scattering features: Δ = clip.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        clip: bound C on the norm of the logits' gradient.
        normalise: bring the logits' gradients to norm C instead of only shortening long ones.
        front: see :func:`~lipdp.models.scattering_front.scattering_front`.
    """
    layers, features = scattering_front(input_shape, **front)
    return nn.Sequential(*layers, *_logits(features, classes, clip, normalise))


@register("scattering-mlp")
def scattering_mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (512,),
    clip: float = 0.2,
    hidden_clip: float = 0.2,
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
        clip: bound on the norm of the logits' gradient.
        hidden_clip: bound on the norm of the gradient at the outputs of hidden layers, before their ReLU.
        normalise: bring both to these norms instead of only shortening long ones.
        init: standard deviation of the hidden layers' first weights. At 1, a unit input gives activations of norm about
            √(width/2), which the ball makes unit again.
        front: see :func:`~lipdp.models.scattering_front.scattering_front`.
    """
    if not hidden or any(width < 1 for width in hidden):
        raise ConfigurationError(f"scattering-mlp needs widths of hidden layers, at least one, not {tuple(hidden)}")
    layers, width = scattering_front(input_shape, **front)
    for size in hidden:
        layer = torch.nn.Linear(width, size, bias=False)
        torch.nn.init.normal_(layer.weight, std=init)
        bound: torch.nn.Module = nn.ClipGradient(hidden_clip, normalise=True) if normalise else nn.Boundary(cotangent=hidden_clip)
        layers += [layer, bound, torch.nn.ReLU(), nn.Boundary(norm=1.0)]
        width = size
    return nn.Sequential(*layers, *_logits(width, classes, clip, normalise))
