"""The plan: two of three, its table, its JSON, and everything it refuses."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lipdp
from lipdp import losses, nn, privacy
from lipdp.errors import BudgetError, ConfigurationError, LipdpError, LipdpWarning, UnsupportedError
from lipdp.planning.plan import ParameterGroup, PrivacyPlan
from lipdp.privacy.noise import grid_factor

from ..training.common import BATCH, SIZE, free, planned, small

Q = BATCH / SIZE


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_two_of_three(accountant):
    model, run = small(), {"sampling_rate": Q, "delta": 1e-4, "accountant": accountant}
    noise = planned(model, epsilon=2.0, epochs=3, accountant=accountant)
    assert noise.steps == 24
    assert noise.noise_multiplier == privacy.calibrate_noise(epsilon=2.0, steps=24, **run)
    assert 2.0 * 0.999 < noise.epsilon <= 2.0
    cost = planned(model, noise_multiplier=1.3, steps=7, accountant=accountant)
    assert cost.epsilon == privacy.epsilon(noise_multiplier=1.3, steps=7, **run)
    length = planned(model, epsilon=2.0, noise_multiplier=1.3, steps=None, accountant=accountant)
    assert length.steps == privacy.max_steps(epsilon=2.0, noise_multiplier=1.3, **run)
    assert length.epsilon <= 2.0 < privacy.epsilon(noise_multiplier=1.3, steps=length.steps + 1, **run)


def test_all_three_are_accepted_only_if_they_fit():
    assert planned(small(), epsilon=50.0, noise_multiplier=1.0, steps=3).epsilon < 50.0
    with pytest.raises(ConfigurationError, match=r"more than the 0\.5 asked for"):
        planned(small(), epsilon=0.5, noise_multiplier=0.5, steps=100)


@pytest.mark.parametrize("given_", [{}, {"epsilon": 1.0}, {"noise_multiplier": 1.0}, {"steps": 3}, {"epochs": 1.0}])
def test_one_of_three_is_too_little(given_):
    with pytest.raises(ConfigurationError, match="give two of"):
        lipdp.plan(small(), losses.CrossEntropy(), dataset_size=SIZE, batch_size=BATCH, delta=1e-4, **given_)


def test_epochs_round_up_to_whole_steps():
    assert planned(small(), epochs=2).steps == 16
    assert planned(small(), epochs=0.01).steps == 1
    assert planned(small(), epochs=1, dataset_size=100, batch_size=30, delta=1e-3).steps == 4


@pytest.mark.parametrize("allocation", ["global", "per_layer", "optimal"])
def test_noise_has_the_multiplier_that_is_accounted(allocation):
    plan = planned(free(), noise_multiplier=1.7, allocation=allocation)
    padded = {name: bound * plan.slack for name, bound in plan.sensitivities.items()}
    found = privacy.effective_multiplier(padded, plan.noise_stds)
    assert found == pytest.approx(1.7 * grid_factor(1.7, sum(g.size for g in plan.groups)), rel=1e-13)
    assert 1.7 * (1 + 1e-12) < found < 1.7 * (1 + 1e-10)
    assert plan.slack > 1
    assert plan.sensitivity == pytest.approx(math.hypot(*plan.sensitivities.values()))


def test_clipping_the_loss_gradient_lowers_the_noise():
    loose, tight = planned(small()), planned(small(clip=0.1))
    for name, std in tight.noise_stds.items():
        assert std / tight.slack == pytest.approx(loose.noise_stds[name] / loose.slack * 0.1 / math.sqrt(2), rel=1e-9)


def test_dropout_is_analysed_in_the_mode_of_the_model():
    model = small(dropout=0.5)
    training, evaluating = planned(model.train()), planned(model.eval())
    assert training.sensitivities["1.weight"] == pytest.approx(2 * evaluating.sensitivities["1.weight"])
    assert training.sensitivities["4.weight"] == pytest.approx(2 * evaluating.sensitivities["4.weight"])


def test_the_table_names_every_parameter_and_the_budget():
    model = free()
    text = str(planned(model, epsilon=2.5))
    for name, p in model.named_parameters():
        assert name in text
        assert f"{p.numel():,}" in text
    for word in ("2.5", "0.0001", "add", "RDP", "Poisson", "CrossEntropy", "proved", "global", "12 steps", "32", "256"):
        assert word in text
    assert "replacing one record" in str(planned(model, adjacency="replace_one", accountant="pld"))


def test_a_plan_is_frozen():
    plan = planned(small())
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.epsilon = 0.1
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.groups[0].noise_std = 0.0


def test_planning_leaves_the_model_and_the_random_state_alone():
    model = small(dropout=0.2)
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    planned(model)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training


POSITIVE = st.floats(1e-6, 1e6)


@settings(max_examples=60, deadline=None)
@given(
    sigma=POSITIVE,
    epsilon=POSITIVE,
    delta=st.floats(1e-12, 0.5),
    stds=st.lists(st.tuples(POSITIVE, POSITIVE, st.one_of(POSITIVE, st.just(math.inf))), min_size=1, max_size=4),
    name=st.text(min_size=1, max_size=5),
    steps=st.integers(1, 10**7),
    allocation=st.sampled_from(["global", "per_layer", "optimal"]),
    adjacency=st.sampled_from(["add_remove", "replace_one"]),
)
def test_json_gives_an_equal_plan(sigma, epsilon, delta, stds, name, steps, allocation, adjacency):
    groups = tuple(ParameterGroup(f"{name}{i}", (f"{name}{i}",), 7, a, "proved", b, c, 1.0) for i, (a, b, c) in enumerate(stds))
    plan = PrivacyPlan(
        "clipless", 100, 10, steps, sigma, epsilon, delta, allocation, adjacency, "pld", "tf32", 1.5, name, 1.0, math.inf, groups
    )
    assert PrivacyPlan.from_json(plan.to_json()) == plan
    json.loads(plan.to_json(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_json_of_real_plans():
    for plan in (planned(small()), planned(free(), allocation="optimal"), planned(small(), precision="bfloat16")):
        again = PrivacyPlan.from_json(plan.to_json())
        assert again == plan
        assert str(again) == str(plan)


@pytest.mark.parametrize("text", ["", "nonsense", "null", "3", "[]", '"text"', "{}", '{"format": 99}', '{"format": 1}'])
def test_garbage_is_no_plan(text):
    with pytest.raises(ConfigurationError):
        PrivacyPlan.from_json(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epsilon", "three"),
        ("epsilon", None),
        ("epsilon", float("nan")),
        ("noise_multiplier", -1.0),
        ("steps", 3.5),
        ("steps", 0),
        ("steps", True),
        ("batch_size", 10**6),
        ("delta", "x"),
        ("slack", 0.5),
        ("allocation", "mine"),
        ("adjacency", "none"),
        ("accountant", "me"),
        ("precision", "int8"),
        ("method", "trust me"),
        ("groups", []),
        ("groups", "abc"),
        ("groups", [{"name": "w"}]),
        ("unknown", 1),
    ],
)
def test_a_plan_with_a_bad_field_is_refused(field, value):
    content = json.loads(planned(small()).to_json())
    content[field] = value
    with pytest.raises(ConfigurationError):
        PrivacyPlan.from_json(json.dumps(content))


@pytest.mark.parametrize("field", ["sensitivity", "noise_std"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "0.1", None])
def test_a_group_with_a_bad_number_is_refused(field, value):
    content = json.loads(planned(small()).to_json())
    content["groups"][0][field] = value
    with pytest.raises(ConfigurationError):
        PrivacyPlan.from_json(json.dumps(content))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": math.nan}, "epsilon"),
        ({"epsilon": math.inf}, "epsilon"),
        ({"epsilon": "3"}, "epsilon"),
        ({"epsilon": True}, "epsilon"),
        ({"noise_multiplier": 0.0}, "noise_multiplier"),
        ({"noise_multiplier": math.nan}, "noise_multiplier"),
        ({"delta": 0.0}, "delta"),
        ({"delta": 1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"delta": "small"}, "delta"),
        ({"batch_size": SIZE + 1}, "larger than dataset_size"),
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.5}, "batch_size"),
        ({"dataset_size": 0}, "dataset_size"),
        ({"dataset_size": True}, "dataset_size"),
        ({"steps": 0}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"epochs": -1.0}, "epochs"),
        ({"epochs": math.nan}, "epochs"),
        ({"epochs": "2"}, "epochs"),
        ({"epochs": 1, "steps": 3}, "not both"),
        ({"method": "naive"}, "method"),
        ({"max_grad_norm": 1.0}, "max_grad_norm"),
        ({"allocation": "even"}, "allocation"),
        ({"adjacency": "swap"}, "adjacency"),
        ({"accountant": "moments"}, "accountant"),
        ({"precision": "float8"}, "precision"),
        ({"adjacency": "replace_one", "accountant": "rdp"}, "replace_one"),
    ],
)
def test_what_can_not_be_meant_is_refused(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        planned(small(), **changes)


def test_a_delta_above_one_over_the_size_warns():
    for delta in (1 / SIZE, 0.1):
        with pytest.warns(LipdpWarning, match="delta"):
            planned(small(), delta=delta)


def test_a_budget_too_small_for_one_step():
    with pytest.raises(BudgetError, match="one step"):
        planned(small(), epsilon=0.01, noise_multiplier=0.5, steps=None)


def test_an_infinite_cost_is_refused(monkeypatch):
    """There is a finite one for every noise and δ; an accountant that has none is not believed to have spent nothing."""
    assert planned(small(), noise_multiplier=1.0, steps=3, delta=1e-300).epsilon > 50
    monkeypatch.setattr("lipdp.planning.decide.run_epsilon", lambda *_: math.inf)
    with pytest.raises(LipdpError, match="epsilon"):
        planned(small(), noise_multiplier=1.0, steps=3)


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ConfigurationError, match="no trainable parameters"):
        planned(small().requires_grad_(False))
    with pytest.raises(ConfigurationError, match="no trainable parameters"):
        planned(nn.Sequential(nn.BoundedInput((6,)), nn.GroupSort(2)))


def test_losses_that_reduce_or_are_unknown_are_refused():
    with pytest.raises(ConfigurationError, match="none"):
        planned(small(), torch.nn.CrossEntropyLoss())
    with pytest.raises(UnsupportedError):
        planned(small(), torch.nn.NLLLoss(reduction="none"))
    assert planned(small(), torch.nn.CrossEntropyLoss(reduction="none")).loss_lipschitz == pytest.approx(math.sqrt(2))


def test_precision_never_promises_more_than_the_model_has():
    assert planned(small()).precision == "float32"
    assert planned(small(), precision="float64").precision == "float32"
    assert planned(small().double()).precision == "float64"
    coarse = planned(small(), precision="bfloat16")
    assert coarse.precision == "bfloat16"
    assert coarse.slack > 1.01 > planned(small()).slack
    assert coarse.noise_energy > planned(small()).noise_energy


def test_the_plan_says_which_bound_each_convolution_has_and_how_tight_it_is():
    from lipdp.parametrize import constraint

    front = nn.BoundedInput((2, 8, 8))
    convolutions = [
        nn.SpectralConv2d(2, 4, 3, padding=1),
        nn.FourierConv2d(4, 4, 3, padding=1),
        nn.SpectralConv2d(4, 4, 3, padding=1, padding_mode="circular", constraint=constraint.AOC()),
    ]
    model = nn.Sequential(front, *convolutions, nn.Flatten(), nn.SpectralLinear(256, 3))
    plan = planned(model)
    notes = dict(plan.notes)
    assert set(notes) == {"program", "1", "2", "3"}
    assert all(note in str(plan) for note in notes.values())
    assert len({note.split()[0] for note in notes.values()}) > 1  # not the same bound for all
    assert lipdp.PrivacyPlan.from_json(plan.to_json()).notes == plan.notes


def test_a_delta_below_what_the_noise_adds_is_refused():
    with pytest.raises(ConfigurationError, match="delta=1e-40"):
        planned(small(), epsilon=3.0, steps=3, delta=1e-40)


def test_arguments_in_groups_and_under_their_earlier_names():
    factors = ((0.0, 1.0), (0.5, 0.5))
    clipping = {"method": "bookkeeping", "max_grad_norm": 1.0}
    grouped = planned(
        small(), **clipping, clipping=lipdp.Clipping(style="per_layer"), schedule=lipdp.Schedule(clip=factors, freeze={"1": 0.5})
    )
    with pytest.warns(DeprecationWarning, match=r"clip_schedule= is schedule=lipdp.Schedule\(clip=…\)"):
        earlier = planned(small(), **clipping, clipping_style="per_layer", clip_schedule=factors, freeze={"1": 0.5})
    assert earlier == grouped
    with pytest.raises(TypeError, match="clip_shedule"):
        planned(small(), clip_shedule=factors)
    with pytest.raises(ConfigurationError, match=r"lipdp\.Clipping\(…\)"):
        planned(small(), clipping="per_layer")
