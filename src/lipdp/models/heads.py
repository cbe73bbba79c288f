"""Heads of plain weights between boundaries on fixed features of norm at most 1, of images or of tables: no weight needs a
constraint.

One of them (``scattering-certified``) stands behind non-expansive layers only, so that its decisions come with useful certificates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lipdp import nn
from lipdp.data.augment import Flip, TestTimeAverage
from lipdp.errors import ConfigurationError
from lipdp.features.kernels import Asinh, Constant, Landmarks, RandomFourier
from lipdp.features.layers import SideBySide, Window
from lipdp.features.scattering import Scattering2d
from lipdp.features.stacks import channel_weights, feature_front, scattering_front
from lipdp.models.by_name import register


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
    input_shape: tuple[int, ...], classes: int, *, clip: float | None = 0.3, normalise: bool = False, **front: Any
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
    **front: Any,
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


@register("patches-linear")
def patches_linear(
    input_shape: tuple[int, ...], classes: int, *, clip: float | None = 0.3, normalise: bool = False, **front: Any
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
    **front: Any,
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


@register("tabular")
def tabular(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    radius: float = 10.0,
    compress: float | None = None,
    standardise: bool = False,
    fourier: int = 0,
    scale: float | Sequence[float] = 1.0,
    each: int | None = None,
    centre: bool = False,
    line: bool = False,
    sums: float | None = None,
    landmarks: int = 0,
    ridge: float = 1e-4,
    reach: float | None = None,
    input_mode: Literal["ball", "sphere"] = "sphere",
    constant: float = 1.0,
    hidden: Sequence[int] = (),
    hidden_clip: float | None = 0.3,
    clip: float | None = 0.3,
    init: float = 1.0,
) -> nn.Sequential:
    """A linear layer from zero, or a small network of plain weights, on bounded features of a row: no weight has a constraint.

    The last layer's Δ is ``clip`` (its inputs have norm 1), that of hidden ones ``hidden_clip``. Everything in front of them is
    fixed by public constants, or, where ``standardise``, by statistics that the plan pays for.

    Args:
        input_shape: (columns,).
        classes: number of outputs.
        radius: a public bound: longer rows are scaled down to it (behind ``compress``).
        compress: draw columns in logarithmically from this level on, for columns of very different sizes.
        standardise: each column minus its mean by its deviation, released privately: needs ``statistics_budget``.
        fourier: number of random Fourier features (:class:`~lipdp.features.kernels.RandomFourier`); 0 takes the columns themselves.
        scale: their kernel's width or widths, in units of the columns.
        each: how many columns each of them reads.
        centre: subtract their means, released privately (needs ``statistics_budget``), before they are brought to norm 1. What all
            rows have in common tells no classes apart, but takes up most of the norm that the noise is scaled to.
        line: put the columns themselves, at norm 1, beside the Fourier features: what is a sum over columns is learned from
            them, and what is not from the features, each with as much of the squared norm.
        sums: width of a kernel that is a sum over the columns, beside the others (needs ``line``; half of ``fourier`` features are
            its): what is a sum of curves, one of each column, is learned from it.
        landmarks: number of kernel features at fixed points (:class:`~lipdp.features.kernels.Landmarks`) of width ``scale``, for
            columns that come standardised; instead of ``fourier``.
        ridge: how far those are whitened.
        reach: behind the standardisation, longer rows are scaled down to this norm, so that rare outliers don't set the scale.
        input_mode: how rows without Fourier features are brought to norm 1, "sphere" or "ball" (of radius ``reach``).
        constant: value of the column that serves as bias, relative to the rest; columns themselves only.
        hidden: widths of hidden layers.
        hidden_clip: bound on the gradient at their outputs; ``None`` for none, where per-example gradients are clipped.
        clip: bound on the logits' gradient; ``None`` likewise.
        init: deviation of hidden layers' first weights.
    """
    if len(input_shape) != 1:
        raise ConfigurationError(f"tabular takes rows of numbers, shape (columns,), not {input_shape}")
    if centre and (standardise or not fourier):
        raise ConfigurationError(
            "centre is for Fourier features (fourier=…), and can't be had with standardise: statistics are released once"
        )
    if sums is not None and not (line and fourier > 1):
        raise ConfigurationError(
            "sums puts a kernel of single columns beside Fourier features and the columns: give fourier and line"
        )
    if line and (not fourier or centre):
        raise ConfigurationError("line puts the columns beside Fourier features (fourier=…), and can't be had with centre")
    if landmarks and (fourier or not isinstance(scale, int | float)):
        raise ConfigurationError("landmarks are features of one width, instead of Fourier features: leave out fourier")
    columns = input_shape[0]
    layers: list[torch.nn.Module] = []
    if compress is not None:
        layers.append(Asinh(compress))
    layers.append(nn.BoundedInput(input_shape, norm=radius))
    if standardise:
        layers.append(nn.Standardize(columns, radius=radius))
    if reach is not None:
        layers.append(nn.Boundary(norm=reach))
    if fourier:
        joint = fourier if sums is None else fourier - fourier // 2
        curved = [RandomFourier(columns, joint, scale, each=each), nn.BoundedInput((joint,), mode="sphere")]
        if line:
            straight = [nn.BoundedInput(input_shape, mode="sphere"), Constant(columns, constant)]
            straight.append(nn.BoundedInput((columns + 1,), mode="sphere"))
            both = fourier + columns + 1
            parts = [nn.Sequential(*curved), nn.Sequential(*straight)]
            if sums is not None:
                single = RandomFourier(columns, fourier // 2, sums, each=1, seed=1)
                parts.append(nn.Sequential(single, nn.BoundedInput((fourier // 2,), mode="sphere")))
            curved = [SideBySide(*parts), nn.BoundedInput((both,), mode="sphere")]
        layers += curved
        if centre:
            layers += [nn.Standardize(fourier, radius=1.0, moments=1), nn.BoundedInput((fourier,), mode="sphere")]
        width = both if line else fourier
    elif landmarks and isinstance(scale, int | float):
        layers += [Landmarks(columns, landmarks, scale, ridge), nn.BoundedInput((landmarks,), mode="sphere")]
        width = landmarks
    else:
        if input_mode == "ball":
            layers.append(nn.Normalize(0.0, reach or radius))
        layers += [nn.BoundedInput(input_shape, mode=input_mode), Constant(columns, constant)]
        width = columns + 1
        layers.append(nn.BoundedInput((width,), mode="sphere"))
    for size in hidden:
        layer = torch.nn.Linear(width, size, bias=False)
        torch.nn.init.normal_(layer.weight, std=init)
        bound = [] if hidden_clip is None else [nn.Boundary(cotangent=hidden_clip)]
        layers += [layer, *bound, torch.nn.ReLU(), nn.Boundary(norm=1.0)]
        width = size
    last = torch.nn.Linear(width, classes, bias=False)
    torch.nn.init.zeros_(last.weight)
    return nn.Sequential(*layers, last, *([] if clip is None else [nn.ClipGradient(clip)]))
