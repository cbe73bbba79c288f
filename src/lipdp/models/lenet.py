"""A LeNet-like convolutional network of Lipschitz layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.models.mlp import InputMode, head, stem
from lipdp.models.registry import register

__all__ = ["lenet"]


@register("lenet")
def lenet(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    channels: Sequence[int] = (16, 32),
    kernel_size: int = 5,
    hidden: int | None = 128,
    input_norm: float = 1.0,
    input_mode: InputMode = "sphere",
    centre: bool = True,
    clip: float | None = None,
) -> nn.Sequential:
    """Convolution, GroupSort and L2-norm pooling for each entry of ``channels``, then dense layers.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        channels: output channels of the convolutions (even), each followed by a 2×2 pool.
        kernel_size: of the convolutions, an odd number; images keep their size.
        hidden: width of the hidden dense layer, ``None`` for none.
        input_norm: norm of the inputs.
        input_mode: "sphere" or "ball".
        centre: subtract each example's own mean first.
        clip: bound on the norm of the logits' gradient.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 2 ** len(channels):
        raise ConfigurationError(
            f"lenet with {len(channels)} poolings needs images (channels, height, width) of at least {2 ** len(channels)} pixels a "
            f"side, not {input_shape}"
        )
    if any(c < 2 or c % 2 for c in channels) or kernel_size < 1 or kernel_size % 2 == 0:
        raise ConfigurationError(f"lenet needs even channels and an odd kernel, not {tuple(channels)} and {kernel_size}")
    layers: list[torch.nn.Module] = stem(input_shape, input_norm, input_mode, centre)
    depth, height, width = input_shape
    for size in channels:
        layers += [
            nn.SpectralConv2d(depth, size, kernel_size, padding=kernel_size // 2, bias=False),
            nn.GroupSort(2),
            nn.L2NormPool2d(2),
        ]
        depth, height, width = size, height // 2, width // 2
    layers.append(nn.Flatten())
    return nn.Sequential(*layers, *head(depth * height * width, classes, clip, hidden))
