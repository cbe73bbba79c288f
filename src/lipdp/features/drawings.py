"""Drawings: images of made-up scenes from a random process, without a single photograph. Networks learn from them for free.

A scene is laid from back to front on a canvas of ``size`` pixels:

1. A background: two flat or graded colours on either side of a tilted horizon (every other image has none), each with a
   texture.
2. Ten objects, of radii r with density ∝ 1/r between a twentieth and just over half of the canvas. An object is built of three
   parts: a body, and two limbs that sit on the body's rim, mirror images of each other in every other object. A part is a
   superellipse |u|^p + |v|^p ≤ ρ(θ)^p, p from 1.2 (nearly a diamond) to 8 (nearly a rectangle), its outline bent by two
   harmonics.
3. Every object has two colours of the scene's palette, one of six textures in its own coordinates (plain in three of eight;
   stripes, checks, dots, cloud, marble), a shading (light from one side of the scene, falling off towards the rim), sometimes a
   darker outline, and a soft shadow on what lies behind it.
4. Light over the whole scene falls off along one direction.

All numbers of a scene are drawn from a generator on the processor, in one call; rendering is arithmetic on the device. So a seed
gives the same scenes everywhere, up to the rounding of floating point.

Two simpler kinds of images are drawn for the public statistics of fixed features, from fixed seeds too.

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

import math
from collections.abc import Sequence
from functools import lru_cache

import torch

from lipdp._checks import whole
from lipdp.errors import ConfigurationError

_OBJECTS, _PARTS = 10, 3
_SMALLEST, _LARGEST = 0.05, 0.55  # radii of objects, in units of the canvas
_CLOUDS = 64  # different cloud textures of one call
_AT_ONCE = 1024
_DARK = 0.55  # how much a shadow takes away at most
# How light varies in natural scenes: mostly all channels together, then blue against red, then green against both.
_OPPONENTS = ((1.0, 0.55, 0.25), (1.0, 0.0, -0.5), (1.0, -0.55, 0.25))


def draw_images(count: int, size: int = 64, seed: int = 0, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """``count`` drawings (count, 3, size, size) with values in [0, 1]; the same ones for the same arguments.

    Args:
        count: how many.
        size: pixels along each side, at least 8.
        seed: of the scenes; public.
        device: where to render them.
    """
    number, side = whole("draw_images count", count), whole("draw_images size", size, least=8)
    draw = torch.Generator().manual_seed(seed)
    parts = [_scenes(min(_AT_ONCE, number - start), side, draw, torch.device(device)) for start in range(0, number, _AT_ONCE)]
    return torch.cat(parts)


class _Numbers:
    """Uniform numbers of all scenes: drawn in one call, handed out one column at a time."""

    def __init__(self, scenes: int, columns: int, draw: torch.Generator, device: torch.device) -> None:
        self._table = torch.rand(scenes, columns, generator=draw).to(device)
        self._next = 0

    def __call__(self, low: float = 0.0, high: float = 1.0) -> torch.Tensor:
        """(scenes, 1, 1): uniform in [low, high]."""
        column = self._table[:, self._next, None, None]
        self._next += 1
        return low + (high - low) * column

    def chance(self, probability: float) -> torch.Tensor:
        """(scenes, 1, 1): 1.0 with this probability, else 0.0."""
        return (self() < probability).float()


_COLUMNS = 454  # that one scene takes


def _scenes(count: int, size: int, draw: torch.Generator, device: torch.device) -> torch.Tensor:
    numbers = _Numbers(count, _COLUMNS, draw, device)
    clouds = _clouds(size, draw).to(device)
    y, x = torch.meshgrid(*(2 * [(torch.arange(size, device=device) + 0.5) / size - 0.5]), indexing="ij")
    light = numbers(0, 2 * math.pi)
    palette = _Palette(numbers)
    canvas = _background(numbers, palette, clouds, x, y)
    for _ in range(_OBJECTS):
        canvas = _object(canvas, numbers, palette, clouds, light, x, y, size)
    falloff = 1 + numbers(-0.5, 0.5) * (torch.cos(light) * x + torch.sin(light) * y)
    return (canvas * falloff[:, None]).clamp(0, 1)


class _Palette:
    """The colours of a scene: a mean, and how strongly they stray from it in brightness and in colour."""

    def __init__(self, numbers: _Numbers) -> None:
        self._numbers = numbers
        self._mean = [numbers(0.25, 0.75), numbers(-0.12, 0.12), numbers(-0.06, 0.06)]
        vivid = numbers()
        self._spread = [numbers(0.15, 0.5), 0.35 * vivid, 0.25 * vivid]

    def colour(self) -> torch.Tensor:
        """(scenes, 3, 1, 1)."""
        own = [mean + spread * self._numbers(-1, 1) for mean, spread in zip(self._mean, self._spread, strict=True)]
        mixing = torch.tensor(_OPPONENTS, device=own[0].device)
        colours: torch.Tensor = torch.einsum("ij,bjhw->bihw", mixing, torch.stack(own, 1)).clamp(0, 1)
        return colours


def _clouds(size: int, draw: torch.Generator) -> torch.Tensor:
    """(_CLOUDS, size, size) of noise with amplitudes ∝ 1/frequency and deviation 1, cut from larger tori."""
    frequency = torch.fft.fftfreq(2 * size)
    radius = torch.sqrt(frequency[:, None] ** 2 + frequency[None, :] ** 2)
    radius[0, 0] = torch.inf
    noise = torch.fft.fft2(torch.randn(_CLOUDS, 2 * size, 2 * size, generator=draw)) / radius
    waves = torch.fft.ifft2(noise).real[:, :size, :size]
    even: torch.Tensor = waves / waves.std((1, 2), keepdim=True)
    return even


def _cloud(numbers: _Numbers, clouds: torch.Tensor) -> torch.Tensor:
    """One of the clouds for each scene, mirrored at random."""
    chosen = clouds[(numbers() * len(clouds)).flatten().long().clamp_max(len(clouds) - 1)]
    return torch.where(numbers() < 0.5, chosen, chosen.flip(1).transpose(1, 2))


def _texture(numbers: _Numbers, cloud: torch.Tensor, u: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """One of six textures of about ±1, in coordinates u, v of the canvas, at a random scale, angle and strength."""
    period, turn, phase = numbers(0.05, 0.3), numbers(0, math.pi), numbers(0, 2 * math.pi)
    along = 2 * math.pi * (torch.cos(turn) * u + torch.sin(turn) * v) / period + phase
    across = 2 * math.pi * (torch.cos(turn) * v - torch.sin(turn) * u) / period
    stripes = torch.tanh(3 * torch.sin(along))
    plain = torch.zeros_like(stripes)
    kinds = (
        plain,
        plain,
        plain,
        stripes,
        stripes * torch.tanh(3 * torch.sin(across)),
        torch.tanh(4 * (torch.cos(along) + torch.cos(across) - 0.8)),
        cloud,
        torch.sin(along + 2 * cloud),
    )
    which = (numbers() * len(kinds)).floor().clamp_max(len(kinds) - 1)
    texture = sum((which == number).float() * kind for number, kind in enumerate(kinds))
    return numbers(0.02, 0.2) * (texture + 0.3 * cloud)


def _background(numbers: _Numbers, palette: _Palette, clouds: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    tilt, height, split = numbers(-0.3, 0.3), numbers(-0.3, 0.3), numbers.chance(0.5)
    below = split * torch.sigmoid((y - height - tilt * x) * 60)
    sides = []
    for _ in range(2):
        grade = 1 + numbers(-0.6, 0.6) * (y + numbers(-0.3, 0.3) * x)
        cloud = _cloud(numbers, clouds)
        sides.append((palette.colour() * grade[:, None]) + _texture(numbers, cloud, x, y)[:, None])
    return sides[0] + below[:, None] * (sides[1] - sides[0])


def _object(
    canvas: torch.Tensor,
    numbers: _Numbers,
    palette: _Palette,
    clouds: torch.Tensor,
    light: torch.Tensor,
    x: torch.Tensor,
    y: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """The canvas with one more object in front, and its shadow."""
    radius = _SMALLEST * (_LARGEST / _SMALLEST) ** numbers()
    right, down = numbers(-0.55, 0.55), numbers(-0.55, 0.55)
    turn, aspect = numbers(0, 2 * math.pi), numbers(0.35, 1.0)
    cosine, sine = torch.cos(turn), torch.sin(turn)
    u = ((x - right) * cosine + (y - down) * sine) / radius
    v = ((y - down) * cosine - (x - right) * sine) / radius
    texture = _texture(numbers, _cloud(numbers, clouds), u * radius, v * radius)
    main, other = palette.colour(), palette.colour()
    strength, outline = numbers(0, 0.45), 0.5 * numbers.chance(0.3)
    shadow, reach = _DARK * numbers() * numbers.chance(0.6), numbers(0.1, 0.35)
    spread, mirrored, where, limb = numbers(0.5, math.pi), numbers.chance(0.5), numbers(0, 2 * math.pi), numbers(0.25, 0.75)
    dark: torch.Tensor | None = None
    solid: torch.Tensor | None = None
    painted = canvas
    shift_u, shift_v = (reach * torch.cos(light - turn), reach * torch.sin(light - turn))
    for part in range(_PARTS):
        side = 0.0 if part == 0 else 1.0 if part == 1 else -1.0
        scale = torch.ones_like(limb) if part == 0 else limb * (mirrored + (1 - mirrored) * numbers(0.6, 1.2) if part == 2 else 1.0)
        angle = where + side * spread
        centre_u, centre_v = (0.0, 0.0) if part == 0 else (0.9 * torch.cos(angle), 0.9 * aspect * torch.sin(angle))
        power, bend = numbers(1.2, 8.0), numbers(0, 0.25) * numbers.chance(0.6)
        phases = numbers(0, 2 * math.pi)
        flat = aspect if part == 0 else 0.5 + 0.5 * aspect
        du, dv = (u - centre_u) / scale, (v - centre_v) / (scale * flat)
        distance = _distance(du, dv, power, bend, phases)
        edge = radius * scale * size  # pixels from the middle to the rim: borders are as soft as a pixel
        alpha = ((1 - distance) * edge + 0.5).clamp(0, 1)
        rim = torch.exp(-(((1 - distance) * edge / 1.5) ** 2))
        facing = du * torch.cos(light - turn) + dv * torch.sin(light - turn)
        shade = 1 - strength * facing - outline * rim
        colour = main if part == 0 else main + numbers.chance(0.5)[:, None] * (other - main)
        look = (colour + texture[:, None]) * shade[:, None]
        painted = painted + alpha[:, None] * (look - painted)
        away = _distance(du - shift_u / scale, dv - shift_v / scale, power, bend, phases)
        cover = torch.sigmoid((1 - away) * 8)
        dark = cover if dark is None else torch.maximum(dark, cover)
        solid = alpha if solid is None else torch.maximum(solid, alpha)
    assert dark is not None
    assert solid is not None
    # The shadow falls on what lies behind the object, not on the object itself.
    return painted * (1 - (shadow * dark * (1 - solid))[:, None])


def _distance(u: torch.Tensor, v: torch.Tensor, power: torch.Tensor, bend: torch.Tensor, phase: torch.Tensor) -> torch.Tensor:
    """1 on the rim of the bent superellipse, less inside: (|u|^p + |v|^p)^(1/p)/(1 + b·cos(3θ + φ) + b/2·cos(5θ + 2φ))."""
    theta = torch.atan2(v, u)
    radial = ((u.abs() + 1e-4) ** power + (v.abs() + 1e-4) ** power) ** (1 / power)
    return radial / (1 + bend * torch.cos(3 * theta + phase) + bend / 2 * torch.cos(5 * theta + 2 * phase))


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


# Images of overlapping shapes ("dead leaves"), drawn from a fixed seed: edges, corners and flat parts without a single photograph.

_SHAPES = 48  # laid from front to back: nearly all of the canvas is covered by then
_FINER = 2  # drawn at this many times the resolution and averaged down, so that edges are smooth
_SMALLEST_LEAF = 3.0  # radius in pixels
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
        least, most = _FINER * _SMALLEST_LEAF, float(max(rows, columns))
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
