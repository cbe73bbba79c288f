"""What the engine refuses and what it puts right: forged plans, changed models, optimisers, budgets, modes."""

from __future__ import annotations

import copy
import dataclasses
import json

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.errors import BudgetError, ConfigurationError, DataError, LipdpWarning
from lipdp.planning.plan import PrivacyPlan

from .common import BATCH, Spy, empty, engine_of, first_gradient, free, planned, same, small, toy, weights


def norms(model):
    return [float(torch.linalg.matrix_norm(p.detach().double(), 2)) for p in model.parameters() if p.ndim == 2]


# ------------------------------------------------------------------------------------------------------ forged plans


def forged(plan, group=None, **changes):
    """The plan after a round trip through JSON in which somebody edited it."""
    content = json.loads(plan.to_json())
    content.update(changes)
    for row in content["groups"]:
        for field, factor in (group or {}).items():
            row[field] *= factor
    return PrivacyPlan.from_json(json.dumps(content))


def test_an_honest_copy_is_accepted():
    engine_of(small(), forged(planned(small())))


@pytest.mark.parametrize("allocation", ["global", "per_layer", "optimal"])
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        ({"group": {"sensitivity": 0.999}}, "sensitivity"),
        ({"group": {"noise_std": 0.999}}, "noise"),
        ({"group": {"noise_std": 0.0}}, "noise"),
        ({"epsilon": 0.1}, "cost epsilon"),
        ({"noise_multiplier": 1.01}, "noise"),
        ({"steps": 13}, "cost epsilon"),
        ({"batch_size": BATCH + 1}, "cost epsilon"),
        ({"dataset_size": 200}, "cost epsilon"),
        ({"delta": 1e-6}, "cost epsilon"),
        ({"adjacency": "replace_one", "accountant": "pld"}, "cost epsilon"),
        ({"slack": 1.0}, "slack"),
        ({"precision": "bfloat16"}, "slack"),
        ({"loss": "CrossEntropy(tau=1.0)"}, "loss"),
    ],
)
def test_a_forged_plan_is_refused(edit, message, allocation):
    model = free()
    with pytest.raises(ConfigurationError, match=message):
        engine_of(model, forged(planned(model, allocation=allocation), **edit))


def test_less_noise_on_one_group_only_is_refused():
    model = free()
    plan = planned(model)
    groups = (dataclasses.replace(plan.groups[0], noise_std=0.5 * plan.groups[0].noise_std), *plan.groups[1:])
    with pytest.raises(ConfigurationError, match="multiplier"):
        engine_of(model, dataclasses.replace(plan, groups=groups))


def test_one_group_for_two_parameters_does_not_hide_a_sensitivity():
    model = free()
    plan = planned(model)
    worst = max(plan.groups, key=lambda g: g.sensitivity)
    merged = dataclasses.replace(worst, parameters=tuple(plan.sensitivities), noise_std=worst.sensitivity * plan.slack)
    others = [dataclasses.replace(g, parameters=()) for g in plan.groups if g is not worst]
    with pytest.raises(ConfigurationError, match="a proved group is one parameter"):
        engine_of(model, dataclasses.replace(plan, groups=(merged, *others)))


def test_a_plan_of_another_model_or_loss_is_refused():
    plan = planned(small())
    wide = nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 10), nn.GroupSort(2), nn.SpectralLinear(10, 3, bias=False))
    for other in (wide, free()):
        with pytest.raises(ConfigurationError, match="another model"):
            engine_of(other, plan)
    louder = copy.deepcopy(small())
    louder[0].norm = 2.0
    with pytest.raises(ConfigurationError, match="another model"):
        engine_of(louder, plan)
    for loss in (losses.CrossEntropy(tau=8.0), losses.CrossEntropy(tau=4.0, scaled=False), losses.MulticlassHinge()):
        with pytest.raises(ConfigurationError, match="loss"):
            lipdp.PrivacyEngine(small(), loss, Spy(small()), plan)


