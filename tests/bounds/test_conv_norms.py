"""Certified norms of convolutions with strides, near orthogonality and on one image size, against dense Jacobians."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp import nn
from lipdp.bounds import analyse
from lipdp.bounds.operator_norm import conv_norm_circular, conv_norm_fft, conv_norm_gram
from lipdp.parametrize import AOC
from lipdp.parametrize.convolution import ConvGeometry
from tests.soundness.harness import impulse_jacobian, largest_singular_value

T = torch.nn


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conv(kernel: torch.Tensor, **arguments: Any) -> torch.nn.Conv2d:
    groups = arguments.get("groups", 1)
    layer = T.Conv2d(kernel.shape[1] * groups, kernel.shape[0], tuple(kernel.shape[2:]), bias=False, **arguments).double()
    with torch.no_grad():
        layer.weight.copy_(kernel)
    return layer


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    window=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    groups=st.integers(1, 2),
    padding=st.integers(0, 2),
    seed=st.integers(0, 9),
)
def test_strided_norms_cover_the_dense_jacobian(rows, columns, window, stride, groups, padding, seed) -> None:
    kernel = normal(rows * groups, columns, *window, seed=seed)
    true = largest_singular_value(
        impulse_jacobian(conv(kernel, stride=stride, groups=groups, padding=padding), (columns * groups, 6, 7))
    )
    strided = conv_norm_fft(kernel, None, groups, stride)
    assert true <= strided * (1 + 1e-12)
    assert true <= conv_norm_gram(kernel, groups, stride) * (1 + 1e-12)
    assert true <= conv_norm_fft(kernel, None, groups) * (1 + 1e-12)


def test_the_stride_is_worth_counting() -> None:
    """Blocks of s×s pixels through an orthogonal matrix: norm 1 at stride s, up to s at stride 1."""
    kernel = torch.linalg.qr(normal(12, 12))[0].reshape(12, 3, 2, 2)
    assert conv_norm_gram(kernel, stride=2) == pytest.approx(1.0, abs=1e-10)
    assert conv_norm_fft(kernel, stride=2) == pytest.approx(1.0, rel=1e-3)  # the window of blocks is 1×1: no grid to interpolate
    assert conv_norm_fft(kernel) > 1.3


def orthogonal_kernel(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    torch.manual_seed(0)
    pi, geometry = AOC(), ConvGeometry(4, 4, (3, 3), (1, 1), (1, 1), ((1, 1), (1, 1)), 1, "zeros")
    return pi.kernel(pi.initial(geometry), geometry).to(dtype).double()


def test_the_gram_bound_is_sharp_for_orthogonal_convolutions_where_a_grid_is_not() -> None:
    assert 1 <= conv_norm_gram(orthogonal_kernel()) < 1 + 1e-9
    assert 1 <= conv_norm_gram(orthogonal_kernel(torch.float32)) < 1 + 1e-5
    assert conv_norm_fft(orthogonal_kernel()) > 1.005


@pytest.mark.parametrize("change", [1e-12, 1e-8, 1e-3, 0.1, 1.0])
def test_the_gram_bound_sees_every_departure_from_orthogonality(change: float) -> None:
    """A single tap moved by any amount: the bound stays above the true norm, by dense SVD and by a fine grid."""
    for seed in range(4):
        kernel = orthogonal_kernel() + change * normal(4, 4, 3, 3, seed=seed)
        symbols = torch.fft.fft2(kernel, s=(61, 61)).flatten(2).movedim(2, 0)  # 61: other frequencies than the bound's own
        assert float(torch.linalg.svdvals(symbols).max()) <= conv_norm_gram(kernel) * (1 + 1e-13)
        dense = largest_singular_value(impulse_jacobian(conv(kernel, padding=1, padding_mode="circular"), (4, 6, 6)))
        assert dense <= conv_norm_gram(kernel) * (1 + 1e-13)


@pytest.mark.parametrize(
    ("window", "size", "groups"), [((3, 3), (5, 6), 1), ((5, 4), (4, 3), 1), ((2, 3), (3, 3), 2), ((1, 1), (2, 2), 1)]
)
def test_on_one_image_size_the_circular_norm_is_exact(window: Any, size: Any, groups: int) -> None:
    for seed in range(3):
        kernel = normal(2 * groups, 2, *window, seed=seed)
        layer = conv(kernel, groups=groups, padding="same", padding_mode="circular")
        true = largest_singular_value(impulse_jacobian(layer, (2 * groups, *size)))
        found = conv_norm_circular(kernel, size, groups)
        assert true <= found * (1 + 1e-13)
        assert found <= true * (1 + 1e-3)  # the Gram iteration stops within a thousandth
        layer.requires_grad_(False)
        assert analyse(layer, 1.0, input_shape=(2 * groups, *size), input_norm=1.0).lipschitz <= found * (1 + 1e-12)


def test_what_is_not_finite_has_no_norm() -> None:
    kernel = normal(2, 2, 3, 3)
    kernel[0, 0, 0, 0] = math.nan
    assert math.isinf(conv_norm_fft(kernel))
    assert math.isinf(conv_norm_gram(kernel))
    assert math.isinf(conv_norm_circular(kernel, (4, 4)))


def test_frozen_layers_use_the_tightest_of_the_norms_and_say_which() -> None:
    layer = conv(orthogonal_kernel(), padding=1).requires_grad_(False)
    found = analyse(layer, 1.0, input_shape=(4, 6, 6), input_norm=1.0)
    assert found.lipschitz == pytest.approx(1.0, abs=1e-8)
    assert "Gram" in found.layers[0].note
    strided = conv(torch.linalg.qr(normal(12, 12))[0].reshape(12, 3, 2, 2), stride=2).requires_grad_(False)
    assert analyse(strided, 1.0, input_shape=(3, 6, 6), input_norm=1.0).lipschitz == pytest.approx(1.0, abs=1e-3)
    turn = conv(normal(2, 2, 3, 3), padding=1, padding_mode="circular").requires_grad_(False)
    assert "images of this size" in analyse(turn, 1.0, input_shape=(2, 5, 5), input_norm=1.0).layers[0].note
    reflected = conv(normal(2, 2, 3, 3), padding=1, padding_mode="reflect").requires_grad_(False)
    assert "counting" in analyse(reflected, 1.0, input_shape=(2, 5, 5), input_norm=1.0).layers[0].note


def test_a_frozen_kernel_is_known_again_by_its_numbers_alone() -> None:
    """Changed in place (same tensor, same address, same version even), it has the norm of its new numbers."""
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(2, 3, 3, padding=1, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(nn.BoundedInput((2, 6, 6)), layer, nn.Flatten())

    def lipschitz() -> float:
        return float(analyse(model, 1.0, check=False).layers[1].norm)

    first = lipschitz()
    assert lipschitz() == first
    layer.weight.data.mul_(3.0)
    assert lipschitz() == pytest.approx(3 * first, rel=1e-6)
    layer.weight.data.view(-1)[0] += 5.0
    dense = impulse_jacobian(layer, (2, 6, 6))
    assert lipschitz() >= largest_singular_value(dense) * (1 - 1e-12)
    layer.stride = (2, 2)
    assert lipschitz() != pytest.approx(3 * first, rel=1e-6)
