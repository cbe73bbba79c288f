"""Parametrisations: norms of their values, and why gradients must not be released through them."""

from __future__ import annotations

import pytest
import torch

from lipdp import nn
from lipdp.errors import ConfigurationError
from lipdp.parametrize import Cayley, DifferentiableBjorck, Householder, MatrixExp, Polar
from tests.soundness.harness import attack

MAPS = [DifferentiableBjorck(), Polar(), Cayley(), MatrixExp(), Householder()]
SHAPES = [(8, 5), (5, 8), (6, 6), (3, 4, 7), (1, 6)]


def orthogonal(*shape: int) -> torch.Tensor:
    return torch.nn.init.orthogonal_(torch.empty(shape[-2:])).expand(shape).clone()


@pytest.mark.parametrize("pi", MAPS, ids=lambda pi: type(pi).__name__)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_norm_is_at_most_one_for_any_parameter(pi, shape, dtype) -> None:
    """By float64 SVD, whose own rounding is below 1e-13 at these sizes."""
    torch.manual_seed(0)
    for scale in (1e-6, 0.1, 1.0, 30.0):
        theta = pi.initial(orthogonal(*shape).to(dtype)) * scale + scale * torch.randn(shape, dtype=dtype)
        weight = pi.weight(theta)
        assert weight.shape == theta.shape
        assert weight.dtype == dtype
        assert float(torch.linalg.svdvals(weight.double()).max()) <= 1 + 1e-13


@pytest.mark.parametrize("pi", MAPS, ids=lambda pi: type(pi).__name__)
@pytest.mark.parametrize("shape", SHAPES)
def test_near_their_start_all_singular_values_are_one(pi, shape) -> None:
    torch.manual_seed(1)
    theta = pi.initial(orthogonal(*shape)) + 0.05 * torch.randn(shape)
    assert float(torch.linalg.svdvals(pi.weight(theta).double()).min()) > 1 - 1e-4


@pytest.mark.parametrize("pi", [Cayley(), MatrixExp(), Householder()], ids=lambda pi: type(pi).__name__)
def test_exact_maps_are_orthogonal_everywhere(pi) -> None:
    torch.manual_seed(2)
    theta = 3 * torch.randn(9, 5, dtype=torch.float64)
    weight = pi.weight(theta)
    assert torch.allclose(weight.T @ weight, torch.eye(5, dtype=torch.float64), atol=1e-9)


@pytest.mark.parametrize("pi", MAPS, ids=lambda pi: type(pi).__name__)
def test_gradients_agree_with_finite_differences(pi) -> None:
    torch.manual_seed(3)
    theta = (pi.initial(orthogonal(6, 4).double()) + 0.1 * torch.randn(6, 4, dtype=torch.float64)).requires_grad_()
    direction, probe = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 4, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((pi.weight(theta) * probe).sum(), theta)
    step = 1e-6
    with torch.no_grad():
        change = ((pi.weight(theta + step * direction) - pi.weight(theta - step * direction)) * probe).sum() / (2 * step)
    # The certified divisor is a constant for the gradient; it differs from 1 by rounding only.
    assert float((gradient * direction).sum()) == pytest.approx(float(change), rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    "pi", [DifferentiableBjorck(iterations=25), Polar(iterations=12), Householder()], ids=lambda pi: type(pi).__name__
)
def test_differentiating_through_the_map_has_no_bound(pi) -> None:
    """The Jacobian grows as 1/s_min (1/‖v‖ for reflections): a per-example gradient through π exceeds any Δ of W."""
    torch.manual_seed(4)
    norms = []
    for smallest in (0.1, 0.01):
        values = torch.tensor([1.0, 1.0, smallest], dtype=torch.float64)
        basis = torch.linalg.qr(torch.randn(5, 3, dtype=torch.float64))[0]
        turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
        theta = basis * values @ turn if not isinstance(pi, Householder) else basis * values
        jacobian = torch.autograd.functional.jacobian(pi.weight, theta).reshape(15, 15)
        norms.append(float(torch.linalg.matrix_norm(jacobian, 2)))
    assert norms[0] > 3
    assert norms[1] > 5 * norms[0]


@pytest.mark.parametrize("pi", MAPS, ids=lambda pi: type(pi).__name__)
def test_a_parameter_that_is_not_finite_is_refused(pi) -> None:
    theta = torch.randn(5, 3)
    theta[0, 0] = float("nan")
    with pytest.raises((ConfigurationError, torch.linalg.LinAlgError)):
        pi.weight(theta)


@pytest.mark.parametrize("pi", MAPS, ids=lambda pi: type(pi).__name__)
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda pi: nn.SpectralLinear(4, 3, constraint=pi), (2, 4)),
        (lambda pi: nn.SpectralConv2d(2, 4, 2, stride=2, groups=2, constraint=pi), (2, 4, 4)),
        (lambda pi: nn.SpectralConv2d(1, 2, 3, padding=2, dilation=2, padding_mode="circular", constraint=pi), (1, 5, 5)),
        (lambda pi: nn.SpectralConvTranspose2d(2, 1, 2, stride=2, constraint=pi), (2, 2, 2)),
        (lambda pi: nn.SpectralConv3d(1, 2, 2, stride=2, constraint=pi), (1, 2, 2, 2)),
    ],
    ids=["dense", "groups", "dilation", "transposed", "3d"],
)
def test_layers_with_each_map_reach_their_bounds_and_no_more(pi, make, shape) -> None:
    """The harness attacks the gradient of W = π(θ), over θ, inputs and cotangents: Δ = G·X is reached, never exceeded."""
    report = attack(make(pi), 1.0, input_shape=shape, input_norm=1.0, steps=4, draws=1, starts=("constant", "aligned", "random"))
    assert report.tightness("parameter") > 0.98
