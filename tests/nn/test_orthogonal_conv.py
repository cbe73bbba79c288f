"""Layers with orthogonal convolutions under attack, over a grid of windows: no bound is beaten, and what is exact is reached."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.bounds import analyse, program_of
from lipdp.bounds.propagate import forward_pass
from lipdp.certify import certify
from lipdp.errors import ConfigurationError
from lipdp.parametrize import constraint
from tests.soundness.harness import attack, impulse_jacobian, largest_singular_value

AOC, BCOP, SOC, FFT = constraint.AOC, constraint.BCOP, constraint.SOC, constraint.CircularFFT


@functools.cache
def grid() -> dict[str, tuple[nn.SpectralConv2d, tuple[int, ...]]]:
    """Layers and the images they see, by name: whatever windows, groups and channels the constraints and torch admit."""
    cases = {}
    windows = [
        (1, 1, 0, 1, 1),
        (2, 1, 1, 1, 1),
        (3, 1, 1, 1, 2),
        (3, 1, "same", 2, 1),
        ((3, 2), (2, 1), (1, 0), 1, 1),
        (3, 2, 1, 1, 1),
        (4, 3, 2, 1, 2),
    ]
    for pi, mode, (kernel, stride, padding, dilation, groups) in itertools.product(
        (AOC(), BCOP(), SOC(3), FFT((5, 6))), ("zeros", "circular"), windows
    ):
        for channels, size in (((2, 4), (5, 6)), ((4, 2), (6, 6)), ((2, 2), (2, 2))):
            arguments = (*channels, kernel, stride, padding, dilation, groups)
            try:
                layer = nn.SpectralConv2d(*arguments, padding_mode=mode, constraint=pi)
                forward_pass(program_of(layer, (channels[0], *size)), 1.0)
            except (ConfigurationError, lipdp.errors.LipdpError):
                continue
            name = f"{type(pi).__name__}-{mode}-{kernel}-{stride}-{padding}-{dilation}-{groups}-{channels}-{size}"
            cases[name] = (layer, (channels[0], *size))
    return cases


def test_the_grid_has_something_of_everything() -> None:
    names = " ".join(grid())
    for part in (
        "AOC-zeros",
        "AOC-circular",
        "BCOP-zeros",
        "BCOP-circular",
        "SOC-zeros",
        "SOC-circular",
        "FFT-circular",
        "(2, 2)-(2, 2)",
    ):
        assert part in names
    assert "FFT-zeros" not in names
    assert len(grid()) > 60


def test_bounds_hold_over_the_grid() -> None:
    for name, (layer, shape) in list(grid().items())[::3]:
        report = attack(layer, 1.0, input_shape=shape, input_norm=1.0, steps=3, draws=1, starts=("constant", "random"))
        assert report.tightness("parameter", "bias") > 0.99, name


def test_operator_norm_is_at_most_one() -> None:
    for name, (layer, shape) in grid().items():
        assert largest_singular_value(impulse_jacobian(layer, shape)) <= 1 + 1e-13, name


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.SpectralConv2d(2, 2, 3, padding=1, padding_mode="circular", constraint=AOC()), (2, 4, 4)),
        (nn.SpectralConv2d(2, 8, 2, stride=2, constraint=AOC()), (2, 4, 4)),
        (nn.SpectralConv2d(2, 2, 3, padding=1, padding_mode="circular", constraint=FFT(4)), (2, 4, 4)),
        (nn.SpectralConvTranspose2d(4, 1, 2, stride=2, constraint=AOC()), (4, 2, 2)),
        (nn.SpectralConv1d(2, 2, 3, padding=1, padding_mode="circular", constraint=BCOP()), (2, 5)),
    ],
    ids=["AOC", "AOC-stride", "FFT", "AOC-transposed", "BCOP-1d"],
)
def test_rules_are_reached_where_every_pixel_is_read_equally_often(layer: Any, shape: tuple[int, ...]) -> None:
    """Δ = √m·G·X of the kernel (G·X for CircularFFT, Parseval), ‖K∗‖ = 1: within 1%, so 2% less would be found out."""
    report = attack(layer, 1.0, input_shape=shape, input_norm=1.0, steps=12, draws=2)
    assert report.tightness("parameter") > 0.99
    assert report.tightness("input") > 0.99
    assert report.tightness("activation") > 0.99


def test_sensitivities_are_those_of_a_stored_kernel() -> None:
    def found(pi: Any, **options: Any) -> float:
        layer = nn.SpectralConv2d(2, 2, 3, padding=1, bias=False, constraint=pi, **options)
        return analyse(layer, 1.0, input_shape=(2, 8, 8), input_norm=1.5).sensitivities["weight"]

    assert found(None) == pytest.approx(1.5)
    assert found(AOC()) == pytest.approx(3 * 1.5)
    assert found(SOC(3)) == pytest.approx(7 * 1.5)  # a window of 3·2+1
    assert found(FFT(8), padding_mode="circular") == pytest.approx(1.5)


def test_notes_say_which_bound_was_used() -> None:
    def note(pi: Any) -> str:
        layer = nn.SpectralConv2d(2, 2, 3, padding=1, padding_mode="circular", constraint=pi)
        return analyse(layer, 1.0, input_shape=(2, 12, 12), input_norm=1.0).layers[0].note

    assert "RKO" in note(None)
    assert "√9" in note(AOC())
    assert "exactly orthogonal" in note(BCOP())
    assert "truncated series" in note(SOC())
    assert "FFT" in note(FFT(12))


def test_certificates_and_plans_take_them() -> None:
    torch.manual_seed(0)
    options: dict[str, Any] = {"padding": 1, "padding_mode": "circular", "bias": False}
    model = nn.Sequential(
        nn.BoundedInput((2, 6, 6), mode="ball"),
        nn.SpectralConv2d(2, 4, 3, **options, constraint=AOC()),
        nn.GroupSort(2),
        nn.SpectralConv2d(4, 4, 3, **options, constraint=FFT(6)),
        nn.SpectralConv2d(4, 4, 3, 2, padding=1, bias=False, constraint=AOC()),
        nn.Flatten(),
        nn.SpectralLinear(36, 3, bias=False),
    )
    x = torch.randn(5, 2, 6, 6)
    y = model(x).argmax(1)
    exact = certify(model, x, y)
    top = model(x).topk(2, dim=1).values.detach()
    # Orthogonal layers certify with their true constant 1, not with √m times it.
    assert bool((exact >= 0.95 * (top[:, 0] - top[:, 1]) / 2**0.5).all())
    plan = lipdp.plan(model, losses.CrossEntropy(), dataset_size=100, batch_size=20, delta=1e-3, noise_multiplier=1.0, steps=2)
    sizes = {group.name: group.size for group in plan.groups}
    assert sizes["1.weight"] == 4 * 2 * 9
    assert sizes["3.weight"] == 4 * 4 * 36
