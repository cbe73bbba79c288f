"""A table of words that is the last layer, too: both uses count together, and nothing is as large as the table for each record."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import lipdp.clipping as clipping
from lipdp.clipping import uses
from lipdp.clipping.contribution import Dense, Scatter
from lipdp.clipping.outer import OuterSum
from lipdp.clipping.uses import Tied, combine
from tests.clipping.helpers import check_all, quadratic


class Model(nn.Module):
    """A language model in small."""

    def __init__(self, words=7, width=4, padding=None):
        super().__init__()
        self.embed, self.mix = nn.Embedding(words, width, padding_idx=padding), nn.Linear(width, width)
        self.decode = nn.Linear(width, words)
        self.decode.weight = self.embed.weight

    def forward(self, tokens):
        return self.decode(torch.tanh(self.mix(self.embed(tokens))))


def parts(seed, records=3, length=5, words=11, width=6, reads=8, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    delta = torch.randn(records, length, words, generator=generator, dtype=dtype)
    x = torch.randn(records, length, width, generator=generator, dtype=dtype)
    tokens = torch.randint(words, (records, reads), generator=generator)
    return delta, x, tokens, torch.randn(records, reads, width, generator=generator, dtype=dtype)


def tied(delta, x, tokens, epsilon):
    return combine([OuterSum(delta, x, (delta.shape[2], x.shape[2])), Scatter(tokens, epsilon, delta.shape[2])])


def exact(delta, x, tokens, epsilon):
    """All gradients, in float64."""
    table = torch.einsum("btp,btd->bpd", delta.double(), x.double())
    for row, (words, cotangents) in enumerate(zip(tokens, epsilon.double(), strict=True)):
        table[row].index_add_(0, words, cotangents)
    return table


@pytest.mark.parametrize("padding", [None, 0])
def test_every_method_is_the_loop(padding):
    torch.manual_seed(0)
    check_all(Model(padding=padding).double(), torch.randint(7, (4, 5)))


def test_read_twice_and_used_twice():
    class Both(Model):
        def forward(self, tokens):
            first = torch.tanh(self.mix(self.embed(tokens)))
            return self.decode(first + self.embed(tokens.flip(1))), self.decode(first.flip(1))

    torch.manual_seed(0)
    check_all(Both().double(), torch.randint(7, (4, 5)))


@pytest.mark.parametrize("copies", [1, 2])
def test_copies_and_what_is_left_out(copies):
    torch.manual_seed(0)
    model, tokens, y = Model().double(), torch.randint(7, (6 * copies, 5)), torch.linspace(-1, 1, 6).double()
    y[2] = math.inf  # its loss is not finite
    naive = clipping.clipped_gradients(model, quadratic, tokens, y, 0.5, "naive", copies=copies)
    for form in ("gram", "materialise"):
        found = clipping.clipped_gradients(model, quadratic, tokens, y, 0.5, copies=copies, form=form)
        for name, value in naive.items():
            assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12), (form, name)


def test_the_two_stay_factored():
    both = tied(*parts(0))
    assert isinstance(both, Tied)
    delta, x, tokens, epsilon = parts(0)
    other = combine([OuterSum(delta.transpose(1, 2), x.new_ones(3, 11, 6), (5, 6)), Scatter(tokens % 5, epsilon, 5)])
    assert isinstance(other, Tied)
    unlike = combine([OuterSum(delta, x, (11, 6)), Dense(torch.zeros(3, 11, 6)), Scatter(tokens, epsilon, 11)])
    assert isinstance(unlike, Dense)  # a third kind
    assert torch.allclose(unlike.materialise(), both.materialise())


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([1, 5, 70]), st.sampled_from([2, 40, 700]), st.sampled_from([1, 30]))
def test_norms_are_never_too_small_and_hardly_too_large(seed, length, words, reads):
    given_parts = parts(seed, length=length, words=words, width=16, reads=reads)
    true = exact(*given_parts)
    norms = true.flatten(1).norm(dim=1)
    for form in ("auto", "gram", "materialise"):
        for found in (tied(*given_parts).squared_norms(form), tied(*given_parts).squared_norms_as_released(form)):
            assert torch.all(found.sqrt() >= norms * (1 - 1e-6))
            assert torch.all(found.sqrt() <= norms * 1.01)
    weights = torch.tensor([0.5, 0.0, 1.0])
    summed = tied(*given_parts).weighted_sum(weights)
    assert torch.allclose(summed, torch.einsum("b,bpd->pd", weights.double(), true), rtol=1e-4, atol=1e-4)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.sampled_from([0.01, 1.0, 300.0, 1e7]), st.sampled_from([0.0, 1e-3, 1.0]))
def test_uses_that_cancel(seed, size, rest):
    """The table's use is nearly the opposite of the layer's: the sum is far below both."""
    delta, x, _, _ = parts(seed, records=1)
    delta, x = delta * size, x * size
    tokens = torch.randperm(11, generator=torch.Generator().manual_seed(seed))[None]
    opposite = torch.einsum("tp,td->pd", delta[0].double(), x[0].double())[tokens[0]]
    epsilon = (-opposite * (1 + rest * 1e-3)).float()[None]
    both, true = tied(delta, x, tokens, epsilon), float(exact(delta, x, tokens, epsilon).norm())
    for form in ("gram", "materialise"):
        norm = float(both.squared_norms_as_released(form).sqrt())
        assert norm >= true
        for c in (1.0, true / 2):
            if c > 0:
                released = both.weighted_sum(torch.tensor([min(1.0, c / norm)]))
                assert float(released.norm()) <= c * (1 + 1e-3), form


def test_adding_up_squares_would_be_too_small():
    delta, x, tokens, _ = parts(0, length=1, reads=1)
    epsilon = delta.gather(2, tokens[:, :, None]) * x  # along the layer's part of that row
    both = tied(delta, x, tokens, epsilon)
    apart = both.layer.squared_norms("gram") + both.table.squared_norms()
    assert torch.all(both.squared_norms("gram") > apart * 1.001)
    assert torch.allclose(both.squared_norms("gram").sqrt(), exact(delta, x, tokens, epsilon).flatten(1).norm(dim=1), rtol=1e-3)


def test_products_that_underflow():
    delta, x = torch.full((1, 6, 40), 1e-23), torch.full((1, 6, 9), 3e18)
    tokens, epsilon = torch.arange(30)[None], torch.full((1, 30, 9), 1e-30)
    true = float(exact(delta, x, tokens, epsilon).norm())
    assert float(tied(delta, x, tokens, epsilon).squared_norms("gram").sqrt()) >= true > 1e-4


def test_in_tiles(monkeypatch):
    given_parts = parts(1, length=7, reads=9)
    whole = tied(*given_parts).squared_norms("gram")
    for most in (1, 20, 70, 10**6):
        monkeypatch.setattr(uses, "_AT_ONCE", most)
        assert torch.allclose(tied(*given_parts).squared_norms("gram"), whole, rtol=1e-6)


def test_half_precision():
    given_parts = parts(2, words=30)
    half = [part.bfloat16() if part.is_floating_point() else part for part in given_parts]
    norms = exact(*half).flatten(1).norm(dim=1)
    found = tied(*half).squared_norms("gram").sqrt()
    assert torch.all(found >= norms)
    assert torch.all(found <= norms * 1.01)


class _Largest(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for part in result if isinstance(result, tuple | list) else (result,):
            if isinstance(part, torch.Tensor):
                self.numbers = max(self.numbers, part.untyped_storage().nbytes() // part.element_size())
        return result


def test_nothing_is_as_large_as_a_table_for_each_record():
    records, length, words, width = 6, 4, 4000, 16
    both = tied(*parts(0, records, length, words, width))
    with _Largest() as largest:
        both.squared_norms_as_released()
        both.weighted_sum(torch.ones(records))
    assert largest.numbers <= max(words * width, records * length * words)