def test_a_clip_other_than_the_planned_one():
    plan = planned(small(clip=0.1))
    with pytest.raises(ConfigurationError, match="another model"):
        engine_of(small(clip=0.2), plan)
    engine_of(small(clip=0.05), plan)  # less sensitive than planned: sound


def test_a_model_in_a_mode_that_was_not_planned():
    model = small(dropout=0.5)
    plan = planned(model.eval())
    with pytest.raises(ConfigurationError, match="another model"):
        engine_of(model.train(), plan)


# --------------------------------------------------------------------------------- models changed behind its back


def test_weights_changed_between_steps_are_projected_before_the_next_one():
    for change in (
        lambda p: p.data.mul_(50),
        lambda p: p.detach().add_(3.0),
        lambda p: torch.nn.init.constant_(p, 5.0),
    ):
        model = small()
        engine = engine_of(model)
        engine.step(*toy(20).tensors, sample="own")
        change(model[1].weight)
        change(model[1].bias)
        assert max(norms(model)) > 1.5
        seen = []
        ask = engine._run.query.ask
        engine._run.query.ask = lambda *a: seen.append((max(norms(model)), float(model[1].bias.detach().norm()))) or ask(*a)  # noqa: B023
        engine.step(*toy(20).tensors, sample="own")
        assert seen[0][0] <= 1 + 1e-6
        assert seen[0][1] <= 0.1 + 1e-6


def test_a_state_loaded_into_the_model_is_projected_before_the_next_step():
    model = small()
    plan, pretrained = planned(model), {k: 10 * v for k, v in small(seed=4).state_dict().items()}
    engine = engine_of(model, plan)
    model.load_state_dict(pretrained)
    x, y = toy(200).tensors
    engine.step(x, y, sample="own")
    noise = engine_of(copy.deepcopy(model), plan)
    assert max(norms(noise.model)) <= 1
    for name, gradient in engine.optimizer.seen[0].items():
        bound = (200 * plan.sensitivities[name] + 6 * plan.noise_stds[name] * gradient.numel() ** 0.5) / BATCH
        assert float(gradient.norm()) < bound


def test_after_a_failed_optimiser_step_weights_are_projected_first():
    model = small()
    engine = engine_of(model)

    class CrashError(RuntimeError):
        pass

    def half_done(closure=None):
        with torch.no_grad():
            model[3].weight.mul_(100)
        raise CrashError

    original, engine.optimizer.step = engine.optimizer.step, half_done
    with pytest.raises(CrashError):
        engine.step(*empty(), sample="own")
    assert engine.steps == 1  # spent
    engine.optimizer.step = original
    before = engine.plan.sensitivities["1.weight"]
    engine.step(*toy(1).tensors, sample="own")
    assert max(norms(model)) <= 1
    gradient = engine.optimizer.seen[-1]["1.weight"] * BATCH
    assert float(gradient.norm()) < before + 8 * engine.plan.noise_stds["1.weight"] * gradient.numel() ** 0.5


def test_settings_of_layers_that_loosen_a_bound_are_noticed():
    changes = {
        "norm": lambda m: setattr(m[0], "norm", 3.0),
        "dropout": lambda m: setattr(m[3], "p", 0.9),
        "clip": lambda m: setattr(m[5], "max_norm", 1.0),
        "bias": lambda m: setattr(m[1], "bias_norm", 5.0),
    }
    for name, change in changes.items():
        model = small(dropout=0.5, clip=0.1)
        engine = engine_of(model)
        engine.step(*empty(), sample="own")
        change(model)
        with pytest.raises(ConfigurationError, match="another model"):
            engine.step(*empty(), sample="own")
        assert engine.steps == 1, name
    model = small(clip=0.1)
    engine = engine_of(model)
    model[4].max_norm = 0.05  # tighter: sound, and allowed
    engine.step(*empty(), sample="own")


