"""Fourier norms of convolutions: above the true norm on every image, near it on large ones; the layer that keeps them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from lipdp import nn
from lipdp.bounds import analyse, conv_norm_fft
from lipdp.bounds.operator_norm import grid_factor, grid_for
from lipdp.errors import ConfigurationError, UnsupportedError
from tests.soundness.harness import attack, impulse_jacobian, largest_singular_value, noisy_steps

T = torch.nn


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


CONVS = [
    pytest.param(kernel, stride, padding, dilation, groups, mode, id=f"{kernel}-{stride}-{padding}-{dilation}-{groups}-{mode}")
    for kernel, (stride, padding, dilation, groups, mode) in itertools.product(
        [1, 2, 3, (2, 3), 5],
        [(1, 0, 1, 1, "zeros"), (1, 2, 1, 2, "zeros"), (2, 1, 1, 1, "zeros"), (1, 2, 2, 1, "zeros"), (1, "same", 1, 1, "circular")],
    )
]


@pytest.mark.parametrize(("kernel", "stride", "padding", "dilation", "groups", "mode"), CONVS)
def test_norm_covers_the_dense_jacobian(kernel: Any, stride: int, padding: Any, dilation: int, groups: int, mode: str) -> None:
    if kernel == 5 and dilation == 2:
        return
    layer = T.Conv2d(2, 4, kernel, stride, padding, dilation, groups, False, mode).double()
    for seed in range(2):
        with torch.no_grad():
            layer.weight.copy_(normal(*layer.weight.shape, seed=seed).abs() if seed else normal(*layer.weight.shape))
        true = largest_singular_value(impulse_jacobian(layer, (2, 6, 5)))
        for grid in (5, 8, 32):
            assert true <= conv_norm_fft(layer.weight, grid, groups) * (1 + 1e-12)


def test_norm_is_tight_on_large_images_and_for_constant_kernels() -> None:
    kernel = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    assert conv_norm_fft(kernel, 32) == pytest.approx(9.0 * grid_factor((3, 3), (32, 32)), rel=1e-3)  # ω = 0 is on the grid
    kernel = normal(3, 2, 3, 3)
    layer = T.Conv2d(2, 3, 3, padding=1, bias=False).double()
    with torch.no_grad():
        layer.weight.copy_(kernel)
    true = largest_singular_value(impulse_jacobian(layer, (2, 20, 20)))
    assert 0.93 < true / conv_norm_fft(kernel, 64) <= 1
    assert conv_norm_fft(kernel, 64) < conv_norm_fft(kernel, 16) < conv_norm_fft(kernel, 4)


def test_a_coarse_grid_is_still_an_upper_bound_and_a_smaller_one_is_refused() -> None:
    for seed in range(8):
        kernel = normal(2, 2, 3, 3, seed=seed)
        fine = conv_norm_fft(kernel, 64) / grid_factor((3, 3), (64, 64)) / 1.001  # a lower bound of the supremum
        for grid in (3, 4, 7):
            assert conv_norm_fft(kernel, grid) >= fine
    with pytest.raises(ConfigurationError, match="drops taps"):
        conv_norm_fft(kernel, 2)
    with pytest.raises(ConfigurationError):
        conv_norm_fft(kernel, (8,))
    assert conv_norm_fft(kernel * math.inf, 8) == math.inf
    assert conv_norm_fft(torch.zeros(1, 1, 3, 3), 8) == 0.0


def test_the_wave_between_grid_points_is_covered() -> None:
    """A kernel whose spectrum peaks half-way between two frequencies of the grid: the factor is needed, and enough."""
    n = 8
    phase = 3 * math.pi / n  # half-way between 2π/n and 4π/n
    taps = torch.arange(8, dtype=torch.float64)
    kernel = torch.stack((torch.cos(phase * taps), torch.sin(phase * taps)))[:, None, None, :]  # two outputs: cos, sin
    truth = max(
        float(torch.linalg.matrix_norm((kernel[:, :, 0].to(torch.complex128) * torch.exp(-1j * w * taps)).sum(-1), 2))
        for w in torch.linspace(0, 2 * math.pi, 2_001, dtype=torch.float64)
    )
    grid = conv_norm_fft(kernel, (1, n))
    assert truth <= grid <= truth * grid_factor((1, 8), (1, n)) * (1 + 1e-3)
    assert grid / grid_factor((1, 8), (1, n)) < truth  # without it the bound would be false


def test_one_and_three_axes() -> None:
    for layer, shape in [
        (T.Conv1d(2, 3, 4, padding=3, bias=False), (2, 7)),
        (T.Conv3d(1, 2, 2, padding=1, bias=False), (1, 3, 3, 3)),
    ]:
        layer = layer.double()
        assert largest_singular_value(impulse_jacobian(layer, shape)) <= conv_norm_fft(layer.weight, 8)


@pytest.mark.parametrize("kernel", ["random", "impulse"])
def test_frozen_convolutions_use_the_smaller_bound_and_say_which(kernel: str) -> None:
    layer = T.Conv2d(2, 2, 3, padding=1, bias=False).double().requires_grad_(False)
    if kernel == "impulse":
        layer.weight.zero_()[0, 0, 1, 1] = 1.0
    result = analyse(layer, 1.0, input_shape=(2, 8, 8))
    true = largest_singular_value(impulse_jacobian(layer, (2, 8, 8)))
    assert true <= result.lipschitz <= 1.15 * true
    assert "Fourier norm on 32" in result.layers[0].note
    counted = T.Conv2d(2, 2, 3, padding=1, bias=False, padding_mode="reflect").double().requires_grad_(False)
    assert "by counting" in analyse(counted, 1.0, input_shape=(2, 8, 8)).layers[0].note
    transposed = T.ConvTranspose2d(2, 3, 3, 2, bias=False).double().requires_grad_(False)
    claimed = analyse(transposed, 1.0, input_shape=(2, 5, 5)).lipschitz
    assert largest_singular_value(impulse_jacobian(transposed, (2, 5, 5))) <= claimed


def test_spectral_convolutions_note_their_bound() -> None:
    assert (
        analyse(nn.SpectralConv2d(1, 1, 3, padding=1), 1.0, input_shape=(1, 8, 8), input_norm=1.0).layers[0].note.startswith("RKO")
    )


def test_grid_choice() -> None:
    assert grid_for(torch.zeros(4, 4, 1, 1)) == 0
    assert grid_for(torch.zeros(4, 4, 3, 3)) == 32
    assert grid_for(torch.zeros(16, 16, 11, 11)) >= 22
    assert 0 < grid_for(torch.zeros(256, 256, 3, 3)) < 32 or grid_for(torch.zeros(256, 256, 3, 3)) == 0


# ---------------------------------------------------------------------------------------------- the layer


@pytest.mark.parametrize(
    ("arguments", "shape"),
    [
        ((2, 3, 3, 1, 1), (2, 6, 6)),
        ((2, 4, 3, 2, 1, 1, 2), (2, 5, 5)),
        ((1, 2, (2, 5), 1, "same", 2), (1, 6, 6)),
        ((2, 3, 3, 1, 1, 1, 1, True, "circular"), (2, 4, 4)),
        ((1, 2, 3, 1, 1, 1, 1, True, "circular"), (1, 1, 2)),
    ],
)
def test_layer_keeps_the_true_norm_at_one(arguments: Any, shape: tuple[int, ...]) -> None:
    layer = nn.FourierConv2d(*arguments)
    for dtype in (torch.float32, torch.float64):
        layer = layer.to(dtype)
        for start in ("initial", "constant", "noise"):
            with torch.no_grad():
                if start == "constant":
                    layer.weight.fill_(1.0)
            layer.project_()
            if start == "noise":
                noisy_steps(layer, 3, 0.3)
            assert largest_singular_value(impulse_jacobian(layer, shape)) <= 1
    report = attack(layer, 1.0, input_shape=shape, input_norm=1.0, steps=6, draws=2, starts=("constant", "random"))
    assert report.tightness("parameter", "bias") > 0.99


def test_kernels_may_be_larger_than_rko_allows() -> None:
    """A kernel that RKO has to shrink by 3: one tap. Its true norm is 1."""
    fourier, rko = nn.FourierConv2d(1, 1, 3, padding=1, bias=False), nn.SpectralConv2d(1, 1, 3, padding=1, bias=False)
    for layer in (fourier, rko):
        with torch.no_grad():
            layer.weight.zero_()[0, 0, 1, 1] = 1.0
        layer.project_()
    image = normal(1, 1, 8, 8).float()
    assert 0.98 < float(fourier(image).detach().norm() / image.norm()) <= 1
    assert float(rko(image).detach().norm() / image.norm()) == pytest.approx(1 / 3, rel=1e-5)
    claimed = {kind: analyse(layer, 1.0, input_shape=(1, 8, 8), input_norm=1.0) for kind, layer in (("f", fourier), ("r", rko))}
    assert claimed["f"].sensitivities == pytest.approx({"weight": 3.0})
    assert claimed["r"].sensitivities == pytest.approx({"weight": 1.0})
    assert "within a factor 1.010" in claimed["f"].layers[0].note


def test_wrap_around_that_repeats_outputs_is_refused() -> None:
    layer = nn.FourierConv2d(1, 1, 3, padding=3, padding_mode="circular")
    with pytest.raises(UnsupportedError, match="beyond one turn"):
        analyse(layer, 1.0, input_shape=(1, 4, 4), input_norm=1.0)


def test_a_diverged_kernel_is_refused() -> None:
    layer = nn.FourierConv2d(1, 1, 3)
    with torch.no_grad():
        layer.weight.fill_(math.nan)
    with pytest.raises(ConfigurationError, match="not finite"):
        layer.project_()
