"""Orthogonal convolutions: norms and singular values for any θ, gradients, and why they must not be released through π."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lipdp import nn
from lipdp.bounds import analyse
from lipdp.errors import ConfigurationError, DataError, UnsupportedError
from lipdp.export import export
from lipdp.parametrize import constraint, effective_leaves
from lipdp.parametrize.convolution import compose
from tests.soundness.harness import impulse_jacobian

CIRCULAR: dict[str, Any] = {"padding": "same", "padding_mode": "circular", "bias": False}
ZEROS: dict[str, Any] = {"padding": 1, "bias": False}
AOC, BCOP, SOC, FFT = constraint.AOC, constraint.BCOP, constraint.SOC, constraint.CircularFFT


def exact() -> dict[str, tuple[torch.nn.Module, tuple[int, ...]]]:
    """Circular padding: all singular values are 1."""
    torch.manual_seed(0)
    strided: dict[str, Any] = {"stride": 2, "padding": 1, "padding_mode": "circular", "bias": False}
    return {
        "AOC": (nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=AOC()), (4, 6, 6)),
        "AOC, more channels": (nn.SpectralConv2d(2, 5, (3, 2), **CIRCULAR, constraint=AOC()), (2, 5, 6)),
        "AOC, fewer": (nn.SpectralConv2d(5, 2, 3, **CIRCULAR, constraint=AOC()), (5, 5, 5)),
        "AOC, one": (nn.SpectralConv2d(1, 1, 3, **CIRCULAR, constraint=AOC()), (1, 5, 5)),
        "AOC, stride": (nn.SpectralConv2d(2, 8, 4, **strided, constraint=AOC()), (2, 6, 6)),
        "AOC, stride, wide": (nn.SpectralConv2d(2, 11, 3, **strided, constraint=AOC()), (2, 6, 6)),
        "AOC, stride, narrow": (nn.SpectralConv2d(3, 4, 3, **strided, constraint=AOC()), (3, 6, 6)),
        "AOC, blocks": (nn.SpectralConv2d(2, 8, 2, 2, bias=False, constraint=AOC()), (2, 4, 4)),
        "AOC, groups": (nn.SpectralConv2d(4, 6, 3, groups=2, **CIRCULAR, constraint=AOC()), (4, 5, 5)),
        "AOC, dilation": (nn.SpectralConv2d(3, 3, 3, dilation=2, **CIRCULAR, constraint=AOC()), (3, 7, 7)),
        "AOC, Householder": (
            nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=AOC(constraint.Householder())),
            (4, 6, 6),
        ),
        "AOC, 1d": (nn.SpectralConv1d(3, 3, 5, **CIRCULAR, constraint=AOC()), (3, 9)),
        "AOC, 3d": (nn.SpectralConv3d(2, 2, 2, **CIRCULAR, constraint=AOC()), (2, 3, 3, 3)),
        "AOC, transposed": (nn.SpectralConvTranspose2d(8, 2, 2, stride=2, bias=False, constraint=AOC()), (8, 3, 3)),
        "BCOP": (nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=BCOP()), (4, 6, 6)),
        "CircularFFT": (nn.SpectralConv2d(4, 4, 3, **CIRCULAR, constraint=FFT(6)), (4, 6, 6)),
        "CircularFFT, wide": (nn.SpectralConv2d(2, 6, 3, groups=2, **CIRCULAR, constraint=FFT((5, 6))), (2, 5, 6)),
        "CircularFFT, narrow": (nn.SpectralConv2d(4, 3, 3, **CIRCULAR, constraint=FFT((4, 3))), (4, 4, 3)),
        "CircularFFT, 1d": (nn.SpectralConv1d(3, 3, 2, **CIRCULAR, constraint=FFT(8)), (3, 8)),
    }


def nearly() -> dict[str, tuple[torch.nn.Module, tuple[int, ...]]]:
    """Zero padding: norm ≤ 1. SOC: a series that is cut."""
    torch.manual_seed(1)
    return {
        "AOC, zeros": (nn.SpectralConv2d(3, 3, 3, **ZEROS, constraint=AOC()), (3, 6, 6)),
        "AOC, zeros, stride": (nn.SpectralConv2d(3, 4, 3, 2, **ZEROS, constraint=AOC()), (3, 7, 6)),
        "AOC, transposed, padded": (
            nn.SpectralConvTranspose2d(4, 2, 3, 2, 1, output_padding=1, bias=False, constraint=AOC()),
            (4, 3, 3),
        ),
        "SOC": (nn.SpectralConv2d(3, 3, 3, **CIRCULAR, constraint=SOC()), (3, 11, 11)),
        "SOC, zeros": (nn.SpectralConv2d(2, 4, 3, **ZEROS, constraint=SOC(terms=3)), (2, 6, 6)),
        "SOC, groups, dilation": (
            nn.SpectralConv2d(4, 2, 3, groups=2, dilation=2, **CIRCULAR, constraint=SOC(terms=3)),
            (4, 13, 13),
        ),
    }


def singular_values(layer: torch.nn.Module, shape: tuple[int, ...]) -> torch.Tensor:
    """Of the layer with the kernel it has in its own dtype: the exported kernel, applied in float64."""
    return torch.linalg.svdvals(impulse_jacobian(export(layer, input_shape=shape), shape))


@pytest.mark.parametrize("name", exact())
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_exact_ones_have_all_singular_values_at_one(name: str, scale: float) -> None:
    layer, shape = exact()[name]
    for dtype, tolerance in ((torch.float64, 1e-7), (torch.float32, 1e-4)):
        moved = copy.deepcopy(layer).to(dtype)
        with torch.no_grad():
            moved.weight.mul_(scale).add_(scale * torch.randn(moved.weight.shape, generator=torch.Generator().manual_seed(2)))
        values = singular_values(moved, shape)
        assert float(values.max()) <= 1 + 1e-13
        assert float(values.min()) >= 1 - tolerance


@pytest.mark.parametrize("name", nearly())
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_the_norm_is_at_most_one_for_any_parameter(name: str, scale: float) -> None:
    layer, shape = nearly()[name]
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        moved = copy.deepcopy(layer).to(dtype)
        with torch.no_grad():
            moved.weight.mul_(scale).add_(scale * torch.randn(moved.weight.shape, generator=torch.Generator().manual_seed(3)))
        values = singular_values(moved.to(dtype), shape)
        assert float(values.max()) <= 1 + 1e-13


def test_soc_is_orthogonal_up_to_its_series() -> None:
    layer, shape = nearly()["SOC"]
    assert float(singular_values(layer, shape).min()) > 0.99
    assert layer.effective("weight").shape[2:] == (9, 9)
    assert layer(torch.zeros(1, *shape)).shape[1:] == shape


def test_gradients_keep_their_norm_through_aoc_and_not_through_rko() -> None:
    torch.manual_seed(0)
    delta = torch.randn(16, 8, 6, 6, dtype=torch.float64)
    ratios = {}
    for name, chosen in (("AOC", AOC()), ("RKO", None)):
        layer = nn.SpectralConv2d(8, 8, 3, **CIRCULAR, constraint=chosen, dtype=torch.float64)
        x = torch.randn(16, 8, 6, 6, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(layer(x), x, delta)
        ratios[name] = gradient.flatten(1).norm(dim=1) / delta.flatten(1).norm(dim=1)
    assert float((ratios["AOC"] - 1).abs().max()) < 1e-3
    assert float(ratios["RKO"].max()) < 0.5


@pytest.mark.parametrize("name", ["AOC", "AOC, stride", "CircularFFT", "CircularFFT, narrow"])
def test_gradients_agree_with_finite_differences(name: str) -> None:
    layer = exact()[name][0].double()
    pi = layer.maps()["weight"]
    theta = layer.weight.detach().clone().requires_grad_()
    probe = torch.randn(pi(theta).shape, generator=torch.Generator().manual_seed(0)).double()
    direction = torch.randn(theta.shape, generator=torch.Generator().manual_seed(1)).double()
    (gradient,) = torch.autograd.grad((pi(theta) * probe).sum(), theta)
    step = 1e-6
    with torch.no_grad():
        change = ((pi(theta + step * direction) - pi(theta - step * direction)) * probe).sum() / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(change), rel=1e-4, abs=1e-5)


NAIVE = {
    "AOC": (lambda: nn.SpectralConv2d(2, 2, 3, **CIRCULAR, constraint=AOC()), (2, 4, 4)),
    "AOC, stride": (lambda: nn.SpectralConv2d(1, 4, 2, 2, bias=False, constraint=AOC()), (1, 4, 4)),
    "BCOP": (lambda: nn.SpectralConv2d(2, 2, 2, **CIRCULAR, constraint=BCOP()), (2, 4, 4)),
    "SOC": (lambda: nn.SpectralConv1d(2, 2, 3, **CIRCULAR, constraint=SOC(terms=3)), (2, 8)),
    "CircularFFT": (lambda: nn.SpectralConv2d(2, 2, 3, **CIRCULAR, constraint=FFT(4)), (2, 4, 4)),
}


def _ascend(name: str, through: bool, seed: int) -> tuple[float, float]:
    """(largest gradient norm ÷ Δ, of θ through π or of W; the norm of π's Jacobian at the end)."""
    make, shape = NAIVE[name]
    torch.manual_seed(seed)
    layer = make().double()
    bound = analyse(layer, 1.0, input_shape=shape, input_norm=1.0).sensitivities["weight"]
    with torch.no_grad():
        layer.weight.mul_(0.1)  # near 0 the maps are steepest
    constant = torch.ones(1, *shape, dtype=torch.float64) if seed == 0 else torch.zeros(1, *shape, dtype=torch.float64)
    output = layer(constant).detach().shape
    x = (constant + 0.1 * torch.randn(1, *shape, dtype=torch.float64)).requires_grad_()
    v = (constant.mean() + 0.1 * torch.randn(output, dtype=torch.float64)).requires_grad_()
    leaves, worst = [layer.weight, x, v], 0.0
    for _ in range(45):
        with effective_leaves(layer, differentiable=True) as effective:
            y = layer(x / x.norm())
            target = layer.weight if through else effective["weight"]
            (gradient,) = torch.autograd.grad(y, target, v / v.norm(), create_graph=True)
        worst = max(worst, float(gradient.detach().norm()))
        steps = torch.autograd.grad(gradient.norm(), leaves, allow_unused=True)
        with torch.no_grad():
            for leaf, step in zip(leaves, steps, strict=True):
                if step is not None:  # ∂L/∂W of a linear layer does not depend on W
                    leaf.add_(0.2 * leaf.norm().clamp_min(0.1) * step / step.norm().clamp_min(1e-12))
            layer.weight.mul_((0.3 / layer.weight.norm()).clamp_max(1.0))  # where SOC's normalisation does not flatten it
    theta = layer.weight.detach()
    jacobian = torch.autograd.functional.jacobian(layer.maps()["weight"], theta).reshape(-1, theta.numel())
    return worst / bound, float(torch.linalg.matrix_norm(jacobian, 2))


@pytest.mark.parametrize("name", NAIVE)
def test_the_released_gradient_is_within_its_sensitivity_and_the_naive_one_is_not(name: str) -> None:
    """Ascent on θ, x and the cotangent: ∂L/∂W never exceeds Δ; ∂L/∂θ, through π, does, because π's Jacobian exceeds 1."""
    released = [_ascend(name, False, seed)[0] for seed in range(2)]
    assert max(released) <= 1 + 1e-9
    assert max(released) > 0.9
    naive, jacobian = zip(*(_ascend(name, True, seed) for seed in (0, 2)), strict=True)
    assert max(jacobian) > 1.5
    assert max(naive) > (1.02 if name == "SOC" else 1.2)  # SOC's Δ counts a window of 7 taps, its θ has 3


@pytest.mark.parametrize("name", NAIVE)
def test_a_parameter_that_is_not_finite_is_refused(name: str) -> None:
    layer = NAIVE[name][0]()
    with torch.no_grad():
        layer.weight.view(-1)[0] = float("nan")
    with pytest.raises((ConfigurationError, torch.linalg.LinAlgError)):
        layer.effective("weight")


def test_composed_kernels_convolve_one_after_the_other() -> None:
    inner, outer = torch.randn(2, 3, 2, 2, 3, dtype=torch.float64), torch.randn(2, 4, 3, 3, 1, dtype=torch.float64)
    x = torch.randn(1, 4, 7, 7, dtype=torch.float64)
    F = torch.nn.functional
    first = F.conv2d(F.conv2d(x, inner.flatten(0, 1), groups=2), outer.flatten(0, 1), groups=2)
    assert torch.allclose(F.conv2d(x, compose(outer, inner).flatten(0, 1), groups=2), first)


def test_theta_has_its_own_shape_is_saved_and_drawn_again() -> None:
    torch.manual_seed(0)
    layer = nn.SpectralConv2d(4, 4, 3, padding=1, constraint=AOC())
    assert layer.weight.shape == (1, 4 * 2 * 4 + 16)
    other = nn.SpectralConv2d(4, 4, 3, padding=1, constraint=AOC())
    other.load_state_dict(layer.state_dict())
    assert torch.equal(layer.effective("weight"), other.effective("weight"))
    kept = layer.weight
    layer.reset_parameters()
    assert layer.weight is kept
    assert not torch.equal(layer.weight, other.weight)
    row = analyse(layer, 1.0, input_shape=(4, 6, 6), input_norm=1.0).parameters[0]
    assert row.size == 4 * 4 * 9  # what is noised is the kernel
    assert "AOC" in repr(layer)


def test_what_has_no_proof_is_refused() -> None:
    def refused(says: str, *arguments: Any, cls: Any = nn.SpectralConv2d, **options: Any) -> None:
        with pytest.raises(ConfigurationError, match=says):
            cls(*arguments, **options)

    for pi in (AOC(), BCOP(), SOC()):
        refused("copies border pixels", 2, 2, 3, padding=1, padding_mode="reflect", constraint=pi)
    refused("skips pixels", 2, 2, 2, stride=3, constraint=AOC())
    refused("Use one of the two", 2, 2, 3, stride=2, dilation=2, constraint=AOC())
    refused("no strides", 2, 2, 3, stride=2, constraint=BCOP())
    refused("no strides", 2, 2, 3, stride=2, constraint=SOC())
    refused("must be odd", 2, 2, 2, constraint=SOC())
    refused("no transposed form", 2, 2, 3, cls=nn.SpectralConvTranspose2d, constraint=SOC())
    refused("padding='same'", 2, 2, 3, constraint=FFT(4))
    refused("no stride", 2, 2, 3, **CIRCULAR, dilation=2, constraint=FFT(4))
    refused("smaller than the kernel", 2, 2, 5, **CIRCULAR, constraint=FFT(4))
    refused("one number or 2", 2, 2, 3, **CIRCULAR, constraint=FFT((4, 4, 4)))
    refused("3 or more", 2, 2, 3, constraint=None, cls=lambda *a, **k: SOC(terms=2))
    refused("whole convolutions", 4, 4, cls=nn.SpectralLinear, constraint=AOC())
    layer = nn.SpectralConv2d(2, 2, 3, **CIRCULAR, constraint=FFT(4))
    with pytest.raises(DataError, match=r"images of \(4, 4\)"):
        analyse(torch.nn.Sequential(layer), 1.0, input_shape=(2, 5, 5), input_norm=1.0)
    with pytest.raises(DataError, match="images of"):
        layer(torch.zeros(1, 2, 5, 5))
    turns = nn.SpectralConv2d(2, 2, 3, padding=2, padding_mode="circular", constraint=AOC())
    with pytest.raises(UnsupportedError, match="beyond one turn"):
        analyse(turns, 1.0, input_shape=(2, 5, 5), input_norm=1.0)
