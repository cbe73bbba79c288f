"""Random textures with the spectrum of natural images: public statistics for fixed features, made without a single photograph.

The channels of a scattering transform differ in size by factors of a thousand, and statistics that would even them out are a query
about private data, whose error is as large for the smallest channel as for the largest. Images of 1/f noise have channels of
nearly the same relative sizes as photographs do; so they are evened out first by what textures give, which is public and costs
nothing, and what is left to correct is small enough to be released privately with little noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lipdp.errors import ConfigurationError

__all__ = ["texture_images", "texture_statistics"]

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
