"""Whatever schedule a plan accepts, its engine accepts and runs to the end; also after the plan went through a file."""

from __future__ import annotations

import copy
import math
import os

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import lipdp
from lipdp import Clipping, Schedule, nn
from lipdp.errors import ConfigurationError, LipdpError
from lipdp.parametrize import Cayley
from lipdp.planning.phases import make_phases
from lipdp.privacy import AdaptiveClip, PrivateRun, effective_multiplier, run_epsilon

from .common import engine_of, planned, small, toy

_FACTORS = st.one_of(st.floats(0.05, 20), st.sampled_from([1.0, 1, 2, np.float32(0.5), 1e-3, 1e3]))


@st.composite
def _schedules(draw):
    points = sorted(
        draw(st.sets(st.one_of(st.floats(1e-6, 0.999), st.sampled_from([0.2, 0.5, 0.75, np.float16(0.1)])), max_size=4))
    )
    return ((0, 1), *((fraction, draw(_FACTORS)) for fraction in points))


def _model(kind):
    torch.manual_seed(0)
    last = nn.ClipGradient(0.3, adaptive=kind == "adaptive")
    constrained = nn.SpectralLinear(6, 8, constraint=Cayley() if kind == "map" else None)
    hidden = torch.nn.Linear(6, 8) if kind == "mixed" else constrained
    tail = torch.nn.Linear(8, 3) if kind == "mixed" else nn.SpectralLinear(8, 3, bias=False)
    return nn.Sequential(nn.BoundedInput((6,)), hidden, nn.GroupSort(2), tail, last)


def _options(kind):
    clipped = {"method": "bookkeeping", "max_grad_norm": 0.5}
    return {
        "clipless": {},
        "map": {"allocation": "per_layer"},
        "adaptive": {"clipping": Clipping(adaptive=AdaptiveClip(0.5))},
        "mixed": {"method": "mixed", "max_grad_norm": 0.5},
        "flat": clipped,
        "per_layer": {**clipped, "clipping": Clipping(style="per_layer"), "allocation": "optimal"},
        "quantile": {**clipped, "clipping": Clipping(adaptive=AdaptiveClip(0.5))},
    }[kind]


@settings(max_examples=int(os.environ.get("LIPDP_SCHEDULES", "12")), deadline=None)
@given(
    kind=st.sampled_from(["clipless", "map", "adaptive", "mixed", "flat", "per_layer", "quantile"]),
    steps=st.integers(1, 6),
    clip=st.none() | _schedules(),
    noise=st.none() | _schedules(),
    freeze=st.none() | st.dictionaries(st.sampled_from(["1", "1.weight", "3", "3.weight"]), st.floats(0.01, 0.99), max_size=2),
)
def test_what_a_plan_accepts_runs(kind, steps, clip, noise, freeze):
    model = _model(kind)
    try:
        plan = planned(model, steps=steps, schedule=Schedule(clip, noise, freeze), **_options(kind))
    except ConfigurationError as refusal:
        if not any(known in str(refusal) for known in ("nothing to train", "no finite epsilon")):
            raise
        assume(False)
    assert plan.phases[0] == lipdp.planning.phases.Phase(0)
    read = lipdp.PrivacyPlan.from_json(plan.to_json())
    assert read == plan
    engine = engine_of(copy.deepcopy(model), read)
    multipliers = []
    for batch in engine.batches(toy()):
        stds, factor = engine.noise_stds, plan.phase(engine.steps).noise
        bounds = engine._run.mechanism.query.bounds(engine.clipping)
        live = {group.name: group for group in plan.groups if any(name in stds for name in group.parameters)}
        found = {name: next(stds[p] for p in group.parameters if p in stds) for name, group in live.items()}
        real = effective_multiplier({name: bounds[name] * plan.slack for name in live}, found)
        if plan.adaptive is not None:  # the counts of the step belong to it
            counts = len(plan.adaptive_clips) * (0.5 / (plan.adaptive.count_noise * factor)) ** 2
            real = (real**-2 + counts) ** -0.5
        multipliers.append(real)
        engine.step(*batch)
    assert engine.steps == steps
    assert engine.epsilon <= plan.epsilon * (1 + 1e-9)
    # What was really done, step by step, costs what the plan says.
    run = PrivateRun(plan.sampling_rate, tuple((sigma, 1) for sigma in multipliers))
    assert run_epsilon(run, plan.delta, "rdp") <= plan.epsilon * (1 + 1e-6)


