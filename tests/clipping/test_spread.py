"""Parameters that are used by hand: each example has its own copy, where that is right; and is refused it, where it is not."""

from __future__ import annotations

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn import functional as F

from lipdp import clipping
from lipdp.clipping import support
from lipdp.clipping.layouts import layouts_of
from tests.clipping.test_attribution import CLIP, assert_same, cross_entropy, looped

ROWS, LENGTH, WIDTH = 5, 4, 6


class Tokens(nn.Module):
    """A class token and positions of the whole model, as vision transformers have them."""

    def __init__(self):
        super().__init__()
        self.cls_token, self.pos_embed = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.randn(1, LENGTH + 1, WIDTH))
        self.shift, self.temperature = nn.Parameter(torch.randn(LENGTH + 1, WIDTH)), nn.Parameter(torch.tensor(0.7))
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed[:, : x.shape[1] + 1] + self.shift
        return self.head(self.block(x)[:, 0]) * self.temperature


class Scale(nn.Module):
    """x·γ in any number of dimensions."""

    def __init__(self, width):
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.gamma


class Root(nn.Module):
    """RMS norms as language models have them: one on tokens, one on heads."""

    def __init__(self):
        super().__init__()
        self.inner, self.tokens, self.heads, self.head = nn.Linear(WIDTH, WIDTH), Scale(WIDTH), Scale(3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.tokens(F.normalize(self.inner(x), dim=-1))
        return self.head(self.heads(x.unflatten(-1, (2, 3)).transpose(1, 2)).transpose(1, 2).flatten(2).sum(1))


class Matrix(nn.Module):
    """A product by hand."""

    def __init__(self):
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head((x @ self.weight).tanh().sum(1))


class Normed(nn.Module):
    """Copies would be one norm for all."""

    def __init__(self):
        super().__init__()
        self.gamma, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(F.layer_norm(x, (WIDTH,), self.gamma).tanh().sum(1))


@pytest.mark.parametrize("make", [Tokens, Root, Matrix, Normed])
@pytest.mark.parametrize("rows", [1, 2, LENGTH, ROWS, LENGTH + 1])
def test_fast_and_right(make, rows):
    torch.manual_seed(0)
    model, x, y = make().double(), torch.randn(rows, LENGTH, WIDTH, dtype=torch.float64), torch.arange(rows) % 3
    expected = looped(model, x, y, cross_entropy)
    assert_same(clipping.clipped_gradients(model, cross_entropy, x, y, CLIP), expected)
    assert all(row.speed == "fast" for row in support(model, x, y, cross_entropy).layers)
    assert all(isinstance(p, nn.Parameter) for module in model.modules() for p in module._parameters.values() if p is not None)


class Mean(nn.Module):
    """The mean of all copies is that of the parameter, and its gradient everybody's."""

    def __init__(self):
        super().__init__()
        self.gamma, self.head = nn.Parameter(torch.randn(WIDTH)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head((x * self.gamma.mean()).tanh().sum(1))


class Largest(Mean):
    def forward(self, x):
        return self.head((x * self.gamma.max()).tanh().sum(1))


class Detached(Mean):
    """Copies that reach the examples in two ways."""

    def forward(self, x):
        return self.head((x * self.gamma * torch.softmax(self.gamma, -1).max()).tanh().sum(1))


@pytest.mark.parametrize("make", [Mean, Largest, Detached])
def test_what_copies_would_get_wrong_is_evaluated_again(make):
    torch.manual_seed(0)
    model, x, y = make().double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), torch.arange(ROWS) % 3
    assert_same(clipping.clipped_gradients(model, cross_entropy, x, y, CLIP), looped(model, x, y, cross_entropy))
    assert support(model, x, y, cross_entropy).layers[0].speed == "slow"


class Around(nn.Module):
    """A module that is evaluated again around one with copies."""

    def __init__(self):
        super().__init__()
        self.table, self.scale, self.head = nn.Parameter(torch.randn(WIDTH)), Scale(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(torch.einsum("btd,d->btd", self.scale(x), self.table).tanh().sum(1))


def test_copies_inside_a_module_that_is_evaluated_again():
    torch.manual_seed(0)
    model, x, y = Around().double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), torch.arange(ROWS) % 3
    assert_same(clipping.clipped_gradients(model, cross_entropy, x, y, CLIP), looped(model, x, y, cross_entropy))
    speeds = {row.layer: row.speed for row in support(model, x, y, cross_entropy).layers}
    assert speeds == {"": "slow", "scale": "fast", "head": "fast"}


def test_a_parameter_of_two_modules():
    torch.manual_seed(0)
    model = nn.Sequential(Scale(WIDTH), nn.Tanh(), Scale(WIDTH), nn.Flatten(), nn.Linear(LENGTH * WIDTH, 3)).double()
    model[2].gamma = model[0].gamma
    x, y = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), torch.arange(ROWS) % 3
    assert_same(clipping.clipped_gradients(model, cross_entropy, x, y, CLIP), looped(model, x, y, cross_entropy))


