"""Heads of plain weights between boundaries, for features of norm at most 1: no weight needs a constraint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError

__all__ = ["hidden_layers", "logit_layers"]


def logit_layers(features: int, classes: int, clip: float | None, normalise: bool) -> list[torch.nn.Module]:
    """A linear layer from zero, and the clip of its gradient: Δ = clip.

    Args:
        features: width of the input.
        classes: number of outputs.
        clip: bound on the norm of the logits' gradient; ``None`` for none, where examples' gradients are clipped instead.
        normalise: bring gradients to this norm instead of only shortening long ones.
    """
    layer = torch.nn.Linear(features, classes, bias=False)
    torch.nn.init.zeros_(layer.weight)
    return [layer] if clip is None else [layer, nn.ClipGradient(clip, normalise=normalise)]


def hidden_layers(
    features: int, widths: Sequence[int], clip: float | None, normalise: bool, init: float
) -> tuple[list[torch.nn.Module], int]:
    """Linear layers with ReLUs, each between boundaries (Δ = clip), and the width of the last.

    Activations are projected on the unit ball behind each ReLU, and cotangents clipped where they reach each layer's output.

    Args:
        features: width of the input.
        widths: of the hidden layers.
        clip: bound on the norm of the gradient at a hidden layer's output, before its ReLU; ``None`` for none.
        normalise: bring gradients to this norm instead of only shortening long ones.
        init: standard deviation of the first weights. At 1, a unit input gives activations of norm about √(width/2), which
            the ball makes unit again.
    """
    if not widths or any(width < 1 for width in widths):
        raise ConfigurationError(f"a hidden head needs widths of hidden layers, at least one, not {tuple(widths)}")
    layers: list[torch.nn.Module] = []
    for width in widths:
        layer = torch.nn.Linear(features, width, bias=False)
        torch.nn.init.normal_(layer.weight, std=init)
        layers.append(layer)
        if clip is not None:
            layers.append(nn.ClipGradient(clip, normalise=True) if normalise else nn.Boundary(cotangent=clip))
        layers += [torch.nn.ReLU(), nn.Boundary(norm=1.0)]
        features = width
    return layers, features
