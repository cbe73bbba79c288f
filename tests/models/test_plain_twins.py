"""Conventional twins: the widths of their Lipschitz originals, no example sees another, per-example clipping works on them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lipdp
from lipdp import losses, models
from lipdp.clipping import clip_batch
from lipdp.errors import ConfigurationError

TWINS: list[tuple[str, str, tuple[int, ...], dict[str, Any]]] = [
    ("mlp", "plain-dense", (1, 6, 6), {"hidden": (8, 6)}),
    ("lenet", "plain-lenet", (1, 8, 8), {"channels": (4, 6), "kernel_size": 3, "hidden": 8}),
    ("lenet", "plain-lenet", (3, 6, 6), {"channels": (4,), "kernel_size": 3, "hidden": None}),
    ("vgg", "plain-vgg", (3, 8, 8), {"width": 8, "hidden": 6}),
    ("vgg", "plain-vgg", (1, 7, 7), {"depth": 8, "width": 8, "hidden": 6}),
    ("resnet", "plain-resnet", (3, 8, 8), {"width": 4}),
    ("resnet", "plain-resnet", (1, 7, 7), {"width": 4, "depth": 10}),
    ("resnet", "plain-resnet", (1, 12, 12), {"width": 4, "patch": 3, "pooled": False, "hidden": 8}),
    ("mixer", "plain-mixer", (3, 8, 8), {"patch": 4, "dim": 6, "depth": 2}),
    ("mixer", "plain-mixer", (1, 8, 8), {"patch": 4, "dim": 6, "pooled": False, "hidden": 4}),
]
CASES = pytest.mark.parametrize(("original", "twin", "shape", "options"), TWINS, ids=[f"{t[1]}-{t[2]}" for t in TWINS])


def made(twin: str, shape: tuple[int, ...], options: dict[str, Any], **more: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return models.create(twin, input_shape=shape, classes=3, **options, **more)


def weighted(model: torch.nn.Module) -> list[tuple[int, int]]:
    """(inputs, outputs) of the layers that both kinds have: dense ones, and convolutions by their channels."""
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | torch.nn.Conv2d)]
    return [tuple(reversed(layer.weight.shape[:2])) for layer in layers]


@CASES
def test_the_same_widths(original: str, twin: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    ours = models.create(original, input_shape=shape, classes=3, **options)
    expected = [tuple(reversed(m.weight.shape[:2])) for m in ours.modules() if "weight" in dict(m.named_parameters(recurse=False))]
    if original == "resnet" and shape[1] % 2 == 0:  # 4c unshuffled channels and a 1×1 kernel there, c channels and 2×2 here
        expected = [(a // 4, b) if a == 2 * b else (a, b) for a, b in expected]
    assert weighted(made(twin, shape, options)) == expected


@CASES
def test_examples_do_not_mix_and_their_scale_does_not_matter(
    original: str, twin: str, shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    model = made(twin, shape, options).double()
    x = torch.randn(5, *shape, dtype=torch.float64)
    together = model(x)
    assert together.shape == (5, 3)
    assert torch.allclose(together[:1], model(x[:1]), atol=1e-10)
    assert torch.allclose(together, model(3 * x + 7), atol=1e-3)


@CASES
@pytest.mark.parametrize("activation", ["relu", "tanh"])
def test_clipped_sums_are_those_of_single_gradients(
    original: str, twin: str, shape: tuple[int, ...], options: dict[str, Any], activation: str
) -> None:
    model = made(twin, shape, options, activation=activation).double()
    x, y = torch.randn(4, *shape, dtype=torch.float64), torch.tensor([0, 1, 2, 1])
    loss, limit = losses.CrossEntropy(tau=2.0), 0.5
    sums = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(4):
        gradients = torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), list(model.parameters()))
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for (name, _), gradient in zip(model.named_parameters(), gradients, strict=True):
            sums[name] += gradient * min(1.0, limit / float(norm))
    found = clip_batch(model, loss, x, y, limit).sums
    assert found.keys() == sums.keys()
    assert all(torch.allclose(found[name], sums[name], atol=1e-9) for name in sums)


def test_one_private_step() -> None:
    model = made("plain-vgg", (1, 8, 8), {"width": 8, "hidden": 6})
    loss = losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=50, batch_size=10, delta=1e-3, noise_multiplier=1.0, steps=1, method="bookkeeping",
                      max_grad_norm=0.3, accountant="rdp")  # fmt: skip
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    engine.step(torch.randn(4, 1, 8, 8), torch.arange(4) % 3, sample="own")
    assert engine.steps == 1


@pytest.mark.parametrize(
    ("twin", "shape", "options", "message"),
    [
        ("plain-dense", (4,), {"activation": "gelu"}, "relu"),
        ("plain-lenet", (1, 2, 2), {"channels": (4, 4)}, "at least 4 pixels"),
        ("plain-vgg", (8,), {}, "plain-vgg needs images"),
        ("plain-vgg", (1, 8, 8), {"depth": 7}, "5, 8, 11"),
        ("plain-resnet", (1, 8, 8), {"depth": 7}, "6, 10, 18"),
        ("plain-resnet", (1, 8, 8), {"patch": 3}, "multiples of the patch"),
        ("plain-mixer", (1, 7, 7), {}, "multiples of the patch"),
        ("plain-mixer", (1, 8, 8), {"depth": -1}, "depth"),
    ],
)
def test_refusals(twin: str, shape: tuple[int, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        models.create(twin, input_shape=shape, classes=3, **options)
