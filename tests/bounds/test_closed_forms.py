"""Theorem 1 of [C] out of the calculus: networks whose Δ is known in closed form, to 1e-12."""

from __future__ import annotations

import math

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.bounds import Bound, Transfer, analyse, times
from lipdp.errors import ConfigurationError
from tests.soundness.functions import Forward
from tests.soundness.harness import attack

L, X0 = 1.7, 3.0


def mlp(depth: int, bias: float | None, scale: float = 1.0, width: int = 6) -> torch.nn.Module:
    """SpectralLinear and GroupSort, with x·scale behind every dense layer."""
    blocks: list[torch.nn.Module] = [nn.BoundedInput((width,), norm=X0)]
    for _ in range(depth):
        blocks.append(nn.SpectralLinear(width, width, bias=bias is not None, bias_norm=bias or 0.1))
        if scale != 1.0:
            blocks.append(Forward(lambda m, x: x * scale))
        blocks.append(nn.GroupSort())
    return nn.Sequential(*blocks)


def weights(model: torch.nn.Module, name: str) -> list[float]:
    return [bound for key, bound in lipdp.sensitivities(model, L).items() if key.endswith(name)]


@pytest.mark.parametrize("depth", [1, 2, 5, 12])
def test_bias_free_with_k_equal_one(depth: int) -> None:
    """Δ = L·X₀ for every layer."""
    assert weights(mlp(depth, None), "weight") == pytest.approx([L * X0] * depth, rel=1e-12)


@pytest.mark.parametrize("depth", [1, 2, 5, 12])
def test_with_biases_and_k_equal_one(depth: int) -> None:
    """Δ_l = L·(X₀ + Σ_{i<l} B); the bias's is L."""
    B = 0.25
    assert weights(mlp(depth, B), "weight") == pytest.approx([L * (X0 + i * B) for i in range(depth)], rel=1e-12)
    assert weights(mlp(depth, B), "bias") == pytest.approx([L] * depth, rel=1e-12)


@pytest.mark.parametrize("K", [0.5, 0.9, 1.1, 2.0])
@pytest.mark.parametrize("depth", [1, 3, 6])
def test_bias_free_with_k_below_and_above_one(depth: int, K: float) -> None:
    """x ↦ K·Wx per layer: activations K^(l−1)X₀ and cotangents L·K^(D−l+1) meet in Δ = L·K^D·X₀."""
    assert weights(mlp(depth, None, K), "weight") == pytest.approx([L * K**depth * X0] * depth, rel=1e-12)


@pytest.mark.parametrize("K", [0.5, 2.0])
def test_with_biases_and_k_below_and_above_one(K: float) -> None:
    """X_l = K(X_{l−1} + B), so Δ_l = L·K^(D−l+1)·(K^(l−1)X₀ + B(K + … + K^(l−1))); bias: L·K^(D−l+1)."""
    B, D = 0.3, 4
    expected = [L * K ** (D - i) * (K**i * X0 + B * sum(K**j for j in range(1, i + 1))) for i in range(D)]  # i = l − 1
    assert weights(mlp(D, B, K), "weight") == pytest.approx(expected, rel=1e-12)
    assert weights(mlp(D, B, K), "bias") == pytest.approx([L * K ** (D - i) for i in range(D)], rel=1e-12)


def test_the_closed_forms_are_reached() -> None:
    """Not only sums of bounds: the attack gets to 99% of every Δ of a deep network with biases and K ≠ 1."""
    for K in (0.5, 1.0, 2.0):
        report = attack(mlp(3, 0.25, K, width=4), L, steps=30)
        assert report.tightness("parameter") > 0.99


def test_convolutional_closed_form() -> None:
    """Biases on maps of T = H·W count √T; the average of a residual halves both paths."""
    model = nn.Sequential(
        nn.BoundedInput((2, 8, 8), norm=X0),
        nn.SpectralConv2d(2, 4, 3, padding=1, bias_norm=0.2),
        nn.Residual(nn.SpectralConv2d(4, 4, 3, padding=1, bias_norm=0.1)),
        nn.L2NormPool2d(2, eps=1e-12),
        nn.Flatten(),
        nn.SpectralLinear(64, 5, bias_norm=0.3),
    )
    x1 = X0 + 8 * 0.2
    x2 = (x1 + (x1 + 8 * 0.1)) / 2
    x3 = math.sqrt(x2**2 + 64 * 1e-12)
    expected = {
        "1.weight": L * X0,
        "1.bias": 8 * L,
        "2.module.weight": L / 2 * x1,
        "2.module.bias": 8 * L / 2,
        "5.weight": L * x3,
        "5.bias": L,
    }
    assert lipdp.sensitivities(model, L) == pytest.approx(expected, rel=1e-12)
    result = analyse(model, L)
    assert result.lipschitz == pytest.approx(1.0, rel=1e-12)
    assert result.output.norm == pytest.approx(x3 + 0.3, rel=1e-12)


