"""A fingerprint changes with anything that a recorded computation depends on, and with nothing else."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np
import pytest
import torch
from torch import nn

from lipdp.fingerprint import Watched, fingerprint, reachable_tensors


def model():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2).eval(), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8, 2))


def changes(made, change):
    before, watched = fingerprint(made), Watched(made)
    number = watched()
    assert fingerprint(made) == before
    assert watched() == number
    hash(before)
    change(made)
    changed = fingerprint(made) != before
    assert (watched() != number) == changed
    return changed


def test_values_are_no_part_of_it():
    def train(made):
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.add_(1.0)
            made[1].running_mean.add_(1.0)

    assert not changes(model(), train)


def test_modes_settings_and_freezing():
    assert changes(model(), lambda made: made.eval())
    assert changes(model(), lambda made: setattr(made[2], "p", 0.1))
    assert changes(model(), lambda made: setattr(made[0], "stride", (2, 2)))
    assert changes(model(), lambda made: setattr(made[1], "momentum", None))
    assert changes(model(), lambda made: made[4].bias.requires_grad_(False))


def test_storages():
    assert changes(model(), lambda made: setattr(made[4].weight, "data", made[4].weight.data.clone()))
    assert changes(model(), lambda made: setattr(made[1], "running_mean", torch.zeros(2)))
    assert changes(model(), lambda made: made.double())
    assert changes(model(), lambda made: setattr(made[4], "weight", nn.Parameter(torch.zeros(2, 8))))


def test_structure_and_hooks():
    assert changes(model(), lambda made: made.append(nn.ReLU()))
    assert changes(model(), lambda made: made.__setitem__(2, nn.Identity()))
    assert changes(model(), lambda made: made[0].register_forward_hook(lambda *_: None))
    assert changes(model(), lambda made: made[0].register_forward_pre_hook(lambda *_: None))
    assert changes(model(), lambda made: setattr(made[0], "forward", lambda x: x))
    assert changes(model(), lambda made: setattr(made, "note", [1, {"a": 2}]))


def test_settings_that_are_equal_but_not_the_same():
    assert fingerprint((1,)) != fingerprint((True,))
    assert fingerprint((1,)) != fingerprint((1.0,))


class Loss:
    def __init__(self, weight):
        self.weight = weight

    def __call__(self, outputs, targets):
        return self.weight * outputs.sum(1)

    def method(self, outputs, targets):
        return self(outputs, targets)


def test_losses():
    loss = Loss(1.0)
    for form in (loss, loss.method, functools.partial(loss), lambda outputs, targets: loss(outputs, targets)):
        loss.weight = 1.0
        before, watched = fingerprint(form), Watched(model(), form)
        number = watched()
        assert fingerprint(form) == before
        assert watched() == number
        loss.weight = 2.0
        assert fingerprint(form) != before
        assert watched() != number
        loss.weight = 1.0
        assert watched() == number  # known again


def test_watched_objects_inside_of_modules():
    """Lists, dictionaries and objects that change in place, and floats that may be stored where the old one was."""
    made = model()
    made.settings, made.helper, made.scale = {"a": [1, 2]}, Loss(1.0), 0.5
    made.act = lambda x, slope=[0.1]: x * slope[0]
    watched = Watched(made)
    numbers = [watched()]

    def note():
        numbers.append(watched())
        assert watched() == numbers[-1]

    made.settings["a"].append(3)
    note()
    made.helper.weight = 2.0
    note()
    made.act.__defaults__[0][0] = 0.2
    note()
    for step in range(50):
        made.scale = float(step)
        note()
    made.settings["b"] = 1
    note()
    assert len(set(numbers)) == len(numbers)

    weight = 1.0

    def closed(outputs, targets, scale=1.0):
        return weight * outputs.sum(1)

    before = fingerprint(closed)
    weight = 3.0
    assert fingerprint(closed) != before
    before = fingerprint(closed)
    closed.__defaults__ = (2.0,)
    assert fingerprint(closed) != before


def test_references_in_circles_end():
    made = nn.Module()
    made.own = {"me": None}
    made.own["me"] = [made.own, made]
    assert fingerprint(made) == fingerprint(made)


def test_tensors_by_where_they_are():
    tensor = torch.zeros(4)
    before = fingerprint(tensor)
    tensor.add_(1)
    assert fingerprint(tensor) == before
    assert fingerprint(tensor.clone()) != before
    assert fingerprint(tensor[:2]) != before
    assert hash(fingerprint(tensor.to_sparse(), torch.empty(2, device="meta"))) is not None


def test_plain_tensors_and_arrays_among_the_attributes():
    """None of them is asked whether it is true: of several numbers that has no answer, and of a zero the wrong one."""

    def holding(value):
        made = model()
        made[0].held = value
        return made

    for value in (torch.tensor(0.0), torch.zeros(3), torch.empty(0), torch.eye(2).to_sparse(), np.zeros(3), np.zeros(0), None, 0j):
        assert not changes(holding(value), lambda made: None)
    assert changes(holding(torch.tensor(0.0)), lambda made: setattr(made[0], "held", torch.tensor(0.0)))
    assert changes(holding(torch.zeros(3)), lambda made: setattr(made[0], "held", torch.zeros(3)))
    assert changes(holding(np.zeros(3)), lambda made: setattr(made[0], "held", np.ones(3)))
    assert changes(holding([]), lambda made: made[0].held.append(1))
    assert changes(holding(None), lambda made: setattr(made[0], "held", 0j))


@pytest.mark.parametrize("far_first", [False, True])
def test_a_tensor_near_by_is_found_though_its_holder_was_met_far_away_before(far_first):
    holder, deep = {"inside": [torch.ones(2)]}, torch.ones(3)
    far = holder
    for _ in range(4):  # what it holds is too far away from here
        far = [far]
    objects = [far, [holder], [[[[[deep]]]]]] if far_first else [[holder], [[[[[deep]]]]], far]
    assert {id(t) for t in reachable_tensors(objects)} == {id(holder["inside"][0]), id(deep)}


def test_no_part_is_taken_for_another_that_is_gone():
    """Mappings may make their values when asked, and memory that was given back is used again, with its address for an id."""

    class Making(Mapping):
        def __init__(self, made):
            self.made = made

        def __getitem__(self, key):
            self.made.append(torch.full((1,), float(key)))
            return [self.made[-1]]

        def __iter__(self):
            return iter(range(40))

        def __len__(self):
            return 40

    first, second = [], []
    reached = {id(t) for t in reachable_tensors(Making(first), Making(second))}
    assert len(first) == len(second) == 40
    assert reached >= {id(t) for t in (*first, *second)}


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


def test_every_one_of_several_objects_without_a_dictionary_is_looked_into():
    objects = [Slotted(number) for number in range(8)]
    for one in objects:
        assert changes(objects, lambda _, one=one: setattr(one, "value", -1))


def test_what_is_near_counts_though_its_holder_was_met_far_away_before():
    holder = {"inside": [[1]]}
    far = holder
    for _ in range(4):
        far = [far]
    assert changes([far, holder], lambda _: holder["inside"][0].append(2))
