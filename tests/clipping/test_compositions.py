"""Random networks of every layer, shared and tied parameters, adapters, in-place operations, checkpointing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import lipdp.clipping as clipping
from lipdp.clipping.record import recording
from lipdp.errors import UnsupportedError
from tests.clipping.helpers import check_all, norm, quadratic, reference
from tests.many import examples

FAST = ("reweight", "ghost", "bookkeeping")


pytestmark = pytest.mark.usefixtures("in_double")


class Apply(nn.Module):
    def __init__(self, function, *modules):
        super().__init__()
        self.inner, self.function = nn.ModuleList(modules), function

    def forward(self, x):
        return self.function(x, *self.inner)


def _inplace_residual(x, layer):
    y = layer(x)
    y += x
    return y


IMAGE = [
    lambda: nn.Conv2d(4, 4, 3, padding=1),
    lambda: nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2, padding_mode="reflect"),
    lambda: nn.ConvTranspose2d(4, 4, 3, padding=1),
    lambda: nn.GroupNorm(2, 4),
    lambda: nn.InstanceNorm2d(4, affine=True),
    lambda: nn.BatchNorm2d(4).eval(),
    lambda: nn.PReLU(4),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.AvgPool2d(3, 1, 1),
    lambda: Apply(_inplace_residual, nn.Conv2d(4, 4, 1)),
    lambda: Apply(lambda x, f, g: f(x) * torch.sigmoid(g(x)), nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1)),
]
SEQUENCE = [
    lambda: nn.Linear(4, 4),
    lambda: nn.Linear(4, 4, bias=False),
    lambda: nn.LayerNorm(4),
    lambda: nn.RMSNorm(4),
    lambda: nn.ReLU(inplace=True),
    lambda: nn.GELU(),
    lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True),
    lambda: Apply(lambda x, f: f(x)[0], nn.GRU(4, 2, bidirectional=True, batch_first=True)),
    lambda: Apply(lambda x, f: f(x)[0], nn.LSTM(4, 4, batch_first=True)),
    lambda: Apply(lambda x, f: f(x, x, x)[0], nn.MultiheadAttention(4, 2, batch_first=True)),
    lambda: Apply(_inplace_residual, nn.Linear(4, 4)),
    lambda: Apply(lambda x, f: f(x.transpose(1, 2)).transpose(1, 2), nn.Conv1d(4, 4, 3, padding=1)),
    lambda: Apply(lambda x, f: f(x, torch.tanh(x)), nn.Bilinear(4, 4, 4)),
]


@settings(max_examples=examples(20), deadline=None, derandomize=True)
@given(st.data())
def test_random_networks(data):
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    image = data.draw(st.booleans())
    pool = IMAGE if image else SEQUENCE
    picked = [pool[k]() for k in data.draw(st.lists(st.integers(0, len(pool) - 1), min_size=1, max_size=5))]
    if data.draw(st.booleans()):  # one of them twice: shared
        picked.append(picked[data.draw(st.integers(0, len(picked) - 1))])
    head = nn.Sequential(nn.Flatten(), nn.Linear(64 if image else 12, 3))
    start = nn.Conv2d(2, 4, 1) if image else nn.Embedding(7, 4)
    model = nn.Sequential(start, *picked, head)
    for frozen in data.draw(st.lists(st.integers(0, 3), max_size=2)):
        list(model.parameters())[frozen].requires_grad_(False)
    x = torch.randn(3, 2, 4, 4) if image else torch.randint(7, (3, 3))
    check_all(model, x, methods=FAST, forms=("auto",))


@pytest.mark.parametrize("make", [make for make in (*IMAGE, *SEQUENCE) if any(True for _ in make().parameters())])
def test_activation_in_place_after_every_layer(make):
    """Written into, a view leaves the graph; nn.Linear on (B, T, d) returns one. Its gradient must not be lost."""
    layer = make()
    image = any(make is one for one in IMAGE)
    shape = (3, 4, 4, 4) if image else (3, 3, 4)
    check_all(nn.Sequential(layer, nn.ReLU(inplace=True)), torch.randn(shape), methods=FAST, forms=("auto",))


def test_slices_written_into():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.a(x)
            y[:, 0] = 0
            y[:, 1].mul_(2)
            return self.b(y)

    check_all(Model(), torch.randn(3, 3, 4))


def test_input_overwritten_after_it_was_read_is_refused():
    class Model(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.a, self.b, self.first = nn.Linear(4, 4), nn.Linear(4, 4), first

        def forward(self, x):
            x = x * 1.0
            h = self.a(x)
            y = self.b(h)
            (x if self.first else h).add_(1.0)
            return y + h

    x, y = torch.randn(3, 4), torch.zeros(3)
    with pytest.raises(UnsupportedError, match=r"'a' is overwritten in place"):
        clipping.clipped_gradients(Model(True), quadratic, x, y, 1.0)
    with pytest.raises(RuntimeError, match="inplace operation"):  # autograd's own words: this could not be trained at all
        clipping.clipped_gradients(Model(False), quadratic, x, y, 1.0)


def test_tied_embedding_and_decoder():
    """Cross terms included; adding up squares would under-report."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mix, self.decode = nn.Embedding(6, 4, padding_idx=0), nn.Linear(4, 4), nn.Linear(4, 6, bias=False)
            self.decode.weight = self.embed.weight

        def forward(self, tokens):
            return self.decode(torch.tanh(self.mix(self.embed(tokens))))

    model, x = Model(), torch.randint(6, (4, 5))
    assert set(reference(model, quadratic, x, torch.zeros(4))[0]) == {"embed.weight", "mix.weight", "mix.bias"}
    check_all(model, x)


