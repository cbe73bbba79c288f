"""Schedules and freezing: decided beforehand, accounted for phase by phase, and what the engine really does."""

from __future__ import annotations

import math

import pytest
import torch

import lipdp
from lipdp import Clipping, Schedule, nn
from lipdp.errors import ConfigurationError
from lipdp.planning.phases import make_phases, segments
from lipdp.privacy import PrivateRun, effective_multiplier, run_epsilon
from lipdp.training import cosine_schedule, linear_schedule

from ..training.common import engine_of, free, planned, small, toy, weights


def test_phases_are_cut_where_something_changes():
    phases = make_phases(
        100, ["a.weight", "a.bias", "b.weight"], clip=((0, 1), (0.5, 0.5)), noise=((0, 1), (0.25, 2)), freeze={"a": 0.75}
    )
    assert [(p.start, p.noise, p.clip, p.frozen) for p in phases] == [
        (0, 1.0, 1.0, ()),
        (25, 2.0, 1.0, ()),
        (50, 2.0, 0.5, ()),
        (75, 2.0, 0.5, ("a.weight", "a.bias")),
    ]
    assert segments(phases, 100, 1.5) == ((1.5, 25), (3.0, 75))


def test_a_noise_schedule_is_accounted_for_phase_by_phase():
    model = small()
    plan = planned(model, schedule=Schedule(noise=((0.0, 1.0), (0.5, 2.0))), noise_multiplier=1.0, accountant="pld")
    half = plan.steps // 2
    run = PrivateRun(plan.sampling_rate, ((1.0, half), (2.0, plan.steps - half)))
    assert plan.epsilon == pytest.approx(run_epsilon(run, plan.delta))
    low, high = (planned(model, noise_multiplier=s, accountant="pld").epsilon for s in (2.0, 1.0))
    assert low < plan.epsilon < high
    tight = planned(model, schedule=Schedule(noise=cosine_schedule(0.5, levels=3)), epsilon=2.0, steps=12, accountant="pld")
    assert 1.99 < tight.epsilon <= 2.0


def test_composition_over_phases_is_that_of_dp_accounting():
    import dp_accounting as dp
    from dp_accounting.pld import PLDAccountant

    run = PrivateRun(0.1, ((1.0, 30), (1.7, 20)))
    theirs = PLDAccountant()
    for sigma, steps in run.segments:
        theirs.compose(dp.SelfComposedDpEvent(dp.PoissonSampledDpEvent(0.1, dp.GaussianDpEvent(sigma)), steps))
    assert run_epsilon(run, 1e-5) == pytest.approx(theirs.get_epsilon(1e-5), rel=1e-6)  # and what rounding may hide


def test_the_noise_of_each_phase_has_the_multiplier_that_is_accounted_for():
    model = free()
    plan = planned(model, schedule=Schedule(noise=linear_schedule(3.0, levels=3), freeze={"1": 0.5}), allocation="optimal")
    engine = engine_of(model, plan)
    seen = set()
    for step in range(plan.steps):
        settings = engine._run.mechanism.at(step)
        bounds = {name: bound * plan.slack for name, bound in plan.sensitivities.items() if name in settings.stds}
        assert effective_multiplier(bounds, settings.stds) == pytest.approx(plan.noise_multiplier * settings.phase.noise, rel=1e-9)
        seen.add(settings.phase.start)
    assert len(seen) == len(plan.phases) > 3


@pytest.mark.parametrize("method", ["clipless", "bookkeeping"])
def test_a_frozen_group_gets_no_noise_leaves_the_sensitivity_and_stays(method):
    model = free()
    options = {} if method == "clipless" else {"method": method, "max_grad_norm": 1.0, "clipping": Clipping(style="per_layer")}
    plan = planned(model, schedule=Schedule(freeze={"1": 0.5}), **options)
    engine = engine_of(model, plan, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    kept = None
    for number, batch in enumerate(engine.batches(toy())):
        if number == plan.steps // 2:
            kept = weights(model)
        engine.step(*batch)
    for name, value in weights(model).items():
        assert torch.equal(value, kept[name]) == name.startswith("1.")
    before, after = engine._run.mechanism.at(0), engine._run.mechanism.at(plan.steps - 1)
    assert set(after.stds) == {name for name in before.stds if not name.startswith("1.")}
    assert max(after.stds.values()) < max(before.stds.values())  # less sensitivity, less noise, at the same privacy


def test_longest_run_with_a_schedule_is_the_longest():
    model = small()
    plan = planned(model, schedule=Schedule(noise=((0.0, 1.0), (0.5, 0.8))), epsilon=4.0, noise_multiplier=1.0, steps=None)

    def cost(count):
        return planned(model, schedule=Schedule(noise=((0.0, 1.0), (0.5, 0.8))), noise_multiplier=1.0, steps=count).epsilon

    assert cost(plan.steps) <= 4.0 < cost(plan.steps + 1)


def test_the_plan_goes_through_json_and_its_table_shows_the_phases():
    model = nn.Sequential(*list(small()), nn.ClipGradient(0.3))
    plan = planned(model, schedule=Schedule(((0, 1), (0.3, 0.5)), linear_schedule(2.0, levels=2), {"1": 0.8}))
    assert lipdp.PrivacyPlan.from_json(plan.to_json()) == plan
    text = str(plan)
    assert "frozen" in text
    assert "phase" in text


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"noise_schedule": ((0.1, 1.0),)}, "starts with"),
        ({"noise_schedule": ((0.0, 2.0),)}, "starts with"),
        ({"noise_schedule": ((0.0, 1.0), (0.5, -1.0))}, "positive"),
        ({"noise_schedule": ((0.0, 1.0), (0.5, math.nan))}, "positive"),
        ({"noise_schedule": (0.5,)}, "pairs"),
        ({"freeze": {"7": 0.5}}, "no trained parameter"),
        ({"freeze": {"1": 1.5}}, "between 0 and 1"),
        ({"freeze": {"1": 0.5, "3": 0.5}}, "nothing to train"),
    ],
)
def test_bad_schedules_are_refused(options, text):
    with pytest.raises(ConfigurationError, match=text):
        planned(small(), **options)
