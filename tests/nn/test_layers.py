"""The layers of lipdp.nn: what they compute, and their bounds reached to 99% by attack."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from lipdp import clipping, losses, nn
from lipdp.bounds import analyse
from lipdp.errors import ConfigurationError, DataError, UnboundedError, UnsupportedError
from lipdp.nn.boundary import example_norms
from lipdp.parametrize import Spectral
from tests.soundness.functions import Forward
from tests.soundness.harness import attack, impulse_jacobian, largest_singular_value

T = torch.nn


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- exactness of each layer


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.GroupSort(), (6,)),
        (nn.GroupSort(3), (6, 2)),
        (nn.GroupSort(None), (5,)),
        (nn.GroupSort(2, dim=-1), (3, 4)),
        (nn.GroupSort(4, dim=2), (3, 4, 2)),
        (nn.MaxMin(), (4, 3, 3)),
        (nn.FullSort(dim=-2), (3, 4)),
        (nn.LayerCentering(), (6,)),
        (nn.LayerCentering(dim=1), (4, 2, 2)),
        (nn.LayerCentering(dim=(2, 3)), (2, 3, 3)),
        (nn.LayerCentering(dim=-1), (3, 4)),
        (nn.ClipGradient(5.0), (4,)),
        (nn.ClipGradient(0.3), (4,)),
        (nn.Boundary(norm=0.5), (4,)),
        (nn.Boundary(cotangent=0.5), (2, 3)),
        (nn.Boundary(norm=5.0, cotangent=0.2), (2, 3)),
        (nn.Boundary(norm=0.8, floor=0.3), (2, 3)),
        (nn.Boundary(norm=0.8, cotangent=0.2, floor=2.0), (4,)),
        (nn.Sequential(nn.Residual(T.Identity())), (4,)),
        (nn.Sequential(nn.Residual(nn.SpectralLinear(4, 4))), (4,)),
        (nn.Sequential(nn.Residual(nn.Residual(nn.SpectralLinear(4, 4, bias=False)))), (4,)),
        (nn.Sequential(nn.Flatten(), nn.SpectralLinear(6, 2)), (2, 3)),
        (nn.SpectralLinear(4, 4, constraint=Spectral()), (4,)),
        (nn.SpectralLinear(4, 3, bias_norm=3.0), (2, 4)),
    ],
    ids=str,
)
def test_layer_reaches_its_bounds(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    report = attack(layer, 1.0, input_shape=shape, input_norm=1.2, steps=30)
    clips = [m.max_norm for m in layer.modules() if isinstance(m, nn.ClipGradient)]
    clips += [m.cotangent for m in layer.modules() if isinstance(m, nn.Boundary) and m.cotangent]
    for row in report.rows:
        if row.kind == "input" and clips:  # the certificate's constant leaves clipping out, the gradient does not
            assert row.attack == pytest.approx(min(1.0, *clips), rel=1e-6)
        else:
            assert row.tightness > 0.99, str(report)


@pytest.mark.parametrize("mode", ["ball", "sphere"])
def test_bounded_input_as_first_layer(mode: str) -> None:
    report = attack(nn.Sequential(nn.BoundedInput((3, 2), norm=2.5, mode=mode), nn.Flatten(), nn.SpectralLinear(6, 3)), 0.4)
    assert report.tightness("parameter") > 0.99
    assert report.tightness("activation") > 0.99
    bounds = {row.name: row.bound for row in report.rows if row.kind == "parameter"}
    assert bounds == pytest.approx({"2.weight": 1.0, "2.bias": 0.4}, rel=1e-12)


# ---------------------------------------------------------------------------------------------- what they compute


def test_group_sort_is_a_permutation_of_each_group_largest_first() -> None:
    x = normal(5, 12, 3)
    for size in (1, 2, 3, 4, 6, 12, None):
        y = nn.GroupSort(size)(x)
        groups = y.reshape(5, -1, 12 if size is None else size, 3)
        assert torch.equal(groups, groups.sort(dim=2, descending=True).values)
        assert torch.equal(y.sort(dim=1).values, x.sort(dim=1).values)
    assert torch.equal(nn.MaxMin()(x), nn.GroupSort(2)(x))
    assert torch.equal(nn.FullSort(dim=-1)(x), x.sort(dim=-1, descending=True).values)


def test_group_sort_at_ties_does_not_lengthen_cotangents() -> None:
    for size in (2, 4):
        jacobian = impulse_jacobian(nn.GroupSort(size), (4,), at=torch.ones(4))
        assert largest_singular_value(jacobian) <= 1 + 1e-12


def test_group_sort_refuses_the_batch_and_odd_channels() -> None:
    with pytest.raises(ConfigurationError, match="dim=0"):
        nn.GroupSort(dim=0)
    with pytest.raises(ConfigurationError, match="at least 1"):
        nn.GroupSort(0)
    with pytest.raises(DataError, match="multiple of 2"):
        nn.GroupSort()(torch.zeros(2, 3))
    with pytest.raises(DataError, match="dimension -2"):
        nn.GroupSort(1, dim=-2)(torch.zeros(2, 3))
    with pytest.raises((UnsupportedError, DataError)):
        analyse(nn.GroupSort(1, dim=-2), 1.0, input_shape=(3,), input_norm=1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_bounded_input_keeps_its_promise_for_any_scale(dtype: torch.dtype) -> None:
    u = torch.finfo(dtype).eps
    for scale in (0.0, 1e-37, 1e-30, 1e-22, 1e-10, 1.0, 1e10, 1e30):
        x = (normal(4, 3, 5) * scale).to(dtype)
        ball = nn.BoundedInput((3, 5), norm=2.0)(x).double().flatten(1).norm(dim=1)
        assert bool((ball <= 2.0 * (1 + 4 * u)).all()), scale
        sphere = nn.BoundedInput((3, 5), norm=2.0, mode="sphere")(x).double().flatten(1).norm(dim=1)
        expected = 0.0 if scale == 0 else 2.0
        assert torch.allclose(sphere, torch.full_like(sphere, expected), rtol=4 * u), scale


def test_sphere_is_not_fooled_by_entries_whose_squares_underflow() -> None:
    """In float32 all squares but one vanish: dividing by that norm gave an output of norm 534 in place of 1."""
    x = torch.full((1, 1_000_000), 2e-23)
    x[0, 0] = 3e-23
    y = nn.BoundedInput((1_000_000,), mode="sphere")(x)
    assert float(y.double().norm()) <= 1 + 1e-5


@pytest.mark.parametrize("shape", [3.0, "x", (), (0,), (2.5,), None, (3, -1), True, ("3",)])
def test_bounded_input_names_a_shape_that_is_none(shape: object) -> None:
    with pytest.raises(ConfigurationError, match="shape of one example"):
        nn.BoundedInput(shape)  # type: ignore[arg-type]


def test_bounded_input_leaves_short_inputs_alone_and_checks_shapes() -> None:
    layer = nn.BoundedInput((3,), norm=2.0)
    x = torch.tensor([[1.0, 0.5, 0.0], [30.0, 40.0, 0.0]])
    assert torch.equal(layer(x)[0], x[0])
    assert torch.allclose(layer(x)[1], torch.tensor([1.2, 1.6, 0.0]))
    with pytest.raises(DataError, match="shape"):
        layer(torch.zeros(2, 4))
    for arguments in [{"shape": ()}, {"shape": (0,)}, {"shape": (3,), "norm": 0.0}, {"shape": (3,), "norm": math.inf}]:
        with pytest.raises(ConfigurationError):
            nn.BoundedInput(**arguments)
    with pytest.raises(ConfigurationError, match="mode"):
        nn.BoundedInput((3,), mode="cube")  # type: ignore[arg-type]


def test_sphere_has_no_certificate_but_bounded_sensitivities() -> None:
    model = nn.Sequential(nn.BoundedInput((3,), mode="sphere"), nn.SpectralLinear(3, 2))
    result = analyse(model, 1.0)
    assert result.lipschitz == math.inf
    assert result.sensitivities == pytest.approx({"1.weight": 1.0, "1.bias": 1.0})
    behind = nn.Sequential(T.Linear(3, 3), nn.BoundedInput((3,), mode="sphere"), nn.SpectralLinear(3, 2))
    with pytest.raises(UnboundedError, match="sphere"):
        analyse(behind, 1.0, input_shape=(3,), input_norm=1.0)


@pytest.mark.parametrize("layer", [nn.ClipGradient(0.5), nn.Boundary(cotangent=0.5), nn.Boundary(norm=9.0, cotangent=0.5)])
@pytest.mark.parametrize("shape", [(7,), (7, 4), (7, 2, 3, 3)], ids=str)
def test_cotangents_are_clipped_example_by_example(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    x = (normal(*shape) * 0.1).requires_grad_()
    v = normal(*shape, seed=1) * torch.linspace(0.01, 3, 7, dtype=torch.float64).reshape(-1, *[1] * (len(shape) - 1))
    y = layer(x)
    assert torch.equal(y, x)
    (grad,) = torch.autograd.grad(y, x, v)
    norms, before = grad.reshape(7, -1).norm(dim=1), v.reshape(7, -1).norm(dim=1)
    assert torch.allclose(norms, before.clamp(max=0.5), rtol=1e-12)
    assert torch.allclose(grad.reshape(7, -1) / norms[:, None], v.reshape(7, -1) / before[:, None], rtol=1e-9)


def test_boundary_projects_each_example_and_needs_a_bound() -> None:
    x = normal(6, 2, 3) * torch.linspace(0.01, 5, 6, dtype=torch.float64).reshape(6, 1, 1)
    y = nn.Boundary(norm=1.0)(x)
    assert torch.allclose(y.flatten(1).norm(dim=1), x.flatten(1).norm(dim=1).clamp(max=1.0), rtol=1e-12)
    with pytest.raises(ConfigurationError, match="bounds nothing"):
        nn.Boundary()
    for arguments in [{"norm": -1.0}, {"cotangent": 0.0}, {"norm": math.nan}, {"cotangent": math.inf}]:
        with pytest.raises(ConfigurationError, match="above 0"):
            nn.Boundary(**arguments)
    with pytest.raises(ConfigurationError, match="max_norm"):
        nn.ClipGradient(-1.0)


def test_layer_centering_removes_each_examples_own_mean() -> None:
    x = normal(4, 3, 2, 2)
    assert float(nn.LayerCentering()(x).flatten(1).mean(1).abs().max()) < 1e-12
    assert float(nn.LayerCentering(1)(x).mean(1).abs().max()) < 1e-12
    for layer in (nn.LayerCentering(), nn.LayerCentering(1), nn.LayerCentering((2, 3))):
        matrix = impulse_jacobian(layer, (3, 2, 2))
        assert torch.allclose(matrix @ matrix, matrix, atol=1e-12)
        assert torch.allclose(matrix, matrix.T, atol=1e-12)


def test_l2_norm_pool_is_the_norm_of_each_window() -> None:
    x = normal(2, 3, 4, 6)
    y = nn.L2NormPool2d((2, 3))(x)
    windows = x.unfold(2, 2, 2).unfold(3, 3, 3).flatten(4)
    assert torch.allclose(y, windows.norm(dim=-1), rtol=1e-9)
    zero = torch.zeros(1, 1, 2, 2, requires_grad=True)
    (grad,) = torch.autograd.grad(nn.L2NormPool2d(2)(zero).sum(), zero)
    assert float(grad.abs().max()) == 0.0
    with pytest.raises(ConfigurationError, match="eps"):
        nn.L2NormPool2d(2, eps=0.0)
    with pytest.raises(ConfigurationError, match="at least 1"):
        nn.L2NormPool2d(0)


def test_scaled_average_pool_refuses_overlap() -> None:
    with pytest.raises(ConfigurationError, match="overlap"):
        nn.ScaledAvgPool2d(3, stride=2)
    x = torch.ones(1, 1, 4, 4, dtype=torch.float64)
    assert float(nn.ScaledAvgPool2d(2)(x).norm()) == pytest.approx(float(x.norm()))


def test_residual_averages_and_checks_shapes() -> None:
    x = normal(3, 4)
    assert torch.allclose(nn.Residual(T.Tanh())(x), (x + x.tanh()) / 2)
    with pytest.raises(DataError, match="shape"):
        nn.Residual(T.Linear(4, 3).double())(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_spectral_layers_start_in_their_set_with_zero_bias(dtype: torch.dtype) -> None:
    for layer in (nn.SpectralLinear(6, 4, dtype=dtype), nn.SpectralConv2d(2, 3, 3, dtype=dtype)):
        assert layer.weight.dtype == dtype
        assert float(layer.bias.detach().abs().max()) == 0.0
        assert 0.8 < largest_singular_value(layer.weight.detach().reshape(len(layer.weight), -1)) <= 1
    with pytest.raises(ConfigurationError, match="bias_norm"):
        nn.SpectralLinear(2, 2, bias_norm=math.inf)
    assert "bias_norm=0.1" in repr(nn.SpectralLinear(2, 2))
    assert "bias_norm" not in repr(nn.SpectralLinear(2, 2, bias=False))


def test_no_layer_mixes_the_examples_of_a_batch() -> None:
    """Changing example 1 leaves the outputs and the gradients of example 0 as they were, bit by bit."""
    cases: list[tuple[Any, tuple[int, ...]]] = [
        (nn.BoundedInput((4, 6, 6)), (4, 6, 6)),
        (nn.BoundedInput((4, 6, 6), mode="sphere"), (4, 6, 6)),
        (nn.Boundary(norm=0.1, cotangent=0.1), (4, 6, 6)),
        (nn.ClipGradient(0.1), (4, 6, 6)),
        (nn.LayerCentering(), (4, 6, 6)),
        (nn.LayerCentering(1), (4, 6, 6)),
        (nn.GroupSort(), (4, 6, 6)),
        (nn.FullSort(), (4, 6, 6)),
        (nn.L2NormPool2d(2), (4, 6, 6)),
        (nn.ScaledAvgPool2d(2), (4, 6, 6)),
        (nn.SpectralConv2d(4, 2, 3).double(), (4, 6, 6)),
        (nn.SpectralLinear(6, 2).double(), (4, 6, 6)),
        (nn.Residual(nn.SpectralLinear(6, 6)).double(), (4, 6, 6)),
    ]
    for layer, shape in cases:
        first = normal(3, *shape)
        second = first.clone()
        second[1:] = normal(2, *shape, seed=1) * 100
        results = []
        for batch in (first, second):
            x = batch.clone().requires_grad_()
            y = layer(x)
            (grad,) = torch.autograd.grad(y[0].sum() + y[1:].sum() * (batch is second), x)
            results.append((y[0].detach(), grad[0]))
        assert torch.allclose(results[0][0], results[1][0], rtol=1e-13, atol=0), layer
        assert torch.allclose(results[0][1], results[1][1], rtol=1e-13, atol=1e-15), layer


def test_centring_an_example_without_dimensions_would_average_the_batch() -> None:
    with pytest.raises(DataError, match="at least one dimension"):
        nn.LayerCentering()(torch.ones(4))
    with pytest.raises((DataError, UnsupportedError)):
        analyse(Forward(lambda m, x: m.centre(x[:, 0]), centre=nn.LayerCentering()), 1.0, input_shape=(3,), input_norm=1.0)


@pytest.mark.parametrize("width", [255, 256, 257, 512, 1024])
@pytest.mark.parametrize("mode", ["ball", "sphere"])
def test_rows_of_every_length_stay_apart_on_their_way_into_a_ball(mode, width) -> None:
    """Norms are added up in pieces of 256: where there is no rest, clipping finds none that it can't follow."""
    model = nn.Sequential(nn.BoundedInput((width,), mode=mode), torch.nn.Linear(width, 2))
    x = torch.randn(5, width)
    assert clipping.support(model, x, torch.arange(5) % 2, losses.CrossEntropy()).apart == "proved"
    assert torch.allclose(example_norms(x)[:, 0], torch.linalg.vector_norm(x.double(), dim=1).float())
