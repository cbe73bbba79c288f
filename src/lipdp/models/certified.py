"""A private head whose decisions come with useful certificates: every layer in front of it is non-expansive."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch

from lipdp import nn
from lipdp.data.augment import Flip, TestTimeAverage
from lipdp.errors import ConfigurationError
from lipdp.features.layers import SideBySide, Window
from lipdp.features.scattering import Scattering2d
from lipdp.features.stacks import channel_weights
from lipdp.models.heads import logit_layers
from lipdp.models.registry import register

__all__ = ["scattering_certified"]


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
