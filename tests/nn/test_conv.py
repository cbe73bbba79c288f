"""SpectralConv2d over a grid of windows: operator norm ≤ 1 by the SVD of the dense Jacobian, gradients below Δ."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from lipdp import nn
from lipdp.bounds import analyse
from lipdp.bounds.rules_functions import conv_multiplicity
from lipdp.errors import ConfigurationError, LipdpError
from lipdp.parametrize import Spectral
from tests.soundness.harness import attack, impulse_jacobian, largest_singular_value

MODES = ("zeros", "reflect", "replicate", "circular")
KERNELS = (1, 2, 3, 4, 5, (3, 1), (2, 5))


def layers() -> list[Any]:
    cases = []
    for mode, kernel in itertools.product(MODES, KERNELS):
        largest = kernel if isinstance(kernel, int) else max(kernel)
        for stride, padding, dilation, groups in [
            (1, 0, 1, 1),
            (1, 1, 1, 2),
            (1, "same", 1, 1),
            (1, "same", 2, 1),
            (2, 2, 1, 1),
            ((1, 3), (2, 1), (2, 1), 1),
            (3, 1, 2, 2),
            (4, 0, 1, 1),
        ]:
            size = (5, 6) if largest < 5 else (6, 5)
            try:
                layer = nn.SpectralConv2d(2, 4, kernel, stride, padding, dilation, groups, padding_mode=mode)
                layer(torch.zeros(1, 2, *size))
            except RuntimeError:  # the window is larger than the padded image: torch refuses it
                continue
            cases.append(pytest.param(layer, (2, *size), id=f"{mode}-{kernel}-{stride}-{padding}-{dilation}-{groups}"))
    # Images smaller than the kernel, of one pixel, and wrap-around that covers the image more than once.
    for mode, size, kernel, padding in [
        ("zeros", (1, 1), 3, 1),
        ("zeros", (2, 2), 5, 2),
        ("circular", (3, 3), 5, 3),
        ("circular", (2, 3), 4, (2, 3)),
        ("circular", (1, 4), 3, 1),
        ("reflect", (3, 3), 5, 2),
        ("replicate", (1, 1), 3, 2),
        ("replicate", (2, 2), 5, 4),
    ]:
        layer = nn.SpectralConv2d(2, 3, kernel, 1, padding, padding_mode=mode)
        cases.append(pytest.param(layer, (2, *size), id=f"small-{mode}-{size}-{kernel}"))
    return cases


LAYERS = layers()


def constant_kernel(layer: nn.SpectralConv2d) -> None:
    with torch.no_grad():
        layer.weight.fill_(1.0)
    layer.project_()


@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_operator_norm_is_at_most_one(layer: nn.SpectralConv2d, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    assert largest_singular_value(impulse_jacobian(layer, shape)) <= 1 + 1e-13
    constant_kernel(layer)  # where the naive factors fail
    assert largest_singular_value(impulse_jacobian(layer, shape)) <= 1 + 1e-13
    with torch.no_grad():
        layer.weight.normal_()
    layer.project_()
    assert largest_singular_value(impulse_jacobian(layer, shape)) <= 1 + 1e-13


@pytest.mark.parametrize(("layer", "shape"), LAYERS[::3])
def test_gradients_stay_below_their_bounds(layer: nn.SpectralConv2d, shape: tuple[int, ...]) -> None:
    report = attack(layer, 1.0, input_shape=shape, input_norm=1.0, steps=6, draws=2, starts=("constant", "random"))
    assert report.tightness("parameter", "bias") > 0.99  # √(H·W) copies, reached by a constant cotangent
    assert report.tightness("parameter", "weight") > 0.3


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.SpectralConv2d(3, 4, 1), (3, 3, 3)),
        (nn.SpectralConv2d(2, 4, 2, stride=2), (2, 4, 4)),
        (nn.SpectralConv2d(1, 2, 3, padding=1, padding_mode="circular"), (1, 4, 4)),
        (nn.SpectralConv2d(1, 2, 2, padding=1, padding_mode="circular", stride=1), (1, 1, 1)),
    ],
)
def test_weight_rule_is_reached_where_every_pixel_is_read_equally_often(layer: Any, shape: tuple[int, ...]) -> None:
    """m copies of every pixel (disjoint windows, or wrap-around): Δ_Θ = G·X and ‖K∗‖ = 1 are exact, not just bounds."""
    report = attack(layer, 1.0, input_shape=shape, input_norm=1.0)
    assert report.tightness("parameter") > 0.99
    assert report.tightness("input") > 0.99
    assert report.tightness("activation") > 0.99


def test_zero_padding_comes_close_on_larger_images() -> None:
    """28×28, k=3: a constant image reads 2.86/3 of the bound; 2% less would not hold for much larger images."""
    layer = nn.SpectralConv2d(1, 1, 3, padding=1, bias=False)
    constant_kernel(layer)
    ratios = []
    for size in (8, 28, 64):
        image = torch.ones(1, 1, size, size, dtype=torch.float64) / size
        ratios.append(float(layer.double()(image).detach().norm()))
    assert ratios == sorted(ratios)
    assert 0.98 < ratios[-1] <= 1


def test_scale_follows_the_image_and_is_one_over_root_m() -> None:
    layer = nn.SpectralConv2d(1, 1, 3, padding=1)
    assert layer.scale(16, 16) == pytest.approx(1 / 3)
    assert layer.scale(1, 1) == pytest.approx(1.0)
    assert layer.scale(2, 16) == pytest.approx(1 / math.sqrt(6))
    assert conv_multiplicity(nn.SpectralConv2d(1, 1, 3, padding=1, padding_mode="reflect"), (8, 8)) == 16


def test_matches_torch_convolution_with_the_scaled_kernel() -> None:
    layer = nn.SpectralConv2d(4, 6, (3, 2), (2, 1), 1, groups=2, padding_mode="reflect").double()
    x = torch.randn(3, 4, 7, 8, dtype=torch.float64)
    plain = torch.nn.Conv2d(4, 6, (3, 2), (2, 1), 1, groups=2, padding_mode="reflect").double()
    with torch.no_grad():
        plain.weight.copy_(layer.weight * layer.scale(7, 8))
        plain.bias.copy_(layer.bias)
    assert torch.allclose(layer(x), plain(x), rtol=1e-12)


def test_groups_are_projected_one_by_one() -> None:
    layer = nn.SpectralConv2d(4, 4, 3, groups=2, constraint=Spectral())
    with torch.no_grad():
        layer.weight[:2] *= 100
        layer.weight[2:] *= 0.01
    small = layer.weight[2:].clone()
    layer.project_()
    assert torch.equal(layer.weight[2:], small)


def test_arguments_are_checked_and_shown() -> None:
    with pytest.raises(ConfigurationError, match="bias_norm"):
        nn.SpectralConv2d(1, 1, 3, bias_norm=0.0)
    with pytest.raises(LipdpError, match="SpectralConv2d"):
        analyse(nn.Sequential(nn.SpectralConv2d(3, 2, 3)), 1.0, input_shape=(5, 5), input_norm=1.0)
    assert "bias_norm=0.1" in repr(nn.SpectralConv2d(1, 1, 3))
    assert "bias_norm" not in repr(nn.SpectralConv2d(1, 1, 3, bias=False))
    assert "bias" not in dict(nn.SpectralConv2d(1, 1, 3, bias=False).named_parameters())
