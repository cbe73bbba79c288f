"""Whose gradient is whose, in batches that are not like the first one: what was verified once is used for nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lipdp import clipping
from lipdp.errors import UnsupportedError

ROWS, LENGTH, WIDTH, CLIP = 6, 20, 4, 0.01
cross_entropy = nn.CrossEntropyLoss(reduction="none")


def looped(model, x, y, loss):
    """Σ of clipped gradients, one example after the other."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    total = {name: torch.zeros_like(p) for name, p in trained.items()}
    for i in range(len(y)):
        one = {name: part[i : i + 1] for name, part in x.items()} if isinstance(x, dict) else x[i : i + 1]
        value = loss(model(**one) if isinstance(x, dict) else model(one), y[i : i + 1]).sum()
        found = torch.autograd.grad(value, list(trained.values()), allow_unused=True)
        own = [torch.zeros_like(p) if g is None else g for p, g in zip(trained.values(), found, strict=True)]
        norm = torch.sqrt(sum(g.square().sum() for g in own))
        for name, g in zip(trained, own, strict=True):
            total[name] += g * min(1.0, CLIP / max(float(norm), 1e-30))
    return total


def assert_same(found, expected):
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-7)


class Packed(nn.Module):
    """Tokens without padding go through a layer; no example sees another."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3).requires_grad_(False)

    def forward(self, x, mask):
        out = torch.zeros_like(x)
        out[mask] = self.inner(x[mask]).tanh()
        return self.head(out.sum(1) / mask.sum(1, keepdim=True))


def lengths(*counts):
    return torch.stack([torch.arange(LENGTH) < count for count in counts])


@pytest.mark.parametrize("first", [(4,) * ROWS, (1, 7, 2, 6, 3, 5), (2,) * ROWS])
def test_packed_tokens_of_other_lengths(first):
    """As many tokens as in the first batch, and not as many of each example."""
    torch.manual_seed(0)
    model, y = Packed(), torch.randint(0, 3, (ROWS,))
    clipping.clipped_gradients(model, cross_entropy, {"x": torch.randn(ROWS, LENGTH, WIDTH), "mask": lengths(*first)}, y, CLIP)
    x = 1e-3 * torch.randn(ROWS, LENGTH, WIDTH)
    x[-1] = 0.3 * torch.randn(1, WIDTH)
    batch = {"x": x, "mask": lengths(1, 1, 1, 1, 1, 19)}
    assert_same(clipping.clipped_gradients(model, cross_entropy, batch, y, CLIP), looped(model, batch, y, cross_entropy))


class Chosen(nn.Module):
    """Of the two tokens of an example those with a positive entry go through one layer, the others through another."""

    def __init__(self):
        super().__init__()
        self.positive, self.negative = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, 3).requires_grad_(False)

    def forward(self, x):
        chosen = x[..., 0] > 0
        out = torch.zeros_like(x)
        out[chosen], out[~chosen] = self.positive(x[chosen]).tanh(), self.negative(x[~chosen]).tanh()
        return self.head(out.sum(1))


def test_tokens_that_are_chosen_one_of_each_example_at_first():
    """As many rows as examples, one of each: by its shapes that is a batch."""
    torch.manual_seed(0)
    model, y = Chosen(), torch.randint(0, 3, (ROWS,))
    x = torch.randn(ROWS, 2, WIDTH)
    x[:, 0, 0], x[:, 1, 0] = 1.0, -1.0
    clipping.clipped_gradients(model, cross_entropy, x, y, CLIP)
    other = 1e-3 * torch.randn(ROWS, 2, WIDTH)
    other[-1] = 0.3 * torch.randn(1, WIDTH)
    other[:, 0, 0], other[:, 1, 0] = 1e-3, -1e-3
    other[0, :, 0], other[-1, :, 0] = -1e-3, 0.3  # both tokens of the last, none of the first
    assert_same(clipping.clipped_gradients(model, cross_entropy, other, y, CLIP), looped(model, other, y, cross_entropy))


class TokenMajor(nn.Module):
    """Rows of a layer are tokens first, examples second."""

    def __init__(self, length):
        super().__init__()
        self.length = length
        self.inner, self.head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 3).requires_grad_(False)
        self.other = nn.Linear(WIDTH, 3)

    def forward(self, x):
        rows = len(x)
        inner = self.inner(x.transpose(0, 1).reshape(rows * self.length, WIDTH)).tanh().reshape(self.length, rows, WIDTH)
        return torch.cat([self.head(inner.mean(0)), self.other(x.mean(1))], 1)


def of_inner(outputs, y):
    return cross_entropy(outputs[:, :3], y)


def of_other(outputs, y):
    return cross_entropy(outputs[:, 3:], y)


@pytest.mark.parametrize("look", ["other loss", "no labels in evaluation mode", "missing numbers", "support"])
def test_another_look_at_a_model_changes_nothing(look):
    """Layouts that another loss, mode or batch was looked at with are not used under an old verdict."""
    torch.manual_seed(0)
    model, y = TokenMajor(ROWS), torch.randint(0, 3, (ROWS,))
    x = 1e-3 * torch.randn(ROWS, ROWS, WIDTH)
    x[2] = 0.3 * torch.randn(1, WIDTH)
    expected = looped(model, x, y, of_inner)
    assert_same(clipping.clipped_gradients(model, of_inner, x, y, CLIP), expected)
    if look == "other loss":
        clipping.per_example_norms(model, of_other, x, y)
    elif look == "support":
        clipping.support(model, x, y, lambda outputs, y: 0 * outputs.sum(1))
    elif look == "missing numbers":
        clipping.per_example_norms(model, of_inner, torch.full_like(x, torch.nan), y)
    else:
        model.eval()
        clipping.clipped_gradients(model, of_inner, x, torch.full_like(y, -100), CLIP)
        model.train()
    assert_same(clipping.clipped_gradients(model, of_inner, x, y, CLIP), expected)


class Standardised(nn.Module):
    """Mixes the examples of a batch."""

    def __init__(self):
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        inner = self.inner(x)
        return self.head(((inner - inner.mean(0)) / inner.std(0)).tanh())


def test_a_first_batch_without_labels_does_not_switch_the_check_off():
    torch.manual_seed(0)
    model, x, y = Standardised(), torch.randn(ROWS, WIDTH), torch.randint(0, 3, (ROWS,))

    def both() -> None:
        for labels in (torch.full_like(y, -100), y):
            clipping.clipped_gradients(model, cross_entropy, x, labels, CLIP)

    with pytest.raises(UnsupportedError):
        both()


@pytest.mark.parametrize("hidden", ["no label", "missing numbers"])
def test_examples_that_show_nothing_are_not_those_that_are_looked_at(hidden):
    """The first three of the batch have no gradient; the others' tell that a weight is used by hand."""

    class ByHand(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x):
            return self.head((self.inner(x).tanh() @ self.inner.weight).tanh())

    torch.manual_seed(0)
    model, x, y = ByHand(), torch.randn(ROWS, WIDTH), torch.randint(0, 3, (ROWS,))
    if hidden == "no label":
        y[:3] = -100
        expected = looped(model, x[3:], y[3:], cross_entropy)
    else:
        x[:3] = torch.nan
        expected = looped(model, x[3:], y[3:], cross_entropy)
    assert_same(clipping.clipped_gradients(model, cross_entropy, x, y, CLIP), expected)
