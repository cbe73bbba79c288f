"""The certificate: never below the spectral norm, and close to it.

The reference is float64 SVD, whose own relative error is below 1e-15·r: that is the tolerance, here and nowhere else.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp._numerics import unit_roundoff
from lipdp.bounds import certified_norm
from lipdp.errors import ConfigurationError


def svd_norm(matrix: torch.Tensor) -> float:
    """‖matrix‖₂ by SVD in float64, scaled so that it neither over- nor underflows."""
    scale = float(matrix.double().abs().max()) or 1.0
    return float(torch.linalg.svdvals(matrix.double() / scale)[0]) * scale


def matrices() -> st.SearchStrategy[torch.Tensor]:
    @st.composite
    def build(draw: st.DrawFn) -> torch.Tensor:
        rows, columns = draw(st.integers(1, 40)), draw(st.integers(1, 40))
        generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
        kind = draw(st.sampled_from(["normal", "deficient", "rank-one", "orthogonal", "sparse", "constant", "spread"]))
        if kind == "deficient":
            rank = max(1, min(rows, columns) // 2)
            w = torch.randn(rows, rank, generator=generator).double() @ torch.randn(rank, columns, generator=generator).double()
        elif kind == "rank-one":
            w = torch.outer(torch.randn(rows, generator=generator), torch.randn(columns, generator=generator)).double()
        elif kind == "orthogonal":
            q, _ = torch.linalg.qr(torch.randn(max(rows, columns), min(rows, columns), generator=generator).double())
            w = q if rows >= columns else q.T
        elif kind == "sparse":
            w = torch.randn(rows, columns, generator=generator).double()
            w = w * (torch.rand(rows, columns, generator=generator) < 0.1)
        elif kind == "constant":
            w = torch.ones(rows, columns, dtype=torch.float64)
        else:
            w = torch.randn(rows, columns, generator=generator).double()
            if kind == "spread":
                w = w * 10.0 ** torch.linspace(-8, 8, columns, dtype=torch.float64)
        w = w * 10.0 ** draw(st.integers(-30, 30))
        return w.float() if draw(st.booleans()) else w

    return build()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(matrices(), st.sampled_from([0, 1, 5, 10]))
def test_certificate_is_above_the_svd_and_tight(matrix: torch.Tensor, squarings: int) -> None:
    reference = svd_norm(matrix)
    if not math.isfinite(reference):
        return  # the scale left float32's range
    rank = min(matrix.shape)
    certified = float(certified_norm(matrix, squarings))
    assert certified >= reference * (1 - 1e-15 * rank)
    assert certified <= reference * rank ** (1 / 2 ** (squarings + 2)) * (1 + 1e-6)


@pytest.mark.parametrize("shape", [(256, 256), (256, 40), (64, 300), (10, 784)])
def test_default_certificate_is_within_one_percent_up_to_rank_256(shape: tuple[int, int]) -> None:
    matrix = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    certified, reference = float(certified_norm(matrix)), svd_norm(matrix)
    assert reference <= certified <= 1.01 * reference


@pytest.mark.parametrize("scale", [1e-320, 1e-300, 1e-160, 1e-30, 1e30, 1e160, 1e300])
def test_extreme_scales_neither_vanish_nor_overflow(scale: float) -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)) * scale
    assert float(certified_norm(matrix)) == pytest.approx(scale, rel=1e-3)
    assert float(certified_norm(matrix)) >= scale


def test_a_scalar_is_never_certified_below_itself() -> None:
    """The logarithm of a large scale has an absolute error that a 1×1 matrix leaves no margin for."""
    values = 10.0 ** torch.linspace(-35, 35, 2_001, dtype=torch.float64)
    assert bool((certified_norm(values.reshape(-1, 1, 1)) >= values).all())
    assert bool((certified_norm(values.reshape(-1, 1, 1)) <= values * (1 + 1e-13)).all())


def test_batches_zeros_and_empty_matrices() -> None:
    stack = torch.stack([torch.eye(3) * c for c in (0.0, 0.5, 2.0)])
    assert certified_norm(stack).tolist() == pytest.approx([0.0, 0.5, 2.0], rel=1e-3)
    assert float(certified_norm(torch.zeros(3, 4))) == 0.0
    assert certified_norm(torch.zeros(2, 0, 4)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (5, 2)])
def test_non_finite_entries_never_get_a_finite_certificate(bad: float, shape: tuple[int, int]) -> None:
    matrix = torch.ones(shape)
    matrix[-1, -1] = bad
    assert not math.isfinite(float(certified_norm(matrix)))
    assert not bool(torch.isfinite(certified_norm(torch.stack([torch.ones(shape), matrix]))[1]))


def test_a_vector_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="matrix"):
        certified_norm(torch.ones(3))


def test_unit_roundoff() -> None:
    assert unit_roundoff(torch.float64) == 2.0**-53
    assert unit_roundoff(torch.float32) == 2.0**-24
    assert unit_roundoff(torch.bfloat16) == 2.0**-8
