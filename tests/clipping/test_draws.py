"""Modules that are evaluated again for each example, with dropout and other randomness inside, in training mode."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lipdp import clipping
from lipdp.clipping.draws import Drawn, Redrawn
from lipdp.errors import UnsupportedError

ROWS, TOKENS, WIDTH, CLIP = 5, 4, 6, 0.05
cross_entropy = nn.CrossEntropyLoss(reduction="none")


class Scaled(nn.Module):
    """A parameter that is used by hand, so that the module has no rule, and something random."""

    def __init__(self, draw):
        super().__init__()
        self.scale, self.draw = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH)), draw

    def forward(self, x):
        return torch.einsum("btd,d->btd", self.draw(x, self.training), self.scale).tanh()


def path(x, training):
    """Examples whose path is left out, as drop_path does."""
    return x * (0.7 + torch.rand((len(x), 1, 1), dtype=x.dtype, device=x.device)).floor_() / 0.7 if training else x


def bernoulli_numbers(x, training):
    return x * x.new_empty((len(x), *[1] * (x.ndim - 1))).bernoulli_(0.7) if training else x


def bernoulli_of_the_example(x, training):
    return x * torch.bernoulli(torch.sigmoid(4 * x.detach())) if training else x


def a_layer_that_is_left_out(x, training):
    return x if training and torch.rand([]) < 0.5 else 2 * x


def in_windows(x, training):
    """Rows are windows of examples."""
    folded = x.reshape(len(x) * 2, TOKENS // 2, WIDTH)
    return F.dropout(folded, 0.4, training).tanh().reshape(x.shape)


def length_first(x, training):
    return F.dropout(x.transpose(0, 1), 0.4, training).transpose(0, 1)


def gaussian(x, training):
    return x + 0.5 * torch.randn_like(x) if training else x


def twice(x, training):
    return F.dropout(2 * F.dropout(x, 0.3, training), 0.3, training, True)


def channels(x, training):
    return F.dropout1d(x, 0.4, training)


def attention(x, training):
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.4 if training else 0.0)


DRAWS = [
    path,
    bernoulli_numbers,
    bernoulli_of_the_example,
    a_layer_that_is_left_out,
    in_windows,
    length_first,
    gaussian,
    twice,
    channels,
]


def network(draw):
    torch.manual_seed(0)

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.middle, self.head = nn.Linear(WIDTH, WIDTH), Scaled(draw), nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.head(self.middle(self.inner(x)).sum(1))

    return Network().double().train()


def batch():
    draw = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, TOKENS, WIDTH, generator=draw, dtype=torch.float64), torch.arange(ROWS) % 3


def clipped(model, x, y, method="bookkeeping"):
    clipping.clipped_gradients(model, cross_entropy, x, y, CLIP)  # looks at the model, if it has not
    torch.manual_seed(8)
    return clipping.clipped_gradients(model, cross_entropy, x, y, CLIP, method)


@pytest.mark.parametrize("draw", [draw for draw in DRAWS if "bernoulli" not in draw.__name__], ids=lambda draw: draw.__name__)
def test_gradients_are_those_of_the_execution_that_gave_the_losses(draw):
    """The same random numbers in one pass with a backward pass for each loss. (torch's own bernoulli draws others from a seed.)"""
    model, (x, y) = network(draw), batch()
    expected = clipped(model, x, y, "multiloss")
    for name, value in clipped(model, x, y).items():
        torch.testing.assert_close(value, expected[name])


@pytest.mark.parametrize("draw", [*DRAWS, attention], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_a_record_moves_the_sum_by_two_norms_at_most(draw, row):
    """And nobody else's norm: each has random numbers of its own, whatever the others are."""
    model, (x, y) = network(draw), batch()
    before = clipped(model, x, y)
    other = x.clone()
    other[row] = 30 * torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    after = clipped(model, other, y)
    moved = torch.sqrt(sum((after[name] - before[name]).square().sum() for name in before))
    assert 0 < moved <= 2 * CLIP * (1 + 1e-9)
    norms = []
    for inputs in (x, other):
        torch.manual_seed(8)
        norms.append(clipping.per_example_norms(model, cross_entropy, inputs, y))
    kept = torch.arange(ROWS) != row
    torch.testing.assert_close(norms[0][kept], norms[1][kept], rtol=1e-12, atol=0)


def test_numbers_are_new_in_every_step():
    model, (x, y) = network(twice), batch()
    one, other = (clipping.clipped_gradients(model, cross_entropy, x, y, CLIP)["middle.scale"] for _ in range(2))
    assert (one - other).norm() > 1e-3 * one.norm()


def mean_of_the_batch(x, training):
    return x * torch.bernoulli(torch.sigmoid(x.detach().mean((0, 1), keepdim=True)).expand(1, TOKENS, WIDTH)) if training else x


def rate_of_the_batch(x, training):
    return F.dropout(x, 0.3 + 0.2 * float(torch.sigmoid(x.detach().mean()))) if training else x


def in_another_order(x, training):
    return x[torch.randperm(len(x))] if training else x


def in_the_order_of_draws(x, training):
    return x[torch.rand(len(x)).argsort()] if training else x


def alpha(x, training):
    return F.alpha_dropout(x, 0.4, training)


@pytest.mark.parametrize("draw", [mean_of_the_batch, rate_of_the_batch, in_another_order, in_the_order_of_draws, alpha])
def test_what_the_company_decides_is_refused(draw):
    """As is what can't be repeated."""
    model, (x, y) = network(draw), batch()
    with pytest.raises(UnsupportedError):
        clipping.clipped_gradients(model, cross_entropy, x, y, CLIP)
    assert clipping.clipped_gradients(model.eval(), cross_entropy, x, y, CLIP)  # where nothing is drawn


@pytest.mark.parametrize("masked", ["nothing", "causal", "some, and all for a row", "numbers", "groups"])
def test_attention_is_torchs(masked):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    settings = {}
    if masked == "causal":
        settings["is_causal"] = True
    if masked in ("some, and all for a row", "numbers"):
        mask = torch.rand(2, 1, 5, 5) < 0.6
        mask[0, 0, 1] = False
        settings["attn_mask"] = mask if masked != "numbers" else torch.zeros(2, 1, 5, 5).double().masked_fill(~mask, -torch.inf)
    if masked == "groups":
        k, v, settings["enable_gqa"] = k[:, :2], v[:, :2], True
    expected = F.scaled_dot_product_attention(q, k, v, **settings)
    kept = [((F.dropout, 0.3), torch.ones(2, 4, 5, 5, dtype=torch.float64))]
    with Redrawn(kept, 2, torch.tensor(0)):
        found = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3, **settings)
    torch.testing.assert_close(found, expected)
    for one, other in zip(torch.autograd.grad(found.sum(), (q, k)), torch.autograd.grad(expected.sum(), (q, k)), strict=True):
        torch.testing.assert_close(one, other)


def test_draws_are_as_likely_as_they_were():
    torch.manual_seed(0)
    likely = torch.full((20_000,), 0.3)
    with Drawn() as drawn:
        one, other = torch.bernoulli(likely), torch.empty(20_000).bernoulli_(0.3)
        dropped = F.dropout(torch.ones(20_000), 0.3)
    assert len(drawn.numbers) == 3
    for share in (one.mean(), other.mean(), (dropped == 0).float().mean()):
        assert abs(float(share) - 0.3) < 0.015
    torch.testing.assert_close(dropped.max(), torch.tensor(1 / 0.7))


def test_the_forward_of_an_object_is_kept():
    model, (x, y) = network(twice), batch()
    plain = model.middle.forward

    def mine(x):
        return 0.5 * plain(x)

    model.middle.forward = mine
    clipping.clipped_gradients(model, cross_entropy, x, y, CLIP)
    assert model.middle.forward is mine
