"""A gradient-norm-preserving multilayer perceptron."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.models.registry import register

__all__ = ["head", "mlp", "stem"]

InputMode = Literal["ball", "sphere"]


def stem(input_shape: tuple[int, ...], input_norm: float, input_mode: InputMode, centre: bool) -> list[torch.nn.Module]:
    """What every model starts with: optionally each example minus its own mean, then the bounded input."""
    centring: list[torch.nn.Module] = [nn.LayerCentering()] if centre else []
    return [*centring, nn.BoundedInput(input_shape, norm=input_norm, mode=input_mode)]


def head(features: int, classes: int, clip: float | None, hidden: int | None = None) -> list[torch.nn.Module]:
    """What every model ends with: optionally a hidden layer, the logits, and optionally a clip on their gradient."""
    if hidden is not None and (hidden < 2 or hidden % 2):
        raise ConfigurationError(f"the hidden width must be even (GroupSort sorts pairs), not {hidden}")
    layers: list[torch.nn.Module] = []
    if hidden is not None:
        layers += [nn.SpectralLinear(features, hidden, bias=False), nn.GroupSort(2)]
        features = hidden
    layers.append(nn.SpectralLinear(features, classes, bias=False))
    return layers if clip is None else [*layers, nn.ClipGradient(clip)]


@register("mlp")
def mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (256, 256),
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """Orthogonal dense layers with GroupSort between them: every layer has Δ = G·X, with G and X preserved.

    Args:
        input_shape: shape of one example.
        classes: number of outputs.
        hidden: widths of the hidden layers (even, for GroupSort).
        input_norm: norm of the inputs.
        input_mode: "sphere" puts every input on the sphere, "ball" only shortens long ones.
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    if any(width < 2 or width % 2 for width in hidden):
        raise ConfigurationError(f"hidden widths must be even (GroupSort sorts pairs), not {tuple(hidden)}")
    layers: list[torch.nn.Module] = [*stem(input_shape, input_norm, input_mode, centre), nn.Flatten()]
    width = math.prod(input_shape)
    for size in hidden:
        layers += [nn.SpectralLinear(width, size, bias=False), nn.GroupSort(2)]
        width = size
    return nn.Sequential(*layers, *head(width, classes, clip))
