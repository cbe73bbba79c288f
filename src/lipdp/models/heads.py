"""Heads of plain weights between boundaries on fixed features of norm at most 1: no weight needs a constraint.

One of them (``scattering-certified``) stands behind non-expansive layers only, so that its decisions come with useful certificates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

import torch

from lipdp import nn
from lipdp.data.augment import Flip, TestTimeAverage
from lipdp.errors import ConfigurationError
from lipdp.features.layers import SideBySide, Window
from lipdp.features.scattering import Scattering2d
from lipdp.features.stacks import AnyBlock, Centre, FrontOptions, channel_weights, feature_front, scattering_front
from lipdp.features.straighten import Straightening
from lipdp.models.by_name import register

__all__ = [
    "BlockOptions",
    "hidden_layers",
    "logit_layers",
    "patches_linear",
    "patches_mlp",
    "scattering_certified",
    "scattering_linear",
    "scattering_mlp",
]


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


@register("scattering-certified")
def scattering_certified(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    scales: Sequence[tuple[int, int]] = ((2, 8),),
    flip: bool = True,
    orders: tuple[float, float, float] = (1.0, 1.0, 1.0),
    grey: float = 0.5,
    radius: float | None = None,
    input_mode: Literal["ball", "sphere"] = "sphere",
    norm: float = 1.0,
    clip: float | None = 0.3,
    normalise: bool = False,
) -> nn.Sequential:
    """A linear layer from zero on scattering coefficients as they are: Δ = norm·clip, and certificates that are worth having.

    What makes features good for accuracy (evening out, decorrelating, compressing) makes them steep. Here nothing in front of
    the ball or sphere brings two images further apart: a constant is taken off the pixels, so that zeros continue the image
    beyond its border without copies of it; scattering is 1-Lipschitz, the mean over an image and its mirror image too; K
    scales side by side are divided by √K; weights of orders are at most 1; and taking the mean off moves all points alike. So a
    margin m of the head is a margin of the pixels, times what the scaling to the sphere adds. (With several scales the calculus
    adds up what each gives back, so that certificates count √K instead of 1.)

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        scales: (J, L) of each transform, side by side.
        flip: average the coefficients over the image and its mirror image.
        orders: weights of the orders 0, 1 and 2, in (0, 1].
        grey: the constant that is taken off the pixels.
        radius: the data's mean is taken off the coefficients, paid for out of ``lipdp.plan(…, statistics_budget=…)``; for it
            (only) each record is scaled into the ball of this radius. ``None``: nothing is taken off.
        input_mode: "sphere" brings every example's coefficients to length ``norm``, "ball" only shortens longer ones.
        norm: that length.
        clip: bound C on the norm of the logits' gradient; ``None`` for none, where examples' gradients are clipped instead.
        normalise: bring the logits' gradients to norm C instead of only shortening long ones.
    """
    if not scales:
        raise ConfigurationError("scattering-certified needs at least one scale (J, L)")
    if len(orders) != 3 or not all(0 < weight <= 1 for weight in orders):
        raise ConfigurationError(f"orders are three weights in (0, 1], so that no two images come further apart, not {orders!r}")
    branches, width = [], 0
    for J, L in scales:
        transform = Scattering2d(input_shape, J, L, colour="rgb", padding="zeros")
        branch: list[torch.nn.Module] = [TestTimeAverage(transform, Flip()) if flip else transform]
        if any(weight != 1 for weight in orders):
            branch.append(Window(channel_weights(transform, (*orders, 1.0))[:, None, None].expand(transform.output_shape).clone()))
        branches.append(nn.Sequential(*branch))
        width += math.prod(transform.output_shape)
    layers: list[torch.nn.Module] = [nn.Normalize(grey, 1.0), SideBySide(*branches)]
    if len(branches) > 1:
        layers.append(Window(torch.tensor(1 / math.sqrt(len(branches)))))
    if radius is not None:
        layers.append(nn.Standardize(width, radius=radius, moments=1))
    layers.append(nn.BoundedInput((width,), norm=norm, mode=input_mode))
    return nn.Sequential(*layers, *logit_layers(width, classes, clip, normalise))
