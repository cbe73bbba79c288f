"""Every field of a plan's file with hostile values: refused clearly, or harmless, never a raw exception.

Harmless: with the noise that the engine will draw, and the sensitivities that the model has, every step and every release together
cost no more than the plan reports.
"""

from __future__ import annotations

import copy
import functools
import json
import math
import os
import random

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.bounds import analyse
from lipdp.planning.plan import PrivacyPlan
from lipdp.planning.settings import clipped_rounding, has_convolutions, proved_rounding, slack_of
from lipdp.privacy import AdaptiveClip, PrivateRun, Release, run_epsilon
from lipdp.training.query import Sample

from ..hostile import all_edits, at, places, put, refused_or
from ..training.common import free, planned, small

LOSS = losses.CrossEntropy(tau=4.0)


def clipping_model():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((6,)),
        nn.SpectralLinear(6, 8),
        nn.GroupSort(2),
        nn.ClipGradient(0.8),
        nn.SpectralLinear(8, 3, bias=False),
        nn.ClipGradient(0.5, adaptive=True),
    )


def standardised():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((6,)), nn.Standardize(6, radius=1.0), nn.BoundedInput((6,)), torch.nn.Linear(6, 3), nn.ClipGradient(0.5)
    )


def half_proved():
    torch.manual_seed(0)
    return nn.Sequential(nn.BoundedInput((6,)), torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))


SCHEDULE = ((0.0, 1.0), (0.5, 0.5))
BOOKKEEPING = {"method": "bookkeeping", "max_grad_norm": 0.7}
CASES = {
    "proved": (free, {"allocation": "per_layer"}),
    "weighted": (small, {"allocation": {"1": 1.0, "3": 2.0}}),
    "changing": (
        clipping_model,
        {
            "clipping": lipdp.Clipping(adaptive=AdaptiveClip(quantile=0.5)),
            "schedule": lipdp.Schedule(SCHEDULE, ((0.0, 1.0), (0.75, 1.25)), {"1": 0.6}),
        },
    ),
    "statistics": (standardised, {"epsilon": 3.0, "statistics_budget": 0.1, "releases": (Release("mean", "pure", 0.1),)}),
    "clipped": (
        half_proved,
        {**BOOKKEEPING, "clipping": lipdp.Clipping(adaptive=AdaptiveClip()), "schedule": lipdp.Schedule(SCHEDULE)},
    ),
    "by layer": (
        half_proved,
        {**BOOKKEEPING, "clipping": lipdp.Clipping(style="per_layer", clip="automatic"), "allocation": "optimal"},
    ),
    "mixed": (half_proved, {"method": "mixed", "max_grad_norm": 0.7, "clipping": lipdp.Clipping(clipped=["1"])}),
    "ghost": (half_proved, {"method": "ghost", "max_grad_norm": 0.7, "accountant": "pld"}),
    "truncated": (small, {"sampling": "truncated_poisson", "largest_batch": 70, "accountant": "pld"}),
    "fixed size": (small, {"sampling": "fixed_size", "adjacency": "replace_one", "accountant": "rdp"}),
}


@functools.cache
def case(name):
    make, settings = CASES[name]
    model = make()
    return model, planned(model, LOSS, **settings)


def engine_for(model, text):
    own = copy.deepcopy(model)
    plan = PrivacyPlan.from_json(text)
    return lipdp.PrivacyEngine(own, copy.deepcopy(LOSS), torch.optim.SGD(own.parameters(), lr=0.1), plan, seed=0)


def real_multiplier(engine, settings, original):
    """σ of a step with this noise, from the model as it is and the norms that are really clipped to."""
    plan, model = engine.plan, copy.deepcopy(engine.model)
    for name, module in model.named_modules():
        if isinstance(module, nn.ClipGradient):
            module.max_norm = settings.clips.get(name, module.max_norm)
    rows, proved = engine.microbatch_size, {}
    if any(group.source == "proved" for group in original.groups):
        found = analyse(model, LOSS, check=False)
        slack = slack_of(proved_rounding(found, original.precision, rows, convolutions=has_convolutions(model)))
        proved = {name: bound * slack for name, bound in found.sensitivities.items()}
    total = 0.0
    for group in original.groups:
        stds = {settings.stds[name] for name in group.parameters if name in settings.stds}
        if not stds:
            continue
        assert len(stds) == 1
        if group.source == "proved":
            bound = proved[group.name]
        else:
            bound = settings.clips.get(group.name, {g.name: g.sensitivity for g in plan.groups}[group.name])
            bound *= slack_of(clipped_rounding(original.method, original.precision, rows))
        assert bound > 0
        total += (bound / stds.pop()) ** 2
    if plan.adaptive_clips:
        total += len(plan.adaptive_clips) * (0.5 / settings.count_std) ** 2
    return 1 / math.sqrt(total)