def test_layers_and_parameters_may_not_be_replaced():
    def replace_layer(m):
        m[3] = torch.nn.Linear(8, 3, bias=False)

    def replace_weight(m):
        m[3].weight = torch.nn.Parameter(m[3].weight.detach().clone())

    def freeze(m):
        m[3].requires_grad_(False)

    def append(m):
        m.append(torch.nn.Identity())

    for change in (replace_layer, replace_weight, freeze, append):
        model = small()
        engine = engine_of(model)
        engine.step(*empty(), sample="own")
        change(model)
        with pytest.raises(ConfigurationError, match="new engine"):
            engine.step(*empty(), sample="own")
        assert engine.steps == 1
    model = small()
    model[3].requires_grad_(False)
    engine = engine_of(model)
    model[3].requires_grad_(True)
    with pytest.raises(ConfigurationError, match="new engine"):
        engine.step(*empty(), sample="own")


def test_a_frozen_layer_whose_norm_grows_is_noticed():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 6, bias=False), torch.nn.Linear(6, 3))
    model[2].requires_grad_(False)
    engine = engine_of(model)
    engine.step(*empty(), sample="own")
    model[2].weight.mul_(2.0)
    with pytest.raises(ConfigurationError, match="another model"):
        engine.step(*empty(), sample="own")


def test_frozen_parameters_are_neither_noised_nor_changed():
    model = small()
    model[1].requires_grad_(False)
    plan = planned(model)
    assert set(plan.sensitivities) == {"3.weight"}
    for optimizer in (torch.optim.SGD(model.parameters(), lr=1.0), torch.optim.AdamW(model.parameters(), lr=0.1)):
        engine = engine_of(model, plan, optimizer)
        before, trained = weights(model[1]), weights(model[3])
        for _ in range(5):
            engine.step(*toy(20).tensors, sample="own")
        assert same(weights(model[1]), before)
        assert not same(weights(model[3]), trained)
    model = small()
    model[1].weight.requires_grad_(False)  # its bias is trained
    engine = engine_of(model, None, torch.optim.SGD(model.parameters(), lr=1.0))
    before = weights(model)
    for _ in range(5):
        engine.step(*toy(20).tensors, sample="own")
    assert torch.equal(model[1].weight, before["1.weight"])
    assert not torch.equal(model[1].bias, before["1.bias"])


def test_images_of_another_size_are_refused():
    """Without a BoundedInput nothing else would look: on a larger image the bias has a larger gradient than was proved."""

    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bound = nn.Boundary(norm=1.0)
            self.conv = nn.SpectralConv2d(1, 4, 3, padding=1)

        def forward(self, x):
            return self.conv(self.bound(x)).flatten(2).sum(2)

    model = Mean()
    plan = planned(model, input_shape=(1, 4, 4))
    engine = engine_of(model, plan, input_shape=(1, 4, 4))
    engine.step(torch.randn(5, 1, 4, 4), torch.arange(5) % 3, sample="own")
    with pytest.raises(DataError, match="shape"):
        engine.step(torch.randn(5, 1, 16, 16), torch.arange(5) % 3)
    assert engine.steps == 1


# -------------------------------------------------------------------------------------------------------- constraints


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=30.0, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=5.0),
        lambda p: torch.optim.AdamW(p, lr=5.0, weight_decay=0.1),
        lambda p: torch.optim.Adagrad(p, lr=1.0),
        lambda p: torch.optim.RMSprop(p, lr=1.0),
        lambda p: torch.optim.Adadelta(p),
        lambda p: torch.optim.NAdam(p, lr=0.1),
    ],
)
def test_any_optimiser_keeps_weights_inside_after_every_step(make):
    model = small()
    optimizer = make(model.parameters())
    engine = engine_of(model, planned(model, steps=25), optimizer, ema_decay=0.9)
    start = weights(model)
    for batch in engine.batches(toy()):
        engine.step(*batch)
        assert max(norms(model)) <= 1
        assert float(model[1].bias.detach().double().norm()) <= 0.1
    assert not same(start, weights(model))
    with engine.averaged() as averaged:
        assert max(norms(averaged)) <= 1
    engine.use_average()
    assert max(norms(model)) <= 1