def test_losses_enter_with_their_constant_for_this_output() -> None:
    model = nn.Sequential(nn.BoundedInput((4,), norm=2.0), nn.SpectralLinear(4, 5, bias=False))
    for loss, constant in [
        (losses.CrossEntropy(), math.sqrt(2)),
        (losses.MulticlassKR(), math.sqrt(1 + 1 / 4)),
        (losses.MulticlassHinge(), 1 / math.sqrt(5)),
        (losses.MAE(), 1 / math.sqrt(5)),
        (losses.MSE(target_norm=3.0, reduction="sum"), 2 * (2.0 + 3.0)),
    ]:
        result = analyse(model, loss)
        assert result.loss_lipschitz == pytest.approx(constant, rel=1e-12)
        assert result.sensitivities == pytest.approx({"1.weight": 2.0 * constant}, rel=1e-12)


@pytest.mark.parametrize("constant", [-1.0, math.nan])
def test_a_constant_that_is_no_bound_never_gives_a_sensitivity_of_zero(constant: float) -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 5))
    with pytest.raises(ConfigurationError, match="Lipschitz constant"):
        analyse(model, constant)


def test_a_loss_that_does_not_know_its_constant_is_refused() -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 5))
    with pytest.raises(ConfigurationError, match="as_loss"):
        analyse(model, torch.nn.CrossEntropyLoss())  # type: ignore[arg-type]


def test_frozen_parameters_are_left_out() -> None:
    model = mlp(3, 0.1)
    model[1].weight.requires_grad_(False)
    model[3].bias.requires_grad_(False)
    names = set(lipdp.sensitivities(model, L))
    assert names == {"1.bias", "3.weight", "5.weight", "5.bias"}
    assert weights(model, "weight") == pytest.approx([L * (X0 + 0.1), L * (X0 + 0.2)], rel=1e-12)


def test_unused_parameters_have_sensitivity_zero() -> None:
    model = Forward(lambda m, x: m.used(x), used=nn.SpectralLinear(4, 2), spare=torch.nn.Linear(4, 2))
    bounds = analyse(model, 1.0, input_shape=(4,), input_norm=1.0).sensitivities
    assert bounds == {"used.weight": 1.0, "used.bias": 1.0, "spare.weight": 0.0, "spare.bias": 0.0}


def test_analysis_leaves_the_model_and_the_random_state_alone() -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), torch.nn.Dropout(0.5), Forward(lambda m, x: x + torch.ones(4)))
    model.train()
    before, attributes = torch.random.get_rng_state(), set(vars(model))
    analyse(model, 1.0)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert set(vars(model)) == attributes
    assert model.training


def test_rows_and_slack() -> None:
    result = analyse(mlp(2, 0.1), L)
    first = result.parameters[0]
    assert (first.name, first.size, first.uses, first.input_norm, first.cotangent_norm) == ("1.weight", 36, 1, X0, L)
    assert [row.where for row in result.layers][:2] == ["layer '0' (BoundedInput)", "layer '1' (SpectralLinear)"]
    assert 1 < result.slack() < 1 + 1e-4
    assert result.slack(1e-3) > result.slack()


def test_bound_and_times_never_under_report() -> None:
    assert times(0.0, math.inf) == math.inf
    assert times(2.0, 3.0) == 6.0
    for bad in (-1.0, math.nan):
        with pytest.raises(ValueError, match="bound on a norm"):
            Bound(bad, (3,))
    assert Bound(1.0, (2, 3, 4)).size == 24
    assert Bound(1.0, (2, 3, 4)).positions() == 6
    assert Transfer(Bound(1.0, (3,))).gains == (1.0,)
