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
from lipdp.models.scattering_layers import Compress, Compression, SideBySide, Window, window
from lipdp.models.scattering_textures import texture_images

__all__ = ["FrontOptions", "scattering_front"]

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
) -> tuple[list[torch.nn.Module], int]:
    """Layers from images to a bounded vector of features, none of them trained, and how many features there are.

    Args:
        input_shape: (channels, height, width).
        scales: (J, L) of each transform, see :class:`~lipdp.models.scattering.Scattering2d`; several stand side by side.
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
    """
    if statistics not in ("none", "textures", "private"):
        raise ConfigurationError(f"statistics must be 'none', 'textures' or 'private', not {statistics!r}")
    if len(weights) != 4 or not all(math.isfinite(w) and w > 0 for w in weights):
        raise ConfigurationError(f"weights are four positive numbers (orders 0, 1, 2; colour), not {weights!r}")
    if compress not in ("none", "log", "root") or not 0 <= whiten <= 1:
        raise ConfigurationError(f"compress is 'none', 'log' or 'root' and whiten in [0, 1], not {compress!r} and {whiten!r}")
    if statistics == "private" and len(scales) > 1:
        raise ConfigurationError("private statistics are released for one scale; use statistics='textures' for several")
    chosen: Colour = colour if colour is not None else "yuv" if input_shape[:1] == (3,) else "rgb"
    copies = Shifts([(int(down), int(right)) for down, right in shifts], flip=flip)
    branches, sizes = [], []
    for J, L in scales:
        transform = Scattering2d(input_shape, J, L, order, chosen, padding)
        public = _constants(transform.input_shape, J, L, order, chosen, padding, compress, whiten)
        branch = _branch(transform, public, copies, compress, statistics, radius)
        height, width = transform.output_shape[1:]
        factors = _channel_weights(transform, weights)[:, None, None] * window(height, width, corner)
        if not bool((factors == 1).all()):
            branch.append(Window(factors))
        branches.append(branch)
        sizes.append(math.prod(transform.output_shape))
    if not branches:
        raise ConfigurationError("scattering needs at least one scale (J, L)")
    if len(branches) > 1:
        joined = SideBySide(*(nn.Sequential(*branch) for branch in branches))
        return [joined, nn.BoundedInput((sum(sizes),), mode=input_mode)], sum(sizes)
    return [*branches[0], nn.BoundedInput(transform.output_shape, mode=input_mode), nn.Flatten()], sizes[0]


def _branch(
    transform: Scattering2d,
    public: tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...], torch.Tensor | None],
    copies: Shifts,
    compress: Compression,
    statistics: Statistics,
    radius: float,
) -> list[torch.nn.Module]:
    levels, mean, std, mixing = public
    extractor: torch.nn.Module = transform
    if compress != "none":
        extractor = nn.Sequential(transform, Compress(levels, compress))
    layers = [extractor if copies.copies == 1 else TestTimeAverage(extractor, copies)]
    if statistics == "none":
        return layers
    layers.append(nn.Normalize(mean, std))
    channels = transform.output_shape[0]
    if mixing is not None:
        mixer = torch.nn.Conv2d(channels, channels, 1, bias=False).requires_grad_(False)
        mixer.weight.copy_(mixing[:, :, None, None])
        layers.append(mixer)
    if statistics == "private":
        layers.append(nn.Standardize(channels, radius=radius * math.sqrt(math.prod(transform.output_shape))))
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


def _channel_weights(transform: Scattering2d, weights: tuple[float, float, float, float]) -> torch.Tensor:
    """By channel; maps come by order, plane after plane."""
    counts = [math.comb(transform.J, m) * transform.L**m for m in range(transform.order + 1)]
    orders = [weights[min(m, 2)] for m, count in enumerate(counts) for _ in range(count)]
    colours = [1.0] + [weights[3] if transform.colour == "yuv" else 1.0] * (transform.input_shape[0] - 1)
    return torch.tensor([colour * order for colour in colours for order in orders])
