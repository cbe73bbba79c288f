"""What holds from one step to the next: nothing that the bounds rest on changes unnoticed, at whatever moment it changes."""

from __future__ import annotations

import pytest
import torch

from lipdp import nn
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.training.held import HeldState
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
    engine.step(*empty(), sample="own")
    change(model)
    with pytest.raises(ConfigurationError, match="new engine"):
        engine.step(*empty(), sample="own")
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
    engine.step(*toy(20).tensors, sample="own")
    with pytest.raises(ConfigurationError, match="another model"):
        engine.step(*toy(20).tensors, sample="own")
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


class OfTwoKinds(torch.nn.Module):
    """Weights of two types, of which one has no number at a place and a negative zero at another."""

    def __init__(self):
        super().__init__()
        self.once = torch.nn.Parameter(torch.tensor([1.0, float("nan"), -0.0]))
        self.twice = torch.nn.Parameter(torch.tensor([[2.0, 3.0]], dtype=torch.float64))
        self.other = torch.nn.Parameter(torch.tensor([4.0]))


CHANGES = {
    "a value": lambda m: m.twice.data.mul_(2),
    "the sign of a zero": lambda m: m.once.data[2].abs_(),
    "two that trade places": lambda m: m.once.data.copy_(m.once.data.flip(0)),
    "another type": lambda m: setattr(m.other, "data", m.other.data.double()),
    "another shape": lambda m: setattr(m.other, "data", m.other.data.repeat(2)),
    "another parameter": lambda m: setattr(m, "other", torch.nn.Parameter(torch.tensor([4.0]))),
    "a new one": lambda m: m.register_parameter("more", torch.nn.Parameter(torch.ones(1))),
    "a new buffer": lambda m: m.register_buffer("more", torch.ones(1)),
    "a hook": lambda m: m._register_state_dict_hook(lambda *args: None),
}


@pytest.mark.parametrize("change", [None, *CHANGES])
def test_weights_of_several_kinds_are_held_to_the_bit(change):
    """What a pass changes is told and put back: values, types, shapes and objects."""
    model = OfTwoKinds()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = dict(model.named_parameters())
    held = HeldState(model, trained=True)
    held.hold()
    assert all(held.same()), "nothing has changed"
    if change is None:
        held.refuse(held.same())
        return
    CHANGES[change](model)
    assert not all(held.same())
    with pytest.raises(UnsupportedError, match=r"the forward pass changes|holds"):
        held.refuse(held.same())
    assert all(held.same()), "it was put back"
    assert dict(model.named_parameters()).keys() == before.keys()
    for name, parameter in model.named_parameters():
        assert parameter is objects[name]
        assert parameter.dtype == before[name].dtype
        assert parameter.detach().numpy().tobytes() == before[name].numpy().tobytes()
