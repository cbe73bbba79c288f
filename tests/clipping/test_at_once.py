"""Layers with small parameters have their gradients made during the backward pass: nothing of theirs is held until its end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lipdp.clipping as clipping
from lipdp.clipping.contribution import Dense, norm_rule
from lipdp.clipping.record import recording
from lipdp.errors import UnsupportedError
from tests.clipping.helpers import check_all, quadratic


def snapshots(model, x):
    """Which taps had their contributions when the first layer's cotangent came, by owner; and the contributions."""
    with recording(model, len(x)) as recorded:
        h = model[0](x)
        seen = []
        h.register_hook(lambda g: seen.append({tap.owner: tap.made is not None for tap in recorded.taps}))
        parts = recorded.contributions(quadratic(model[1:](h), torch.zeros(len(x))).sum())
    return seen, parts, recorded


NORMS = {
    "layer": (lambda: nn.LayerNorm(6), (5, 6)),
    "rms": (lambda: nn.RMSNorm(6), (5, 6)),
    "group": (lambda: nn.GroupNorm(2, 6), (6, 6)),
    "instance": (lambda: nn.InstanceNorm1d(6, affine=True), (6, 6)),
    "frozen batch": (lambda: nn.BatchNorm1d(6).eval(), (6, 6)),
    "prelu": (lambda: nn.PReLU(6), (6, 6)),
}


@pytest.mark.parametrize("kind", list(NORMS))
def test_made_before_the_backward_pass_goes_on(kind):
    make, shape = NORMS[kind]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), make(), nn.Linear(6, 3)).double()
    seen, parts, recorded = snapshots(model, torch.randn(4, *shape).double())
    assert seen == [{"0": False, "1": True, "2": False}]
    assert all(isinstance(part, Dense) for name, part in parts.items() if name.startswith("1."))
    assert all(tap.made is None and not tap.watched and tap.make.__closure__ is None for tap in recorded.taps)


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 3)),  # nothing before it: no backward pass goes through it
        nn.Sequential(nn.LayerNorm(6), nn.LayerNorm(6), nn.PReLU(6), nn.Linear(6, 3)),
        nn.Sequential(nn.LayerNorm(6), nn.PReLU(6)),
        nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.LayerNorm(6)),
        nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU(inplace=True), nn.Linear(6, 2)),
    ],
)
@pytest.mark.parametrize("needs", [False, True])
def test_wherever_they_are(model, needs):
    torch.manual_seed(0)
    check_all(model.double(), torch.randn(4, 6, 6, dtype=torch.float64, requires_grad=needs))


class Branches(nn.Module):
    """A normalisation used twice, one that does not reach the loss, and frozen layers in between."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.unused = nn.Linear(4, 4), nn.LayerNorm(4), nn.LayerNorm(4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x):
        h = self.norm(self.first(x))
        self.unused(h)
        return self.norm(torch.tanh(self.frozen(h))) + h


def test_used_twice_or_in_vain():
    torch.manual_seed(0)
    check_all(Branches().double(), torch.randn(4, 3, 4).double())


class Clamped(nn.Module):
    """The user clamps what comes back to a normalisation in the middle."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.norm(self.a(x))
        if h.requires_grad:
            h.register_hook(lambda g: g.clamp(-0.1, 0.1))
        return self.b(h)


def test_what_the_users_hooks_make_of_the_cotangent_counts():
    torch.manual_seed(0)
    check_all(Clamped().double(), torch.randn(4, 4).double(), methods=("naive", "multiloss", "bookkeeping"))


class Overwritten(nn.Module):
    """The normalisation's input is written into after it was read, where autograd does not look."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.PReLU(4), nn.Linear(4, 2)

    def forward(self, x):
        h = self.first(x)
        out = self.norm(h)
        with torch.no_grad():
            h.add_(1.0)
        return self.last(out)


def test_an_input_that_is_overwritten_is_found():
    with pytest.raises((UnsupportedError, RuntimeError), match=r"in ?place"):
        clipping.clipped_gradients(Overwritten(), quadratic, torch.randn(3, 4), torch.zeros(3), 1.0)


def test_a_rule_of_ones_own():
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x):
            return self.weight * x

    @norm_rule(Scale, at_once=True)
    def _scale(layer, inputs, output):
        x = inputs[0].detach()
        return lambda cotangent: {"weight": Dense((cotangent * x).flatten(1, -2).sum(1))}

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Scale(), nn.Linear(3, 2)).double()
    check_all(model, torch.randn(4, 5, 3).double())
    seen, _, _ = snapshots(model, torch.randn(4, 5, 3).double())
    assert seen[0]["1"]