def test_the_engine_projects_at_once():
    model = small()
    with torch.no_grad():
        model[1].weight.mul_(9)
    engine_of(model)
    assert max(norms(model)) <= 1


def test_diverged_weights_are_an_error_and_the_step_is_spent():
    model = small()
    engine = engine_of(model, None, torch.optim.SGD(model.parameters(), lr=float("inf")))
    with pytest.raises(ConfigurationError, match="not finite"):
        engine.step(*empty(), sample="own")
    assert engine.steps == 1


def test_lbfgs_is_refused():
    model = small()
    with pytest.raises(ConfigurationError, match="LBFGS"):
        engine_of(model, None, torch.optim.LBFGS(model.parameters()))


def test_foreign_parameters_are_refused():
    model, other = small(), small()
    for parameters in (other.parameters(), [*model.parameters(), *other.parameters()]):
        with pytest.raises(ConfigurationError, match="not the model's"):
            engine_of(model, None, torch.optim.SGD(parameters, lr=0.1))


def test_parameters_that_the_optimiser_leaves_out_warn():
    model = small()
    with pytest.warns(LipdpWarning, match=r"1\.weight"):
        engine_of(model, None, torch.optim.SGD(model[3].parameters(), lr=0.1))


# ------------------------------------------------------------------------------------------------------------- budget


def test_a_step_beyond_the_plan_is_refused_and_changes_nothing():
    model = small()
    engine = engine_of(model, planned(model, steps=3), torch.optim.Adam(model.parameters(), lr=0.1), ema_decay=0.5)
    for _ in range(3):
        engine.step(*toy(20).tensors, sample="own")
    before, state = weights(model), engine.state_dict()
    assert engine.epsilon == engine.plan.epsilon
    for _ in range(2):
        with pytest.raises(BudgetError, match="3 steps"):
            engine.step(*toy(20).tensors, sample="own")
    assert engine.steps == 3
    assert engine.epsilon == engine.plan.epsilon
    assert same(before, weights(model))
    assert str(engine.state_dict()) == str(state)
    assert list(engine.batches(toy())) == []


@pytest.mark.parametrize(("accountant", "adjacency"), [("pld", "add_remove"), ("pld", "replace_one"), ("rdp", "add_remove")])
def test_epsilon_grows_with_the_steps_to_exactly_the_plans(accountant, adjacency):
    model = small()
    plan = planned(model, noise_multiplier=2.0, steps=5, accountant=accountant, adjacency=adjacency)
    engine = engine_of(model, plan)
    spent = [engine.epsilon]
    for batch in engine.batches(toy()):
        engine.step(*batch)
        spent.append(engine.epsilon)
    assert spent[0] == 0.0
    assert spent == sorted(set(spent))
    assert spent[-1] == plan.epsilon
    run = {"noise_multiplier": plan.noise_multiplier, "sampling_rate": plan.sampling_rate, "delta": plan.delta}
    for steps in (1, 4, 5):
        assert spent[steps] == lipdp.privacy.epsilon(steps=steps, accountant=accountant, adjacency=adjacency, **run)


