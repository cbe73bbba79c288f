"""The small tanh network of "Tempered sigmoid activations" (Papernot et al., 2021): the usual reference for clipped DP-SGD."""

from __future__ import annotations

import torch

from lipdp.errors import ConfigurationError
from lipdp.models.registry import register

__all__ = ["tanh_cnn"]


@register("tanh-cnn")
def tanh_cnn(input_shape: tuple[int, ...], classes: int, *, width: int = 16, hidden: int = 32) -> torch.nn.Sequential:
    """Two strided convolutions with tanh and 2×2 max pooling of stride 1, then two dense layers; unconstrained.

    Args:
        input_shape: (channels, height, width), 28 pixels a side or more.
        classes: number of outputs.
        width: channels of the first convolution; the second has twice as many.
        hidden: width of the hidden dense layer.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 20:
        raise ConfigurationError(f"tanh-cnn needs images (channels, height, width) of at least 20 pixels a side, not {input_shape}")
    features = torch.nn.Sequential(
        torch.nn.Conv2d(input_shape[0], width, 8, stride=2, padding=3),
        torch.nn.Tanh(),
        torch.nn.MaxPool2d(2, 1),
        torch.nn.Conv2d(width, 2 * width, 4, stride=2),
        torch.nn.Tanh(),
        torch.nn.MaxPool2d(2, 1),
        torch.nn.Flatten(),
    )
    with torch.no_grad():
        size = features(torch.zeros(1, *input_shape)).shape[1]
    return torch.nn.Sequential(*features, torch.nn.Linear(size, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, classes))
