"""Drawn images: public statistics for fixed features, made from fixed seeds without a single photograph.

*Textures* are noise with the spectrum of natural images. The channels of a scattering transform differ in size by factors of a
thousand, and statistics that would even them out are a query about private data, whose error is as large for the smallest channel
as for the largest. Images of 1/f noise have channels of nearly the same relative sizes as photographs do; so they are evened out
first by what textures give, which is public and costs nothing, and what is left to correct is small enough to be released privately
with little noise.

*Leaves* are images of overlapping shapes ("dead leaves"). Gaussian noise with the spectrum of photographs has no edges: whitened,
it is white noise. Opaque shapes of sizes r with density ∝ r⁻³ laid over each other have both the spectrum *and* the edges. What is
made from such images (whitening, patches, thresholds) is a constant of the library, like a table of filters: no data are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from lipdp.errors import ConfigurationError

__all__ = ["leaf_images", "texture_images", "texture_statistics"]


# Opponent colours of natural light: all channels together vary most, then one against the others.
_COLOURS = ((1.0, 0.15, 0.05), (1.0, 0.0, -0.05), (1.0, -0.15, 0.05))
_CONTRAST, _BRIGHTNESS = 0.25, 0.5


def texture_images(shape: Sequence[int], count: int = 256, seed: int = 0) -> torch.Tensor:
    """``count`` images of Gaussian noise with amplitudes ∝ 1/frequency, in [0, 1]; the same ones for the same arguments.

    Args:
        shape: (channels, height, width).
        count: how many.
        seed: of the draw; public.
    """
    if len(shape) != 3:
        raise ConfigurationError(f"textures are images (channels, height, width), not of shape {tuple(shape)}")
    channels, height, width = shape
    draw = torch.Generator().manual_seed(seed)
    # Cut from a larger torus, so that opposite borders do not match.
    rows, columns = (torch.fft.fftfreq(2 * n, dtype=torch.float64) for n in (height, width))
    frequency = torch.sqrt(rows[:, None] ** 2 + columns[None, :] ** 2)
    frequency[0, 0] = torch.inf  # no constant part: brightness is set below
    noise = torch.randn(count, channels, 2 * height, 2 * width, generator=draw, dtype=torch.float64)
    waves = torch.fft.ifft2(torch.fft.fft2(noise) / frequency).real[..., :height, :width]
    waves = waves / waves.std(dim=(0, 2, 3), keepdim=True)
    if channels == 3:
        waves = torch.einsum("ij,bjhw->bihw", torch.tensor(_COLOURS, dtype=torch.float64), waves)
    images: torch.Tensor = (_BRIGHTNESS + _CONTRAST * waves).clamp(0, 1).to(torch.float32)
    return images


def texture_statistics(module: torch.nn.Module, shape: Sequence[int], count: int = 256) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean and standard deviation of every channel (dimension 1) of ``module``'s response to textures: public constants."""
    with torch.no_grad():
        response = torch.cat([module(part) for part in torch.split(texture_images(shape, count), 32)]).double()
    dims = tuple(d for d in range(response.ndim) if d != 1)
    return response.mean(dims), response.std(dims)


# Images of overlapping shapes ("dead leaves"), drawn from a fixed seed: edges, corners and flat parts without a single photograph.

_SHAPES = 48  # laid from front to back: nearly all of the canvas is covered by then
_FINER = 2  # drawn at this many times the resolution and averaged down, so that edges are smooth
_SMALLEST = 3.0  # radius in pixels
_SATURATION = 0.2  # how far colours stray from grey


def leaf_images(shape: Sequence[int], count: int = 512, seed: int = 0) -> torch.Tensor:
    """``count`` images of overlapping ellipses and rectangles, shaded and lightly textured, in [0, 1].

    Args:
        shape: (channels, height, width).
        count: how many.
        seed: of the draw; public.
    """
    if len(shape) != 3 or min(shape) < 1:
        raise ConfigurationError(f"leaves are drawn on images (channels, height, width), not on the shape {tuple(shape)}")
    return _drawn(int(shape[0]), int(shape[1]), int(shape[2]), count, seed).clone()


@lru_cache(maxsize=4)
def _drawn(channels: int, height: int, width: int, count: int, seed: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    rows, columns = _FINER * height, _FINER * width
    y, x = torch.arange(rows, dtype=torch.float32)[:, None], torch.arange(columns, dtype=torch.float32)[None, :]
    grain = texture_images((channels, rows, columns), count, seed) - 0.5
    canvas = 0.5 + 0.3 * grain
    empty = torch.ones(count, rows, columns, dtype=torch.bool)

    def uniform(low: float, high: float, *size: int) -> torch.Tensor:
        return low + (high - low) * torch.rand(count, *size, generator=draw)

    for _ in range(_SHAPES):
        # Inverse of the distribution function of r⁻³ on [smallest, largest].
        least, most = _FINER * _SMALLEST, float(max(rows, columns))
        radius = (least**-2 + uniform(0, 1) * (most**-2 - least**-2)).rsqrt()
        aspect, turn, round_ = uniform(0.35, 1.0), uniform(0, torch.pi), uniform(0, 1) < 0.5
        reach = radius.clamp_max(max(rows, columns) / 2)
        down, right = (uniform(0, 1) * (n + 2 * reach) - reach for n in (rows, columns))
        across, along = (part[:, None, None] for part in (right, down))
        cosine, sine = torch.cos(turn)[:, None, None], torch.sin(turn)[:, None, None]
        u = ((x - across) * cosine + (y - along) * sine) / radius[:, None, None]
        v = ((y - along) * cosine - (x - across) * sine) / (radius * aspect)[:, None, None]
        inside = torch.where(round_[:, None, None], u * u + v * v < 1, torch.maximum(u.abs(), v.abs()) < 0.85)
        grey, shade, roughness = uniform(0, 1, 1), uniform(-0.25, 0.25, 1), uniform(0, 0.5, 1)
        colour = grey + (_SATURATION * uniform(-1, 1, channels) if channels > 1 else 0)
        slope = (shade[:, :, None, None] * u[:, None]).clamp(-0.5, 0.5)
        painted = colour[:, :, None, None] + slope + roughness[:, :, None, None] * grain
        canvas = torch.where((inside & empty)[:, None], painted, canvas)
        empty &= ~inside
    return torch.nn.functional.avg_pool2d(canvas.clamp(0, 1), _FINER)