def test_an_error_in_the_optimiser_spends_the_step_and_one_before_it_does_not():
    model = small()
    engine = engine_of(model)
    with pytest.raises(DataError):
        engine.step(torch.zeros(3, 7), torch.zeros(3, dtype=torch.long))
    with pytest.raises(DataError):
        engine.step(torch.zeros(3, 6), torch.full((3,), 9), sample="own")  # no such class
    assert engine.steps == 0

    def fail(closure=None):
        raise RuntimeError("out of memory")

    engine.optimizer.step = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step(*empty(), sample="own")
    assert engine.steps == 1
    assert engine.epsilon > 0


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.zeros(3, 6), torch.zeros(2, dtype=torch.long)),
        (torch.zeros(3, 7), torch.zeros(3, dtype=torch.long)),
        (torch.zeros(3, 2, 3), torch.zeros(3, dtype=torch.long)),
        (torch.zeros(6), torch.zeros(6, dtype=torch.long)),
        (torch.zeros(()), torch.zeros(())),
        (torch.zeros(3, 6), torch.zeros(3)),
        (torch.zeros(3, 6), torch.zeros(3, 1, dtype=torch.long)),
        ([[0.0] * 6], [1]),
    ],
)
def test_batches_that_do_not_fit_are_errors_that_cost_nothing(inputs, targets):
    engine = engine_of(small())
    before = weights(engine.model)
    with pytest.raises(DataError):
        engine.step(inputs, targets, sample="own")
    assert engine.steps == 0
    assert same(before, weights(engine.model))


def test_types_that_can_not_be_converted_are_errors_that_cost_nothing():
    """Others are converted: tests/test_dtypes.py."""
    engine = engine_of(small())
    x, y = torch.ones(3, 6), torch.arange(3)
    for inputs, targets in ((x.to(torch.complex64), y), (x.to_sparse(), y), (x, y.to(torch.complex64)), (x, y.double())):
        with pytest.raises(DataError):
            engine.step(inputs, targets, sample="own")
    assert engine.steps == 0


@pytest.mark.parametrize("seed", [1.5, "7", True, -1, [1]])
def test_seeds_are_whole_numbers(seed):
    with pytest.raises(ConfigurationError, match="seed"):
        engine_of(small(), seed=seed)


@pytest.mark.parametrize("size", [0, -3, 2.5, "all"])
def test_microbatch_sizes_are_whole_numbers(size):
    with pytest.raises(ConfigurationError, match="microbatch_size"):
        engine_of(small(), microbatch_size=size)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 2.0])
def test_average_decays_lie_below_one(decay):
    with pytest.raises(ConfigurationError, match="ema_decay"):
        engine_of(small(), ema_decay=decay)


# -------------------------------------------------------------------------------------------------------------- modes


def test_the_mode_of_the_proof_is_the_mode_of_every_step():
    model = small(dropout=0.5)
    plan, batch = planned(model), toy(40).tensors
    expected = first_gradient(model, plan, batch)
    engine = engine_of(copy.deepcopy(model), plan)
    engine.model.eval()
    engine.step(*batch, sample="own")
    assert same(engine.optimizer.seen[0], expected)
    calm = copy.deepcopy(model).eval()
    engine = engine_of(calm, planned(calm))
    calm.train()
    engine.step(*batch, sample="own")
    assert not calm[3].training


def test_averaged_weights_come_and_go():
    model = small()
    engine = engine_of(model, None, torch.optim.SGD(model.parameters(), lr=1.0), ema_decay=0.9)
    with engine.averaged() as same_model:
        assert same_model is model
    steps = []
    for _ in range(5):
        engine.step(*toy(30).tensors, sample="own")
        steps.append(weights(model))
    average = steps[0]
    for number, step in enumerate(steps[1:], 1):
        decay = min(0.9, number / (number + 9))
        average = {name: decay * a + (1 - decay) * step[name] for name, a in average.items()}
    assert all(torch.allclose(engine.average.weights[name], a, atol=1e-6) for name, a in average.items())
    with engine.averaged() as inside:
        assert not same(weights(inside), steps[-1])
    assert same(weights(model), steps[-1])
    block = engine.averaged()
    block.__enter__()
    with pytest.raises(KeyError):
        block.gen.throw(KeyError())  # an error inside the block
    assert same(weights(model), steps[-1])
    engine.use_average()
    assert not same(weights(model), steps[-1])


def test_the_loss_may_be_torchs():
    model, loss = small(), torch.nn.CrossEntropyLoss(reduction="none")
    engine = engine_of(model, planned(model, loss), loss=loss)
    engine.step(*toy(20).tensors, sample="own")
    assert engine.steps == 1
