"""Random networks of all layers, wired at random: no bound is beaten."""

from __future__ import annotations

import math
import os
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from lipdp import nn
from lipdp.parametrize import constraint
from tests.many import examples
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
    "layer-norm",
    "rms-norm",
    "layer-scale",
    "l1",
    "frobenius",
    "householder",
    "prelu",
    "convex",
    "concat-residual",
    "where",
    "clamp",
    "maximum",
    "normalize",
    "softmax",
    "log-softmax",
    "repeat",
    "function-linear",
    "glu",
    "parameter-scale",
    "cayley",
    "exponential",
    "reflections",
    "polar",
)
NEW_IMAGE = (
    "transposed",
    "fourier",
    "group-norm",
    "householder-2d",
    "prelu-2d",
    "upsample",
    "bilinear",
    "adaptive",
    "adaptive-max",
    "function-conv",
    "down",
    "normalise-input",
    "convex-2d",
    "instance",
    "aoc",
    "aoc-stride",
    "aoc-transposed",
    "bcop",
    "soc",
    "circular-fft",
    "cayley-conv",
    "bicubic",
)
TOKENS = ("attention", "plain-attention", "block", "ball", "token-norm", "positions", "sinusoids", "dense", "sdpa", "mean-back")
IMAGE = ("conv", "sort", "relu", "centre", "pool", "l2", "avg", "pad", "mean-add", "residual", "permute", "bias", "boundary")
OLD_VECTOR = VECTOR[: VECTOR.index("clip") + 1]
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
        for name in draw(st.lists(st.sampled_from(IMAGE + NEW_IMAGE), min_size=0, max_size=3)):
            make = self._image if name in IMAGE else self._new_image
            shape = self._append(make(name, shape, draw), shape)
        if draw(st.integers(0, 2)) == 0 and math.prod(shape[1:]) <= 9:
            self.stages.append(Forward(lambda m, x: m.lin(x.flatten(2).transpose(1, 2)), lin=nn.SpectralLinear(shape[0], 4)))
            shape = (math.prod(shape[1:]), 4)
            for name in draw(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=2)):
                shape = self._append(self._tokens(name, shape, draw), shape)
        self.stages.append(nn.Flatten())
        shape = (math.prod(shape),)
        width = 4
        self.stages.append(nn.SpectralLinear(shape[0], width, bias=draw(st.booleans())))
        for name in draw(st.lists(st.sampled_from(VECTOR), min_size=0, max_size=4)):
            self._append((self._vector if name in OLD_VECTOR else self._new_vector)(name, draw), (width,))
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
            "boundary": lambda: nn.Boundary(
                norm=0.8, cotangent=draw(st.sampled_from([None, 0.6])), floor=draw(st.sampled_from([None, 0.5, 1.1]))
            ),
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

    def _new_vector(self, name: str, draw: st.DrawFn) -> torch.nn.Module:
        eps, mask = draw(st.sampled_from([1.0, 0.1])), torch.tensor([True, False, True, True])
        return {
            "layer-norm": lambda: nn.LayerNorm(4, eps=eps, scale=1.5),
            "rms-norm": lambda: nn.RMSNorm(4, eps=eps),
            "layer-scale": lambda: nn.LayerScale(draw(st.sampled_from([(), (4,)])), bound=2.0),
            "l1": lambda: nn.L1Linear(4, 4, rows=draw(st.booleans())),
            "frobenius": lambda: nn.FrobeniusLinear(4, 4),
            "householder": lambda: nn.Householder(4),
            "prelu": lambda: nn.BoundedPReLU(draw(st.sampled_from([1, 4]))),
            "convex": lambda: nn.ConvexResidual(nn.SpectralLinear(4, 4), 0.3, learned=draw(st.booleans())),
            "concat-residual": lambda: T.Sequential(nn.ConcatResidual(nn.SpectralLinear(4, 4)), nn.SpectralLinear(8, 4)),
            "where": lambda: Forward(lambda m, x: torch.where(m.mask, x, -x * 0.5), mask=mask),
            "clamp": lambda: Forward(lambda m, x: x.clamp(-0.4, 0.9)),
            "maximum": lambda: Forward(lambda m, x: torch.maximum(x, x.flip(1) * 0.5)),
            "normalize": lambda: Forward(lambda m, x: F.normalize(x, dim=1, eps=0.3)),
            "softmax": lambda: Forward(lambda m, x: torch.softmax(x * 2.0, 1)),
            "log-softmax": lambda: T.LogSoftmax(1),
            "repeat": lambda: Forward(lambda m, x: x[:, :2].repeat(1, 2)),
            "function-linear": lambda: Forward(lambda m, x: F.linear(x, m.w), w=torch.linspace(-1, 1, 16).reshape(4, 4)),
            "glu": lambda: Forward(lambda m, x: F.glu(torch.cat([x, x], 1), 1)),
            "cayley": lambda: nn.SpectralLinear(4, 4, constraint=constraint.Cayley()),
            "exponential": lambda: nn.SpectralLinear(4, 4, constraint=constraint.MatrixExp()),
            "reflections": lambda: nn.SpectralLinear(4, 4, constraint=constraint.Householder()),
            "polar": lambda: nn.SpectralLinear(4, 4, constraint=constraint.Polar()),
            "parameter-scale": lambda: T.Sequential(
                nn.Boundary(cotangent=0.5), Forward(lambda m, x: x * m.p, p=T.Parameter(torch.ones(4))), nn.Boundary(1.5, 0.8)
            ),
        }[name]()  # type: ignore[no-untyped-call]

    def _new_image(self, name: str, shape: tuple[int, ...], draw: st.DrawFn) -> torch.nn.Module:
        channels, rows, columns = shape
        k, s = draw(st.integers(1, 3)), draw(st.integers(1, 2))
        window, same = min(k, rows, columns), {"padding": "same", "padding_mode": "circular"}
        aoc, fits = constraint.AOC(), rows % 2 == columns % 2 == 0 and min(rows, columns) > 1
        even = channels % 2 == 0
        return {
            "transposed": lambda: nn.SpectralConvTranspose2d(channels, 2, k, 1, k // 2, bias=draw(st.booleans())),
            "fourier": lambda: nn.FourierConv2d(channels, 2, min(k, rows, columns), s, k // 2, bias=draw(st.booleans()), grid=8),
            "group-norm": lambda: nn.GroupNorm(2 if even else 1, channels, eps=0.5) if rows * columns > 1 else nn.Abs(),
            "householder-2d": lambda: nn.Householder(channels) if even else nn.Abs(),
            "prelu-2d": lambda: nn.BoundedPReLU(channels),
            "upsample": lambda: T.Upsample(scale_factor=2) if rows * columns <= 9 else nn.Abs(),
            "bilinear": lambda: T.Upsample(size=(3, 2), mode="bilinear", align_corners=draw(st.booleans())),
            "adaptive": lambda: T.AdaptiveAvgPool2d((min(rows, 2), min(columns, 3))),
            "adaptive-max": lambda: T.AdaptiveMaxPool2d((min(rows, 3), min(columns, 2))),
            "function-conv": lambda: Forward(
                lambda m, x: F.conv2d(x, m.w, padding=1), w=torch.linspace(-0.5, 0.4, 2 * channels * 9).reshape(2, channels, 3, 3)
            ),
            "down": lambda: nn.InvertibleDownsampling(2) if rows % 2 == columns % 2 == 0 else nn.Abs(),
            "normalise-input": lambda: nn.Normalize(0.1, 0.7),
            "convex-2d": lambda: nn.ConvexResidual(nn.SpectralConv2d(channels, channels, 3, padding=1), 0.4),
            "aoc": lambda: nn.SpectralConv2d(channels, 2, window, padding=k // 2, bias=draw(st.booleans()), constraint=aoc),
            "aoc-stride": lambda: (
                nn.SpectralConv2d(channels, draw(st.sampled_from([1, 5])), 2, 2, bias=False, constraint=aoc) if fits else nn.Abs()
            ),
            "aoc-transposed": lambda: nn.SpectralConvTranspose2d(channels, 2, k, 1, k // 2, constraint=aoc),
            "bcop": lambda: nn.SpectralConv2d(channels, 2, window, **same, constraint=constraint.BCOP()),
            "soc": lambda: nn.SpectralConv2d(channels, 2, 3, padding=1, bias=False, constraint=constraint.SOC(2 + s)),
            "circular-fft": lambda: nn.SpectralConv2d(
                channels, 2, window, **same, bias=draw(st.booleans()), constraint=constraint.CircularFFT((rows, columns))
            ),
            "cayley-conv": lambda: nn.SpectralConv2d(channels, 2, 3, padding=1, constraint=constraint.Cayley()),
            "bicubic": lambda: T.Upsample(size=(3, 2), mode="bicubic", align_corners=draw(st.booleans())),
            "instance": lambda: T.InstanceNorm2d(channels, eps=0.5) if rows * columns > 1 else nn.Abs(),
        }[name]()  # type: ignore[no-untyped-call]

    def _tokens(self, name: str, shape: tuple[int, ...], draw: st.DrawFn) -> torch.nn.Module:
        tokens, heads = shape[0], draw(st.sampled_from([1, 2]))
        return {
            "attention": lambda: nn.LipschitzAttention(4, heads, tokens=tokens, causal=draw(st.booleans())),
            "plain-attention": lambda: nn.LipschitzAttention(4, heads, token_norm=0.7, scale=1.5, bias=True),
            "block": lambda: nn.TransformerBlock(4, heads, 4, tokens=tokens),
            "ball": lambda: nn.TokenBall(0.4),
            "token-norm": lambda: nn.LayerNorm(4, eps=0.5),
            "positions": lambda: nn.LearnedPositions(tokens, 4, 0.5),
            "sinusoids": lambda: nn.SinusoidalPositions(tokens, 4, 0.2),
            "dense": lambda: nn.SpectralLinear(4, 4),
            "sdpa": lambda: Forward(lambda m, x: F.scaled_dot_product_attention(x, x * 0.5, torch.tanh(x), scale=0.9)),
            "mean-back": lambda: Forward(lambda m, x: x + x.mean(1, keepdim=True)),
        }[name]()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            x = stage(x)
        return x


# The suite draws 25 graphs; LIPDP_GRAPHS=500 draws more.
@settings(
    max_examples=examples(int(os.environ.get("LIPDP_GRAPHS", "25"))),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(st.data())
def test_random_graphs_are_never_beaten(data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = data.draw(st.composite(lambda draw: Graph(draw))())
    report = attack(model, 0.9, steps=5, draws=2, starts=("random", "constant", "positive"))
    assert max(row.tightness for row in report.rows) > 0.5
