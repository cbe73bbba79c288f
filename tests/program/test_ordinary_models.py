"""Ordinary models, ours, torch's own and those of the docs: none is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import lipdp
from lipdp import losses, models, nn
from lipdp.bounds import analyse
from lipdp.convert.boundaries import between_boundaries
from lipdp.parametrize import constraint
from tests.models.test_zoo import LIPSCHITZ
from tests.soundness.functions import Forward

T = torch.nn
L = nn.SpectralLinear


def bounded(*layers: torch.nn.Module, shape: tuple[int, ...] = (4,)) -> torch.nn.Module:
    return nn.Sequential(nn.BoundedInput(shape), *layers)


class Block(torch.nn.Module):
    """A residual block as people write it."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.SpectralConv2d(channels, channels, 3, padding=1)
        self.conv2 = nn.SpectralConv2d(channels, channels, 3, padding=1, bias=False)
        self.relu = T.ReLU(inplace=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x
        out = self.relu(self.conv1(x))
        out = self.conv2(out)
        out += identity
        return self.relu(out)


class Sizes(torch.nn.Module):
    """Sizes, loops, lists, conditions on settings, early returns: Python that does not depend on the data."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.layers = T.ModuleList([L(4, 4) for _ in range(3)])
        self.named = T.ModuleDict({"last": L(4, 3)})
        self.deep, self.calls = deep, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, width = x.shape
        x = x.view(batch, width)
        for layer in self.layers:
            x = F.relu(layer(x))
            if not self.deep:
                break
        if self.training:
            x = F.dropout(x, 0.1, training=self.training)
        parts = [x[:, :2], x[:, 2:]]
        x = torch.cat(parts[::-1], dim=1).reshape(x.size(0), x.size(1))
        return self.named["last"](x)


class Frozen(torch.nn.Module):
    """A frozen front under no_grad, a trained head."""

    def __init__(self) -> None:
        super().__init__()
        self.front = T.Sequential(nn.BoundedInput((4,)), T.Linear(4, 6), T.Tanh()).requires_grad_(False)
        self.head = L(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            features = self.front(x)
        return self.head(features)


def tied() -> torch.nn.Module:
    layer = L(4, 4)
    return bounded(layer, nn.GroupSort(2), layer, L(4, 3))


def between(network: torch.nn.Module, shape: tuple[int, ...]) -> torch.nn.Module:
    return between_boundaries(network, shape, clip=1.0)


def converted(network: torch.nn.Module, shape: tuple[int, ...]) -> torch.nn.Module:
    return lipdp.convert(network, shape).model


def conv_net() -> torch.nn.Module:
    return T.Sequential(T.Conv2d(1, 4, 3, padding=1), T.ReLU(), T.MaxPool2d(2), T.Flatten(), T.Linear(64, 3))


IMAGE = (1, 8, 8)
HAND: dict[str, Callable[[], torch.nn.Module]] = {
    "linear": lambda: bounded(L(4, 3)),
    "readme": lambda: nn.Sequential(
        nn.BoundedInput(IMAGE, norm=1.0, mode="sphere"),
        nn.Flatten(),
        L(64, 64, bias=False),
        nn.GroupSort(2),
        L(64, 10),
        nn.ClipGradient(0.2),
    ),
    "contract": lambda: bounded(
        nn.SpectralConv2d(1, 4, kernel_size=3, padding=1), nn.GroupSort(2), nn.L2NormPool2d(2), nn.Flatten(), L(64, 10), shape=IMAGE
    ),
    "residual block": lambda: bounded(nn.SpectralConv2d(1, 4, 3, padding=1), Block(4), nn.Flatten(), L(256, 3), shape=IMAGE),
    "sizes": lambda: bounded(Sizes(deep=True)),
    "sizes, shallow": lambda: bounded(Sizes(deep=False)),
    "frozen front": Frozen,
    "tied layers": tied,
    "guide": lambda: nn.Sequential(
        nn.BoundedInput((64,)),
        T.Linear(64, 128),
        T.ReLU(),
        nn.Boundary(norm=1.0, cotangent=0.1),
        T.Linear(128, 10),
        nn.ClipGradient(0.1),
    ),
    "in-place relu": lambda: bounded(L(4, 4), T.ReLU(inplace=True), L(4, 3)),
    "functional in-place": lambda: bounded(Forward(lambda m, x: F.relu(m.a(x), inplace=True), a=L(4, 4)), L(4, 3)),
    "plus equals": lambda: bounded(Forward(lambda m, x: _plus(m, x), a=L(4, 4)), L(4, 3)),
    "residual": lambda: bounded(nn.Residual(T.Sequential(L(4, 4), nn.GroupSort(2))), L(4, 3)),
    "convex residual": lambda: bounded(nn.ConvexResidual(L(4, 4), learned=True), L(4, 3)),
    "concat residual": lambda: bounded(nn.ConcatResidual(L(4, 4)), L(8, 3)),
    "layer scale": lambda: bounded(nn.LayerScale(4), L(4, 3)),
    "group norm": lambda: bounded(nn.SpectralConv2d(1, 4, 3), nn.GroupNorm(2, 4, eps=1e-2), nn.Flatten(), L(144, 3), shape=IMAGE),
    "layer norm": lambda: bounded(L(4, 4), nn.LayerNorm(4, eps=1e-2), L(4, 3)),
    "frozen batch norm": lambda: bounded(L(4, 4), T.BatchNorm1d(4, affine=False).eval(), L(4, 3)),
    "dropout": lambda: bounded(L(4, 4), T.Dropout(0.3), L(4, 3)),
    "gelu": lambda: bounded(L(4, 4), T.GELU(), L(4, 3)),
    "silu": lambda: bounded(L(4, 4), T.SiLU(), L(4, 3)),
    "leaky relu": lambda: bounded(L(4, 4), T.LeakyReLU(0.1), L(4, 3)),
    "average pooling": lambda: bounded(T.AvgPool2d(2), nn.Flatten(), L(16, 3), shape=IMAGE),
    "max pooling": lambda: bounded(T.MaxPool2d(2), nn.Flatten(), L(16, 3), shape=IMAGE),
    "adaptive pooling": lambda: bounded(T.AdaptiveAvgPool2d(2), nn.Flatten(), L(4, 3), shape=IMAGE),
    "upsampling": lambda: bounded(T.Upsample(scale_factor=2), nn.Flatten(), L(256, 3), shape=IMAGE),
    "padding": lambda: bounded(T.ZeroPad2d(1), nn.Flatten(), L(100, 3), shape=IMAGE),
    "orthogonal convolution": lambda: bounded(
        nn.SpectralConv2d(1, 4, 3, padding=1, constraint=constraint.AOC()), nn.Flatten(), L(256, 3), shape=IMAGE
    ),
    "cayley": lambda: bounded(L(4, 4, constraint=constraint.Cayley()), L(4, 3)),
    "matrix exponential": lambda: bounded(L(4, 4, constraint=constraint.MatrixExp()), L(4, 3)),
    "householder": lambda: bounded(L(4, 4, constraint=constraint.Householder()), L(4, 3)),
    "fourier": lambda: bounded(nn.FourierConv2d(1, 4, 3, padding=1), nn.Flatten(), L(256, 3), shape=IMAGE),
    "transposed": lambda: bounded(nn.SpectralConvTranspose2d(1, 2, 2, stride=2), nn.Flatten(), L(512, 3), shape=IMAGE),
    "l1": lambda: bounded(nn.L1Linear(4, 4), L(4, 3)),
    "frobenius": lambda: bounded(nn.FrobeniusLinear(4, 4), L(4, 3)),
    "gate": lambda: bounded(Forward(lambda m, x: torch.sigmoid(m.a(x)) * m.b(x), a=L(4, 4), b=L(4, 4)), L(4, 3)),
    "two heads": lambda: bounded(Forward(lambda m, x: torch.cat([m.a(x), m.b(x)], 1), a=L(4, 2), b=L(4, 1))),
    "dense connections": lambda: bounded(Forward(lambda m, x: torch.cat([x, m.a(x)], dim=1), a=L(4, 4)), L(8, 3)),
    "buffer": lambda: bounded(Forward(lambda m, x: x * m.mask, mask=torch.tensor([1.0, 0.0, 1.0, 1.0])), L(4, 3)),
    "constant made in forward": lambda: bounded(Forward(lambda m, x: x + torch.ones(4)), L(4, 3)),
    "einops-like": lambda: bounded(Forward(lambda m, x: x.reshape(x.shape[0], 2, 2).transpose(1, 2).flatten(1)), L(4, 3)),
    "squeeze": lambda: bounded(Forward(lambda m, x: x.unsqueeze(1).squeeze(1)), L(4, 3)),
    "double precision": lambda: bounded(L(4, 4), nn.GroupSort(2), L(4, 3)).double(),
    "frozen layer": lambda: bounded(L(4, 4).requires_grad_(False), L(4, 3)),
    "nested": lambda: bounded(T.Sequential(T.Sequential(L(4, 4)), T.Identity()), L(4, 3)),
    "subclass with a name": lambda: bounded(type("Mine", (L,), {})(4, 4), L(4, 3)),
    "standardize": lambda: bounded(nn.Standardize(1, radius=1.0), nn.Flatten(), nn.BoundedInput((64,)), L(64, 3), shape=IMAGE),
    "normalise": lambda: bounded(nn.Normalize(0.5, 0.5), L(4, 3)),
    "boundaries": lambda: between(conv_net(), IMAGE),
    "twin of a network": lambda: converted(conv_net(), IMAGE),
    "twin of a transformer": lambda: converted(T.TransformerEncoderLayer(4, 2, 8, batch_first=True), (5, 4)),
}


def _plus(m: Any, x: torch.Tensor) -> torch.Tensor:
    out = m.a(x)
    out += x
    out *= 0.5
    return out


ZOO = {f"{name} {number}": (name, shape, options) for number, (name, shape, options) in enumerate(LIPSCHITZ)}


def test_there_are_enough_of_them() -> None:
    assert len(HAND) + len(ZOO) >= 60


@pytest.mark.parametrize("name", HAND)
def test_models_written_by_hand(name: str) -> None:
    torch.manual_seed(0)
    analysis = analyse(HAND[name](), losses.CrossEntropy())
    assert all(row.sensitivity >= 0 for row in analysis.parameters)
    assert any(row.sensitivity > 0 for row in analysis.parameters)


@pytest.mark.parametrize("name", ZOO)
def test_models_by_name(name: str) -> None:
    kind, shape, options = ZOO[name]
    torch.manual_seed(0)
    assert analyse(models.create(kind, input_shape=shape, classes=3, **options), losses.CrossEntropy()).parameters
