"""Projections: ‖W‖₂ ≤ 1 after the cast, from any start, and kept by noisy steps.

"‖W‖₂ ≤ 1" is checked by float64 SVD of the stored weights with a tolerance of 1e-15·r, the error of the SVD itself.
"""

from __future__ import annotations

import contextlib
import math

import pytest
import torch

from lipdp import nn
from lipdp._numerics import deferred_checks
from lipdp.errors import ConfigurationError
from lipdp.parametrize import Bjorck, Constrained, Constraint, Spectral, project_
from lipdp.parametrize import constraint as constraint_module
from lipdp.parametrize.constraint import RKO, normalise_certified, project_ball
from tests.soundness.harness import impulse_jacobian, largest_singular_value, noisy_steps

SHAPES = [(1, 1), (8, 8), (3, 40), (40, 3), (64, 48)]
CONSTRAINTS = [Bjorck(), Bjorck(iterations=0), Bjorck(iterations=3), Spectral(), RKO()]
DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def starts(shape: tuple[int, int]) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(sum(shape))
    normal = torch.randn(shape, generator=g, dtype=torch.float64)
    u, _, v = torch.linalg.svd(normal, full_matrices=False)
    return {
        "random": normal,
        "huge": normal * 1e6,
        "tiny": normal * 1e-6,
        "rank-one": torch.outer(normal[:, 0], normal[0]),
        "orthogonal": u @ v,
        "orthogonal+noise": u @ v + 0.02 * torch.randn(shape, generator=g, dtype=torch.float64),
        "constant": torch.ones(shape, dtype=torch.float64),
        "zero": torch.zeros(shape, dtype=torch.float64),
        "at-sqrt-3": (u @ v) * math.sqrt(3),
    }


def assert_in_unit_ball(matrix: torch.Tensor) -> None:
    wide = matrix.detach().double().reshape(-1, *matrix.shape[-2:])
    norms = torch.linalg.svdvals(wide)[:, 0]
    assert float(norms.max()) <= 1 + 1e-15 * min(matrix.shape[-2:])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("constraint", CONSTRAINTS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_projection_lands_in_the_unit_ball_from_any_start(
    shape: tuple[int, int], constraint: Constraint, dtype: torch.dtype
) -> None:
    for name, start in starts(shape).items():
        before = start.to(dtype)
        after = constraint.project(before)
        assert after.dtype == dtype, name
        assert after.shape == before.shape, name
        assert_in_unit_ball(after)
        assert_in_unit_ball(constraint.project(after))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_projection_does_not_shrink_more_than_it_must(dtype: torch.dtype) -> None:
    """Also a lower side: a certificate 2% too cautious would cost accuracy at every layer."""
    for name, start in starts((64, 48)).items():
        if name in ("tiny", "zero"):
            continue
        for constraint in (Bjorck(), Spectral()):
            norm = largest_singular_value(constraint.project(start.to(dtype)))
            assert norm >= 0.99, (name, constraint)


def test_spectral_only_scales_and_leaves_small_weights_alone() -> None:
    small = starts((8, 8))["tiny"]
    assert torch.equal(Spectral().project(small), small)
    big = starts((8, 8))["random"] * 5
    projected = Spectral().project(big)
    assert torch.allclose(projected / projected.norm(), big / big.norm(), rtol=1e-12)


def test_bjorck_makes_singular_values_one() -> None:
    for shape in SHAPES:
        values = torch.linalg.svdvals(Bjorck(iterations=40).project(starts(shape)["random"]))
        assert float(values.min()) >= 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", ["linear", "conv", "grouped"])
def test_25_noisy_steps_stay_in_the_ball_and_near_orthogonal(layer: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = {
        "linear": lambda: nn.SpectralLinear(24, 16, dtype=dtype),
        "conv": lambda: nn.SpectralConv2d(3, 8, 3, padding=1, dtype=dtype),
        "grouped": lambda: nn.SpectralConv2d(4, 8, 3, groups=2, dtype=dtype),
    }[layer]()
    for seed in range(25):
        noisy_steps(module, steps=1, noise=0.02, seed=seed)
        matrices = module.weight.detach().reshape(getattr(module, "groups", 1), -1, *[module.weight[0].numel()])
        assert_in_unit_ball(matrices)
        assert float(module.bias.detach().double().norm()) <= module.bias_norm
        if dtype is not torch.bfloat16:  # its certificate gives away (1+√r·2⁻⁸)
            assert float(torch.linalg.svdvals(matrices.double()).min()) >= 0.9


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.SpectralLinear(12, 7), (12,)),
        (nn.SpectralLinear(5, 9), (2, 5)),
        (nn.SpectralConv2d(2, 3, 3, padding=1), (2, 5, 6)),
        (nn.SpectralConv2d(2, 4, (3, 2), stride=2, padding="valid", groups=2), (2, 6, 5)),
        (nn.SpectralConv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 5, 5)),
        (nn.SpectralConv2d(1, 2, 3, padding=1, padding_mode="circular", constraint=Spectral()), (1, 4, 4)),
    ],
    ids=str,
)
def test_operator_norm_stays_below_one_after_25_noisy_steps(layer: torch.nn.Module, shape: tuple[int, ...]) -> None:
    noisy_steps(layer, steps=25, noise=0.3)
    assert largest_singular_value(impulse_jacobian(layer, shape)) <= 1 + 1e-13


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("constraint", [Bjorck(), Spectral()], ids=str)
def test_non_finite_weights_raise(bad: float, constraint: Constraint) -> None:
    layer = nn.SpectralLinear(4, 3, constraint=constraint)
    with torch.no_grad():
        layer.weight[1, 2] = bad
    with pytest.raises(ConfigurationError, match="not finite"):
        project_(nn.Sequential(layer))
    conv = nn.SpectralConv2d(2, 2, 3, constraint=constraint)
    with torch.no_grad():
        conv.bias[0] = bad
    with pytest.raises(ConfigurationError, match="not finite"):
        project_(conv)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
