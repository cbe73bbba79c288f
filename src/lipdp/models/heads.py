"""Heads of plain weights between boundaries on fixed features of norm at most 1: no weight needs a constraint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.features.stacks import AnyBlock, Centre, FrontOptions, feature_front, scattering_front
from lipdp.features.straighten import Straightening
from lipdp.models.registry import register

__all__ = ["BlockOptions", "hidden_layers", "logit_layers", "patches_linear", "patches_mlp", "scattering_linear", "scattering_mlp"]


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


# Networks on scattering features: a fixed front that needs no privacy, and a head of plain weights between boundaries.


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
        front: see :func:`~lipdp.features.stacks.scattering_front`.
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
        front: see :func:`~lipdp.features.stacks.scattering_front`.
    """
    layers, features = scattering_front(input_shape, **front)
    between, width = hidden_layers(features, hidden, hidden_clip, normalise, init)
    return nn.Sequential(*layers, *between, *logit_layers(width, classes, clip, normalise))


# Networks on blocks of fixed features (patches, scattering): a front that needs no privacy, and a head between boundaries.


class BlockOptions(TypedDict, total=False):
    """The arguments of :func:`~lipdp.features.stacks.feature_front`."""

    blocks: Sequence[AnyBlock | Mapping[str, Any]]
    centre: Centre
    radius: float
    input_mode: Literal["ball", "sphere"]
    straighten: Straightening
    relu: int


@register("patches-linear")
def patches_linear(
    input_shape: tuple[int, ...], classes: int, *, clip: float | None = 0.3, normalise: bool = False, **front: Unpack[BlockOptions]
) -> nn.Sequential:
    """A linear layer, from zero and without constraints, on features of patches: Δ = clip.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        clip: bound on the norm of the logits' gradient; ``None`` for none, where examples' gradients are clipped instead.
        normalise: bring the logits' gradients to norm C instead of only shortening long ones.
        front: see :func:`~lipdp.features.stacks.feature_front`.
    """
    layers, features = feature_front(input_shape, **front)
    return nn.Sequential(*layers, *logit_layers(features, classes, clip, normalise))


@register("patches-mlp")
def patches_mlp(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    hidden: Sequence[int] = (512,),
    clip: float | None = 0.2,
    hidden_clip: float | None = 0.2,
    normalise: bool = False,
    init: float = 1.0,
    **front: Unpack[BlockOptions],
) -> nn.Sequential:
    """`patches-linear` with hidden ReLU layers, each between boundaries: Δ = hidden_clip for theirs, clip for the last.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        hidden: widths of the hidden layers.
        clip: bound on the norm of the logits' gradient; ``None`` for none, where examples' gradients are clipped instead.
        hidden_clip: bound on the norm of the gradient at the outputs of hidden layers, before their ReLU; ``None`` likewise.
        normalise: bring both to these norms instead of only shortening long ones.
        init: standard deviation of the hidden layers' first weights.
        front: see :func:`~lipdp.features.stacks.feature_front`.
    """
    layers, features = feature_front(input_shape, **front)
    between, width = hidden_layers(features, hidden, hidden_clip, normalise, init)
    return nn.Sequential(*layers, *between, *logit_layers(width, classes, clip, normalise))
