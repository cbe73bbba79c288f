"""A layer is one file: a made-up one, all of it below, works in everything that lipdp does with layers."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.bounds import Bound, Call, Transfer, rule
from lipdp.clipping import OuterSum, clipped_gradients, norm_rule
from lipdp.export import Site, lowering
from lipdp.parametrize import Constrained
from lipdp.twins import Decision, Where, twin


class Foo(Constrained, torch.nn.Module):
    """y = W·x with ‖W‖_F ≤ 1, which bounds ‖W‖₂."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs))
        self.project_()

    def project_(self) -> None:
        with torch.no_grad():
            self.weight.div_(self.weight.double().norm().clamp_min(1.0).to(self.weight.dtype) * (1 + 1e-6))

    def is_inside(self) -> bool:
        return float(self.weight.detach().double().norm()) <= 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Bar(torch.nn.Module):
    """An ordinary layer of somebody's, whose twin is Foo."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs
        self.weight = torch.nn.Parameter(torch.randn(outputs, inputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


@rule(Foo)
def _bound(layer: Foo, call: Call) -> Transfer:
    """‖Wx‖ ≤ ‖W‖_F‖x‖ ≤ ‖x‖; the gradient δ⊗x has norm G·X."""
    x = call.inputs[0]
    return Transfer(Bound(x.norm, call.output_shape), gains=(1.0,), parameters={"weight": x.norm})


@norm_rule(Foo)
def _contributions(layer, inputs, output):
    x = inputs[0].detach()
    return lambda cotangent: {"weight": OuterSum(cotangent[:, None], x[:, None], tuple(layer.weight.shape))}


@lowering(Foo)
def _plain(layer: Foo, site: Site) -> torch.Tensor:
    return F.linear(site.x, layer.weight)


@twin(Bar)
def _twin(module: Bar, where: Where) -> Decision:
    return Decision("replaced", Foo(module.inputs, module.outputs))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.BoundedInput((6,)), Foo(6, 8), nn.GroupSort(2), Foo(8, 3))


@pytest.fixture
def data():
    draw = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(64, 6, generator=draw), torch.randint(3, (64,), generator=draw))


@pytest.mark.parametrize("method", ["clipless", "bookkeeping", "ghost"])
def test_plan_and_step(model, data, method):
    clip = {} if method == "clipless" else {"max_grad_norm": 0.3}
    loss = losses.CrossEntropy()
    plan = lipdp.plan(
        model,
        loss,
        dataset_size=64,
        batch_size=32,
        delta=1e-3,
        noise_multiplier=1.0,
        steps=3,
        method=method,
        accountant="rdp",
        **clip,
    )
    assert all(bound > 0 for bound in plan.sensitivities.values())
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), plan)
    before = [p.detach().clone() for p in model.parameters()]
    for batch in engine.batches(data):
        engine.step(*batch)
    assert not any(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(layer.is_inside() for layer in model if isinstance(layer, Foo))


def test_clipped_gradients_are_those_of_a_loop(model, data):
    x, y = data.tensors
    loss = losses.CrossEntropy(tau=10.0)
    fast, slow = (clipped_gradients(model, loss, x, y, 0.1, method) for method in ("bookkeeping", "naive"))
    for name in slow:
        assert torch.allclose(fast[name], slow[name], atol=1e-5)


def test_export(model, data):
    plain = model.export()
    assert not any("lipdp" in type(module).__module__ or "tests" in type(module).__module__ for module in plain.modules())
    assert torch.allclose(plain(data.tensors[0]), model.eval()(data.tensors[0]), atol=1e-6)


def test_certify(model, data):
    x = data.tensors[0] * 0.1  # inside the ball, where BoundedInput is the identity
    y = model.eval()(x).argmax(1)
    radii = lipdp.certify(model, x, y)
    assert bool((radii > 0).all())
    outputs = model(x)
    margins = outputs.gather(1, y[:, None])[:, 0] - outputs.scatter(1, y[:, None], -torch.inf).amax(1)
    assert bool((radii <= margins / 2**0.5).all())
    assert bool((radii >= 0.99 * margins / 2**0.5).any())


def test_convert():
    ordinary = torch.nn.Sequential(Bar(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    conversion = lipdp.convert(ordinary, (6,))
    assert conversion.report.bounded, conversion.report
    assert any(isinstance(module, Foo) for module in conversion.model.modules())
