"""Clipping styles, automatic clipping and noise weights through the plan and the engine."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import lipdp
from lipdp.clipping import clipped_gradients
from lipdp.errors import ConfigurationError
from lipdp.privacy import effective_multiplier

from .common import engine_of, free, planned, toy

LOSS = torch.nn.CrossEntropyLoss(reduction="none")


def model_of():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


@pytest.mark.parametrize(
    ("norm", "options"),
    [
        (1.0, lipdp.Clipping(style="per_layer")),
        ({"0": 0.2, "2": 0.7}, lipdp.Clipping(style="per_layer")),
        (1.0, lipdp.Clipping(style="per_group", groups=["0", "2"])),
        (1.0, lipdp.Clipping(clip="automatic", stability=0.1)),
    ],
)
@pytest.mark.parametrize("method", ["bookkeeping", "multiloss"])
def test_the_engine_sums_what_the_plan_says(norm, options, method):
    model = model_of()
    plan = planned(model, LOSS, method=method, max_grad_norm=norm, clipping=options)
    assert math.hypot(*(g.sensitivity for g in plan.groups)) == pytest.approx(plan.max_grad_norm)
    engine = engine_of(model, plan, loss=LOSS)
    x, y = toy(20).tensors
    sample = lipdp.training.query.Sample(x.double(), y, 7, torch.device("cpu"))
    found = engine._run.query.ask(dict(model.named_parameters()), sample, {}).sums
    norms = {g.name: g.sensitivity for g in plan.groups} if options.style != "flat" else 1.0
    expected = clipped_gradients(
        model,
        LOSS,
        x.double(),
        y,
        norms,
        "naive",
        style=options.style,
        clip=options.clip,
        stability=options.stability,
    )
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12)
    assert lipdp.PrivacyPlan.from_json(plan.to_json()) == plan


def test_a_method_that_scales_whole_gradients_is_refused_for_other_styles_when_planning():
    with pytest.raises(ConfigurationError, match="flat"):
        planned(model_of(), LOSS, method="reweight", clipping=lipdp.Clipping(style="per_layer"), max_grad_norm=1.0)


def test_groups_that_are_not_those_of_the_style_are_refused():
    model = model_of()
    plan = planned(model, LOSS, method="bookkeeping", clipping=lipdp.Clipping(style="per_layer"), max_grad_norm=1.0)
    with pytest.raises(ConfigurationError, match="not those of its style"):
        engine_of(model, dataclasses.replace(plan, clipping_style="flat"), loss=LOSS)


def test_user_given_noise_weights():
    model = free()
    weights = {"1.weight": 1.0, "1.bias": 2.0, "3": 0.5}
    plan = planned(model, allocation=weights)
    stds = plan.noise_stds
    assert stds["1.bias"] / stds["1.weight"] == pytest.approx(2.0)
    assert stds["3.weight"] == pytest.approx(stds["3.bias"]) == pytest.approx(stds["1.weight"] / 2)
    bounds = {name: bound * plan.slack for name, bound in plan.sensitivities.items()}
    assert effective_multiplier(bounds, stds) == pytest.approx(plan.noise_multiplier)
    engine_of(model, plan)
    for wrong in ({"1": 1.0}, {**weights, "9": 1.0}, {**weights, "3": 0.0}):
        with pytest.raises(ConfigurationError):
            planned(model, allocation=wrong)


def test_the_plan_predicts_the_noise_energy_of_each_allocation():
    model = free()
    plans = {name: planned(model, allocation=name) for name in ("global", "per_layer", "optimal")}
    for name, plan in plans.items():
        assert plan.noise_energy == pytest.approx(plan.noise_energies[name], rel=1e-9)
        assert plan.noise_energies == pytest.approx(plans["global"].noise_energies, rel=1e-9)
    assert min(plans["global"].noise_energies, key=plans["global"].noise_energies.get) == "optimal"
    assert "optimal" in str(plans["global"])