def check_contribution(engine, settings):
    """What one loud record adds, group by group, is within the bounds that the noise is for."""
    draw = torch.Generator().manual_seed(1)
    x, y = 100 * torch.randn(1, 6, generator=draw), torch.zeros(1, dtype=torch.long)
    bounds = engine._run.query.bounds(settings.clips)
    trained = {name: p for name, p in engine.model.named_parameters() if name in settings.stds}
    answer = engine._run.query.ask(trained, Sample(x, y, 4, torch.device("cpu")), settings.clips)
    for group in engine.plan.groups:
        parts = [answer.sums[name].norm() for name in group.parameters if name in answer.sums]
        size = math.hypot(*map(float, parts))
        assert size <= bounds[group.name] * (1 + 1e-4), (group.name, size, bounds[group.name])


def harmless(original, engine):
    plan = engine.plan
    segments = []
    ends = [*(phase.start for phase in plan.phases[1:]), plan.steps]
    for phase, end in zip(plan.phases, ends, strict=True):
        settings = engine._run.mechanism.at(phase.start)
        segments.append((real_multiplier(engine, settings, original), end - phase.start))
        check_contribution(engine, settings)
    statistics = [Release(r.name, "gaussian" if r.name == "statistics" else r.kind, r.amount) for r in plan.releases]
    real = PrivateRun(plan.batch_size / plan.dataset_size, tuple(segments), tuple(statistics), plan.sampler)
    quick = plan.adjacency == "add_remove" and plan.sampling == "poisson"
    spent = run_epsilon(real, plan.delta, "rdp" if quick or plan.sampling == "fixed_size" else "pld", plan.adjacency)
    if plan.accountant == "pld" and spent > plan.epsilon:
        spent = run_epsilon(real, plan.delta, "pld", plan.adjacency)
    assert spent <= plan.epsilon * (1 + 1e-5), (spent, plan.epsilon)
    assert engine.ledger.planned_epsilon >= spent * (1 - 1e-5)
    assert str(plan)
    rows = plan.batch_size if plan.sampling == "fixed_size" else 5
    for _ in range(2):  # it runs, or says why it does not
        engine.step(torch.randn(rows, 6), torch.zeros(rows, dtype=torch.long), sample="own")


def run_case(name):
    model, plan = case(name)
    content = json.loads(plan.to_json())
    outcomes = {"refused": 0, "harmless": 0}
    failures = []
    for what, edited in all_edits(content, 1, seed=sorted(CASES).index(name)):
        try:
            outcomes[refused_or(what, lambda c: engine_for(model, json.dumps(c)), edited, functools.partial(harmless, plan))] += 1
        except AssertionError as error:
            failures.append(f"{what}: {error}")
    assert not failures, f"{len(failures)} of {sum(outcomes.values()) + len(failures)}:\n" + "\n".join(failures[:40])
    return outcomes


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_edited_plans_are_refused_or_harmless(name):
    outcomes = run_case(name)
    print(name, outcomes)
    assert outcomes["refused"] > 0


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_several_edits_at_once(name):
    """Fields that belong together, changed together, by factors that could be meant: what one check misses another has to see."""
    model, plan = case(name)
    content = json.loads(plan.to_json())
    draw = random.Random(sorted(CASES).index(name))
    numbers = [path for path in places(content) if type(at(content, path)) in (int, float) and path != ("format",)]
    count = 400 if os.environ.get("LIPDP_HOSTILE") == "all" else 6
    for _ in range(count):
        edited = content
        # All fields of one name are changed by one factor: noise and sensitivities of every group, say.
        for field in draw.sample(sorted({path[-1] for path in numbers if isinstance(path[-1], str)}), 3):
            factor = draw.choice((0.5, 0.9, 1.1, 2.0, 10.0))
            for path in numbers:
                if path[-1] == field:
                    value = at(content, path) * factor
                    edited = put(edited, path, round(value) if isinstance(at(content, path), int) else value)
        refused_or(f"{name}", lambda c: engine_for(model, json.dumps(c)), edited, functools.partial(harmless, plan))


@pytest.mark.parametrize("name", CASES)
def test_the_harness_accepts_the_plan_as_it_is(name):
    model, plan = case(name)
    harmless(plan, engine_for(model, plan.to_json()))
