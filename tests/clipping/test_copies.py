"""Augmentation multiplicity: an example is several rows, its gradient is that of their mean loss, and *that* is clipped."""

from __future__ import annotations

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lipdp.clipping as clipping
import lipdp.nn
from lipdp.errors import ConfigurationError, DataError, LipdpNotice
from tests.clipping.helpers import METHODS, assert_close, clipped, norm, quadratic

EXAMPLES = 3


pytestmark = pytest.mark.usefixtures("in_double")


class Scaled(nn.Module):
    """A bare parameter: torch.func does it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.tanh(x * self.scale)


class Tied(nn.Module):
    """One layer used twice, at different shapes."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)).mean(1))


class TwiceConvolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Conv1d(2, 2, 3, padding=1)

    def forward(self, x):
        return self.layer(torch.tanh(self.layer(x)))


FAMILIES = {
    "linear": (lambda: nn.Linear(4, 3), (4,)),
    "linear at positions": (lambda: nn.Linear(4, 3), (5, 4)),
    "bilinear": (lambda: _Bilinear(), (2, 4)),
    "prelu": (lambda: nn.PReLU(4), (4, 3)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 2, stride=2, padding=1), (2, 6)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3, padding=1, groups=2), (4, 5, 4)),
    "conv2d dilated": (lambda: nn.Conv2d(2, 3, 2, dilation=2, padding=1, padding_mode="circular"), (2, 5, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 2, 2), (2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, groups=2), (4, 2, 3)),
    "spectral": (lambda: lipdp.nn.SpectralConv2d(2, 4, 3, padding=1).double(), (2, 4, 4)),
    "layer norm": (lambda: nn.LayerNorm(4), (5, 4)),
    "rms norm": (lambda: nn.RMSNorm(4), (4,)),
    "group norm": (lambda: nn.GroupNorm(2, 4), (4, 3)),
    "instance norm": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 3)),
    "batch norm, frozen": (lambda: nn.BatchNorm1d(4).eval(), (4, 3)),
    "rnn": (lambda: nn.RNN(3, 4, batch_first=True), (5, 3)),
    "lstm": (lambda: nn.LSTM(3, 2, 2, batch_first=True, bidirectional=True), (4, 3)),
    "gru": (lambda: nn.GRU(3, 4, batch_first=True), (5, 3)),
    "attention": (lambda: nn.TransformerEncoderLayer(4, 2, 5, dropout=0.0, batch_first=True), (3, 4)),
    "a bare parameter": (Scaled, (3, 4)),
    "one layer twice": (Tied, (3, 4)),
    "one convolution twice": (TwiceConvolved, (2, 5)),
}


class _Bilinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Bilinear(2, 2, 3)

    def forward(self, x):
        return self.layer(x[..., :2], x[..., 2:])