def test_a_change_near_the_start_leaves_the_first_step_as_planned():
    plan = planned(small(clip=0.3), steps=2, schedule=Schedule(((0, 1), (0.01, 2.0)), ((0, 1), (0.2, 1.5))))
    assert [(p.start, p.noise, p.clip) for p in plan.phases] == [(0, 1.0, 1.0), (1, 1.5, 2.0)]
    assert [(p.start, p.noise) for p in make_phases(3, ["a"], noise=((0, 1), (0.1, 2), (0.2, 3), (0.99, 4)))] == [(0, 1), (1, 3)]
    assert len(make_phases(1, ["a"], noise=((0, 1), (0.2, 1.5)), clip=((0, 1), (0.9, 2)), freeze={"a": 0.5})) == 1


def test_a_schedule_may_be_a_generator_and_hold_numbers_of_numpy():
    pairs = ((0.0, 1.0), (0.5, 2.0))
    once = planned(small(), epsilon=2.0, schedule=Schedule(noise=(pair for pair in pairs)))
    assert once == planned(small(), epsilon=2.0, schedule=Schedule(noise=pairs))
    assert len(once.phases) == 2
    typed = planned(
        small(clip=0.3),
        steps=70_000,
        noise_multiplier=np.float32(20.0),
        delta=np.float32(1e-4),
        schedule=Schedule(((np.float16(0), np.float16(1)), (np.float16(0.9), np.float16(0.5)))),
    )
    assert typed.phases[1].start == round(float(np.float16(0.9)) * 70_000)
    assert lipdp.PrivacyPlan.from_json(typed.to_json()) == typed


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"clip_schedule": ((0, 1), (0.5, 1e-60))}, "phase"),
        ({"clip_schedule": ((0, 1), (0.5, 1e-320))}, "phase"),
        ({"clip_schedule": ((0, 1), (0.5, 1e308))}, "phase"),
        ({"clip_schedule": ((0, 1), (0.5, 1e50))}, "phase"),
        ({"noise_schedule": ((0, 1), (0.5, 1e60))}, "phase"),
        ({"clip_schedule": 0.5}, "pairs"),
        ({"noise_schedule": "cosine"}, "pairs"),
        ({"noise_schedule": {0: 1, 0.5: 2}}, "pairs"),
        ({"freeze": ("1",)}, "mapping"),
    ],
)
@pytest.mark.parametrize("method", ["clipless", "bookkeeping"])
def test_what_would_fail_on_the_way_is_refused_when_planning(options, text, method):
    clipped = {} if method == "clipless" else {"method": method, "max_grad_norm": 0.5}
    with pytest.raises(ConfigurationError, match=text):
        planned(small(clip=0.3), **options, **clipped)


@pytest.mark.parametrize("factor", ["1e309", "1e308", "-1.0", "0.0"])
def test_an_engine_looks_at_every_phase_of_a_plan(factor):
    """A plan from a file whose later phase has no meaning is refused before the first step, not when it comes to it."""
    options = {"method": "bookkeeping", "max_grad_norm": 20.0, "schedule": Schedule(((0, 1), (0.5, 0.5)))}
    plan = planned(small(), **options)
    text = plan.to_json().replace('"clip": 0.5', f'"clip": {factor}')
    assert text != plan.to_json()
    with pytest.raises(LipdpError):
        engine_of(small(), lipdp.PrivacyPlan.from_json(text))


@pytest.mark.parametrize("stability", [-1.0, 0.0, math.nan, "a"])
def test_a_stability_without_meaning_is_refused_when_planning(stability):
    with pytest.raises(ConfigurationError, match="stability"):
        planned(small(), method="bookkeeping", max_grad_norm=0.5, clipping=Clipping(clip="automatic", stability=stability))
