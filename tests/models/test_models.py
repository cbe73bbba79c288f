"""The models: shapes, sizes, bounds, one private step, and what their constructors refuse."""

from __future__ import annotations

import math

import pytest
import torch

import lipdp
from lipdp import losses, models, nn
from lipdp.errors import ConfigurationError

SETTINGS = [
    ("mlp", (1, 8, 8), {"hidden": (16, 8)}, 64 * 16 + 16 * 8 + 8 * 10),
    ("mlp", (7,), {"hidden": (), "centre": False}, 7 * 10),
    ("mlp", (3, 4, 4), {"hidden": (32,), "input_norm": 5.0, "input_mode": "ball", "clip": 0.5}, 48 * 32 + 32 * 10),
    ("lenet", (1, 8, 8), {"channels": (4, 6), "kernel_size": 3, "hidden": 12}, 4 * 9 + 6 * 4 * 9 + 24 * 12 + 12 * 10),
    ("lenet", (3, 9, 11), {"channels": (4,), "hidden": None}, 4 * 3 * 25 + 4 * 4 * 5 * 10),
    ("lenet", (1, 28, 28), {}, 16 * 25 + 32 * 16 * 25 + 32 * 49 * 128 + 128 * 10),
]


@pytest.mark.parametrize(("name", "shape", "options", "size"), SETTINGS)
def test_forward_plan_and_one_step(name, shape, options, size):
    torch.manual_seed(0)
    model = models.create(name, input_shape=shape, classes=10, **options)
    assert sum(p.numel() for p in model.parameters()) == size
    x, y = torch.randn(5, *shape), torch.arange(5)
    assert model(x).shape == (5, 10)
    loss = losses.CrossEntropy(tau=8.0)
    plan = lipdp.plan(model, loss, dataset_size=100, batch_size=10, delta=1e-3, noise_multiplier=1.0, steps=2, accountant="rdp")
    expected = options.get("clip", math.sqrt(2)) * options.get("input_norm", 1.0)
    assert all(bound == pytest.approx(expected) for bound in plan.sensitivities.values())
    assert float(model(x * 1e3).detach().norm(dim=1).max()) <= options.get("input_norm", 1.0) * (1 + 1e-5)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    before = [p.detach().clone() for p in model.parameters()]
    engine.step(x, y, sample="own")
    assert engine.steps == 1
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_clip_comes_last_and_the_mean_first():
    model = models.mlp((4,), 3, hidden=(6,), clip=0.2)
    assert isinstance(model[-1], nn.ClipGradient)
    assert isinstance(model[0], nn.LayerCentering)
    x = torch.randn(5, 4)
    assert torch.allclose(model(x), model(x + 7.0), atol=1e-5)
    assert not isinstance(models.lenet((1, 8, 8), 3, centre=False)[0], nn.LayerCentering)


def test_names():
    assert {"mlp", "lenet"} <= set(models.names())
    assert list(models.names()) == sorted(models.names())


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("mlp", (4,), {"hidden": (5,)}),
        ("mlp", (4,), {"hidden": (0,)}),
        ("mlp", (4,), {"widths": (4,)}),
        ("mlp", (4,), {"clip": -1.0}),
        ("mlp", (4,), {"clip": 0.0}),
        ("mlp", (4,), {"input_norm": math.inf}),
        ("mlp", (4,), {"input_mode": "cube"}),
        ("mlp", (0,), {}),
        ("mlp", (), {}),
        ("lenet", (4,), {}),
        ("lenet", (1, 3, 28), {}),
        ("lenet", (1, 28, 28), {"channels": (3,)}),
        ("lenet", (1, 28, 28), {"kernel_size": 4}),
        ("lenet", (1, 28, 28), {"hidden": 5}),
        ("lenet", (1, 28, 28), {"depth": 2}),
        ("resnet-1000", (1, 28, 28), {}),
    ],
)
def test_options_that_can_not_be_meant(name, shape, options):
    with pytest.raises(ConfigurationError):
        models.create(name, input_shape=shape, classes=10, **options)


@pytest.mark.parametrize("classes", [0, -1])
def test_numbers_of_classes(classes):
    with pytest.raises(ConfigurationError, match="classes"):
        models.create("mlp", input_shape=(4,), classes=classes)
