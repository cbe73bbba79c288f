"""Networks in pairs: an ordinary one, and the Lipschitz one of the same shape that clipless training trains."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lipdp import models, nn

VOCABULARY = 10_000
IMAGE = (3, 32, 32)


class Pair(NamedTuple):
    """Constructors of both, the shape of an example (of token ids, where it has one axis) and the number of classes."""

    ordinary: Callable[[], torch.nn.Module]
    lipschitz: Callable[[], torch.nn.Module]
    shape: tuple[int, ...]
    classes: int

    def batch(self, rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Random inputs and targets."""
        if len(self.shape) == 1:
            x = torch.randint(VOCABULARY, (rows, *self.shape), device=device)
        else:
            x = torch.randn(rows, *self.shape, device=device)
        return x, torch.randint(self.classes, (rows,), device=device)


def cnn(channels: tuple[int, int, int], hidden: int) -> torch.nn.Module:
    """Three convolutions with ReLU and max pooling, two dense layers."""
    layers: list[torch.nn.Module] = []
    depth = 3
    for size in channels:
        layers += [torch.nn.Conv2d(depth, size, 3, padding=1), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
        depth = size
    layers += [torch.nn.Flatten(), torch.nn.Linear(depth * 16, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)]
    return torch.nn.Sequential(*layers)


def lipschitz_cnn(channels: tuple[int, int, int], hidden: int) -> torch.nn.Module:
    """The same with Lipschitz layers in the place of convolution, ReLU and max pooling."""
    layers: list[torch.nn.Module] = [nn.BoundedInput(IMAGE)]
    depth = 3
    for size in channels:
        layers += [nn.SpectralConv2d(depth, size, 3, padding=1, bias=False), nn.GroupSort(2), nn.L2NormPool2d(2)]
        depth = size
    layers += [nn.Flatten(), nn.SpectralLinear(depth * 16, hidden, bias=False), nn.GroupSort(2)]
    return nn.Sequential(*layers, nn.SpectralLinear(hidden, 10, bias=False))


def _cnns(channels: tuple[int, int, int], hidden: int) -> Pair:
    return Pair(lambda: cnn(channels, hidden), lambda: lipschitz_cnn(channels, hidden), IMAGE, 10)


def _models(ordinary: str, lipschitz: str, shape: tuple[int, ...], classes: int = 10, **options: object) -> Pair:
    make = {name: getattr(models, name) for name in (ordinary, lipschitz)}
    return Pair(
        lambda: make[ordinary](shape, classes, **options), lambda: make[lipschitz](shape, classes, **options), shape, classes
    )


PAIRS = {
    "cnn-small": _cnns((32, 64, 64), 64),
    "cnn-large": _cnns((64, 128, 256), 256),
    "mnist-cnn": _models("plain_lenet", "lenet", (1, 28, 28)),
    "mlp": _models("plain_dense", "mlp", (1, 28, 28), hidden=(512, 512)),
    "mixer": _models("plain_mixer", "mixer", IMAGE, dim=128, depth=4),
    "resnet18": _models("plain_resnet", "resnet", IMAGE, depth=18, width=32),
    "transformer": _models("plain_transformer", "transformer", (128,), 2, dim=128, heads=4, depth=2, vocabulary=VOCABULARY),
}
