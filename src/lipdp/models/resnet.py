"""Residual networks of Lipschitz layers: the 1-Lipschitz residual average in place of the sum."""

from __future__ import annotations

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.models.mlp import InputMode, head, stem
from lipdp.models.registry import register

__all__ = ["resnet", "resnet6", "resnet10", "resnet18"]

BLOCKS = {6: (1, 1), 10: (1, 1, 1, 1), 18: (2, 2, 2, 2)}  # blocks of two convolutions, by stage


def _block(channels: int) -> nn.Residual:
    return nn.Residual(
        nn.Sequential(
            nn.SpectralConv2d(channels, channels, 3, padding=1, bias=False),
            nn.GroupSort(2),
            nn.SpectralConv2d(channels, channels, 3, padding=1, bias=False),
        )
    )


@register("resnet")
def resnet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    depth: int = 6,
    width: int = 32,
    patch: int = 1,
    pooled: bool = True,
    hidden: int | None = None,
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """A convolution, stages of residual averages ``(x + f(x))/2``, a scaled average over the image (or all of it), logits.

    Between stages the image is halved without loss (pixel-unshuffle where sides are even, an L2-norm pool where not) and a
    1×1 convolution doubles the channels. Every Δ is at most G·X.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        depth: 6, 10 or 18: the convolutions of stem and blocks, and the logits.
        width: channels of the first stage (even).
        patch: side of the squares of pixels that become channels before the first convolution. A convolution's gradient is a sum
            over positions, and its bound allows for all of them to add up: fewer positions make it tighter.
        pooled: average over the image before the logits. The average of 1-Lipschitz features is short, and so are its margins;
            without it the features keep their norm, and the logits have more weights.
        hidden: width of a dense layer before the logits (even), ``None`` for none.
        input_norm: norm of the inputs.
        input_mode: "sphere" or "ball".
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    if depth not in BLOCKS:
        raise ConfigurationError(f"there is ResNet with depth 6, 10 or 18, not {depth}")
    if len(input_shape) != 3 or width < 2 or width % 2:
        raise ConfigurationError(f"resnet needs images (channels, height, width) and an even width, not {input_shape} and {width}")
    layers: list[torch.nn.Module] = stem(input_shape, input_norm, input_mode, centre)
    depth_in, rows, columns = input_shape
    if patch < 1 or rows % patch or columns % patch:
        raise ConfigurationError(f"resnet needs images whose sides are multiples of the patch, not {input_shape} and {patch}")
    if patch > 1:
        layers.append(nn.InvertibleDownsampling(patch))
        depth_in, rows, columns = depth_in * patch**2, rows // patch, columns // patch
    layers += [nn.SpectralConv2d(depth_in, width, 3, padding=1, bias=False), nn.GroupSort(2)]
    channels = width
    for stage, blocks in enumerate(BLOCKS[depth]):
        if stage and min(rows, columns) >= 2:
            even = rows % 2 == 0 and columns % 2 == 0
            layers.append(nn.InvertibleDownsampling(2) if even else nn.L2NormPool2d(2))
            rows, columns = rows // 2, columns // 2
            layers.append(nn.SpectralConv2d(4 * channels if even else channels, 2 * channels, 1, bias=False))
            channels = 2 * channels
        for _ in range(blocks):
            layers += [_block(channels), nn.GroupSort(2)]
    if pooled:
        layers.append(nn.ScaledAdaptiveAvgPool2d(1))
    layers.append(nn.Flatten())
    return nn.Sequential(*layers, *head(channels if pooled else channels * rows * columns, classes, clip, hidden))


@register("resnet6")
def resnet6(input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Sequential:
    """:func:`resnet` with two blocks."""
    return resnet(input_shape, classes, depth=6, **options)  # type: ignore[arg-type]


@register("resnet10")
def resnet10(input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Sequential:
    """:func:`resnet` with four blocks."""
    return resnet(input_shape, classes, depth=10, **options)  # type: ignore[arg-type]


@register("resnet18")
def resnet18(input_shape: tuple[int, ...], classes: int, **options: object) -> nn.Sequential:
    """:func:`resnet` with eight blocks."""
    return resnet(input_shape, classes, depth=18, **options)  # type: ignore[arg-type]
