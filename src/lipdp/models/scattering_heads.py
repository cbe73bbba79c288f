"""Networks on scattering features: a fixed front that needs no privacy, and a head of plain weights between boundaries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, TypedDict, Unpack

import torch

from lipdp import nn
from lipdp.data.augment import Shifts, TestTimeAverage
from lipdp.errors import ConfigurationError
from lipdp.models.registry import register
from lipdp.models.scattering import Colour, Padding, Scattering2d
from lipdp.models.scattering_layers import LogCompress
from lipdp.models.scattering_textures import texture_images, texture_statistics

__all__ = ["FrontOptions", "scattering_front", "scattering_linear", "scattering_mlp"]

Statistics = Literal["none", "textures", "private"]
# In units of the textures' deviation: photographs have up to three times their contrast.
_RADIUS = 3.0
# Where compression turns logarithmic, in units of a channel's mean response to textures.
_LEVEL = 0.3


class FrontOptions(TypedDict, total=False):
    """The arguments of :func:`scattering_front`."""

    J: int
    L: int
    order: int
    colour: Colour | None
    padding: Padding
    compress: bool
    shifts: Sequence[tuple[int, int]]
    flip: bool
    statistics: Statistics
    weights: tuple[float, float, float, float]
    input_mode: Literal["ball", "sphere"]


def scattering_front(
    input_shape: tuple[int, ...],
    *,
    J: int = 2,
    L: int = 8,
    order: int = 2,
    colour: Colour | None = None,
    padding: Padding = "reflect",
    compress: bool = False,
    shifts: Sequence[tuple[int, int]] = ((0, 0),),
    flip: bool = False,
    statistics: Statistics = "textures",
    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    input_mode: Literal["ball", "sphere"] = "sphere",
) -> tuple[list[torch.nn.Module], int]:
    """Layers from images to a bounded vector of features, none of them trained, and how many features there are.

    Args:
        input_shape: (channels, height, width).
        J: see :class:`~lipdp.models.scattering.Scattering2d`.
        L: the same.
        order: the same.
        colour: the same; by default "yuv" for three channels.
        padding: the same.
        compress: logarithms of the coefficients, see :class:`~lipdp.models.scattering_layers.LogCompress`.
        shifts: features are the mean over copies of the image moved by these (down, right) pixels.
        flip: and over their mirror images.
        statistics: what channels are evened out by. "textures": public constants, the response to random textures
            (:mod:`lipdp.models.scattering_textures`). "private": then also by the data's own statistics, paid for out of
            ``lipdp.plan(…, statistics_budget=…)``. "none".
        weights: of the features' orders 0, 1 and 2 (and up), and of the colour differences of "yuv" relative to brightness.
        input_mode: "sphere" puts every example's features on the unit sphere, "ball" only shortens long ones.
    """
    if statistics not in ("none", "textures", "private"):
        raise ConfigurationError(f"statistics must be 'none', 'textures' or 'private', not {statistics!r}")
    if len(weights) != 4 or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ConfigurationError(f"weights are four positive numbers (orders 0, 1, 2; colour), not {weights!r}")
    chosen: Colour = colour if colour is not None else "yuv" if input_shape[:1] == (3,) else "rgb"
    transform = Scattering2d(input_shape, J, L, order, chosen, padding)
    levels, mean, std = _constants(transform.input_shape, J, L, order, chosen, padding, compress)
    extractor: torch.nn.Module = nn.Sequential(transform, LogCompress(levels)) if compress else transform
    copies = Shifts([(int(down), int(right)) for down, right in shifts], flip=flip)
    layers = [extractor if copies.copies == 1 else TestTimeAverage(extractor, copies)]
    shape = transform.output_shape
    if statistics != "none":
        layers.append(nn.Normalize(mean, std))
    if statistics == "private":
        layers.append(nn.Standardize(shape[0], radius=_RADIUS * math.sqrt(math.prod(shape))))
    if any(weight != 1 for weight in weights):
        layers.append(nn.Normalize(0.0, [1 / weight for weight in _channel_weights(transform, weights)]))
    return [*layers, nn.BoundedInput(shape, mode=input_mode), nn.Flatten()], math.prod(shape)


@lru_cache(maxsize=16)
def _constants(
    shape: tuple[int, ...], J: int, L: int, order: int, colour: Colour, padding: Padding, compress: bool
) -> tuple[tuple[float, ...], ...]:
    """By channel: levels of compression, then means and deviations, of the response to textures."""
    transform: torch.nn.Module = Scattering2d(shape, J, L, order, colour, padding)
    with torch.no_grad():
        response = torch.cat([transform(part) for part in torch.split(texture_images(shape), 32)]).abs().mean((0, 2, 3))
    # A channel that textures leave at 0 (colour differences of grey ones, say) is not blown up.
    levels = (_LEVEL * response).clamp_min(1e-6 * float(response.max()))
    if compress:
        transform = torch.nn.Sequential(transform, LogCompress(levels.tolist()))
    mean, std = texture_statistics(transform, shape)
    return tuple(levels.tolist()), tuple(mean.tolist()), tuple(std.clamp_min(1e-3 * float(std.max())).tolist())


def _channel_weights(transform: Scattering2d, weights: tuple[float, float, float, float]) -> list[float]:
    """By channel; maps come by order, plane after plane."""
    orders = [
        weight for m in range(transform.order + 1) for weight in [weights[min(m, 2)]] * (math.comb(transform.J, m) * transform.L**m)
    ]
    planes = transform.input_shape[0]
    colours = [1.0, *[weights[3] if transform.colour == "yuv" else 1.0] * (planes - 1)]
    return [colour * order for colour in colours for order in orders]


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
        front: see :func:`scattering_front`.
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
        front: see :func:`scattering_front`.
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
