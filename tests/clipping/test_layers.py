"""Each layer against the plain loop, in float64, over a grid of its settings."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import lipdp.clipping as clipping
import lipdp.nn
from lipdp.clipping import rules_conv
from tests.clipping.helpers import METHODS, assert_close, check_all, quadratic
from tests.many import examples

FAST = ("reweight", "ghost", "bookkeeping")
few = settings(max_examples=examples(15), deadline=None, derandomize=True)
CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}


pytestmark = pytest.mark.usefixtures("in_double")


@few
@given(st.lists(st.integers(1, 4), max_size=3), st.integers(1, 5), st.integers(1, 5), st.booleans(), st.integers(1, 4))
def test_linear_any_leading_dimensions(lead, d, p, bias, batch):
    check_all(nn.Linear(d, p, bias=bias), torch.randn(batch, *lead, d), methods=FAST)


def test_linear_over_no_positions():
    layer = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    x = torch.randn(2, 0, 3)
    check_all(layer, x, methods=FAST)


@few
@given(st.lists(st.integers(1, 3), max_size=2), st.booleans(), st.integers(1, 3), st.integers(1, 3))
def test_bilinear(lead, bias, a, b):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Bilinear(a, b, 4, bias=bias)

        def forward(self, x):
            return self.layer(x[..., :a], x[..., a:])

    check_all(Model(), torch.randn(3, *lead, a + b), methods=FAST)


@st.composite
def convolutions(draw):
    axes = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    kernel = [draw(st.integers(1, 3)) for _ in range(axes)]
    stride = [draw(st.integers(1, 3)) for _ in range(axes)]
    dilation = [draw(st.integers(1, 2)) for _ in range(axes)]
    padding = draw(st.sampled_from(["same", "valid", "numbers"]))
    if padding == "same":
        stride = [1] * axes
    if padding == "numbers":
        padding = [draw(st.integers(0, 2)) for _ in range(axes)]
    size = [draw(st.integers(1, 6)) for _ in range(axes)]
    arguments = {"stride": stride, "dilation": dilation, "groups": groups, "padding_mode": mode, "bias": draw(st.booleans())}
    layer = CONV[axes](groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 2)), kernel, padding=padding, **arguments)
    return layer, torch.randn(draw(st.integers(1, 3)), layer.in_channels, *size)


@settings(max_examples=examples(50), deadline=None, derandomize=True)
@given(convolutions())
def test_convolutions(case):
    layer, x = case
    try:
        layer(x)
    except RuntimeError:
        assume(False)  # the kernel does not fit, or the padding is larger than the image allows
    check_all(layer, x, methods=FAST)


def test_image_smaller_than_kernel():
    check_all(nn.Conv2d(1, 2, 5, padding=2), torch.randn(3, 1, 2, 3))


def test_one_kernel_position():
    check_all(nn.Conv2d(2, 3, 4), torch.randn(3, 2, 4, 4))


@settings(max_examples=examples(30), deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.integers(0, 2), st.booleans(), st.data())
def test_transposed_convolutions(axes, kernel, stride, groups, padding, bias, data):
    dilation = data.draw(st.integers(1, 2))
    output_padding = data.draw(st.integers(0, max(stride, dilation) - 1))
    layer = TRANSPOSED[axes](2 * groups, groups, kernel, stride, padding, output_padding, groups, bias, dilation)
    x = torch.randn(2, 2 * groups, *[data.draw(st.integers(1, 4)) for _ in range(axes)])
    try:
        assume(layer(x).numel() > 0)
    except RuntimeError:
        assume(False)
    check_all(layer, x, methods=FAST)


def test_transposed_with_output_size():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.up = nn.ConvTranspose2d(2, 3, 3, stride=2)

        def forward(self, x):
            return self.up(x, output_size=[10, 10])

    check_all(Model(), torch.randn(3, 2, 4, 4))


def test_spectral_layers_of_this_library():
    model = nn.Sequential(
        lipdp.nn.SpectralConv2d(1, 4, 3, padding=1), lipdp.nn.GroupSort(2), nn.Flatten(), lipdp.nn.SpectralLinear(100, 3)
    )
    check_all(model.double(), torch.randn(3, 1, 5, 5))


@few
@given(st.integers(1, 6), st.sampled_from([None, 0, -1]), st.integers(0, 2), st.sampled_from([torch.int64, torch.int32]))
def test_embedding_with_repeated_tokens(length, padding, extra, dtype):
    tokens = torch.randint(3, (3, length, *[2] * extra)).to(dtype)
    check_all(nn.Embedding(3, 4, padding_idx=padding), tokens, methods=FAST)


def test_embedding_of_one_token():
    check_all(nn.Embedding(5, 3), torch.tensor([1, 1, 4]))


@few
@given(st.sampled_from(["sum", "mean"]), st.sampled_from([None, 1]), st.booleans(), st.integers(1, 5))
def test_embedding_bag_rows(mode, padding, weighted, length):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(3, 4, mode=mode, padding_idx=padding)

        def forward(self, tokens):
            weights = torch.cos(tokens.double()) if weighted and mode == "sum" else None
            return self.bag(tokens, per_sample_weights=weights)

    check_all(Model(), torch.randint(3, (4, length)), methods=FAST)


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("padding", [None, 0])
def test_embedding_bag_offsets(mode, last, padding):
    class Model(nn.Module):
        """Bags of different lengths, one of them empty: (tokens, offsets) made from padded rows."""

        def __init__(self):
            super().__init__()
            self.bag = nn.EmbeddingBag(5, 3, mode=mode, include_last_offset=last, padding_idx=padding)

        def forward(self, rows):
            lengths = rows[:, 0]
            tokens = torch.cat([row[1 : 1 + int(n)] for row, n in zip(rows, lengths, strict=True)])
            ends = lengths.cumsum(0)
            offsets = torch.cat([torch.zeros(1, dtype=torch.long), ends if last else ends[:-1]])
            return self.bag(tokens, offsets)

    check_all(Model(), torch.tensor([[3, 1, 1, 0], [0, 0, 0, 0], [2, 4, 2, 0]]))


@few
@given(st.integers(0, 2), st.integers(1, 2), st.booleans())
def test_layer_norm(lead, trailing, bias):
    shape = [3, 4][:trailing]
    layer = nn.LayerNorm(shape, bias=bias)
    nn.init.normal_(layer.weight)
    check_all(layer, torch.randn(3, *[2] * lead, *shape), methods=FAST)


def test_rms_norm():
    check_all(nn.RMSNorm(4), torch.randn(3, 5, 4))
    check_all(nn.RMSNorm([3, 4], eps=1e-3), torch.randn(3, 2, 3, 4))


@few
@given(st.integers(0, 3), st.sampled_from([1, 2, 4]))
def test_group_norm(axes, groups):
    groups = groups if axes else 2  # torch refuses to normalise a single number
    check_all(nn.GroupNorm(groups, 4), torch.randn(3, 4, *[3] * axes), methods=FAST)


@pytest.mark.parametrize(("cls", "axes"), [(nn.InstanceNorm1d, 1), (nn.InstanceNorm2d, 2), (nn.InstanceNorm3d, 3)])
def test_instance_norm(cls, axes):
    check_all(cls(2, affine=True), torch.randn(3, 2, *[3] * axes))


@pytest.mark.parametrize(("cls", "shape"), [(nn.BatchNorm1d, (4,)), (nn.BatchNorm1d, (4, 3)), (nn.BatchNorm2d, (4, 3, 3))])
def test_batch_norm_with_frozen_statistics(cls, shape):
    layer = cls(4)
    layer(torch.randn(8, *shape))
    check_all(layer.eval(), torch.randn(3, *shape))


@few
@given(st.integers(0, 2), st.booleans())
def test_prelu(axes, many):
    check_all(nn.PReLU(4 if many else 1), torch.randn(3, 4, *[3] * axes), methods=FAST)


def test_every_method_of_one_layer():
    check_all(nn.Conv2d(2, 3, 3, padding=1), torch.randn(4, 2, 5, 5), methods=(*METHODS, "auto"))


@pytest.mark.parametrize(("kernel", "stride", "padding", "groups"), [(2, 2, 0, 1), (2, 3, 1, 2), (1, 1, 0, 1), (3, 3, 0, 2)])
def test_windows_that_lie_apart(monkeypatch, kernel, stride, padding, groups):
    """Long ones (a picture's patches) are taken as the positions of a dense layer."""
    monkeypatch.setattr(rules_conv, "_LONG_WINDOW", 1)
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 6, kernel, stride, padding, groups=groups).double()
    x, y = torch.randn(6, 4, 7, 7, dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    check_all(nn.Sequential(layer, nn.Tanh()), x)
    found, expected = (clipping.clipped_gradients(layer, quadratic, x, y, 0.5, method, copies=2) for method in ("auto", "naive"))
    assert_close(found, expected)


@pytest.mark.parametrize("at_once", [1, 250, 2**20])
@pytest.mark.parametrize("copies", [1, 2])
def test_gradients_held_some_records_after_others(monkeypatch, at_once, copies):
    monkeypatch.setattr(rules_conv, "_AT_ONCE", at_once)  # one record of 120 numbers, two, all
    torch.manual_seed(0)
    layer = nn.Conv2d(4, 5, (2, 3), padding=1)
    x, y = torch.randn(5 * copies, 4, 5, 5), torch.linspace(-1, 1, 5)
    x[2 * copies] = math.inf  # is left out
    found, expected = (
        clipping.clipped_gradients(layer, quadratic, x, y, 0.5, method, copies=copies) for method in ("auto", "naive")
    )
    assert_close(found, expected)
    kept = x.isfinite().flatten(1).all(1)
    check_all(layer, x[kept][:4])
