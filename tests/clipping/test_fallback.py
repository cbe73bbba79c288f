"""Modules without a norm rule, and what they may look like."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import lipdp.clipping as clipping
from lipdp.errors import LipdpNotice, UnsupportedError
from tests.clipping.helpers import check_all, quadratic

pytestmark = pytest.mark.usefixtures("in_double")


class Scale(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return x * self.gamma


def test_bare_parameters():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.token, self.places = nn.Parameter(torch.randn(1, 1, 4)), nn.Parameter(torch.randn(1, 4, 4))
            self.block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True)
            self.head = nn.Linear(4, 2)

        def forward(self, x):
            x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.places
            return self.head(self.block(x)[:, 0])

    check_all(Vision(), torch.randn(3, 3, 4))


class Diagonal(Scale):
    def forward(self, x):
        return torch.einsum("bd,d->bd", x, self.gamma)


def test_a_notice_once():
    model = nn.Sequential(Diagonal(4), nn.Linear(4, 2))
    with pytest.warns(LipdpNotice, match=r"Diagonal has no norm rule.*gamma"):
        clipping.clipped_gradients(model, quadratic, torch.randn(3, 4), torch.zeros(3), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        clipping.clipped_gradients(model, quadratic, torch.randn(3, 4), torch.zeros(3), 1.0)


def test_parameter_lists_and_dicts():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.several = nn.ParameterList([torch.randn(4), torch.randn(4)])
            self.named = nn.ParameterDict({"a": torch.randn(4, 4)})

        def forward(self, x):
            return (x * self.several[0] + self.several[1]) @ self.named["a"]

    check_all(Model(), torch.randn(3, 4))


def test_view_followed_by_an_operation_in_place():
    class Turned(Scale):
        def forward(self, x):
            return (x * self.gamma).transpose(1, 2)

    check_all(nn.Sequential(Turned(4), nn.ReLU(inplace=True), nn.Linear(3, 2)), torch.randn(3, 3, 4))


def test_several_outputs_made_of_one_another():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x, *, extra):
            y = x * self.a
            return {"y": y, "z": (y * self.b + extra["shift"],)}

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.two, self.out = Two(), nn.Linear(4, 2)

        def forward(self, x):
            found = self.two(x, extra={"shift": torch.sin(x)})
            return self.out(torch.tanh(found["y"]) + found["z"][0] * found["y"])

    check_all(Model(), torch.randn(3, 4))


def test_a_shared_mask_as_large_as_the_batch():
    """A (T, T) mask in a batch of T examples is not one row for each."""

    class Weighted(Scale):
        def forward(self, x, mask):
            return x * self.gamma * mask[-1][:, None]  # one row alone would have a last row too

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = Weighted(2), nn.Linear(2, 2)

        def forward(self, x):
            return self.out(self.inner(x, torch.arange(1.0, 26.0).reshape(5, 5)))

    model = Model()
    for batch in (2, 3, 5, 7):
        check_all(model, torch.randn(batch, 5, 2))


def test_control_flow_that_reads_values():
    class Branching(Scale):
        def forward(self, x):
            return x * self.gamma if float(x.sum()) > 1e9 else x * self.gamma.square()

    check_all(nn.Sequential(Branching(4), nn.Linear(4, 2)), torch.randn(3, 4))


def test_aliases_of_one_parameter():
    class Aliased(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 4)
            self.again = self.layer.weight
            self.more = self.layer.weight

        def forward(self, x):
            return self.layer(x) @ self.again + torch.tanh(x @ self.more)

    check_all(Aliased(), torch.randn(3, 4))


@pytest.mark.filterwarnings("ignore")
def test_randomness_inside_is_refused_with_the_fix():
    class Noisy(Diagonal):
        def forward(self, x):
            return torch.nn.functional.alpha_dropout(super().forward(x), 0.5, self.training)

    model = nn.Sequential(Noisy(16), nn.Linear(16, 2))
    with pytest.raises(UnsupportedError, match=r"(Noisy|Sequential).*randomness inside.*module of their own"):
        clipping.clipped_gradients(model, quadratic, torch.randn(8, 16), torch.zeros(8), 1.0)
    check_all(model.eval(), torch.randn(3, 16))


def test_an_overridden_forward_has_no_rule():
    class Doubled(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    class Standardised(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight - weight.mean(), bias)

    check_all(nn.Sequential(Doubled(4, 4), nn.Linear(4, 2)), torch.randn(3, 4))
    check_all(Standardised(2, 3, 2), torch.randn(3, 2, 4, 4))
    patched = nn.Linear(4, 2)
    patched.forward = lambda x: 3 * nn.functional.linear(x, patched.weight, patched.bias)
    check_all(patched, torch.randn(3, 4))
    assert "forward" in vars(patched)


def test_a_rule_of_ones_own():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.by = nn.Parameter(torch.randn(4))

        def forward(self, x):
            return x + self.by

    @clipping.norm_rule(Shift)
    def _shift(layer, inputs, output):
        return lambda cotangent: {"by": clipping.PositionSum(cotangent.flatten(1, -2), (4,))}

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_all(Shift(), torch.randn(3, 5, 4))


def test_hooks_of_the_users_are_seen_through():
    """An output that a user's hook doubles is not the layer's: its cotangent is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda module, args, output: 2 * output)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    check_all(model, torch.randn(3, 4))
