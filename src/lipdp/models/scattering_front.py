"""From images to evened-out scattering features, all by public constants: what the heads of scattering_heads.py stand on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, TypedDict

import torch

from lipdp import nn
from lipdp.data.augment import Shifts, TestTimeAverage
from lipdp.errors import ConfigurationError
from lipdp.models.scattering import Colour, Padding, Scattering2d
from lipdp.models.scattering_layers import Compress, Compression, FromGrid, Mix, SideBySide, ToGrid, Window, window
from lipdp.models.scattering_textures import texture_images
from lipdp.models.straighten import Straightening, straighten_layers

__all__ = ["FrontOptions", "channel_weights", "scattering_front"]

Statistics = Literal["none", "textures", "private"]
# Where compression sets in, in units of a channel's mean response to textures.
_LEVELS = {"log": 0.3, "root": 0.01}


class FrontOptions(TypedDict, total=False):
    """The arguments of :func:`scattering_front`."""

    scales: Sequence[tuple[int, int]]
    order: int
    colour: Colour | None
    padding: Padding
    compress: Compression
    shifts: Sequence[tuple[int, int]]
    flip: bool
    whiten: float
    statistics: Statistics
    radius: float
    weights: tuple[float, float, float, float]
    corner: float
    input_mode: Literal["ball", "sphere"]
    straighten: Straightening


def scattering_front(
    input_shape: tuple[int, ...],
    *,
    scales: Sequence[tuple[int, int]] = ((2, 8),),
    order: int = 2,
    colour: Colour | None = None,
    padding: Padding = "reflect",
    compress: Compression = "none",
    shifts: Sequence[tuple[int, int]] = ((0, 0),),
    flip: bool = False,
    whiten: float = 0.0,
    statistics: Statistics = "textures",
    radius: float = 1.8,
    weights: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0),
    corner: float = 1.0,
    input_mode: Literal["ball", "sphere"] = "sphere",
    straighten: Straightening = False,
) -> tuple[list[torch.nn.Module], int]:
    """Layers from images to a bounded vector of features, none of them trained, and how many features there are.

    Args:
        input_shape: (channels, height, width).
        scales: (J, L) of each transform, see :class:`~lipdp.models.scattering.Scattering2d`; the maps of several are put on one
            grid, the finest.
        order: the same.
        colour: the same; by default "yuv" for three channels.
        padding: the same.
        compress: "log" or "root" of the coefficients, see :class:`~lipdp.models.scattering_layers.Compress`.
        shifts: features are the mean over copies of the image moved by these (down, right) pixels.
        flip: and over their mirror images.
        whiten: a in (0, 1]: channels are decorrelated as it would decorrelate the textures', by ((1−a)·Σ + a·I)^(-1/2); 0: not.
        statistics: what channels are evened out by. "textures": public constants, the response to random textures
            (:mod:`lipdp.models.scattering_textures`). "private": then also by the data's own statistics, paid for out of
            ``lipdp.plan(…, statistics_budget=…)``. "none".
        radius: for "private": a public bound on the root mean square of an image's features, in units of the textures' deviation.
        weights: of the features' orders 0, 1 and 2 (and up), and of the colour differences of "yuv" relative to brightness.
        corner: weight of the image's corners relative to its middle.
        input_mode: "sphere" puts every example's features on the unit sphere, "ball" only shortens long ones.
        straighten: bring every image into one pose first, for handwriting; settings of
            :class:`~lipdp.models.straighten.Straighten`, or ``True`` for its own.
    """
    if statistics not in ("none", "textures", "private"):
        raise ConfigurationError(f"statistics must be 'none', 'textures' or 'private', not {statistics!r}")
    if len(weights) != 4 or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ConfigurationError(f"weights are four positive numbers (orders 0, 1, 2; colour), not {weights!r}")
    if compress not in ("none", "log", "root") or not 0 <= whiten <= 1:
        raise ConfigurationError(f"compress is 'none', 'log' or 'root' and whiten in [0, 1], not {compress!r} and {whiten!r}")
    chosen: Colour = colour if colour is not None else "yuv" if input_shape[:1] == (3,) else "rgb"
    copies = Shifts([(int(down), int(right)) for down, right in shifts], flip=flip)
    if not scales:
        raise ConfigurationError("scattering needs at least one scale (J, L)")
    # The finest grid first: the others are put on it.
    transforms = [Scattering2d(input_shape, J, L, order, chosen, padding) for J, L in sorted(scales)]
    branches = [_branch(transform, copies, compress, whiten, statistics != "none") for transform in transforms]
    layers: list[torch.nn.Module] = branches[0]
    shape: tuple[int, ...] = transforms[0].output_shape
    each = [_factors(transform, weights, corner) for transform in transforms]
    factors, grid = each[0], None
    if len(branches) > 1:
        layers = [SideBySide(*(nn.Sequential(*branch) for branch in branches))]
        factors = torch.cat([part.flatten() for part in each])
        shape = tuple(factors.shape)
    if len(branches) > 1 and statistics == "private":  # channels of all scales side by side, for the statistics only
        grid = ToGrid([transform.output_shape for transform in transforms])
        layers.append(grid)
        shape, factors = grid.output_shape, grid(factors[None])[0] * grid.evening
    if statistics == "private":
        layers.append(nn.Standardize(shape[0], radius=radius * math.sqrt(math.prod(shape))))
    if not bool((factors == 1).all()):
        layers.append(Window(factors))
    if grid is not None:
        layers.append(FromGrid(grid))
        shape = grid.input_shape
    first = straighten_layers(input_shape, straighten)
    return [*first, *layers, nn.BoundedInput(shape, mode=input_mode), nn.Flatten()], math.prod(shape)


def _factors(transform: Scattering2d, weights: tuple[float, float, float, float], corner: float) -> torch.Tensor:
    _, height, width = transform.output_shape
    return channel_weights(transform, weights)[:, None, None] * window(height, width, corner)


def _branch(transform: Scattering2d, copies: Shifts, compress: Compression, whiten: float, even: bool) -> list[torch.nn.Module]:
    """One transform with what is public and follows it: compression, the mean over copies, the textures' statistics."""
    levels, mean, std, mixing = _constants(
        transform.input_shape,
        transform.J,
        transform.L,
        transform.order,
        transform.colour,
        transform.padding,
        compress,
        whiten if even else 0.0,
    )
    extractor: torch.nn.Module = transform
    if compress != "none":
        extractor = nn.Sequential(transform, Compress(levels, compress))
    layers = [extractor if copies.copies == 1 else TestTimeAverage(extractor, copies)]
    if even:
        layers.append(nn.Normalize(mean, std))
    if mixing is not None:
        layers.append(Mix(mixing))
    return layers


