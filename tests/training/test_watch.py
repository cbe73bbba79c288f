"""What holds from one step to the next: nothing that the bounds rest on changes unnoticed, at whatever moment it changes."""

from __future__ import annotations

import pytest
import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.training.watch import ModelWatch, Projection

from .common import Spy, empty, engine_of, small, toy


def nested():
    torch.manual_seed(0)
    inner = torch.nn.Sequential(nn.SpectralLinear(6, 6, bias=False), nn.GroupSort(2))
    return nn.Sequential(nn.BoundedInput((6,)), nn.Residual(inner), nn.Normalize(0.0, 2.0), nn.SpectralLinear(6, 3, bias=False))


def replace_inside(model):
    model[1].module[0] = nn.SpectralLinear(6, 6, bias=False)


def append_inside(model):
    model[1].module.append(torch.nn.Identity())


def remove_inside(model):
    del model[1].module[1]


def swap_inside(model):
    model[1].module = torch.nn.Sequential(*reversed(list(model[1].module)))


def use_twice(model):
    model[1].module[1] = model[1].module[0]


def share(model):
    model[3].weight = model[1].module[0].weight


def freeze_inside(model):
    model[1].module[0].weight.requires_grad_(False)


def add_a_parameter(model):
    model[1].register_parameter("extra", torch.nn.Parameter(torch.zeros(1)))


@pytest.mark.parametrize(
    "change", [replace_inside, append_inside, remove_inside, swap_inside, use_twice, share, freeze_inside, add_a_parameter]
)
def test_the_structure_is_looked_at_down_to_the_last_layer(change):
    model = nested()
    engine = engine_of(model)
    engine.step(*empty())
    change(model)
    with pytest.raises(ConfigurationError, match="new engine"):
        engine.step(*empty())
    assert engine.steps == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m[1].module[0].weight.data.mul_(1.5),
        lambda m: m[2].std.mul_(0.5),
        lambda m: m[2].register_buffer("std", 0.5 * m[2].std),
        lambda m: setattr(m[0], "norm", 0.5),
    ],
)
def test_values_buffers_and_settings_are_compared_in_every_step(change):
    model = nested()
    watch = ModelWatch(model)
    watch.remember()
    assert not watch.changed
    watch.remember_values()
    assert not watch.changed
    change(model)
    assert watch.changed
    watch.remember()
    assert not watch.changed


def test_a_setting_that_changes_during_a_step_is_noticed_in_the_next():
    """After a step the settings of its beginning count as proved, not those that it left behind."""
    model = small(clip=0.1)

    class Meddling(Spy):
        def step(self, closure=None):
            model[0].norm = 3.0
            return super().step(closure)

    engine = engine_of(model, None, Meddling(model))
    engine.step(*toy(20).tensors)
    with pytest.raises(ConfigurationError, match="another model"):
        engine.step(*toy(20).tensors)
    assert engine.steps == 1


def test_modes_are_put_back():
    model = small(dropout=0.5)
    model[2].eval()
    watch = ModelWatch(model)
    model.eval()
    model[2].train()
    watch.restore_modes()
    assert [module.training for module in model] == [True, True, False, True, True]
    assert model.training


def test_weights_without_a_constraint_are_left_alone_and_others_are_not():
    plain, bound = torch.nn.Linear(3, 3), nn.Sequential(torch.nn.Sequential(nn.SpectralLinear(3, 3)))
    with torch.no_grad():
        plain.weight.mul_(50)
        bound[0][0].weight.mul_(50)
    before = plain.weight.detach().clone()
    for model in (plain, bound):
        Projection(model)()
    assert torch.equal(plain.weight, before)
    assert float(torch.linalg.matrix_norm(bound[0][0].weight.detach(), 2)) <= 1
