"""Straightened drawings: one pose for all slants and places, the bound on their norm under attack, and the heads behind them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, models, nn
from lipdp.bounds import analyse
from lipdp.errors import ConfigurationError, DataError, UnboundedError
from lipdp.features.front import extract_features, split_front
from lipdp.features.layers import Straighten, straighten_layers

SIDE = 28
PATCHES: dict[str, Any] = {"blocks": [{"kind": "patches", "patch": 3, "filters": 6, "grid": 2}], "centre": "private"}
SCATTERING: dict[str, Any] = {"scales": ((1, 2),), "order": 1}


def hook(slant: float = 0.0, down: float = 0.0, right: float = 0.0, wide: float = 1.0) -> torch.Tensor:
    """A smooth upright stroke with a foot, moved, sheared and made ``wide`` times as wide, drawn exactly (not resampled)."""
    u, v = (torch.arange(SIDE, dtype=torch.float64) - (SIDE - 1) / 2 - offset for offset in (down, right))
    v = (v[None, :] - slant * u[:, None]) / wide
    u = u[:, None]
    stroke = torch.exp(-(v**2) / 4 - (u / 6) ** 4)
    foot = torch.exp(-((v - 3) ** 2) / 8 - (u - 5) ** 2 / 2)
    return (stroke + foot)[None, None]


def moments(x: torch.Tensor) -> tuple[float, float, float, float]:
    """Mean down and across, standard deviation across, covariance: in pixels, of one image."""
    p = (x.abs().sum((0, 1)) / x.abs().sum()).double().numpy()
    u, v = np.arange(p.shape[0]) - (p.shape[0] - 1) / 2, np.arange(p.shape[1]) - (p.shape[1] - 1) / 2
    down, across = float(p.sum(1) @ u), float(p.sum(0) @ v)
    return down, across, math.sqrt(float(p.sum(0) @ (v - across) ** 2)), float((u - down) @ p @ (v - across))


# ------------------------------------------------------------------ what it does


@settings(max_examples=25, deadline=None)
@given(slant=st.floats(-0.6, 0.6), down=st.floats(-3, 3), right=st.floats(-3, 3))
def test_one_pose_for_all_slants_and_places(slant: float, down: float, right: float) -> None:
    layer = Straighten((1, SIDE, SIDE), stretch=0.0).double()
    upright, other = layer(hook()), layer(hook(slant, down, right))
    apart = float(torch.linalg.vector_norm(upright - other) / torch.linalg.vector_norm(upright))
    assert apart < 0.05  # a linear interpolation's error
    before = float(torch.linalg.vector_norm(hook() - hook(slant, down, right)) / torch.linalg.vector_norm(hook()))
    assert apart < 0.02 + 0.3 * before
    assert moments(other)[0] == pytest.approx(0, abs=0.02)
    assert moments(other)[1] == pytest.approx(0, abs=0.02)
    assert moments(other)[3] == pytest.approx(0, abs=0.2)


@pytest.mark.parametrize("stretch", [0.25, 0.5, 1.0])
def test_widths_come_nearer(stretch: float) -> None:
    """A width w becomes w^(1−stretch)·(spread·width)^stretch; interpolation widens it a little."""
    upright, stretched = (Straighten((1, SIDE, SIDE), stretch=s, spread=0.12).double() for s in (0.0, stretch))
    for wide in (1.3, 1.6, 1.9):
        before, after = (moments(layer(hook(0.4, wide=wide)))[2] for layer in (upright, stretched))
        assert after == pytest.approx(before ** (1 - stretch) * (0.12 * SIDE) ** stretch, rel=0.03)


def reference(layer: Straighten, x: np.ndarray) -> np.ndarray:
    """The class's formulas, pixel by pixel, for one image (channels, height, width)."""
    _, height, width = x.shape
    ink = np.abs(x).sum(0)
    middle_u, middle_v = (height - 1) / 2, (width - 1) / 2
    points = [(i - middle_u, j - middle_v, ink[i, j] / ink.sum()) for i in range(height) for j in range(width)]
    mean_u, mean_v = (sum(p[axis] * p[2] for p in points) for axis in (0, 1))
    uu = sum((p[0] - mean_u) ** 2 * p[2] for p in points)
    vv = sum((p[1] - mean_v) ** 2 * p[2] for p in points)
    uv = sum((p[0] - mean_u) * (p[1] - mean_v) * p[2] for p in points)
    s = min(1.0, max(-1.0, layer.shear * uv / uu))
    d = (math.sqrt(vv - 2 * s * uv + s * s * uu) / (layer.spread * width)) ** layer.stretch
    d = min(1.6, max(1 / 1.6, d))
    y = np.zeros_like(x)
    for i in range(height):
        for j in range(width):
            u, v = i - middle_u, j - middle_v
            at_u, at_v = u + mean_u + middle_u, d * v + s * u + mean_v + middle_v
            for a in range(height):
                for b in range(width):
                    weight = max(0.0, 1 - abs(at_u - a)) * max(0.0, 1 - abs(at_v - b))
                    y[:, i, j] += weight * x[:, a, b]
    return y