@lru_cache(maxsize=16)
def _constants(
    shape: tuple[int, ...], J: int, L: int, order: int, colour: Colour, padding: Padding, compress: Compression, whiten: float
) -> tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], torch.Tensor | None]:
    """Of the response to textures: levels of compression, means and deviations by channel, and what decorrelates channels."""
    transform = Scattering2d(shape, J, L, order, colour, padding)
    with torch.no_grad():
        response = torch.cat([transform(part) for part in torch.split(texture_images(shape), 32)])
        level = response.abs().mean((0, 2, 3))
        # A channel that textures leave at 0 (colour differences of grey ones, say) is not blown up.
        levels = (_LEVELS.get(compress, 1.0) * level).clamp_min(1e-6 * float(level.max()))
        if compress != "none":
            response = Compress(levels.tolist(), compress)(response)
        mean, std = response.mean((0, 2, 3)), response.std((0, 2, 3))
        std = std.clamp_min(1e-3 * float(std.max()))
        mixing = None
        if whiten:
            even = ((response - mean[:, None, None]) / std[:, None, None]).movedim(1, -1).flatten(0, 2).double()
            values, vectors = torch.linalg.eigh(even.T @ even / len(even))
            shrunk = (1 - whiten) * values.clamp_min(0) + whiten
            mixing = (vectors * shrunk.rsqrt() @ vectors.T).float()
    return tuple(levels.tolist()), tuple(mean.tolist()), tuple(std.tolist()), mixing


def channel_weights(transform: Scattering2d, weights: tuple[float, float, float, float]) -> torch.Tensor:
    """By channel; maps come by order, plane after plane."""
    counts = [math.comb(transform.J, m) * transform.L**m for m in range(transform.order + 1)]
    orders = [weights[min(m, 2)] for m, count in enumerate(counts) for _ in range(count)]
    colours = [1.0] + [weights[3] if transform.colour == "yuv" else 1.0] * (transform.input_shape[0] - 1)
    return torch.tensor([colour * order for colour in colours for order in orders])
