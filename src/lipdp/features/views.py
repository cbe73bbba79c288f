"""Two looks at one drawing: what a network is taught to recognise as the same.

Crops of a fifth to all of the area, turned and mirrored, then changed in light and colour, blurred, sometimes grey, with a little
noise. All numbers come from one generator; an image's views depend on that image and on nothing else.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional as F

__all__ = ["random_views"]

_LEAST_AREA = 0.2
_ASPECT = 4 / 3
_TURN = math.pi / 9
_GREY, _BLURRED = 0.2, 0.5


def random_views(images: torch.Tensor, size: int, draw: torch.Generator) -> torch.Tensor:
    """One random view (batch, 3, size, size) of each drawing (batch, 3, height, width) with values in [0, 1]; around 0.

    Args:
        images: drawings, on the generator's device.
        size: pixels of a view along each side.
        draw: where the numbers come from.
    """
    numbers = torch.rand(len(images), 24, generator=draw, device=images.device)
    views = _crops(images, size, numbers[:, :6])
    views = _blurred(_recoloured(views, numbers[:, 6:20]), numbers[:, 20:22])
    noise = torch.randn(views.shape, generator=draw, device=views.device)
    return views - 0.5 + 0.05 * (numbers[:, 22] * numbers[:, 23])[:, None, None, None] * noise


def _crops(images: torch.Tensor, size: int, numbers: torch.Tensor) -> torch.Tensor:
    """Rectangles of a random area, shape and place, turned and mirrored at random, brought to one size."""
    area = _LEAST_AREA + (1 - _LEAST_AREA) * numbers[:, 0]
    aspect = torch.exp((2 * numbers[:, 1] - 1) * math.log(_ASPECT))
    width, height = ((area * ratio).sqrt().clamp_max(1) for ratio in (aspect, 1 / aspect))
    right, down = ((2 * number - 1) * (1 - part) for number, part in ((numbers[:, 2], width), (numbers[:, 3], height)))
    turn = (2 * numbers[:, 4] - 1) * _TURN
    mirror = torch.where(numbers[:, 5] < 0.5, -1.0, 1.0)
    cosine, sine = torch.cos(turn), torch.sin(turn)
    rows = (cosine * width * mirror, -sine * height, right, sine * width * mirror, cosine * height, down)
    grid = F.affine_grid(torch.stack(rows, 1).reshape(-1, 2, 3), [len(images), 3, size, size], align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)


def _recoloured(views: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Light and contrast changed, channels mixed by a random matrix near the identity, a fifth of them made grey."""

    def each(number: int, low: float, high: float) -> torch.Tensor:
        return (low + (high - low) * numbers[:, number])[:, None, None, None]

    mixing = torch.eye(3, device=views.device) + 0.5 * (numbers[:, :9].reshape(-1, 3, 3) - 0.5)
    mixing = mixing / mixing.sum(2, keepdim=True)  # grey stays grey
    views = torch.einsum("bij,bjhw->bihw", mixing, views)
    grey = views.mean(1, keepdim=True)
    saturation = each(9, 0.2, 1.6) * (numbers[:, 10] > _GREY).float()[:, None, None, None]
    views = grey + saturation * (views - grey)
    mean = views.mean((1, 2, 3), keepdim=True)
    return mean + each(11, 0.5, 1.5) * (views - mean) + each(12, -0.2, 0.2) + each(13, -0.1, 0.1) * grey


def _blurred(views: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Half of them mixed with their own blur."""
    line = torch.tensor([1.0, 4.0, 6.0, 4.0, 1.0], device=views.device) / 16
    kernel = torch.outer(line, line).expand(3, 1, 5, 5)
    soft = F.conv2d(F.pad(views, (2, 2, 2, 2), mode="reflect"), kernel, groups=3)
    share = (numbers[:, 0] * (numbers[:, 1] < _BLURRED).float())[:, None, None, None]
    return views + share * (soft - views)