@pytest.mark.parametrize(("shear", "stretch"), [(1.0, 0.5), (0.6, 0.0), (0.0, 1.0)])
def test_against_the_formula(shear: float, stretch: float) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(3, 2, 7, 9, generator=draw, dtype=torch.float64) ** 4 - 0.05
    layer = Straighten((2, 7, 9), shear=shear, stretch=stretch, spread=0.2)
    expected = np.stack([reference(layer, image.numpy()) for image in x])
    assert np.abs(layer.double()(x).numpy() - expected).max() < 1e-12
    assert np.abs(layer.float()(x.float()).numpy() - expected).max() < 1e-4
    assert layer(x.bfloat16()).dtype == torch.bfloat16


def test_blank_images_dots_and_level_strokes() -> None:
    layer = Straighten((1, 9, 9))
    x = torch.zeros(3, 1, 9, 9)
    x[1, 0, 2, 7] = 1  # a dot comes to the middle
    x[2, 0, 6, :] = 1  # so does a level stroke, whose slant is not defined
    y = layer(x)
    assert bool(torch.isfinite(y).all())
    assert torch.count_nonzero(y[0]) == 0
    assert float(y[1, 0, 4, 4]) == pytest.approx(1)
    assert torch.allclose(y[2, 0, 4, 2:7], torch.ones(5), atol=1e-5)
    assert float(y[2, 0, [0, 1, 2, 3, 5, 6, 7, 8]].abs().max()) < 1e-5
    assert layer(x[:0]).shape == (0, 1, 9, 9)


def test_faint_images_are_moved_like_strong_ones() -> None:
    layer = Straighten((1, SIDE, SIDE))
    x = hook(0.4, 2.0, 1.0).float()
    for factor in (1e-20, 1e-3, 1e6):
        assert torch.allclose(layer(factor * x) / factor, layer(x), atol=1e-4)


def test_examples_are_independent() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(4, 1, 12, 12, generator=draw) ** 3
    layer = Straighten((1, 12, 12))
    together = layer(x)
    for number in range(4):
        others = torch.rand(4, 1, 12, 12, generator=draw)
        others[number] = x[number]
        assert torch.allclose(layer(others)[number], together[number], atol=1e-5)


# ------------------------------------------------------------------ its norm


