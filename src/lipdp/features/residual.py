"""The residual network that learns from drawings: normalised by batches while it learns, folded into plain convolutions after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["SHAPES", "NetworkShape", "ResidualNetwork", "folded_weights"]


@dataclass(frozen=True)
class NetworkShape:
    """Sizes of a network: channels of its stages, and residual blocks of each. Every stage but the first halves the image."""

    widths: tuple[int, ...]
    blocks: tuple[int, ...]

    @classmethod
    def of(cls, given: Mapping[str, Sequence[int]]) -> NetworkShape:
        """From plain data, as a file holds it."""
        return cls(tuple(map(int, given["widths"])), tuple(map(int, given["blocks"])))

    def plain(self) -> dict[str, Sequence[int]]:
        """As plain data."""
        return asdict(self)


SHAPES = {
    "large": NetworkShape((128, 256, 512), (2, 2, 2)),
    "small": NetworkShape((48, 128, 256), (1, 1, 1)),
}
"""By the names that features="…" knows."""


class _NormedConvolution(nn.Module):
    """A convolution without bias, then batch normalisation: what learns."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.norm = nn.BatchNorm2d(outputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.norm(self.convolution(x))
        return y

    def folded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias of the convolution that does the same in evaluation mode."""
        norm = self.norm
        assert norm.running_var is not None
        assert norm.running_mean is not None
        factor = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
        return self.convolution.weight * factor[:, None, None, None], norm.bias - norm.running_mean * factor


def _convolution(inputs: int, outputs: int, kernel: int, stride: int, learning: bool) -> nn.Module:
    if learning:
        return _NormedConvolution(inputs, outputs, kernel, stride)
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, learning: bool) -> None:
        super().__init__()
        self.first = _convolution(inputs, outputs, 3, stride, learning)
        self.second = _convolution(outputs, outputs, 3, 1, learning)
        same = inputs == outputs and stride == 1
        self.short: nn.Module = nn.Identity() if same else _convolution(inputs, outputs, 1, stride, learning)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.short(x))


class ResidualNetwork(nn.Module):
    """Stages of residual blocks behind one 3 × 3 convolution of three channels.

    Args:
        shape: its sizes.
        learning: with batch normalisation. Otherwise plain convolutions, for the weights of :func:`folded_weights`.
    """

    def __init__(self, shape: NetworkShape, *, learning: bool = False) -> None:
        super().__init__()
        self.shape = shape
        self.stem = _convolution(3, shape.widths[0], 3, 1, learning)
        self.stages, inputs = nn.ModuleList(), shape.widths[0]
        for number, (width, blocks) in enumerate(zip(shape.widths, shape.blocks, strict=True)):
            strides = [2 if number else 1] + [1] * (blocks - 1)
            layers = [_Block(width if j else inputs, width, stride, learning) for j, stride in enumerate(strides)]
            self.stages.append(nn.Sequential(*layers))
            inputs = width

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Images (batch, 3, height, width) around 0 → the maps of every stage, none of them negative."""
        maps, y = [], F.relu(self.stem(x))
        for stage in self.stages:
            y = stage(y)
            maps.append(y)
        return maps


def folded_weights(network: ResidualNetwork) -> dict[str, torch.Tensor]:
    """The weights of the network without normalisation that does the same in evaluation mode."""
    weights: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, part in network.named_modules():
            if isinstance(part, _NormedConvolution):
                weights[f"{name}.weight"], weights[f"{name}.bias"] = (value.detach().float().cpu() for value in part.folded())
    return weights
