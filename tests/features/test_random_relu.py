"""Random ReLU features: rotations, their kernel, their constants under attack, and heads of squares on them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipdp
from lipdp import losses, models, nn
from lipdp.bounds import analyse
from lipdp.errors import ConfigurationError, DataError
from lipdp.features.kernels import RandomReLU
from tests.soundness.harness import attack


def unit_rows(count: int, features: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(count, features, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x / torch.linalg.vector_norm(x, dim=1, keepdim=True)


def matrices(layer: RandomReLU) -> torch.Tensor:
    """Q_b of every block, (blocks, p, features), from Sylvester's definition H_ij = (−1)^(number of common ones of i and j)."""
    p = layer.padded
    hadamard = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(p)] for i in range(p)], dtype=torch.float64)
    hadamard /= math.sqrt(p)
    signs = layer.signs.double()
    return torch.stack([(hadamard * s[1]) @ (hadamard * s[0]) for s in signs])[:, :, : layer.features]


@pytest.mark.parametrize("features", [1, 2, 13, 32, 40])
def test_against_the_formula(features: int) -> None:
    layer = RandomReLU(features, blocks=3, norm=2.0, seed=4)
    x = 2 * unit_rows(5, features)
    p = layer.padded
    assert p // 2 < features <= p
    rotated = torch.einsum("bpf,nf->nbp", matrices(layer), x)
    assert torch.allclose(torch.linalg.vector_norm(rotated, dim=2), torch.full((5, 3), 2.0, dtype=torch.float64))
    expected = ((rotated.clamp_min(0) - 2 / math.sqrt(2 * math.pi * p)) / math.sqrt(3)).flatten(1)
    assert torch.allclose(layer.double()(x), expected, atol=1e-12)
    assert torch.allclose(layer.float()(x.float()).double(), expected, atol=1e-5)
    assert layer(x[:0].float()).shape == (0, layer.output_features)


def test_kernel() -> None:
    """Inner products of many features are those of the arc-cosine kernel without its mean."""
    layer = RandomReLU(64, blocks=256).double()
    x = unit_rows(6, 64)
    x[1] = (x[0] + 0.3 * x[1]) / torch.linalg.vector_norm(x[0] + 0.3 * x[1])
    x[2] = -x[0]
    y = layer(x)
    angle = torch.acos((x @ x.T).clamp(-1, 1))
    expected = (torch.sin(angle) + (math.pi - angle) * torch.cos(angle) - 1) / (2 * math.pi)
    assert torch.allclose(y @ y.T, expected, atol=0.01)


def test_public_constants() -> None:
    first, again, other = RandomReLU(20), RandomReLU(20), RandomReLU(20, seed=1)
    x = unit_rows(3, 20).float()
    assert torch.equal(first(x), again(x))
    assert not torch.allclose(first(x), other(x))
    assert not list(first.parameters())
    assert not first.state_dict()


@settings(max_examples=30, deadline=None)
@given(features=st.integers(1, 40), blocks=st.integers(1, 3), size=st.floats(1e-3, 1e3), seed=st.integers(0, 1000))
def test_brings_no_points_further_apart(features: int, blocks: int, size: float, seed: int) -> None:
    layer = RandomReLU(features, blocks=blocks).double()
    x, other = size * unit_rows(8, features, seed), size * unit_rows(8, features, seed + 1)
    before = torch.linalg.vector_norm(x - other, dim=1)
    assert bool((torch.linalg.vector_norm(layer(x) - layer(other), dim=1) <= before * (1 + 1e-9)).all())
    assert bool((torch.linalg.vector_norm(layer(x), dim=1) <= math.sqrt(size**2 + 1 / (2 * math.pi)) * (1 + 1e-9)).all())


def test_constants_hold_under_attack() -> None:
    found = attack(nn.Sequential(nn.BoundedInput((6,), norm=2.0), RandomReLU(6)), 1.0, steps=25, draws=3)
    assert found.tightness("input") > 0.7, str(found)


def test_constants_are_reached() -> None:
    """An x whose rotation by every block is nowhere negative keeps its whole length: one block of one entry has such an x."""
    layer = RandomReLU(1).double()
    x = torch.tensor([[3.0], [-3.0], [2.0], [-2.0]], dtype=torch.float64)
    ends = layer(x)
    moved = [float(torch.linalg.vector_norm(ends[i] - ends[i + 2])) for i in (0, 1)]
    signs = layer.signs.prod(1).flatten()
    assert max(moved) == pytest.approx(1.0 if signs[0] == signs[1] else math.sqrt(0.5))
    many = RandomReLU(1, blocks=1).double()
    reached = max(float((many(x)[i] - many(x)[i + 2]).abs().max()) for i in (0, 1))
    assert reached == pytest.approx(1.0)
    model = nn.Sequential(nn.BoundedInput((1,), norm=3.0), many.float())
    assert reached <= analyse(model, 1.0).lipschitz == pytest.approx(1.0, rel=1e-3)


def test_the_calculus_knows_it() -> None:
    model = nn.Sequential(nn.BoundedInput((12,), norm=2.0), RandomReLU(12))
    assert analyse(model, losses.CrossEntropy()).output.norm == pytest.approx(math.sqrt(4 + 1 / (2 * math.pi)), rel=1e-4)
    model = nn.Sequential(nn.BoundedInput((12,), norm=2.0), RandomReLU(12), nn.SpectralLinear(32, 3))
    x = unit_rows(4, 12).float()
    assert math.isfinite(float(lipdp.certify(model, x, model(x).argmax(1)).max()))
    assert torch.allclose(model.export()(x), model(x), atol=1e-6)


def test_refuses() -> None:
    bad: list[dict[str, Any]] = [{"features": 0}, {"features": 3, "blocks": 0}, {"features": 3, "norm": 0.0}]
    for given_settings in bad:
        with pytest.raises(ConfigurationError, match="RandomReLU needs"):
            RandomReLU(**given_settings)
    with pytest.raises(DataError, match="expects 3 features"):
        RandomReLU(3)(torch.rand(2, 4))


# ------------------------------------------------------------------ heads


BLOCKS: list[dict[str, Any]] = [{"kind": "scattering", "J": 1, "L": 2, "order": 1, "flip": False}]


def test_heads_of_squares() -> None:
    """Squares have no constant on a free linear layer, and the clip gives them one."""
    model = models.create("patches-linear", input_shape=(1, 8, 8), classes=3, blocks=BLOCKS, relu=2, clip=0.2, straighten=True)
    found = lipdp.sensitivities(model, losses.Squares())
    assert list(found.values()) == pytest.approx([0.2])
    assert list(lipdp.sensitivities(model, losses.CrossEntropy()).values()) == pytest.approx([0.2])
    x = torch.rand(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.nn.init.normal_(next(model.parameters()))
    assert torch.allclose(model.export()(x), model(x), atol=1e-4)
    free = models.create("patches-linear", input_shape=(1, 8, 8), classes=3, blocks=BLOCKS, clip=None)
    with pytest.raises(lipdp.errors.UnboundedError):
        lipdp.sensitivities(free, losses.Squares())