@pytest.mark.parametrize("stretch", [0.0, 0.5])
def test_norm_under_attack(stretch: float) -> None:
    layer = Straighten((1, 9, 9), stretch=stretch).double()
    x = torch.randn(40, 1, 9, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[20:] *= torch.tensor([0.0, 0, 0, 0.2, 1, 0.2, 0, 0, 0], dtype=torch.float64)  # narrow ones are stretched most
    x.requires_grad_()
    optimizer = torch.optim.Adam([x], lr=0.03)
    for _ in range(150):
        ratio = torch.linalg.vector_norm(layer(x), dim=(1, 2, 3)) / torch.linalg.vector_norm(x, dim=(1, 2, 3))
        optimizer.zero_grad()
        (-torch.log(ratio).sum()).backward()
        optimizer.step()
    reached = float(ratio.detach().max())
    assert reached <= layer.norm_gain
    assert reached > 0.85 * layer.norm_gain


def test_largest_weights_are_reached() -> None:
    """h(1/1.6) = 1 + 2·(1 − 1/1.6) is the most that an old pixel gives to new ones: one in the middle of a narrow stroke does."""
    layer = Straighten((1, 11, 11), spread=10.0)
    x = torch.zeros(1, 1, 11, 11)
    x[0, 0, 5, 5] = 1
    assert float(layer(x).sum()) == pytest.approx(1 + 2 * (1 - 1 / 1.6), rel=1e-4)
    assert layer.norm_gain == pytest.approx(math.sqrt(1.75), rel=2e-4)
    assert Straighten((1, 11, 11), stretch=0.0).norm_gain == pytest.approx(1, rel=2e-4)


# ------------------------------------------------------------------ in models


def test_the_calculus_bounds_its_norm_and_refuses_certificates() -> None:
    model = nn.Sequential(nn.BoundedInput((1, 9, 9), norm=2.0), Straighten((1, 9, 9)), nn.Flatten(), nn.SpectralLinear(81, 3))
    layer = model[1]
    assert isinstance(layer, Straighten)
    front = nn.Sequential(*list(model)[:3])
    assert analyse(front, losses.CrossEntropy()).output.norm == pytest.approx(2 * layer.norm_gain)
    assert math.isfinite(max(lipdp.sensitivities(model, losses.CrossEntropy()).values()))
    x = torch.rand(4, 1, 9, 9)
    with pytest.raises(UnboundedError, match="Straighten"):
        lipdp.certify(model, x, model(x).argmax(1))
    assert torch.allclose(model.export()(x), model(x), atol=1e-6)


@pytest.mark.parametrize(("name", "front"), [("patches-linear", PATCHES), ("scattering-linear", SCATTERING)])
def test_heads(name: str, front: dict[str, Any]) -> None:
    model = models.create(name, input_shape=(1, 12, 12), classes=3, clip=0.2, straighten=True, **front)
    assert isinstance(model, torch.nn.Sequential)
    assert list(lipdp.sensitivities(model, losses.CrossEntropy()).values()) == pytest.approx([0.2])
    crooked = models.create(name, input_shape=(1, 12, 12), classes=3, clip=0.2, **front)
    assert isinstance(crooked, torch.nn.Sequential)
    data = TensorDataset(torch.rand(10, 1, 12, 12, generator=torch.Generator().manual_seed(0)) ** 3, torch.arange(10) % 3)
    straightened = TensorDataset(Straighten((1, 12, 12))(data.tensors[0]), data.tensors[1])
    found = extract_features(split_front(model)[0], data).tensors[0]
    assert torch.allclose(found, extract_features(split_front(crooked)[0], straightened).tensors[0], atol=1e-5)
    with torch.no_grad():
        torch.nn.init.normal_(next(model.parameters()))
    assert torch.allclose(model.export()(data.tensors[0]), model(data.tensors[0]), atol=1e-4)


def test_settings() -> None:
    assert straighten_layers((1, 8, 8), False) == []
    layer = straighten_layers((1, 8, 8), {"stretch": 0.25, "spread": 0.2})[0]
    assert isinstance(layer, Straighten)
    assert (layer.shear, layer.stretch, layer.spread) == (1.0, 0.25, 0.2)
    with pytest.raises(ConfigurationError, match="no setting slant"):
        straighten_layers((1, 8, 8), {"slant": 1.0})
    bad: list[dict[str, float]] = [{"shear": 1.5}, {"stretch": -0.1}, {"spread": 0.0}, {"spread": math.inf}, {"shear": math.nan}]
    for given_settings in bad:
        with pytest.raises(ConfigurationError, match=f"Straighten {next(iter(given_settings))}"):
            Straighten((1, 8, 8), **given_settings)
    with pytest.raises(ConfigurationError, match="images"):
        Straighten((8, 8))
    with pytest.raises(DataError, match="expects images of shape"):
        Straighten((1, 8, 8))(torch.rand(2, 1, 8, 9))