def test_copies_of_an_example_share_its_norm():
    """Two rows make up one example: their gradients are added up before they are clipped."""
    torch.manual_seed(0)
    model, x, y = Tokens().double(), torch.randn(6, LENGTH, WIDTH, dtype=torch.float64), torch.arange(3)
    found = clipping.clipped_gradients(model, cross_entropy, x, y, CLIP, copies=2)
    expected = clipping.clipped_gradients(model, cross_entropy, x, y, CLIP, "naive", copies=2)
    assert_same(found, expected)


def test_copies_in_layers_that_are_computed_again():
    """Gradient checkpointing evaluates a module a second time, in the backward pass, with the same copies."""

    class Checkpointed(Root):
        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(super().forward, x, use_reentrant=False)

    torch.manual_seed(0)
    model, x, y = Checkpointed().double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), torch.arange(ROWS) % 3
    assert_same(clipping.clipped_gradients(model, cross_entropy, x, y, CLIP), looped(model, x, y, cross_entropy))


class Selected(nn.Module):
    """Large numbers go through a layer; in the first batch there is one in each example, and contents elsewhere have as many."""

    def __init__(self, how):
        super().__init__()
        self.how = how
        self.inner, self.scale = nn.Linear(1, 3, bias=False), nn.Parameter(torch.ones(3))
        self.inner.requires_grad_(how != "by hand")
        self.scale.requires_grad_(how == "by hand")
        self.choose = Choose()

    def forward(self, x):
        rows, places = self.choose(x) if self.how == "in a module" else torch.nonzero(x.abs() > 5, as_tuple=True)
        chosen = x[rows, places][:, None]
        made = (chosen * self.scale if self.how == "by hand" else self.inner(chosen)).tanh()
        return torch.zeros(len(x), 3, dtype=x.dtype).index_add(0, rows, made)


class Choose(nn.Module):
    def forward(self, x):
        large = x.abs() > 5
        rows = torch.arange(len(x))[:, None].expand(x.shape)
        return rows[large], torch.arange(x.shape[1]).expand(x.shape)[large]


@pytest.mark.parametrize("how", ["by a layer", "by hand", "in a module"])
def test_tokens_that_are_chosen_are_no_examples(how, monkeypatch):
    """Even if no other contents are tried."""
    monkeypatch.setattr("lipdp.clipping.looking._others", lambda x, drawings: iter(()))
    torch.manual_seed(0)
    model, y = Selected(how), torch.randint(0, 3, (ROWS,))
    x = torch.randn(ROWS, 8)
    x[torch.arange(ROWS), torch.randint(0, 8, (ROWS,))] = 6.0
    clipping.clipped_gradients(model, cross_entropy, x, y, CLIP)
    x = 0.1 * torch.randn(ROWS, 8)
    x[0, :ROWS] = 6 + 0.1 * torch.randn(ROWS)  # all of one example
    assert_same(clipping.clipped_gradients(model, cross_entropy, x, y, CLIP), looped(model, x, y, cross_entropy))
    assert not layouts_of(model, x).spread


@pytest.mark.parametrize("settings", [{"add_bias_kv": True}, {"add_zero_attn": True}, {"add_bias_kv": True, "add_zero_attn": True}])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_attention_with_keys_of_its_own(settings, batch_first, need_weights):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.head = nn.MultiheadAttention(WIDTH, 2, batch_first=batch_first, **settings), nn.Linear(WIDTH, 3)

        def forward(self, x):
            x = x if batch_first else x.transpose(0, 1)
            masks = {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)}
            out, _ = self.attention(x, x, x, need_weights=need_weights, **masks)
            return self.head(out.sum(1 if batch_first else 0))

    torch.manual_seed(0)
    model, x, y = Attention().double(), torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64), torch.arange(ROWS) % 3
    assert_same(clipping.clipped_gradients(model, cross_entropy, x, y, CLIP), looped(model, x, y, cross_entropy))
