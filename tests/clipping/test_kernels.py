"""The Triton kernels against plain float64 arithmetic: on a GPU, or anywhere by Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import lipdp.clipping as clipping
from lipdp.clipping import kernels
from lipdp.clipping.outer import OuterSum
from lipdp.clipping.rules_conv import ConvSum
from lipdp.errors import LipdpNotice
from tests.clipping.helpers import quadratic

ON_CUDA = torch.cuda.is_available()
DEVICE = "cuda" if ON_CUDA else "cpu"
usable = importlib.util.find_spec("triton") is not None and (ON_CUDA or os.environ.get("TRITON_INTERPRET") == "1")
pytestmark = pytest.mark.skipif(not usable, reason="needs Triton, and a CUDA device or TRITON_INTERPRET=1")
few = settings(max_examples=15, deadline=None, derandomize=True)
# Three TF32 products are float32 but for a few units in the last place.
CLOSE = 2e-6


@few
@given(st.integers(1, 3), st.integers(1, 2), st.integers(1, 3), st.integers(1, 18), st.data())
def test_convolutions(examples, groups, channels, outputs, data):
    kernel, stride, dilation, padding = ([data.draw(st.integers(low, high)) for _ in range(2)] for low, high in
                                         ((1, 3), (1, 2), (1, 2), (0, 2)))  # fmt: skip
    copies = data.draw(st.integers(1, 2))
    side = [data.draw(st.integers(5, 9)) for _ in range(2)]
    torch.manual_seed(0)
    layer = nn.Conv2d(groups * channels, groups * outputs, kernel, stride, padding, dilation, groups)
    x = torch.randn(examples * copies, groups * channels, *side)
    delta = torch.randn_like(layer(x)).detach()
    shape = tuple(layer.weight.shape)
    part = ConvSum(delta.double(), x.double(), shape, layer.stride, layer.dilation, groups, 1.0, layer.padding, copies)
    expected = part.materialise().flatten(1).square().sum(1)
    arguments = (layer.kernel_size, layer.stride, layer.padding, layer.dilation, groups, copies)
    found = kernels.convolution_norms(x.to(DEVICE), delta.to(DEVICE), *arguments, "tf32x3").sum(1)
    assert torch.allclose(found.cpu().double(), expected, rtol=CLOSE)


@few
@given(st.integers(1, 3), st.integers(1, 140), st.integers(1, 70), st.integers(1, 40))
def test_gram(batch, positions, p, d):
    torch.manual_seed(0)
    delta, x = torch.randn(batch, positions, p), torch.randn(batch, positions, d)
    found = kernels.gram_sums(delta.to(DEVICE), x.to(DEVICE), "tf32x3")
    of_delta, of_x = delta.double().square().sum(2), x.double().square().sum(2)
    scale = (of_delta.sqrt() * of_x.sqrt()).sum(1)
    expected = torch.einsum("btp,btd->bpd", delta.double(), x.double()).flatten(1).square().sum(1)
    assert torch.all((found.products.cpu().double() - expected).abs() <= CLOSE * scale.square())
    for one, other in (
        (found.scale, scale),
        (found.of_delta, of_delta.sum(1)),
        (found.of_x, of_x.sum(1)),
        (found.largest, of_delta.amax(1)),
    ):
        assert torch.allclose(one.cpu().double(), other, rtol=1e-5)


@few
@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16]))
def test_sums_of_cotangents(batch, outputs, positions, dtype):
    torch.manual_seed(0)
    delta = torch.randn(batch, outputs, positions).to(dtype)
    found = kernels.cotangent_sums(delta.to(DEVICE))
    wide = delta.double()
    assert torch.allclose(found.total.cpu().double(), wide.square().sum((1, 2)), rtol=1e-5)
    assert torch.allclose(found.largest.cpu().double(), wide.square().sum(1).amax(1), rtol=1e-5)
    assert torch.allclose(found.sums.cpu().double(), wide.sum(2), rtol=1e-4, atol=1e-4)


@few
@given(st.integers(1, 700), st.integers(1, 9000))
def test_squares_of_rows(rows, size):
    torch.manual_seed(0)
    x = torch.randn(min(rows, 20), size)
    assert torch.allclose(kernels.row_squares(x.to(DEVICE))[0].cpu().double(), x.double().square().sum(1), rtol=1e-5)


def test_squares_that_underflow_are_counted():
    x = torch.full((2, 50), 1e-25, device=DEVICE)
    assert bool((kernels.row_squares(x)[0] >= 50 * 1e-50).all())
    assert bool((kernels.row_squares(x)[0] > 0).all())
    assert bool((kernels.cotangent_sums(x[:, None]).total > 0).all())


@pytest.fixture
def by_kernel(monkeypatch):
    """As on a GPU: whatever a kernel can do, it does."""
    if not ON_CUDA:
        monkeypatch.setattr(kernels, "available", lambda *tensors: all(t.dtype != torch.float64 for t in tensors))


def test_norms_are_never_too_small(by_kernel):
    """Cancelling terms, as in test_float32: the margins are those of tensor cores."""
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed)
        delta, x = (torch.randn(1, 32, 16, generator=generator) * 300 for _ in range(2))
        near = x + torch.randn(1, 32, 16, generator=generator) * 1e-5
        order = torch.randperm(64, generator=generator)
        delta, x = torch.cat([delta, -delta], 1)[:, order].to(DEVICE), torch.cat([x, near], 1)[:, order].to(DEVICE)
        true = float(torch.einsum("btp,btd->bpd", delta.double(), x.double()).norm())
        part = OuterSum(delta, x, (16, 16))
        image, cotangent = (t.transpose(1, 2).reshape(1, 16, 8, 8) for t in (x, delta))
        convolved = ConvSum(cotangent, image, (16, 16, 1, 1), (1, 1), (1, 1), 1)
        for found in (part.squared_norms("gram"), convolved.squared_norms("materialise"), convolved.squared_norms("auto")):
            norm = float(found.sqrt())
            assert norm >= true
            for made in (part, convolved):
                released = made.weighted_sum(torch.tensor([min(1.0, 1.0 / norm)], device=DEVICE))
                assert float(released.double().norm()) <= 1 + 1e-3


@pytest.mark.parametrize("copies", [1, 2])
def test_whole_networks(by_kernel, copies):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, stride=2, groups=2), nn.Flatten(2), nn.Conv1d(8, 6, 3),
        nn.ReLU(), nn.Linear(7, 5), nn.Flatten(), nn.Linear(30, 3),
    )  # fmt: skip
    x, y = torch.randn(4 * copies, 1, 8, 8, device=DEVICE), torch.zeros(4, device=DEVICE)
    model.to(DEVICE)
    true = clipping.per_example_norms(model.double(), quadratic, x.double(), y.double(), copies=copies)
    for form in ("auto", "gram", "materialise"):
        found = clipping.per_example_norms(model.float(), quadratic, x, y, form=form, copies=copies).double()
        assert torch.all(found >= true * (1 - 1e-5))
        assert torch.all(found <= true * 1.03), form
    x[-1] = float("inf")  # and one example that is left out
    naive = clipping.clipped_gradients(model, quadratic, x, y, 0.5, "naive", copies=copies)
    fast = clipping.clipped_gradients(model, quadratic, x, y, 0.5, copies=copies)
    for name, value in naive.items():
        assert float((fast[name] - value).norm()) <= 0.03 * float(value.norm()) + 1e-4, name


def test_the_trial(monkeypatch):
    assert kernels._right(torch.device(DEVICE))
    monkeypatch.setattr(kernels, "row_squares", lambda x: (x.square().sum(1) * 1.1, 1))
    with pytest.warns(LipdpNotice, match="do not compute what they should"):
        assert not kernels._KERNELS.work(torch.device(DEVICE))
