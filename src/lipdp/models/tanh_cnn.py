"""The small tanh network of "Tempered sigmoid activations" (Papernot et al., 2021): the usual reference for clipped DP-SGD."""

from __future__ import annotations

import math
from typing import Literal, get_args

import torch

from lipdp.errors import ConfigurationError
from lipdp.models.registry import register

__all__ = ["Activation", "tanh_cnn"]

Activation = Literal["tanh", "relu"]


class _Standardised(torch.nn.Module):
    """(x − centre)/spread with public constants."""

    def __init__(self, centre: float, spread: float) -> None:
        super().__init__()
        self.centre, self.spread = centre, spread

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.centre) / self.spread

    def extra_repr(self) -> str:
        return f"centre={self.centre}, spread={self.spread}"


@register("tanh-cnn")
def tanh_cnn(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 16,
    hidden: int = 32,
    activation: Activation = "tanh",
    groups: int = 0,
    centre: float = 0.0,
    spread: float = 1.0,
) -> torch.nn.Sequential:
    """Two strided convolutions with tanh and 2×2 max pooling of stride 1, then two dense layers; unconstrained.

    Args:
        input_shape: (channels, height, width), 28 pixels a side or more.
        classes: number of outputs.
        width: channels of the first convolution; the second has twice as many.
        hidden: width of the hidden dense layer; 0 for none.
        activation: "tanh", or "relu".
        groups: of a group normalisation after each convolution; 0 for none.
        centre: the network reads (x − centre)/spread: public constants, not taken from private data.
        spread: see ``centre``.
    """
    if len(input_shape) != 3 or min(input_shape[1:]) < 20:
        raise ConfigurationError(f"tanh-cnn needs images (channels, height, width) of at least 20 pixels a side, not {input_shape}")
    if activation not in get_args(Activation):
        raise ConfigurationError(f"activation must be one of {', '.join(get_args(Activation))}, not {activation!r}")
    if groups < 0 or (groups and width % groups):
        raise ConfigurationError(f"groups={groups!r} does not divide the {width} channels of tanh-cnn; 0 means no normalisation")
    if not (math.isfinite(centre) and math.isfinite(spread) and spread > 0):
        raise ConfigurationError(f"centre={centre!r} and spread={spread!r} must be finite, and the spread positive")

    def block(inside: int, outside: int, kernel: int, padding: int) -> list[torch.nn.Module]:
        normalised = [torch.nn.GroupNorm(groups, outside)] if groups else []
        return [
            torch.nn.Conv2d(inside, outside, kernel, stride=2, padding=padding),
            *normalised,
            _nonlinear(activation),
            torch.nn.MaxPool2d(2, 1),
        ]

    front = [] if (centre, spread) == (0.0, 1.0) else [_Standardised(centre, spread)]
    features = [*front, *block(input_shape[0], width, 8, 3), *block(width, 2 * width, 4, 0), torch.nn.Flatten()]
    with torch.no_grad():
        size = torch.nn.Sequential(*features)(torch.zeros(1, *input_shape)).shape[1]
    if hidden == 0:
        return torch.nn.Sequential(*features, torch.nn.Linear(size, classes))
    head = [torch.nn.Linear(size, hidden), _nonlinear(activation), torch.nn.Linear(hidden, classes)]
    return torch.nn.Sequential(*features, *head)


def _nonlinear(activation: Activation) -> torch.nn.Module:
    return torch.nn.Tanh() if activation == "tanh" else torch.nn.ReLU()
