"""Proved and clipped groups in one plan: one mechanism, each part with the sensitivity it claims."""

from __future__ import annotations

import math

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.errors import ConfigurationError
from lipdp.parametrize import Cayley
from lipdp.privacy import effective_multiplier

from .common import Spy, engine_of, planned, toy


def mixed_model(seed=0, head=None):
    """An ordinary trunk, which nothing bounds, under a Lipschitz head, which is proved."""
    torch.manual_seed(seed)
    return nn.Sequential(
        torch.nn.Linear(6, 8),
        torch.nn.ReLU(),
        nn.Boundary(norm=1.0),
        head or nn.SpectralLinear(8, 8, bias=False),
        nn.GroupSort(2),
        nn.SpectralLinear(8, 3),
    )


def mixed_plan(model, **options):
    return planned(model, method="mixed", max_grad_norm=0.5, input_shape=(6,), **options)


def test_each_layer_shows_where_its_bound_comes_from():
    plan = mixed_plan(mixed_model())
    sources = {group.name: group.source for group in plan.groups}
    assert sources == {
        "0.bias": "proved",  # its gradient is the cotangent, which the head bounds; the weight's input is not bounded
        "all parameters": "clipped",
        "3.weight": "proved",
        "5.weight": "proved",
        "5.bias": "proved",
    }
    clipped = next(group for group in plan.groups if group.source == "clipped")
    assert clipped.parameters == ("0.weight",)
    assert "clipped" in str(plan)
    assert "proved" in str(plan)
    bounds = {group.name: group.sensitivity * plan.slack for group in plan.groups}
    assert effective_multiplier(bounds, {group.name: group.noise_std for group in plan.groups}) == pytest.approx(
        plan.noise_multiplier
    )
    assert lipdp.PrivacyPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("head", [None, "cayley"])
def test_no_example_exceeds_any_group_and_the_sum_is_right(head):
    """Against autograd in float64, example by example: the clipped group clipped, the proved ones as they are."""
    model = mixed_model(head=None if head is None else nn.SpectralLinear(8, 8, bias=False, constraint=Cayley())).double()
    loss = losses.CrossEntropy(tau=4.0)
    plan = mixed_plan(model, noise_multiplier=1e-6, accountant="rdp") if head is None else mixed_plan(model)
    engine = engine_of(model, plan, Spy(model), loss, input_shape=(6,))
    x, y = toy(12).tensors
    x = 3 * x.double()
    settings = engine._run.mechanism.at(0)
    sample = lipdp.training.query.Sample(x, y, 5, torch.device("cpu"))
    answer = engine._run.query.ask(dict(model.named_parameters()), sample, settings.clips)
    expected = {name: torch.zeros_like(value) for name, value in answer.sums.items()}
    with lipdp.parametrize.effective_leaves(model) as leaves:
        targets = {**dict(model.named_parameters()), **leaves}
        for i in range(len(x)):
            grads = dict(
                zip(
                    targets, torch.autograd.grad(loss(model(x[i : i + 1]), y[i : i + 1]).sum(), list(targets.values())), strict=True
                )
            )
            for group in plan.groups:
                norm = math.sqrt(sum(float(grads[name].square().sum()) for name in group.parameters))
                factor = min(1.0, group.sensitivity / norm) if group.source == "clipped" else 1.0
                assert norm * factor <= group.sensitivity * (1 + 1e-12)
                for name in group.parameters:
                    expected[name] += factor * grads[name]
    for name, value in expected.items():
        assert torch.allclose(answer.sums[name], value, rtol=1e-9, atol=1e-12), name


def test_it_trains_and_a_forced_layer_is_clipped():
    model = mixed_model()
    plan = mixed_plan(model, clipping=lipdp.Clipping(clipped=("3", "0.bias")))
    clipped = next(group for group in plan.groups if group.source == "clipped")
    assert clipped.parameters == ("0.weight", "0.bias", "3.weight")
    history = lipdp.fit(
        model, losses.CrossEntropy(tau=4.0), torch.optim.SGD(model.parameters(), lr=0.1), plan, toy(), seed=0, input_shape=(6,)
    )
    assert history.epsilon == plan.epsilon


def test_a_model_that_is_all_of_one_kind_is_sent_to_the_method_for_it():
    proved = nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 3))
    with pytest.raises(ConfigurationError, match=r"nothing to clip.*clipless"):
        planned(proved, method="mixed", max_grad_norm=1.0)
    plain = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.ReLU(), torch.nn.Linear(4, 3, bias=False))
    with pytest.raises(ConfigurationError, match=r"nothing to prove.*bookkeeping"):
        planned(plain, method="mixed", max_grad_norm=1.0, input_shape=(6,))
    with pytest.raises(ConfigurationError, match="clipped"):
        planned(proved, clipping=lipdp.Clipping(clipped=("1",)))
