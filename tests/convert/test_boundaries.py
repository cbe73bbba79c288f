"""Ordinary networks between boundaries: proved sensitivities that attacks reach but do not pass."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import lipdp
from lipdp import losses, models
from lipdp.convert import between_boundaries
from lipdp.errors import ConfigurationError, LipdpError
from tests.soundness.harness import attack

T = torch.nn


class Skipping(T.Module):
    """A residual sum with normalisations, a layer that is used twice, and a pool."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.twice = T.Conv2d(1, 4, 3, padding=1), T.Conv2d(4, 4, 3, padding=1)
        self.norm, self.end = T.GroupNorm(2, 4), T.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = x + torch.relu(self.norm(self.twice(x)))
        x = torch.nn.functional.max_pool2d(torch.relu(x), 2)
        x = x + self.twice(x)
        y: torch.Tensor = self.end(x.flatten(1))
        return y


def test_sensitivities_are_the_clips() -> None:
    net = T.Sequential(
        T.Conv2d(1, 4, 3, padding=1), T.ReLU(), T.Flatten(), T.Linear(64, 6), T.Tanh(), T.LayerNorm(6), T.Linear(6, 3)
    )
    bounded = between_boundaries(net, (1, 4, 4), clip=0.2, conv_clip=0.05)
    expected = {"network.0.layer.weight": 0.05 * 3, "network.3.layer.weight": 0.2, "network.6.layer.weight": 0.2}
    assert lipdp.sensitivities(bounded, losses.CrossEntropy()) == pytest.approx(expected)
    for factor in (1e-3, 1e3):  # whatever the weights are
        with torch.no_grad():
            for weight in bounded.parameters():
                weight.mul_(factor)
        assert lipdp.sensitivities(bounded, losses.CrossEntropy()) == pytest.approx(expected)


def test_the_model_itself_stays_as_it_is() -> None:
    net = T.Sequential(T.Linear(4, 3), T.LayerNorm(3))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    between_boundaries(net, (4,), clip=0.5)
    assert net.state_dict().keys() == before.keys()
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


def test_every_layer_gets_inputs_of_norm_one_and_scale_does_not_matter() -> None:
    torch.manual_seed(0)
    bounded = between_boundaries(T.Sequential(T.Linear(5, 6), T.Tanh(), T.Linear(6, 3)), (5,), clip=0.3).double()
    norms: list[torch.Tensor] = []
    for module in bounded.modules():
        if isinstance(module, T.Linear):
            module.register_forward_pre_hook(lambda _, arguments: norms.append(arguments[0].norm(dim=1)))
    x = torch.randn(7, 5, dtype=torch.float64)
    y = bounded(x)
    assert all(torch.allclose(n, torch.ones_like(n)) for n in norms)
    assert torch.allclose(bounded(1e4 * x), y)


NETWORKS: dict[str, tuple[T.Module, tuple[int, ...], float]] = {
    "dense": (T.Sequential(T.Linear(4, 4), T.ReLU(), T.Linear(4, 2)), (4,), 0.99),
    "residual": (Skipping(), (1, 4, 4), 0.2),
    "transposed": (T.Sequential(T.ConvTranspose2d(2, 2, 2, stride=2), T.Tanh(), T.Flatten(), T.Linear(32, 2)), (2, 2, 2), 0.9),
    "tokens": (T.Sequential(T.LayerNorm(4), T.Linear(4, 4), T.Tanh(), T.Flatten(), T.Linear(12, 2)), (3, 4), 0.9),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_no_attack_passes_the_bounds(name: str) -> None:
    network, shape, reached = NETWORKS[name]
    bounded = between_boundaries(network, shape, clip=0.3, conv_clip=0.1)
    report = attack(bounded, 1.0, steps=12, draws=3)
    assert max(row.tightness for row in report.rows if row.kind == "parameter") > reached, str(report)


@pytest.mark.parametrize(
    ("name", "shape", "options"),
    [
        ("boundary-dense", (1, 6, 6), {"hidden": (8,)}),
        ("boundary-lenet", (1, 8, 8), {"channels": (4,), "kernel_size": 3, "hidden": 8, "activation": "tanh"}),
        ("boundary-vgg", (3, 8, 8), {"width": 8, "hidden": 6, "conv_clip": 0.02}),
        ("boundary-resnet", (1, 8, 8), {"width": 4, "patch": 2, "pooled": False, "clip": 0.4}),
        ("boundary-mixer", (3, 8, 8), {"patch": 4, "dim": 6, "pooled": False, "hidden": 4}),
    ],
)
def test_models(name: str, shape: tuple[int, ...], options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = models.create(name, input_shape=shape, classes=3, **options)
    loss = losses.CrossEntropy(tau=4.0)
    plan = lipdp.plan(model, loss, dataset_size=100, batch_size=10, delta=1e-3, noise_multiplier=1.0, steps=2, accountant="rdp")
    for path, module in model.named_modules():
        if isinstance(module, T.Conv2d):  # small images have fewer positions than windows have entries
            kernel, stride = math.prod(module.kernel_size), math.prod(module.stride)
            largest = options.get("conv_clip", 0.05) * math.sqrt(kernel / stride)
            assert 0.3 * largest < plan.sensitivities[f"{path}.weight"] < largest * (1 + 1e-9)
        elif isinstance(module, T.Linear):
            assert plan.sensitivities[f"{path}.weight"] == pytest.approx(options.get("clip", 0.2))
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    x = torch.randn(4, *shape)
    assert torch.equal(model(x), torch.zeros(4, 3))  # the logits start at zero
    engine.step(x, torch.arange(4) % 3, sample="own")
    assert not torch.equal(model(x), torch.zeros(4, 3))
    assert torch.allclose(model.export()(x), model(x), atol=1e-6)
    assert set(options) | {"clip", "conv_clip"} <= set(models.by_name.option_names(name))


def test_what_no_boundary_helps_is_named() -> None:
    mixing = between_boundaries(
        T.Sequential(T.Conv2d(1, 4, 3), T.BatchNorm2d(4), T.Flatten(), T.Linear(16, 2)), (1, 4, 4), clip=0.1
    )
    with pytest.raises(LipdpError, match="BatchNorm"):
        lipdp.sensitivities(mixing, losses.CrossEntropy())
    net = T.Sequential(T.TransformerEncoderLayer(4, 1, 4, batch_first=True), T.Flatten())
    attention = between_boundaries(net, (3, 4), clip=0.1)
    assert attention(torch.randn(2, 3, 4)).shape == (2, 12)
    with pytest.raises(LipdpError, match="TransformerEncoderLayer"):
        lipdp.sensitivities(attention, losses.CrossEntropy())
    with pytest.raises(ConfigurationError, match=r"takes a torch\.nn\.Module"):
        between_boundaries(3, (4,), clip=0.1)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="above 0"):
        between_boundaries(T.Linear(4, 2), (4,), clip=-0.1)
