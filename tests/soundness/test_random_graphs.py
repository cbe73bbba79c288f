"""Random networks of all layers, wired at random: no bound is beaten."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lipdp import nn
from tests.soundness.functions import Forward
from tests.soundness.harness import attack

T = torch.nn
VECTOR = (
    "linear",
    "sort",
    "relu",
    "abs",
    "centre",
    "residual",
    "scale",
    "split",
    "gate",
    "concat",
    "elementwise",
    "shared",
    "clip",
)
IMAGE = ("conv", "sort", "relu", "centre", "pool", "l2", "avg", "pad", "mean-add", "residual", "permute", "bias", "boundary")
ELEMENTWISE = (torch.tanh, torch.sigmoid, F.softplus, F.gelu, F.silu, F.selu, F.hardswish, torch.sin, F.elu)


def _split(m: Any, x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=1)
    return torch.cat([b * 2.0, a - b], dim=1)


def _shared(m: Any, x: torch.Tensor) -> torch.Tensor:
    return m.layer(x) + m.layer(-x * 0.5)


class Graph(torch.nn.Module):
    """An image stem, a flattening, a vector head: what the drawn names say."""

    def __init__(self, draw: st.DrawFn) -> None:
        super().__init__()
        channels, size = draw(st.sampled_from([1, 2])), draw(st.integers(2, 4))
        self.shape = (channels, size, size)
        self.stages = torch.nn.ModuleList([nn.BoundedInput(self.shape, norm=draw(st.sampled_from([0.5, 1.0, 3.0])))])
        shape = self.shape
        for name in draw(st.lists(st.sampled_from(IMAGE), min_size=0, max_size=3)):
            shape = self._append(self._image(name, shape, draw), shape)
        self.stages.append(nn.Flatten())
        shape = (math.prod(shape),)
        width = 4
        self.stages.append(nn.SpectralLinear(shape[0], width, bias=draw(st.booleans())))
        for name in draw(st.lists(st.sampled_from(VECTOR), min_size=0, max_size=4)):
            self._append(self._vector(name, draw), (width,))
        if draw(st.booleans()):
            self.stages.extend([nn.Boundary(cotangent=0.7), T.Linear(width, 3)])

    def _append(self, stage: torch.nn.Module, shape: tuple[int, ...]) -> tuple[int, ...]:
        self.stages.append(stage)
        with torch.no_grad():
            return tuple(stage(torch.zeros(1, *shape)).shape[1:])

    def _image(self, name: str, shape: tuple[int, ...], draw: st.DrawFn) -> torch.nn.Module:
        channels, small = shape[0], min(shape[1:])
        k = draw(st.integers(1, min(3, small)))
        mode = draw(st.sampled_from(["zeros", "circular", "replicate"]))
        return {
            "conv": lambda: nn.SpectralConv2d(
                channels, 2, k, draw(st.integers(1, 2)), k // 2, bias=draw(st.booleans()), padding_mode=mode
            ),
            "sort": lambda: nn.FullSort(),
            "relu": lambda: T.LeakyReLU(draw(st.sampled_from([0.1, 1.5]))),
            "centre": lambda: nn.LayerCentering(draw(st.sampled_from([None, 1, (2, 3)]))),
            "pool": lambda: T.MaxPool2d(k, draw(st.integers(1, 2)), k // 2),
            "l2": lambda: nn.L2NormPool2d(k, draw(st.integers(1, 2)), eps=1e-3),
            "avg": lambda: T.AvgPool2d(k, draw(st.integers(1, 2)), k // 2, ceil_mode=draw(st.booleans())),
            "pad": lambda: Forward(lambda m, x: F.pad(x, (1, 0))),
            "mean-add": lambda: Forward(lambda m, x: x - x.mean((2, 3), keepdim=True) * 0.5),
            "residual": lambda: nn.Residual(nn.SpectralConv2d(channels, channels, 3, padding=1)),
            "permute": lambda: Forward(lambda m, x: x.permute(0, 2, 3, 1).transpose(1, -1)),
            "bias": lambda: torch.nn.Sequential(
                Forward(lambda m, x: x + m.p, p=T.Parameter(torch.zeros(channels, 1, 1))), nn.Boundary(norm=2.0)
            ),
            "boundary": lambda: nn.Boundary(norm=0.8, cotangent=draw(st.sampled_from([None, 0.6]))),
        }[name]()  # type: ignore[no-untyped-call]

    def _vector(self, name: str, draw: st.DrawFn) -> torch.nn.Module:
        factor, function = draw(st.sampled_from([-2.0, 0.3])), draw(st.sampled_from(ELEMENTWISE))
        return {
            "linear": lambda: nn.SpectralLinear(4, 4, bias_norm=0.5),
            "sort": lambda: nn.GroupSort(draw(st.sampled_from([2, 4]))),
            "relu": lambda: T.ReLU(),
            "abs": lambda: Forward(lambda m, x: x.abs()),
            "centre": lambda: nn.LayerCentering(),
            "residual": lambda: nn.Residual(nn.Sequential(nn.SpectralLinear(4, 4), nn.GroupSort())),
            "scale": lambda: Forward(lambda m, x: 0.1 + factor * x),
            "split": lambda: Forward(_split),
            "gate": lambda: Forward(lambda m, x: torch.tanh(x) * torch.sigmoid(x)),
            "concat": lambda: Forward(lambda m, x: torch.cat([x, x], 1)[:, 2:6]),
            "elementwise": lambda: Forward(lambda m, x: function(x)),
            "shared": lambda: Forward(_shared, layer=nn.SpectralLinear(4, 4)),
            "clip": lambda: nn.ClipGradient(0.4),
        }[name]()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.data())
def test_random_graphs_are_never_beaten(data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = data.draw(st.composite(lambda draw: Graph(draw))())
    report = attack(model, 0.9, steps=5, draws=2, starts=("random", "constant", "positive"))
    assert max(row.tightness for row in report.rows) > 0.5
