"""Fixed layers behind the transform: bounds under attack, and the arrangement of maps of several scales."""

from __future__ import annotations

import math

import pytest
import torch

from lipdp import models, nn
from lipdp.errors import ConfigurationError, DataError
from lipdp.features.front import split_front
from lipdp.features.layers import Compress, FromGrid, Mix, SideBySide, ToGrid, Window, window
from lipdp.features.stacks import scattering_front
from tests.soundness.harness import attack, impulse_jacobian


@pytest.mark.parametrize("kind", ["log", "root"])
def test_compression(kind: str) -> None:
    layer = Compress([0.5, 2.0], kind)  # type: ignore[arg-type]
    x = torch.tensor([-3.0, -0.1, 0.0, 0.1, 3.0]).reshape(1, 1, 5).expand(1, 2, 5)
    u = x.abs() / torch.tensor([0.5, 2.0])[:, None]
    expected = torch.sign(x) * (torch.log(1 + u) if kind == "log" else torch.sqrt(1 + 2 * u) - 1)
    assert torch.allclose(layer(x), expected, atol=1e-6)
    report = attack(nn.Sequential(nn.BoundedInput((2, 3), norm=0.01), layer), 1.0, steps=10, draws=2, starts=("random", "impulse"))
    assert report.tightness("input") > 0.95


def test_joined_and_taken_apart() -> None:
    grid = ToGrid([(2, 4, 4), (3, 2, 2), (1, 3, 1)])
    assert grid.input_shape == (32 + 12 + 3,)
    assert grid.output_shape == (6, 4, 4)
    parts = [torch.rand(5, 2, 4, 4), torch.rand(5, 3, 2, 2), torch.rand(5, 1, 3, 1)]
    branches = SideBySide(*(torch.nn.Identity() for _ in parts))
    assert branches(parts[0]).shape == (5, 96)
    y = grid(torch.cat([part.flatten(1) for part in parts], 1))
    assert torch.equal(y[:, :2], parts[0])
    assert torch.equal(y[:, 2:5], parts[1].repeat_interleave(2, 2).repeat_interleave(2, 3))
    even = y * grid.evening
    for start, part in zip((0, 2, 5), parts, strict=True):  # every part keeps its norm
        chunk = even[:, start : start + part.shape[1]]
        assert torch.allclose(chunk.flatten(1).norm(dim=1), part.flatten(1).norm(dim=1))
    joined = torch.cat([part.flatten(1) for part in parts], 1)
    assert torch.allclose(FromGrid(grid)(even), joined)
    with pytest.raises(DataError, match="FromGrid expects"):
        FromGrid(grid)(even[:, 1:])


@pytest.mark.parametrize(
    "layer",
    [
        ToGrid([(1, 2, 3), (2, 1, 1)]),
        FromGrid(ToGrid([(1, 2, 3), (2, 1, 1), (1, 1, 2)])),
        Mix(torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0]])),
        Window(torch.tensor([[0.5, -2.0, 1.0]])),
        SideBySide(torch.nn.Identity(), torch.nn.Flatten()),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_gains(layer: torch.nn.Module) -> None:
    shape = getattr(layer, "input_shape", (2, 1, 2) if isinstance(layer, Mix) else (1, 3))
    model = nn.Sequential(nn.BoundedInput(shape), layer)
    report = attack(model, 1.0, steps=15, draws=3)
    jacobian = impulse_jacobian(layer.double(), shape)
    largest = float(torch.linalg.matrix_norm(jacobian, 2))
    bound = max(row.bound for row in report.rows if row.kind == "input")
    slack = math.sqrt(2) if isinstance(layer, SideBySide) else 1.0  # the calculus adds up both branches
    assert largest <= bound * (1 + 1e-9)
    assert bound == pytest.approx(slack * largest)


def test_window() -> None:
    factors = window(5, 5, 0.25)
    assert float(factors[2, 2]) == 1
    assert float(factors[0, 4]) == pytest.approx(0.25)
    assert float(factors[0, 2]) == pytest.approx(0.5)
    assert window(1, 1, 0.3).tolist() == [[1.0]]


def test_weights_of_orders_and_colours() -> None:
    layers, _ = scattering_front((3, 8, 8), scales=((2, 2),), weights=(3.0, 2.0, 0.5, 0.1))
    factors = next(layer.factors for layer in layers if isinstance(layer, Window))[:, 0, 0]
    plane = [3.0, *[2.0] * 4, *[0.5] * 4]
    assert factors.tolist() == pytest.approx([*plane, *(0.1 * w for w in plane), *(0.1 * w for w in plane)])


def test_whitening_decorrelates_textures() -> None:
    from lipdp.features.drawings import texture_images

    def spread(whiten: float) -> float:
        layers, _ = scattering_front((1, 16, 16), scales=((2, 4),), whiten=whiten)
        x = texture_images((1, 16, 16), 128, seed=7)
        for layer in layers[:-2]:
            x = layer(x)
        even = x.movedim(1, -1).flatten(0, 2)
        values = torch.linalg.eigvalsh((even.T @ even / len(even)).double())
        return float(values.max() / values.mean())

    assert spread(0.01) < 1.6 < 3 < spread(0.0)


def test_several_scales_learn_together() -> None:
    model = models.create("scattering-linear", input_shape=(1, 8, 8), classes=3, scales=((2, 2), (1, 2)), statistics="private")
    assert isinstance(model, torch.nn.Sequential)
    front, head = split_front(model)
    assert [type(layer) for layer in head][:4] == [ToGrid, nn.Standardize, Window, FromGrid]
    assert head[-2].in_features == head[0].input_shape[0]  # every value once
    x = torch.rand(4, 1, 8, 8)
    with torch.no_grad():
        head[-2].weight.normal_()
    assert torch.allclose(head(front(x)), model(x), atol=1e-5)
    assert torch.allclose(model.export()(x), model(x), atol=1e-5)


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="finest"):
        ToGrid([(1, 2, 2), (1, 4, 4)])
    with pytest.raises(ConfigurationError, match="level"):
        Compress([1.0, 0.0])
    with pytest.raises(ConfigurationError, match="kind"):
        Compress([1.0], "square")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="no branches"):
        SideBySide()
    with pytest.raises(ConfigurationError, match="corners"):
        window(4, 4, 0.0)
    for wrong in ({"scales": ()}, {"weights": (1.0, 1.0)}, {"compress": "cube"}, {"whiten": 2.0}, {"statistics": "mine"}):
        with pytest.raises(ConfigurationError):
            scattering_front((1, 8, 8), **wrong)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="features"):
        ToGrid([(1, 2, 2)])(torch.rand(1, 5))
    with pytest.raises(DataError, match="channels"):
        Compress([1.0])(torch.rand(1, 2, 3))