def test_adding_up_squares_of_tied_uses_would_be_too_small():
    layer = nn.Linear(3, 3, bias=False)
    model, x = nn.Sequential(layer, layer, layer), torch.rand(2, 3)
    nn.init.eye_(layer.weight)

    def loss(outputs, targets):
        return outputs.sum(1)

    true = check_all(model, x, loss=loss)
    with torch.enable_grad(), recording(model, 2) as recorded:
        total = loss(model(x), None).sum()
        cotangents = torch.autograd.grad(total, [tap.edge for tap in recorded.taps])
    parts = [tap.make(g)["weight"].squared_norms() for tap, g in zip(recorded.taps, cotangents, strict=True)]
    summed = torch.stack(parts).sum(0).sqrt()
    assert torch.all(true > 1.5 * summed)  # up to √3


def test_unlike_layers_that_share_a_weight():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.turned, self.norm = (
                nn.Conv2d(2, 2, 3, padding=1),
                nn.ConvTranspose2d(2, 2, 3, padding=1),
                nn.GroupNorm(1, 2),
            )
            self.turned.weight = self.conv.weight
            self.turned.bias = self.norm.weight

        def forward(self, x):
            return self.norm(self.turned(torch.tanh(self.conv(self.conv(x)))))

    check_all(Model(), torch.randn(3, 2, 4, 4))


def test_low_rank_adapters():
    class Adapted(nn.Module):
        def __init__(self, base, rank=2):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(4, rank, bias=False), nn.Linear(rank, 4, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = nn.Sequential(Adapted(nn.Linear(4, 4)), nn.ReLU(), Adapted(nn.Linear(4, 4)))
    check_all(model, torch.randn(3, 5, 4))


def test_low_rank_adapters_of_bare_parameters():
    class Adapted(nn.Linear):
        def __init__(self):
            super().__init__(4, 4)
            self.weight.requires_grad_(False)
            self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.zeros(4, 2))

        def forward(self, x):
            return super().forward(x) + x @ self.a.T @ self.b.T

    check_all(nn.Sequential(Adapted(), nn.ReLU(), Adapted()), torch.randn(3, 5, 4))


def test_frozen_parameters_cost_nothing():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.LSTM(4, 4, batch_first=True))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    tail = nn.Linear(4, 2)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.tail = model, tail

        def forward(self, x):
            return self.tail(self.body(x)[0])

    whole, x = Model(), torch.randn(3, 2, 4)
    with recording(whole, 3) as recorded:
        whole(x)
    assert [tap.owner for tap in recorded.taps] == ["tail"]
    check_all(whole, x)


@pytest.mark.parametrize("make", [lambda: nn.Linear(4, 4), lambda: nn.Conv1d(3, 3, 3)])
def test_training_biases_only_holds_no_inputs(make):
    layer = make()
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 3, 4)
    with recording(layer, 3) as recorded:
        layer(x)
    held = [cell.cell_contents for tap in recorded.taps for cell in tap.make.__closure__]
    assert not any(isinstance(one, torch.Tensor) for one in held)
    check_all(layer, x)


def test_called_by_keyword_and_several_times_and_in_vain():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.unused, self.never = (nn.Linear(4, 4) for _ in range(4))

        def forward(self, x):
            self.unused(x)
            h = self.a(input=x)
            with torch.no_grad():
                self.b(h)
            return self.a(h) + self.b(input=torch.tanh(h)).detach() * self.b(h)

    model, x = Model(), torch.randn(3, 4)
    check_all(model, x)
    found = clipping.clipped_gradients(model, quadratic, x, torch.zeros(3), 1.0)
    assert float(found["unused.weight"].norm()) == float(found["never.bias"].norm()) == 0.0


@pytest.mark.parametrize("method", FAST)
def test_gradient_checkpointing(method):
    class Model(nn.Module):
        def __init__(self, reentrant):
            super().__init__()
            self.first, self.last, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 2), reentrant
            self.block = nn.TransformerEncoderLayer(4, 2, 5, dropout=0.3, batch_first=True)

        def forward(self, x):
            return self.last(checkpoint(self.block, self.first(x), use_reentrant=self.reentrant))

    x, y = torch.randn(3, 3, 4), torch.zeros(3)
    check_all(Model(False).eval(), x, methods=(method,))
    model = Model(False)
    plain = nn.Sequential(model.first, model.block, model.last)  # dropout: the same random numbers, with and without
    torch.manual_seed(1)
    found = clipping.clipped_gradients(model, quadratic, x, y, 1.0, method)
    torch.manual_seed(1)
    expected = clipping.clipped_gradients(plain, quadratic, x, y, 1.0, method)
    for one, other in zip(found.values(), (expected[n] for n in ["0.weight", "0.bias", "2.weight", "2.bias"]), strict=False):
        assert torch.allclose(one, other, atol=1e-9)
    with pytest.raises(UnsupportedError, match="use_reentrant"):
        clipping.clipped_gradients(Model(True), quadratic, x, y, 1.0, method)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.sampled_from(["clip", "automatic"]))
def test_no_example_gets_past_the_bound(seed, c, clip):
    """The sum over one example is its clipped gradient."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.Flatten(), nn.Linear(9, 2))
    x = torch.randn(1, 2, 4) * 10 ** torch.empty(1).uniform_(-3, 3)
    for method in ("naive", "multiloss", *FAST):
        assert float(norm(clipping.clipped_gradients(model, quadratic, x, torch.ones(1), c, method, clip=clip))) <= c * (1 + 1e-9)
