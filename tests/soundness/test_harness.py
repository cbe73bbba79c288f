"""The harness itself: it finds rules that are a little too small, and reports what it should."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lipdp import losses, nn
from lipdp.bounds import Bound, Call, Transfer, rule
from tests.soundness.harness import Report, Row, attack, impulse_jacobian, largest_singular_value, noisy_steps


class Claims(torch.nn.Linear):
    """A free dense layer that claims factors of our choosing."""

    def __init__(self, **factors: float) -> None:
        super().__init__(4, 4)
        self.factors = {"weight": 1.0, "bias": 1.0, "norm": math.inf, "gain": math.inf} | factors

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input)


@rule(Claims)
def _claims(layer: Claims, call: Call) -> Transfer:
    x, f = call.inputs[0], layer.factors
    T = math.sqrt(x.positions())
    return Transfer(Bound(f["norm"], x.shape), (f["gain"],), {"weight": f["weight"] * x.norm, "bias": f["bias"] * T})


@pytest.mark.parametrize("shape", [(4,), (3, 4)])
@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_sensitivity_two_percent_too_small_is_found(name: str, shape: tuple[int, ...]) -> None:
    attack(Claims(), 1.0, input_shape=shape, input_norm=1.0)
    with pytest.raises(AssertionError, match="bounds are beaten"):
        attack(Claims(**{name: 0.98}), 1.0, input_shape=shape, input_norm=1.0)


class Rotation(torch.nn.Module):
    """An orthogonal map that claims an activation bound and a gain."""

    def __init__(self, norm: float = 1.0, gain: float = 1.0) -> None:
        super().__init__()
        self.norm, self.gain = norm, gain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(1)


@rule(Rotation)
def _rotation(layer: Rotation, call: Call) -> Transfer:
    x = call.inputs[0]
    return Transfer(Bound(layer.norm * x.norm, x.shape), (layer.gain,))


@pytest.mark.parametrize("wrong", [{"norm": 0.98}, {"gain": 0.98}])
def test_activation_and_cotangent_bounds_too_small_are_found(wrong: dict[str, float]) -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 4), Rotation(**wrong), nn.SpectralLinear(4, 4))
    assert not attack(nn.Sequential(nn.BoundedInput((4,)), Rotation()), 1.0).violations
    report = attack(model, 1.0, check=False)
    assert report.violations
    with pytest.raises(AssertionError, match="bounds are beaten"):
        attack(model, 1.0)


def test_a_wrong_bound_of_one_layer_shows_in_the_layers_behind_it() -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), Rotation(norm=0.5), nn.SpectralLinear(4, 4, bias=False))
    report = attack(model, 1.0, check=False)
    assert "2.weight" in {row.name for row in report.violations if row.kind == "parameter"}


def test_attack_is_reproducible_and_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3), torch.nn.ReLU())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.random.get_rng_state()
    first, second = attack(model, losses.CrossEntropy(), steps=5), attack(model, losses.CrossEntropy(), steps=5)
    assert first == second
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert next(model.parameters()).dtype == torch.float32


def test_report_reads_well() -> None:
    report = Report((Row("parameter", "w", 0.5, 1.0), Row("parameter", "b", 1.1, 1.0), Row("activation", "z", 0.0, 0.0)))
    assert report.tightness("parameter", "w") == 0.5
    assert [row.name for row in report.violations] == ["b"]
    assert "0.5000" in str(report)
    assert Row("parameter", "w", 1e-3, 0.0).tightness == math.inf
    with pytest.raises(AssertionError, match="no row"):
        report.tightness("cotangent")


def test_impulse_jacobian_of_affine_and_nonlinear_layers() -> None:
    linear = torch.nn.Linear(3, 2).double()
    assert torch.allclose(impulse_jacobian(linear, (3,)), linear.weight)
    at = torch.tensor([-1.0, 2.0])
    assert torch.allclose(impulse_jacobian(torch.nn.ReLU(), (2,), at=at), torch.diag(torch.tensor([0.0, 1.0])).double())
    assert largest_singular_value(torch.diag(torch.tensor([1.0, -3.0]))) == pytest.approx(3.0)


def test_noisy_steps_move_and_project() -> None:
    layer: Any = nn.SpectralLinear(4, 4)
    before = layer.weight.detach().clone()
    noisy_steps(layer, steps=2)
    assert not torch.equal(layer.weight, before)
    assert largest_singular_value(layer.weight.detach()) <= 1
