"""Images of overlapping shapes ("dead leaves"), drawn from a fixed seed: edges, corners and flat parts without a single photograph.

Gaussian noise with the spectrum of photographs (:mod:`lipdp.models.scattering_textures`) has no edges: whitened, it is white noise.
Opaque shapes of sizes r with density ∝ r⁻³ laid over each other have both the spectrum *and* the edges. What is made from such
images (whitening, patches, thresholds) is a constant of the library, like a table of filters: no data are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from lipdp.errors import ConfigurationError
from lipdp.models.scattering_textures import texture_images

__all__ = ["leaf_images"]

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
