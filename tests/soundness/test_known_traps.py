"""theory.md's "known traps": each measured in published code, each reproduced here, and each avoided by lipdp.

Traps 1 to 8. Trap 9 (the cost of adaptive clipping) is tested in tests/privacy/test_privacy_adaptive.py and
tests/training/test_adaptive_clipping.py; trap 10 (the budget search) with the accountants in tests/privacy.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

import lipdp
from lipdp import losses, nn
from lipdp.bounds import analyse, certified_norm
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.parametrize import Bjorck, Spectral
from tests.soundness.harness import attack, impulse_jacobian, largest_singular_value


def constant_conv(size: int = 3) -> nn.SpectralConv2d:
    layer = nn.SpectralConv2d(1, 1, size, padding=size // 2, bias=False).double()
    with torch.no_grad():
        layer.weight.fill_(1.0)
    layer.project_()
    return layer


def test_trap_1_rko_coefficient_above_one_over_root_m() -> None:
    """Constant kernel, k=3, 16×16: the "border" coefficient gives operator norm 1.020; 1/√m gives at most 1."""
    layer, k, n = constant_conv(), 3, 16
    ours = largest_singular_value(impulse_jacobian(layer, (1, n, n)))
    kbar = (k - 1) / 2  # the published coefficient √(n²/((k n − kbar(kbar+1))²)), "for border effects"
    published = math.sqrt(n * n / (k * n - kbar * (kbar + 1)) ** 2)
    assert published > 1 / 3
    unsound = ours * published / layer.scale(n, n)
    assert unsound == pytest.approx(1.020, abs=2e-3)
    assert 0.95 < ours <= 1 + 1e-13


def test_trap_2_kernel_gradient_factor_depends_on_where_the_scale_lives() -> None:
    """Constant image and cotangent, k=3, 28×28: the gradient of a *stored* kernel is 2.86; G·X, times 1.02, misses it."""
    n = 28
    x = torch.ones(1, 1, n, n, dtype=torch.float64) / n
    v = torch.ones(1, 1, n, n, dtype=torch.float64) / n
    stored = torch.nn.Conv2d(1, 1, 3, padding=1, bias=False).double()
    (gradient,) = torch.autograd.grad(stored(x), stored.weight, v)
    true = float(gradient.norm())
    assert true == pytest.approx(2.86, abs=0.01)
    assert true > 1.02  # what the mixed-up factor claims
    claimed = analyse(stored, 1.0, input_shape=(1, n, n), input_norm=1.0).sensitivities["weight"]
    assert claimed == pytest.approx(3.0)  # √m·X·G
    assert true <= claimed
    ours = constant_conv()
    (gradient,) = torch.autograd.grad(ours(x), ours.weight, v)
    claimed = analyse(ours, 1.0, input_shape=(1, n, n), input_norm=1.0).sensitivities["weight"]
    assert claimed == pytest.approx(1.0)  # the stored Θ: X·G
    assert 0.95 < float(gradient.norm()) <= claimed


def test_trap_3_a_bias_on_a_feature_map_needs_root_hw() -> None:
    n = 28
    layer = nn.SpectralConv2d(1, 2, 3, padding=1).double()
    v = torch.zeros(1, 2, n, n, dtype=torch.float64)
    v[:, 0] = 1 / n
    (gradient,) = torch.autograd.grad(layer(torch.zeros(1, 1, n, n, dtype=torch.float64)), layer.bias, v)
    claimed = analyse(layer, 1.0, input_shape=(1, n, n), input_norm=1.0).sensitivities["bias"]
    assert float(v.norm()) == pytest.approx(1.0)
    assert float(gradient.norm()) == pytest.approx(28.0)
    assert claimed == pytest.approx(28.0)


def test_trap_4_centring_never_averages_over_the_batch() -> None:
    x = torch.randn(4, 3, 5, 5, dtype=torch.float64)
    other = x.clone()
    other[1] += 100.0
    for layer in (nn.LayerCentering(), nn.LayerCentering(1), nn.LayerCentering((2, 3)), nn.LayerCentering(-1)):
        changed = (layer(x) - layer(other)).flatten(1).norm(dim=1) > 0
        assert not changed[[0, 2, 3]].any()
    batch_mean = x - x.mean(0, keepdim=True)  # the trap: everyone's output moves
    assert not torch.allclose(batch_mean[0], (other - other.mean(0, keepdim=True))[0])
    for dim in (0, (0, 1), [0, 2, 3]):
        with pytest.raises(ConfigurationError, match="batch"):
            nn.LayerCentering(dim)
    with pytest.raises(UnsupportedError, match="batch"):
        analyse(nn.LayerCentering(-2), 1.0, input_shape=(3,), input_norm=1.0)


@pytest.mark.parametrize("loss", [losses.MulticlassKR(), losses.HKR(alpha=5.0), losses.MulticlassHinge(), losses.CrossEntropy()])
def test_trap_5_losses_have_bounded_per_example_influence_whatever_the_classes_in_the_batch(loss: losses.Loss) -> None:
    K, n = 4, 32
    z = torch.randn(n, K, dtype=torch.float64, requires_grad=True)
    rare = torch.zeros(n, dtype=torch.long)
    rare[0] = 1  # one example of its class: dividing by the class's count gives it the weight of all others together
    balanced = torch.arange(n) % K
    balanced[0] = 1
    gradients = []
    for y in (rare, balanced):
        (gradient,) = torch.autograd.grad(loss(z, y).sum(), z)
        assert float(gradient.norm(dim=1).max()) <= loss.lipschitz_for(K) * (1 + 1e-12)
        gradients.append(gradient[0])
    assert torch.equal(*gradients)  # example 0 feels nothing of the others' labels
    counts = torch.bincount(rare, minlength=K).clamp_min(1)
    published = F.one_hot(rare, K) / counts  # −ŷ_true/(number of examples of the class), as published, × n for the sum
    assert float((published * n).norm(dim=1).max()) == pytest.approx(n)


def power_iteration(matrix: torch.Tensor, iterations: int) -> float:
    u = torch.ones(matrix.shape[0], dtype=torch.float64)
    for _ in range(iterations):
        v = F.normalize(matrix.T @ u, dim=0)
        u = F.normalize(matrix @ v, dim=0)
    return float(u @ matrix @ v)


def test_trap_6_power_iteration_under_estimates() -> None:
    """One dominant direction that the start hardly sees: 10 iterations, then W/estimate has norm above 1.03."""
    g = torch.Generator().manual_seed(0)
    q, _ = torch.linalg.qr(torch.randn(64, 64, generator=g, dtype=torch.float64))
    p, _ = torch.linalg.qr(torch.randn(64, 64, generator=g, dtype=torch.float64))
    ones = torch.ones(64, dtype=torch.float64) / 8
    q[:, 0] -= (q[:, 0] @ ones) * ones * 0.999  # nearly orthogonal to the start
    q, _ = torch.linalg.qr(q)
    values = torch.ones(64, dtype=torch.float64)
    values[0] = 1.3
    weight = q @ torch.diag(values) @ p.T
    normalised = weight / power_iteration(weight, 10)
    assert largest_singular_value(normalised) > 1.03
    assert float(certified_norm(weight)) >= largest_singular_value(weight)
    for constraint in (Spectral(), Bjorck(), Bjorck(iterations=1)):
        assert largest_singular_value(constraint.project(normalised)) <= 1 + 1e-14


def test_trap_7_gradients_through_an_orthogonalisation_are_unbounded_and_refused() -> None:
    """W = UVᵀ of θ: its Jacobian grows like 1/s_min, so no Δ exists for θ."""

    def polar(theta: torch.Tensor) -> torch.Tensor:
        for _ in range(60):  # Björck, differentiable
            theta = 1.5 * theta - 0.5 * theta @ (theta.T @ theta)
        return theta

    norms = []
    for smallest in (1e-1, 1e-2, 1e-3):
        theta = torch.tensor([[1.0, 0.0], [0.0, smallest], [0.0, 0.0]], dtype=torch.float64)
        jacobian = torch.autograd.functional.jacobian(polar, theta).reshape(6, 6)
        norms.append(largest_singular_value(jacobian) * smallest)
    assert all(0.5 < product < 3 for product in norms)  # Jacobian ≈ 1/s_min
    layer = torch.nn.utils.parametrizations.orthogonal(torch.nn.Linear(4, 4))
    spectral = torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(4, 4))
    for wrapped in (layer, spectral):
        with pytest.raises(UnsupportedError, match="parametrize"):
            lipdp.sensitivities(nn.Sequential(nn.BoundedInput((4,)), wrapped), 1.0)


def test_trap_8_clipping_the_loss_gradient_lowers_every_sensitivity_in_proportion() -> None:
    def model(*last: torch.nn.Module) -> torch.nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.BoundedInput((1, 6, 6), norm=2.0),
            nn.SpectralConv2d(1, 4, 3),
            nn.GroupSort(),
            nn.Flatten(),
            nn.SpectralLinear(64, 5),
            *last,
        )

    loss = losses.CrossEntropy()
    plain, C = lipdp.sensitivities(model(), loss), 0.1
    clipped = lipdp.sensitivities(model(nn.ClipGradient(C)), loss)
    assert clipped == pytest.approx({name: bound * C / math.sqrt(2) for name, bound in plain.items()}, rel=1e-12)
    above = lipdp.sensitivities(model(nn.ClipGradient(10.0)), loss)
    assert above == pytest.approx(plain)  # C above L changes nothing
    report = attack(model(nn.ClipGradient(C)), loss, steps=10, draws=2)
    assert report.tightness("parameter", "4.weight") > 0.8


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_trap_8_units_are_per_example_for_any_batch_size(batch: int) -> None:
    """The gradient of a *sum* over b examples is at most b·Δ, and b equal examples reach it: clipping acts on each."""
    C = 0.05
    model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3, bias=False), nn.ClipGradient(C)).double()
    loss = losses.CrossEntropy()
    x, y = torch.ones(batch, 4, dtype=torch.float64), torch.zeros(batch, dtype=torch.long)
    (gradient,) = torch.autograd.grad(loss(model(x), y).sum(), model[1].weight)
    bound = lipdp.sensitivities(model, loss)["1.weight"]
    assert bound == pytest.approx(C)
    assert float(gradient.norm()) == pytest.approx(batch * C, rel=1e-9)