def rowwise(model, loss, x, y, copies):
    """[{name: gradient}] for each example: the gradient of the mean of its rows' losses, one row at a time."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for i in range(len(x) // copies):
        total = {name: torch.zeros_like(p) for name, p in parameters.items()}
        for k in range(i * copies, (i + 1) * copies):
            found = torch.autograd.grad(loss(model(x[k : k + 1]), y[k : k + 1]).sum(), list(parameters.values()), allow_unused=True)
            for name, gradient in zip(parameters, found, strict=True):
                if gradient is not None:
                    total[name] += gradient / copies
        rows.append(total)
    return rows


def check_copies(model, x, copies, methods=METHODS, loss=quadratic, tolerance=1e-9):
    y = torch.linspace(-0.5, 0.5, len(x) // copies)
    rows = rowwise(model, loss, x, y.repeat_interleave(copies), copies)
    norms = torch.stack([norm(row) for row in rows])
    c = float(norms.median())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LipdpNotice)
        for form in ("auto", "gram", "materialise"):
            found = clipping.per_example_norms(model, loss, x, y, form=form, copies=copies)
            assert torch.allclose(found, norms, rtol=tolerance, atol=tolerance)
        for method in methods:
            for targets in (y, y.repeat_interleave(copies)):
                found = clipping.clip_batch(model, loss, x, targets, c, method, copies=copies)
                assert found.norms.shape == (len(norms), 1)
                assert torch.allclose(found.norms[:, 0], norms, rtol=tolerance, atol=tolerance)
                assert_close(found.sums, clipped(rows, c), tolerance, method)


@pytest.mark.parametrize("name", list(FAMILIES))
def test_every_layer(name):
    make, shape = FAMILIES[name]
    check_copies(make(), torch.randn(EXAMPLES * 2, *shape), 2, methods=("naive", "reweight", "ghost", "bookkeeping"))


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.integers(1, 4), st.integers(1, 4), st.booleans())
def test_any_number_of_copies(copies, examples, per_layer):
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Tanh(), nn.Flatten(), nn.Linear(8, 3))
    x = torch.randn(examples * copies, 1, 4, 4)
    check_copies(model, x, copies)
    y = torch.zeros(examples)
    style = "per_layer" if per_layer else "flat"
    fast, slow = (
        clipping.clip_batch(model, quadratic, x, y, 0.7, method, style=style, copies=copies) for method in ("bookkeeping", "naive")
    )
    assert_close(fast.sums, slow.sums)
    assert torch.allclose(fast.norms, slow.norms)


@pytest.mark.parametrize("make", [lambda: nn.Embedding(5, 3), lambda: nn.EmbeddingBag(5, 3, mode="mean")])
def test_tokens(make):
    check_copies(make(), torch.randint(5, (EXAMPLES * 3, 4)), 3)


@pytest.mark.parametrize("method", METHODS)
def test_masks_and_gradients_that_are_not_finite(method):
    """Both are about examples: one bad copy takes its example with it, and no other."""
    model = nn.Sequential(nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(6, 2))
    x, y = torch.randn(8, 1, 4), torch.zeros(4)
    mask = torch.tensor([True, True, False, True])
    whole = clipping.clip_batch(model, quadratic, x, y, 0.5, method, copies=2, mask=mask)
    kept = clipping.clip_batch(model, quadratic, x[[0, 1, 2, 3, 6, 7]], y[:3], 0.5, method, copies=2)
    assert_close(whole.sums, kept.sums)
    x[3, 0, 1] = float("inf")
    broken = clipping.clip_batch(model, quadratic, x, y, 0.5, method, copies=2, mask=mask)
    rest = clipping.clip_batch(model, quadratic, x[[0, 1, 6, 7]], y[:2], 0.5, method, copies=2)
    assert_close(broken.sums, rest.sums)
    assert float(broken.factors[1, 0]) == 0.0


def test_the_gradient_of_the_mean_is_clipped_not_each_copys():
    model = nn.Linear(1, 1, bias=False)
    x = torch.tensor([[10.0], [-10.0]])
    found = clipping.clip_batch(model, lambda out, y: out[:, 0], x, torch.zeros(1), 1.0, copies=2)
    assert float(found.norms[0, 0]) == pytest.approx(0.0, abs=1e-9)  # opposite gradients cancel before they are measured
    assert float(found.sums["weight"].abs().sum()) == pytest.approx(0.0, abs=1e-9)


def test_what_can_not_be_meant():
    model, x = nn.Linear(2, 1), torch.randn(6, 2)
    for copies in (0, -1, 1.5, True):
        with pytest.raises(ConfigurationError, match="copies"):
            clipping.clip_batch(model, quadratic, x, torch.zeros(6), 1.0, copies=copies)
    with pytest.raises(DataError, match="whole number of examples"):
        clipping.clip_batch(model, quadratic, x, torch.zeros(6), 1.0, copies=4)
    with pytest.raises(DataError, match="targets"):
        clipping.clip_batch(model, quadratic, x, torch.zeros(4), 1.0, copies=3)
    with pytest.raises(DataError, match="mask"):
        clipping.clip_batch(model, quadratic, x, torch.zeros(2), 1.0, copies=3, mask=torch.ones(6, dtype=torch.bool))


def test_rounding_is_covered_across_copies():
    """big + 8 − big over three copies: measured 0 in one order, released as 8 in another."""
    rows = torch.tensor([2.0**28, 8.0, -(2.0**28)], dtype=torch.float32)
    part = clipping.Dense(rows.reshape(3, 1)).merged(3)
    assert float(part.squared_norms().sqrt()) >= 8.0
    part = clipping.PositionSum(rows.reshape(3, 1, 1).transpose(1, 2), (1,)).merged(3)
    assert float(part.squared_norms().sqrt()) >= 8.0
