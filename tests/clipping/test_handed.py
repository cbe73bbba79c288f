"""Parameters that modules hand to torch's functions: their gradients are told from the uses, and nothing else is believed."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from lipdp import clipping
from lipdp.clipping import support
from lipdp.clipping.layouts import layouts_of
from tests.clipping.helpers import check_all, quadratic

pytestmark = pytest.mark.filterwarnings("ignore::lipdp.errors.LipdpNotice")
ROWS, LENGTH, WIDTH = 4, 3, 5


class Conv1D(nn.Module):
    """As GPT-2 has it: rows of all positions at once, and the weight the other way round."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], 6)


class ByHand(nn.Linear):
    """As Falcon has it."""

    def __init__(self):
        super().__init__(WIDTH, 6)

    def forward(self, x):
        return x @ self.weight.T + self.bias


class Low(nn.Module):
    """Two factors, one of them turned by transpose."""

    def __init__(self):
        super().__init__()
        self.down, self.up = nn.Parameter(torch.randn(WIDTH, 2)), nn.Parameter(torch.randn(6, 2))

    def forward(self, x):
        return torch.matmul(x, self.down) @ self.up.transpose(0, 1)


class ChannelsFirst(nn.LayerNorm):
    """As ConvNeXt and SqueezeBert have it."""

    def __init__(self):
        super().__init__(WIDTH)

    def forward(self, x):
        return super().forward(x.transpose(1, 2).transpose(1, 2))


class Twice(nn.Module):
    """One parameter, handed on twice, and told of its shape and type."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        assert (self.weight.shape, self.weight.device, self.weight.requires_grad) == ((WIDTH, WIDTH), x.device, True)
        return F.linear(F.linear(x, self.weight.to(x.dtype)).tanh(), self.weight)


class InPlace(nn.Module):
    """The output is written into: its place in the graph has to be kept."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, WIDTH))

    def forward(self, x):
        return F.linear(x, self.weight).mul_(2.0).tanh_()


class Checkpointed(Conv1D):
    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)


class Model(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.first, self.inner = nn.Linear(WIDTH, WIDTH), inner

    def forward(self, x):
        return self.inner(torch.tanh(self.first(x)))


@pytest.mark.parametrize("make", [Conv1D, ByHand, Low, ChannelsFirst, Twice, InPlace, Checkpointed])
@pytest.mark.parametrize("rows", [1, LENGTH, ROWS])
def test_fast_and_right(make, rows):
    torch.manual_seed(0)
    model, x = Model(make()).double(), torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64)
    check_all(model, x, methods=("bookkeeping", "ghost", "multiloss"), forms=("auto",))
    assert layouts_of(model, x).handed == {"inner"}
    seen = support(model, x, torch.linspace(-0.5, 0.5, rows, dtype=torch.float64), quadratic)
    assert seen.apart == "proved"
    assert all(row.speed == "fast" for row in seen.layers)
    assert all(isinstance(p, nn.Parameter) for module in model.modules() for p in module._parameters.values() if p is not None)


class Scaled(nn.Embedding):
    """As Gemma and BART have it; numbered from two on, and with a row that has no gradient."""

    def __init__(self):
        super().__init__(9, WIDTH, padding_idx=3)

    def forward(self, numbers):
        return super().forward(numbers + 2) * 3.0


def test_embeddings():
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(), nn.Linear(WIDTH, 2)).double()
    x = torch.tensor([[1, 1, 4], [0, 5, 5], [6, 2, 1]])
    check_all(model, x, methods=("bookkeeping",), forms=("auto",))
    assert layouts_of(model, x).handed == {"0"}


class AlsoByHand(Conv1D):
    """A use that is no function's: the sum of all weights."""

    def forward(self, x):
        return super().forward(x) * self.weight.square().sum()


class OneUnused(Conv1D):
    """A use that is known of one parameter only."""

    def forward(self, x):
        return F.linear(x, self.weight.t()) * torch.exp(self.bias)


class LengthFirst(Conv1D):
    """Rows of an example do not lie together, though their number says so."""

    def forward(self, x):
        rows = x.transpose(0, 1).reshape(-1, x.shape[-1])
        return torch.addmm(self.bias, rows, self.weight).view(x.shape[1], x.shape[0], 6).transpose(0, 1)


class Detached(Conv1D):
    def forward(self, x):
        return super().forward(x) + F.linear(x, self.weight.detach().t())


@pytest.mark.parametrize("make", [AlsoByHand, OneUnused, LengthFirst, Detached])
@pytest.mark.parametrize("rows", [1, 2, LENGTH, ROWS])
def test_whatever_else_is_done_is_evaluated_again(make, rows):
    torch.manual_seed(0)
    model, x = Model(make()).double(), torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64)
    check_all(model, x, methods=("bookkeeping",), forms=("auto",))


class Changing(Conv1D):
    """From some batch on it does something else with its weight."""

    otherwise = False

    def forward(self, x):
        return super().forward(x) + (self.weight.square().sum() if self.otherwise else 0.0)


def test_another_use_in_a_later_batch_is_seen():
    torch.manual_seed(0)
    model, x = Model(Changing()).double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64)
    y = torch.linspace(-0.5, 0.5, ROWS, dtype=torch.float64)
    clip = clipping.Clipper(model, quadratic)
    clip(x, y, 1.0)
    assert layouts_of(model, x).handed
    Changing.otherwise = True  # of the class: no attribute of the module changes
    try:
        found = clip(x, y, 1.0).sums
        expected = clipping.clipped_gradients(model, quadratic, x, y, 1.0, "naive")
    finally:
        Changing.otherwise = False
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), name
