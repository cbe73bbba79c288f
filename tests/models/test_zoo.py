"""Every model: forward, plan, one private step; Lipschitz ones also stay within their bounds and are attacked when small."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lipdp
from lipdp import losses, models
from lipdp.bounds import analyse
from lipdp.errors import ConfigurationError
from tests.soundness.harness import attack

LIPSCHITZ: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("vgg", (1, 8, 8), {"width": 4, "hidden": 6}),
    ("vgg5", (1, 6, 7), {"width": 4, "hidden": 6, "clip": 0.5}),
    ("vgg8", (3, 8, 8), {"width": 4, "hidden": 6, "input_norm": 2.0}),
    ("vgg11", (1, 8, 8), {"width": 4, "hidden": 6}),
    ("resnet", (1, 8, 8), {"width": 4}),
    ("resnet6", (3, 7, 7), {"width": 4, "input_mode": "ball"}),
    ("resnet10", (1, 8, 8), {"width": 4}),
    ("resnet18", (1, 8, 8), {"width": 2}),
    ("resnet", (1, 8, 8), {"width": 4, "patch": 2, "pooled": False, "hidden": 6, "clip": 0.3}),
    ("resnet", (2, 6, 6), {"width": 4, "patch": 3, "hidden": 4}),
    ("mixer", (1, 8, 8), {"dim": 6}),
    ("mixer", (1, 8, 8), {"dim": 6, "pooled": False, "hidden": 4}),
    ("mixer", (1, 6, 6), {"dim": 4, "patch": 2, "residual": False, "pooled": False, "clip": 0.2}),
    ("mixer", (3, 6, 9), {"dim": 4, "patch": 3, "depth": 3}),
    ("transformer", (1, 8, 8), {"dim": 4}),
    ("transformer", (5,), {"dim": 4, "vocabulary": 11, "depth": 2}),
]
CONVENTIONAL: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("plain-mlp", (1, 8, 8), {}),
    ("plain-cnn", (1, 16, 18), {"hidden": 8}),
    ("plain-rnn", (1, 8, 8), {"hidden": 8}),
    ("plain-rnn", (5, 3), {"hidden": 8}),
    ("plain-lstm", (2, 6, 5), {"hidden": 8}),
    ("plain-transformer", (1, 6, 6), {"dim": 8, "heads": 2, "hidden": 8}),
    ("plain-transformer", (5,), {"dim": 8, "heads": 2, "hidden": 8, "vocabulary": 11}),
    ("plain-resnet18", (3, 8, 8), {"width": 4}),
    ("plain-vgg11", (3, 8, 8), {"width": 4, "hidden": 8}),
]


def examples(shape: tuple[int, ...], options: dict[str, Any]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if "vocabulary" in options:
        return torch.randint(options["vocabulary"], (4, *shape), generator=generator)
    return torch.randn(4, *shape, generator=generator)


def one_step(model: torch.nn.Module, x: torch.Tensor, shape: tuple[int, ...], **arguments: Any) -> lipdp.PrivacyPlan:
    loss = losses.CrossEntropy(tau=4.0)
    plan = lipdp.plan(
        model, loss, dataset_size=100, batch_size=10, delta=1e-3, noise_multiplier=1.0, steps=2, accountant="rdp", **arguments
    )
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    before = [p.detach().clone() for p in model.parameters()]
    engine.step(x, torch.arange(4) % 3, sample="own")
    assert engine.steps == 1
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    return plan


@pytest.mark.parametrize(("name", "shape", "options"), LIPSCHITZ, ids=lambda v: v if isinstance(v, str) else "")
def test_lipschitz_models_plan_and_step(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = models.create(name, input_shape=shape, classes=3, **options)
    x = examples(shape, options)
    assert model(x).shape == (4, 3)
    plan = one_step(model, x, shape)
    largest = options.get("clip", math.sqrt(2)) * options.get("input_norm", 1.0)
    if "vocabulary" not in options and name != "transformer":
        assert all(0 < bound <= largest * (1 + 1e-6) for bound in plan.sensitivities.values())
    assert all(math.isfinite(bound) for bound in plan.sensitivities.values())
    result = analyse(model, 1.0)
    assert float(model(x * 1000 if x.is_floating_point() else x).detach().norm(dim=1).max()) <= result.output.norm * (1 + 1e-5)
    if "vocabulary" not in options:
        assert torch.allclose(model.export()(x), model(x), atol=1e-6)
        radii = lipdp.certify(model, x, torch.zeros(4, dtype=torch.long))
        assert radii.shape == (4,)
        assert bool((radii >= 0).all())
    if options.get("input_mode") == "ball":
        assert result.lipschitz <= 1 + 1e-9  # a certificate for the whole network


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("vgg8", (1, 4, 4), {"width": 2, "hidden": 2}),
        ("resnet6", (1, 4, 4), {"width": 2}),
        ("resnet6", (1, 4, 4), {"width": 2, "patch": 2, "pooled": False, "hidden": 2}),
        ("mixer", (1, 4, 4), {"dim": 2, "patch": 2}),
        ("mixer", (1, 4, 4), {"dim": 2, "patch": 2, "residual": False, "pooled": False}),
        ("transformer", (1, 4, 4), {"dim": 2, "heads": 1, "patch": 2}),
        ("transformer", (3,), {"dim": 2, "heads": 1, "vocabulary": 5}),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_small_models_hold_under_attack(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    model = models.create(name, input_shape=shape, classes=2, **options)
    report = attack(model, 1.0, steps=6, draws=2, starts=("random", "constant", "aligned"))
    assert max(row.tightness for row in report.rows if row.kind == "parameter") > 0.2, str(report)


@pytest.mark.parametrize(("name", "shape", "options"), CONVENTIONAL, ids=lambda v: v if isinstance(v, str) else "")
def test_conventional_models_are_clipped(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = models.create(name, input_shape=shape, classes=3, **options)
    x = examples(shape, options)
    assert model(x).shape == (4, 3)
    other = x.clone()
    other[1:] = x[1:].flip(0)
    assert torch.allclose(model(x)[0], model(other)[0], atol=1e-5)  # nothing mixes examples
    one_step(model, x, shape, method="bookkeeping", max_grad_norm=1.0)


def test_sizes_of_the_papers_models() -> None:
    sizes = {
        name: sum(p.numel() for p in models.create(name, input_shape=(1, 28, 28), classes=10).parameters())
        for name in ("plain-mlp", "plain-cnn", "plain-rnn", "plain-lstm")
    }
    assert sizes["plain-mlp"] == 784 * 128 + 128 + 128 * 256 + 256 + 2570
    assert sizes["plain-cnn"] == 20 * 26 + 50 * 501 + 800 * 128 + 128 + 1290
    assert sizes["plain-rnn"] == 28 * 128 + 128 * 128 + 256 + 1290
    assert sizes["plain-lstm"] == 4 * (28 * 128 + 128 * 128 + 256) + 1290


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("vgg", (1, 8, 8), {"depth": 7}),
        ("vgg5", (8, 8), {}),
        ("vgg5", (1, 8, 8), {"width": 3}),
        ("vgg5", (1, 8, 8), {"hidden": 3}),
        ("vgg5", (1, 8, 8), {"wide": 3}),
        ("resnet", (1, 8, 8), {"depth": 7}),
        ("resnet6", (8,), {}),
        ("resnet6", (1, 8, 8), {"patch": 3}),
        ("resnet6", (1, 8, 8), {"hidden": 3}),
        ("mixer", (1, 8, 9), {}),
        ("mixer", (1, 8, 8), {"hidden": 0}),
        ("mixer", (1, 8, 8), {"dim": 3}),
        ("mixer", (1, 8, 8), {"depth": -1}),
        ("transformer", (1, 8, 8), {"dim": 6, "heads": 4}),
        ("transformer", (1, 8, 8), {"vocabulary": 5}),
        ("transformer", (1, 8, 8), {"depth": -1}),
        ("plain-cnn", (1, 8, 8), {}),
        ("plain-cnn", (64,), {}),
        ("plain-rnn", (64,), {}),
        ("plain-transformer", (1, 8, 8), {"vocabulary": 5}),
    ],
)
def test_options_that_can_not_be_meant(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        models.create(name, input_shape=shape, classes=3, **options)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("plain-transformer", {"dim": 10, "heads": 4}, "dim=10 and heads=4.*multiple of heads, e.g. dim=8"),
        ("plain-transformer", {"heads": 0}, "heads is 0: it has to be a whole number"),
        ("plain-transformer", {"depth": -1}, "depth is -1"),
        ("plain-transformer", {"hidden": 0}, "hidden is 0"),
        ("vgg5", {"depth": 5}, "the depth of model 'vgg5' goes with its name: leave out depth="),
        ("vgg5", {"deep": 5}, "does not accept these options"),
        ("plain-lstm", {"hidden": -3}, "model 'plain-lstm' can't be built with hidden=-3"),
    ],
)
def test_options_that_no_model_can_have_are_told_in_our_words(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        models.create(name, input_shape=(1, 28, 28), classes=10, **options)
