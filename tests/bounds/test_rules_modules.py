"""torch's own layers: attacked as they are (frozen), or as first and last layers and between boundaries (trained)."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from lipdp import nn
from lipdp.bounds import analyse
from lipdp.errors import UnsupportedError
from tests.soundness.harness import attack, impulse_jacobian, largest_singular_value

T = torch.nn


def frozen(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return module.double().requires_grad_(False)


# ---------------------------------------------------------------------------------------------- dense layers


@pytest.mark.parametrize("shape", [(4,), (3, 4), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("make", [lambda: T.Linear(4, 3), lambda: nn.SpectralLinear(4, 3)], ids=["free", "spectral"])
def test_dense_layer_at_any_number_of_positions_is_exact(make: Any, shape: tuple[int, ...]) -> None:
    report = attack(make(), 0.7, input_shape=shape, input_norm=1.5)
    positions = math.prod(shape[:-1])
    bounds = {row.name: row.bound for row in report.rows if row.kind == "parameter"}
    assert bounds == pytest.approx({"weight": 0.7 * 1.5, "bias": 0.7 * math.sqrt(positions)}, rel=1e-12)
    assert report.tightness("parameter") > 0.99
    if isinstance(make(), nn.SpectralLinear):
        assert report.tightness("activation") > 0.99  # √T·B is added, not B
        assert report.tightness("input") > 0.99


def test_frozen_dense_layer_has_its_certified_norm() -> None:
    layer = frozen(T.Linear(5, 4))
    report = attack(T.Sequential(layer, T.Linear(4, 2)), 1.0, input_shape=(3, 5), input_norm=1.0)
    assert {row.name for row in report.rows if row.kind == "parameter"} == {"1.weight", "1.bias"}
    assert analyse(layer, 1.0, input_shape=(5,)).lipschitz == pytest.approx(largest_singular_value(layer.weight), rel=1e-3)
    last = T.Sequential(T.Linear(4, 4), frozen(T.Linear(4, 4, bias=False)))
    report = attack(last, 1.0, input_shape=(4,), input_norm=1.0)
    assert report.tightness("parameter", "0.weight") > 0.98


def test_free_layers_between_boundaries_first_and_last() -> None:
    model = nn.Sequential(
        nn.BoundedInput((4,), norm=2.0),
        T.Linear(4, 6),
        nn.Boundary(norm=1.5, cotangent=0.6),
        T.Linear(6, 5),
        T.ReLU(),
        nn.Boundary(norm=3.0, cotangent=0.4),
        T.Linear(5, 3),
    )
    report = attack(model, 1.0)
    bounds = {row.name: row.bound for row in report.rows if row.kind == "parameter"}
    assert bounds == pytest.approx(
        {"1.weight": 1.2, "1.bias": 0.6, "3.weight": 0.6, "3.bias": 0.4, "6.weight": 3.0, "6.bias": 1.0}, rel=1e-12
    )
    assert report.tightness("parameter") > 0.98


# ---------------------------------------------------------------------------------------------- convolutions

CONVS: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: T.Conv1d(2, 3, 3, padding=1), (2, 6)),
    (lambda: T.Conv1d(2, 2, 2, stride=2, groups=2), (2, 6)),
    (lambda: T.Conv1d(1, 2, 3, padding="same", dilation=2, padding_mode="circular"), (1, 7)),
    (lambda: T.Conv2d(2, 2, 3, padding=1), (2, 4, 4)),
    (lambda: T.Conv2d(1, 2, (2, 3), stride=(2, 1), padding=(1, 0)), (1, 5, 4)),
    (lambda: T.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 4, 4)),
    (lambda: T.Conv2d(1, 2, 4, padding="same", padding_mode="replicate"), (1, 3, 3)),
    (lambda: T.Conv3d(1, 2, 2, padding=1), (1, 3, 3, 3)),
    (lambda: T.Conv3d(2, 2, (1, 2, 3), groups=2), (2, 2, 3, 4)),
]


@pytest.mark.parametrize(("make", "shape"), CONVS)
def test_free_convolution_weights_and_biases(make: Any, shape: tuple[int, ...]) -> None:
    report = attack(make(), 1.0, input_shape=shape, input_norm=1.0, steps=12, draws=3)
    assert report.tightness("parameter", "bias") > 0.99
    assert report.tightness("parameter", "weight") > 0.4


@pytest.mark.parametrize(("make", "shape"), CONVS)
def test_frozen_convolution_gain_covers_the_dense_jacobian(make: Any, shape: tuple[int, ...]) -> None:
    layer = frozen(make())
    actual = largest_singular_value(impulse_jacobian(layer, shape))
    claimed = analyse(layer, 1.0, input_shape=shape).lipschitz
    assert actual <= claimed * (1 + 1e-12)
    attack(layer, 1.0, input_shape=shape, input_norm=1.0, steps=5, draws=2, starts=("random", "constant"))


def test_pointwise_and_disjoint_free_convolutions_are_exact() -> None:
    """m = 1: Δ_K = G·X, as tight as a dense layer."""
    for layer in (T.Conv2d(3, 2, 1), T.Conv2d(1, 2, 2, stride=2), T.Conv1d(2, 2, 3, stride=3)):
        shape = (3, 3, 3) if layer.kernel_size == (1, 1) else (1, 4, 4) if len(layer.kernel_size) == 2 else (2, 6)
        report = attack(layer, 1.0, input_shape=shape, input_norm=1.0)
        assert report.tightness("parameter", "weight") > 0.99


# ---------------------------------------------------------------------------------------------- pools


def pools() -> list[Any]:
    cases: list[Any] = []
    for k, s, p, ceil in itertools.product((2, 3), (1, 2, 3), (0, 1), (False, True)):
        cases.append(pytest.param(T.MaxPool2d(k, s, p, ceil_mode=ceil), (1, 4, 5), id=f"max2-{k}-{s}-{p}-{ceil}"))
        cases += [
            pytest.param(T.AvgPool2d(k, s, p, ceil, include), (1, 4, 5), id=f"avg2-{k}-{s}-{p}-{ceil}-{include}")
            for include in (False, True)
        ]
    cases += [
        pytest.param(T.MaxPool1d(3, 1), (2, 6), id="max1"),
        pytest.param(T.MaxPool1d(2, 1, dilation=2), (1, 6), id="max1-dilated"),
        pytest.param(T.MaxPool2d((2, 3), (1, 2), (0, 1), dilation=(2, 1)), (1, 5, 5), id="max2-mixed"),
        pytest.param(T.MaxPool3d(2, 1), (1, 3, 3, 3), id="max3"),
        pytest.param(T.AvgPool1d(3, 1, 1), (1, 6), id="avg1"),
        pytest.param(T.AvgPool1d(3, 2, 1, ceil_mode=True, count_include_pad=False), (1, 6), id="avg1-ceil"),
        pytest.param(T.AvgPool2d(2, 1, divisor_override=1), (1, 4, 4), id="avg2-divisor-1"),
        pytest.param(T.AvgPool2d(3, 3, 1, divisor_override=2), (1, 5, 5), id="avg2-divisor-2"),
        pytest.param(T.AvgPool3d(2, 1, 1, divisor_override=3), (1, 2, 2, 3), id="avg3-divisor"),
        pytest.param(T.AvgPool3d(2, 2, ceil_mode=True), (1, 3, 3, 3), id="avg3-ceil"),
        pytest.param(nn.L2NormPool2d(2), (1, 4, 4), id="l2"),
        pytest.param(nn.L2NormPool2d(3, stride=1, padding=1), (1, 4, 4), id="l2-overlap-padded"),
        pytest.param(nn.L2NormPool2d((2, 3), stride=(1, 2), padding=(1, 0), eps=0.5), (2, 4, 5), id="l2-eps"),
        pytest.param(nn.ScaledAvgPool2d(2), (1, 4, 4), id="scaled"),
        pytest.param(nn.ScaledAvgPool2d((1, 2), stride=(2, 3)), (1, 4, 5), id="scaled-gaps"),
    ]
    return cases


@pytest.mark.parametrize(("pool", "shape"), pools())
def test_pools_hold_under_attack_and_disjoint_ones_are_exact(pool: torch.nn.Module, shape: tuple[int, ...]) -> None:
    report = attack(pool, 1.0, input_shape=shape, input_norm=1.0, steps=8, draws=2, starts=("positive", "constant", "impulse"))
    kernel, stride = pool.kernel_size, pool.stride
    disjoint = stride >= kernel if isinstance(kernel, int) else all(s >= k for k, s in zip(kernel, stride, strict=True))
    if disjoint and not isinstance(pool, T.AvgPool1d | T.AvgPool2d | T.AvgPool3d):
        assert report.tightness("input") > 0.99
        assert report.tightness("activation") > 0.99
    else:  # √m is reached within a factor: an overlap that is not counted fails here or above
        assert report.tightness("activation") > 0.3


@pytest.mark.parametrize(
    ("pool", "shape"),
    [
        (T.MaxPool2d(3, 1), (6, 6)),
        (T.MaxPool1d(3, 1), (6,)),
        (T.MaxPool3d(2, 1), (3, 3, 3)),
        (T.AvgPool2d(3, 1, divisor_override=1), (6, 6)),
        (T.AvgPool1d(2), (6,)),
        (nn.L2NormPool2d(3, 1), (6, 6)),
    ],
    ids=str,
)
def test_examples_without_channels_are_refused(pool: torch.nn.Module, shape: tuple[int, ...]) -> None:
    """torch takes (batch, H, W) for one image of "batch" channels and pools H and W; the count must not miss an axis."""
    with pytest.raises(UnsupportedError, match="channel dimension"):
        analyse(pool, 1.0, input_shape=shape, input_norm=1.0)


def test_pools_that_answer_minus_infinity_or_indices_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="padding only"):
        analyse(T.MaxPool1d(2, 2, 1, dilation=2), 1.0, input_shape=(1, 1), input_norm=1.0)
    with pytest.raises(UnsupportedError, match="return_indices"):
        analyse(T.MaxPool1d(2, return_indices=True), 1.0, input_shape=(1, 4), input_norm=1.0)


# ---------------------------------------------------------------------------------------------- the rest


def batch_norm(make: Any, train_affine: bool, affine: bool = True) -> torch.nn.Module:
    norm = make(3, affine=affine).double().eval()
    norm.running_mean.copy_(torch.tensor([0.3, -1.0, 0.0]))
    norm.running_var.copy_(torch.tensor([0.5, 2.0, 0.1]))
    with torch.no_grad():
        if affine:
            norm.weight.copy_(torch.tensor([1.0, -2.0, 0.3]))
            norm.bias.copy_(torch.tensor([0.2, 0.0, -0.5]))
    return norm.requires_grad_(train_affine)


@pytest.mark.parametrize(
    ("make", "shape"),
    [(T.BatchNorm1d, (3,)), (T.BatchNorm1d, (3, 4)), (T.BatchNorm2d, (3, 2, 2)), (T.BatchNorm3d, (3, 1, 2, 2))],
)
def test_batch_norm_in_evaluation_mode(make: Any, shape: tuple[int, ...]) -> None:
    for affine in (True, False):
        layer = batch_norm(make, train_affine=False, affine=affine)
        report = attack(layer, 1.0, input_shape=shape, input_norm=1.0, steps=20)
        assert report.tightness("input") > 0.99  # max|γ|/√(v+ε)
        assert report.tightness("activation") > 0.7
    report = attack(batch_norm(make, train_affine=True), 1.0, input_shape=shape, input_norm=1.0, steps=20)
    assert report.tightness("parameter", "bias") > 0.99
    assert report.tightness("parameter", "weight") > 0.95


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (T.Identity(), (3,)),
        (T.Flatten(), (2, 3)),
        (nn.Flatten(), (2, 3)),
        (T.Unflatten(1, (2, 2)), (4,)),
        (T.PixelShuffle(2), (4, 2, 2)),
        (T.PixelUnshuffle(2), (1, 4, 4)),
        (T.ZeroPad1d((1, 2)), (1, 3)),
        (T.ZeroPad2d(1), (1, 3, 3)),
        (T.ZeroPad3d(1), (1, 2, 2, 2)),
        (T.Dropout(0.5), (6,)),
        (T.Dropout(0.5).eval(), (6,)),
        (T.Dropout2d(0.3), (3, 2, 2)),
    ],
    ids=str,
)
def test_rearranging_padding_and_dropout_layers_are_exact(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    report = attack(layer, 1.0, input_shape=shape, input_norm=1.0, steps=5, draws=12)
    least = 0.99 if not layer.training or not isinstance(layer, T.Dropout | T.Dropout2d) else 0.7
    assert report.tightness("activation") > least
    assert report.tightness("input") > least


@pytest.mark.parametrize(
    ("layer", "shape", "says"),
    [
        (T.Flatten(0), (3,), "batch"),
        (T.Flatten(-2), (3,), "batch"),
        (T.Unflatten(0, (1, -1)), (3,), "batch"),
        (T.ZeroPad2d((0, 0, 1, -1)), (3,), "batch"),
        (T.BatchNorm1d(3, track_running_stats=False).eval(), (3,), "mixes examples"),
        (T.BatchNorm1d(3), (3,), "mixes examples"),
        (T.Sequential(T.LPPool1d(3, 2)), (1, 4), "no rule"),
    ],
    ids=str,
)
def test_layers_that_mix_examples_or_have_no_rule_are_refused(layer: torch.nn.Module, shape: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        analyse(layer, 1.0, input_shape=shape, input_norm=1.0)


def test_zero_padding_with_another_value_is_refused() -> None:
    layer = T.ZeroPad1d(1)
    layer.value = 1.0
    with pytest.raises(UnsupportedError, match="zeros"):
        analyse(layer, 1.0, input_shape=(1, 3), input_norm=1.0)
