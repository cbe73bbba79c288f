"""Layers that few examples use, tokens that Python chooses: whose gradient is whose is told, though a first batch shows nothing."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lipdp.clipping as clipping
from lipdp.clipping.layouts import layouts_of
from lipdp.errors import UnsupportedError

LOSS = nn.CrossEntropyLoss(reduction="none")
SPECIAL = 7


class ForSomeTokens(nn.Module):
    """A layer for tokens of one kind: as many as there are examples, in some batches, of one example more than of another."""

    def __init__(self, choose):
        super().__init__()
        self.table, self.layer, self.head = nn.Embedding(20, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.choose = choose

    def forward(self, tokens):
        embedded = self.table(tokens)
        places = self.choose((tokens == SPECIAL).flatten())
        pooled = embedded.mean(1)
        if len(places):
            chosen = embedded.flatten(0, 1)[places]
            pooled = pooled.index_add(0, torch.as_tensor(places) // tokens.shape[1], self.layer(chosen))
        return self.head(pooled)


CHOICES = {
    "by Python": lambda is_special: [place for place, special in enumerate(is_special.tolist()) if special],
    "by their number": lambda is_special: is_special.to(torch.int8).argsort(descending=True, stable=True)[: int(is_special.sum())],
    "by torch": lambda is_special: is_special.nonzero()[:, 0],
}


def tokens_with(special):
    """Eight examples of six tokens; so many of each are special."""
    tokens = torch.randint(SPECIAL + 1, 20, (8, 6))
    for row, count in enumerate(special):
        tokens[row, torch.randperm(6)[:count]] = SPECIAL
    return tokens


@pytest.mark.parametrize("first", [[0] * 8, [1] * 8, [0] * 5 + [1] * 3])
@pytest.mark.parametrize("seed", [0, 4])
@pytest.mark.parametrize("choice", list(CHOICES))
def test_tokens_are_attributed_though_their_number_is_that_of_the_examples(choice, seed, first):
    torch.manual_seed(seed)
    model, y = ForSomeTokens(CHOICES[choice]), torch.arange(8) % 3
    clipper = clipping.Clipper(model, LOSS)
    clipper(tokens_with(first), y, 0.3)
    later = tokens_with([0] * 6 + [2, 6])
    sums = clipper(later, y, 0.3).sums
    expected = clipping.clip_batch(model, LOSS, later, y, 0.3, "naive")
    for name, total in expected.sums.items():
        torch.testing.assert_close(sums[name], total, rtol=1e-5, atol=1e-6)
    norms = clipping.per_example_norms(model, LOSS, later, y)
    torch.testing.assert_close(norms.double(), expected.norms[:, 0], rtol=1e-4, atol=1e-6)


def test_tokens_that_numpy_chooses_are_refused():
    """It can't be evaluated where gradients of one example are taken."""
    torch.manual_seed(4)
    model = ForSomeTokens(lambda is_special: is_special.numpy().nonzero()[0].tolist())
    with pytest.raises(UnsupportedError, match="no norm rule"):
        clipping.clipped_gradients(model, LOSS, tokens_with([1] * 8), torch.arange(8) % 3, 0.3)


class SecondHead(nn.Module):
    """A head that is only there in training."""

    def __init__(self):
        super().__init__()
        self.body, self.head, self.second = nn.Linear(5, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        h = torch.tanh(self.body(x))
        return self.head(h) + self.second(h) if self.training else self.head(h)


def test_a_layer_that_is_only_called_in_training_shows_its_gradients_itself():
    torch.manual_seed(0)
    model, x, y = SecondHead(), torch.randn(6, 5), torch.arange(6) % 3
    sums = clipping.clip_batch(model, LOSS, x, y, 0.5).sums
    assert not layouts_of(model, x).risen  # nothing is evaluated again
    for name, total in clipping.clip_batch(model, LOSS, x, y, 0.5, "naive").sums.items():
        torch.testing.assert_close(sums[name], total, rtol=1e-5, atol=1e-6)
