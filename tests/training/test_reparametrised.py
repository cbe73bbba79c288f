"""Reparametrised weights: what is released is the noised gradient of the effective weight, pulled back afterwards."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.parametrize import Cayley, DifferentiableBjorck, Householder, MatrixExp, Polar, effective_leaves, pull_back

MAPS = [DifferentiableBjorck(), Polar(), Cayley(), MatrixExp(), Householder()]
LOSS = losses.CrossEntropy(tau=8.0)
named = pytest.mark.parametrize("pi", MAPS, ids=lambda pi: type(pi).__name__)


def network(pi, dtype=torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((1, 6, 6)),
        nn.SpectralConv2d(1, 4, 3, padding=1, bias=False, constraint=pi, dtype=dtype),
        nn.GroupSort(2),
        nn.Flatten(),
        nn.SpectralLinear(144, 10, bias=False, constraint=pi, dtype=dtype),
    )


def data(count: int = 64, dtype=torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, 6, 6, generator=generator).to(dtype)
    return x, x.flatten(1)[:, :10].argmax(1)


def planned(model, **changes):
    settings = {"dataset_size": 256, "batch_size": 64, "delta": 1e-4, "noise_multiplier": 1.0, "steps": 30, "accountant": "rdp"}
    return lipdp.plan(model, LOSS, **{**settings, **changes})


class Recorder(torch.optim.SGD):
    def __init__(self, parameters, lr=0.0):
        super().__init__(parameters, lr=lr)
        self.seen = []

    def step(self, closure=None):
        self.seen.append([p.grad.clone() for group in self.param_groups for p in group["params"]])
        super().step(closure)


@named
def test_the_gradient_of_the_effective_weight_is_within_its_sensitivity(pi) -> None:
    """Random θ and long inputs, example by example. (The rule itself is attacked in tests/nn, where it is tight.)"""
    model = network(pi, torch.float64)
    bounds = lipdp.sensitivities(model, LOSS)
    x, y = data(8, torch.float64)
    for _ in range(5):
        with effective_leaves(model) as leaves:
            for i in range(len(x)):
                found = torch.autograd.grad(LOSS(model(50 * x[i : i + 1]), y[i : i + 1]).sum(), list(leaves.values()))
                for name, gradient in zip(leaves, found, strict=True):
                    assert float(gradient.norm()) <= bounds[name] * (1 + 1e-9)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.5 * torch.randn_like(parameter))


def test_the_gradient_through_the_map_is_not() -> None:
    """Naive differentiation through π: its Jacobian is 1/(s_i + s_j), so two small singular values of θ break W's bound."""
    model = nn.Sequential(
        nn.BoundedInput((4,)), nn.SpectralLinear(4, 4, bias=False, constraint=Polar(iterations=12), dtype=torch.float64)
    )
    bound = lipdp.sensitivities(model, losses.CrossEntropy())["1.weight"]
    with torch.no_grad():
        model[1].weight.copy_(torch.diag(torch.tensor([1.0, 1.0, 0.01, 0.01], dtype=torch.float64)))
    worst = 0.0
    for seed in range(20):
        x = torch.randn(1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 10
        value = losses.CrossEntropy()(model(x), torch.tensor([seed % 4])).sum()
        (gradient,) = torch.autograd.grad(value, model[1].weight)
        worst = max(worst, float(gradient.norm()))
    assert worst > 2 * bound


@named
def test_the_engine_noises_the_effective_gradient_and_pulls_it_back(pi) -> None:
    model = network(pi)
    optimizer = Recorder(model.parameters())
    plan = planned(model, noise_multiplier=1e-4)  # so small that the released gradient is the true one
    x, y = data(50)
    with effective_leaves(model) as leaves:
        total = torch.autograd.grad(LOSS(model(x), y).sum(), list(leaves.values()))
    expected = pull_back(model, {name: g / 64 for name, g in zip(leaves, total, strict=True)})
    lipdp.PrivacyEngine(model, LOSS, optimizer, plan, seed=0, reproducible=True).step(x, y, sample="own")
    for found, (name, reference) in zip(optimizer.seen[0], expected.items(), strict=True):
        assert torch.allclose(found, reference, atol=2e-4), name


@named
def test_noise_lives_in_the_space_of_the_weight(pi) -> None:
    """On an empty batch, the gradient of θ is π's transposed Jacobian times planned noise: that is what comes out."""
    model = network(pi)
    plan = planned(model)
    released: list[dict[str, torch.Tensor]] = []
    engine = lipdp.PrivacyEngine(model, LOSS, Recorder(model.parameters()), plan, seed=3, reproducible=True)
    inner = engine._run.query.gradients
    engine._run.query.gradients = lambda noised: released.append(dict(noised)) or inner(noised)  # type: ignore[method-assign]
    x, y = data()
    for _ in range(20):
        engine.step(x[:0], y[:0], sample="own")
    for name, std in plan.noise_stds.items():
        drawn = torch.cat([step[name].flatten() for step in released]) * 64 / std
        # A chi-square of n draws is within 6 deviations √(2n) of n, but for one run in 5e8.
        assert abs(float(drawn.square().sum()) - drawn.numel()) < 6 * (2 * drawn.numel()) ** 0.5


@named
def test_a_reparametrised_network_trains_and_stays_in_its_set(pi) -> None:
    model = network(pi)
    x, y = data(512)
    plan = planned(model, dataset_size=512, batch_size=128, noise_multiplier=0.5)
    before = lipdp.evaluate(model, LOSS, TensorDataset(x, y))["accuracy"]
    lipdp.fit(
        model,
        LOSS,
        torch.optim.Adam(model.parameters(), lr=0.02),
        plan,
        TensorDataset(x, y),
        seed=0,
        reproducible=True,
        evaluations=1,
    )
    assert lipdp.evaluate(model, LOSS, TensorDataset(x, y))["accuracy"] > before + 0.1
    for layer in (model[1], model[4]):
        weight = layer.effective("weight").detach().double()
        assert float(torch.linalg.svdvals(weight.reshape(weight.shape[0], -1)).max()) <= 1 + 1e-13


def test_a_shared_parameter_is_refused() -> None:
    model = nn.Sequential(
        nn.BoundedInput((4,)),
        nn.SpectralLinear(4, 4, bias=False, constraint=Cayley()),
        torch.nn.Identity(),
        nn.SpectralLinear(4, 4, bias=False),
    )
    model[3].weight = model[1].weight
    with pytest.raises(UnsupportedError, match="two different constraint sets"):
        planned(model)
    model[3] = nn.SpectralLinear(4, 4, bias=False, constraint=Cayley())  # the same set: but its map is another path to the data
    model[3].weight = model[1].weight
    engine = lipdp.PrivacyEngine(model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), planned(model))
    with pytest.raises(UnsupportedError, match="shared"):
        engine.step(torch.randn(3, 4), torch.tensor([0, 1, 2]), sample="own")


def test_clipping_and_other_constraints_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="reparametrised"):
        lipdp.plan(
            network(Cayley()), LOSS, dataset_size=256, batch_size=64, delta=1e-4, noise_multiplier=1.0, steps=5,
            method="bookkeeping", max_grad_norm=1.0,
        )  # fmt: skip
    with pytest.raises(ConfigurationError, match="constraint"):
        nn.SpectralLinear(4, 4, constraint="orthogonal")
