"""Weights that are certainly inside their sets are told from others, and stay what they are to the last bit."""

from __future__ import annotations

import pytest
import torch

from lipdp import nn
from lipdp.bounds.operator_norm import is_contraction
from lipdp.parametrize import Spectral, constraint, project_, project_outside_

LAYERS = {
    "linear": lambda: nn.SpectralLinear(7, 12),
    "scaled linear": lambda: nn.SpectralLinear(12, 5, constraint=Spectral()),
    "frobenius": lambda: nn.FrobeniusLinear(6, 4),
    "l1": lambda: nn.L1Linear(6, 5),
    "l1 rows": lambda: nn.L1Linear(6, 5, rows=True),
    "conv": lambda: nn.SpectralConv2d(3, 6, 3),
    "grouped conv": lambda: nn.SpectralConv2d(4, 6, 3, groups=2, constraint=Spectral()),
    "fourier": lambda: nn.FourierConv2d(2, 4, 3),
    "embedding": lambda: nn.BoundedEmbedding(9, 5),
    "positions": lambda: nn.LearnedPositions(5, 4, norm=0.05),
    "norm": lambda: nn.LayerNorm(6),
    "scale": lambda: nn.LayerScale((4,)),
    "prelu": lambda: nn.BoundedPReLU(3, init=1.0),
    "mix": lambda: nn.ConvexMix(1.0, learned=True),
    "cayley": lambda: nn.SpectralLinear(5, 5, constraint=constraint.Cayley()),
}
FREE = ("cayley",)  # in its set whatever its parameters are


def moved(layer, size, seed):
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_((size * torch.randn(parameter.shape, generator=draw)).to(parameter.dtype))
    return layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_projected_weights_are_inside_and_stay(name, dtype):
    for seed in range(4):
        torch.manual_seed(seed)
        layer = moved(LAYERS[name]().to(dtype), 0.01 * 5**seed, seed)
        project_(layer)
        before = [parameter.detach().clone() for parameter in layer.parameters()]
        assert project_outside_(layer) == []
        assert all(map(torch.equal, before, layer.parameters()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", [name for name in LAYERS if name not in FREE])
def test_weights_outside_are_noticed(name, dtype):
    """By a little more than the type's precision, at the edge of the set."""
    torch.manual_seed(0)
    layer = moved(LAYERS[name]().to(dtype), 3.0, 1)
    project_(layer)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(1.02)
    assert project_outside_(torch.nn.Sequential(layer)) == ["0"]
    assert layer.is_inside()


@pytest.mark.parametrize("excess", [1e-3, 1e-6, 1e-9, 1e-12])
def test_a_contraction_is_told_from_what_is_none(excess):
    q, _ = torch.linalg.qr(torch.randn(20, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    spectrum = torch.linspace(1, 0.5, 20, dtype=torch.float64)
    above, below = (q @ torch.diag(factor * spectrum) @ q.T for factor in (1 + excess, 1 - max(excess, 1e-9)))
    assert not is_contraction(above)
    assert is_contraction(below)
    assert not is_contraction(torch.full((3, 3), float("nan")))


def test_a_look_leaves_the_weights_alone():
    layer = moved(nn.BoundedEmbedding(9, 5), 5.0, 0)
    before = layer.weight.detach().clone()
    assert not layer.is_inside()
    assert torch.equal(layer.weight, before)