def test_bias_ball_holds_after_the_cast(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    for size, radius, scale in [(1, 0.1, 3.0), (7, 0.1, 1.0), (300, 2.0, 1e3), (5, 1.0, 1e-3)]:
        vector = (torch.randn(size, generator=g) * scale).to(dtype)
        projected = project_ball(vector, radius)
        assert projected.dtype == dtype
        assert float(projected.double().norm()) <= radius
        if float(vector.double().norm()) < 0.9 * radius:
            assert torch.equal(projected, vector)
        else:
            assert float(projected.double().norm()) >= 0.98 * radius


def test_project_reaches_every_constrained_layer_and_nothing_else() -> None:
    model = nn.Sequential(nn.SpectralLinear(4, 4), nn.Residual(nn.SpectralLinear(4, 4)), torch.nn.Linear(4, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10).add_(3)
    free = model[2].weight.clone()
    project_(model)
    for layer in (model[0], model[1].module):
        assert_in_unit_ball(layer.weight)
        assert float(layer.bias.detach().double().norm()) <= layer.bias_norm
    assert torch.equal(model[2].weight, free)


def test_projection_keeps_grad_mode_and_parameter_identity() -> None:
    layer = nn.SpectralLinear(3, 3)
    weight = layer.weight
    layer(torch.ones(1, 3)).sum().backward()
    project_(layer)
    assert layer.weight is weight
    assert weight.requires_grad
    assert weight.grad is not None


def test_bad_arguments_and_missing_methods_say_so() -> None:
    with pytest.raises(ConfigurationError, match="iterations"):
        Bjorck(iterations=-1)

    class Forgotten(Constrained, torch.nn.Module):
        pass

    with pytest.raises(NotImplementedError, match="Forgotten"):
        project_(Forgotten())
    assert isinstance(Spectral(), Constraint)
    assert float(normalise_certified(torch.eye(2) * 3, torch.float32).max()) <= 1


def large_starts() -> dict[str, torch.Tensor]:
    """Matrices large enough that they are projected in float32 on a processor; rounding has to be divided out."""
    g = torch.Generator().manual_seed(0)
    orthogonal = torch.linalg.qr(torch.randn(400, 96, generator=g, dtype=torch.float64))[0]
    noise = torch.randn(400, 96, generator=g, dtype=torch.float64)
    return {
        "orthogonal": orthogonal,
        "after a step": orthogonal + 2e-3 * noise,
        "after a long step": orthogonal + 2e-2 * noise,
        "one direction": torch.ones(400, 96, dtype=torch.float64) / (400 * 96) ** 0.5,
        "slightly too long": orthogonal * (1 + 1e-4),
        "huge": 1e30 * noise,
        "small": 1e-20 * noise,
        "uneven": orthogonal * torch.logspace(-6, 0, 96, dtype=torch.float64),
    }


@pytest.mark.parametrize("name", large_starts())
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("deferred", [False, True])
def test_large_matrices_are_certified_in_float32(name: str, wide: bool, deferred: bool) -> None:
    """By the bound on the iteration's own rounding: never above 1, and not far below where singular values are 1."""
    start = large_starts()[name].float()
    assert constraint_module._working_type(start) == torch.float32
    if wide:
        start = start.T
    with deferred_checks() if deferred else contextlib.nullcontext():
        after = Bjorck().project(start)
    assert after.shape == start.shape
    assert_in_unit_ball(after)
    if name in ("orthogonal", "after a step", "slightly too long"):
        assert float(torch.linalg.svdvals(after.double()).min()) >= 0.998


@pytest.mark.parametrize("shape", [(320, 256), (400, 300), (385, 385), (2, 310, 270)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_matrices_are_certified_by_half_of_their_gram_matrix(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """The other half is the same numbers; and projections that rest on it are inside, where no block may be left out."""
    g = torch.Generator().manual_seed(sum(shape))
    orthogonal = torch.linalg.qr(torch.randn(shape, generator=g, dtype=torch.float64))[0]
    noise = torch.randn(shape, generator=g, dtype=torch.float64)
    for start in (orthogonal + 2e-3 * noise, orthogonal + 2e-2 * noise, torch.full_like(noise, 0.1), 1e10 * noise):
        work = start.to(dtype)
        gram, sizes = constraint_module._gram(work), work.abs().double().mT @ work.abs().double()
        assert ((gram - work.double().mT @ work.double()).abs() <= (64 + shape[-2] / 64) * torch.finfo(dtype).eps * sizes).all()
        for after in (Bjorck().project(work), Bjorck(iterations=1).project(work)):
            for each in after.reshape(-1, *shape[-2:]):
                assert_in_unit_ball(each)


def test_rounding_is_bounded_whatever_the_products_make_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product is off by as much as the bound allows, in the direction that lengthens the result."""
    g = torch.Generator().manual_seed(1)
    start = (torch.linalg.qr(torch.randn(400, 96, generator=g))[0] + 1e-3 * torch.randn(400, 96, generator=g)).float()
    u, honest = 2.0**-24, constraint_module._gram

    def dishonest(work: torch.Tensor) -> torch.Tensor:
        terms = 64 + -(-400 // 64)
        lower = terms * u * (work.abs().double().T @ work.abs().double())
        return (honest(work).double() - lower).float()  # E too small: the iteration shortens too little

    monkeypatch.setattr(constraint_module, "_gram", dishonest)
    assert_in_unit_ball(Bjorck(iterations=1).project(start))


@pytest.mark.parametrize("coarse", ["autocast", "matmul precision"])
def test_coarser_products_never_reach_the_certificate(coarse: str) -> None:
    start = large_starts()["after a step"].float()
    before = torch.get_float32_matmul_precision()
    expected = Bjorck().project(start)
    try:
        if coarse == "matmul precision":
            torch.set_float32_matmul_precision("medium")
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=coarse == "autocast"):
            after = Bjorck().project(start)
    finally:
        torch.set_float32_matmul_precision(before)
    assert_in_unit_ball(after)
    torch.testing.assert_close(after, expected, atol=1e-3, rtol=0)
