"""Queries: definitions against numpy, and sensitivities against all neighbouring datasets of a small grid."""

from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch

from lipdp.errors import ConfigurationError
from lipdp.mechanisms.problem import Query, parse_query


@pytest.mark.parametrize("n", [2, 3, 7, 10, 100])
@pytest.mark.parametrize("text", ["median", "p10", "p90", "quantile:0.25", "p0", "p100"])
def test_quantiles_are_numpys_averaged_inverted_cdf(n: int, text: str) -> None:
    x = torch.rand(20, n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).sort(1).values
    query = parse_query(text)
    want = np.quantile(x.numpy(), float(query.p), axis=1, method="averaged_inverted_cdf")
    assert np.allclose(query(x).numpy(), want, atol=1e-12)


def test_mean_and_variance() -> None:
    x = torch.rand(5, 9, dtype=torch.float64)
    assert torch.allclose(parse_query("mean")(x), x.mean(1))
    assert np.allclose(parse_query("variance")(x).numpy(), np.var(x.numpy(), axis=1))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
@pytest.mark.parametrize("text", ["mean", "variance", "median", "p10", "p25", "p50", "p80", "p0"])
def test_sensitivity_is_the_worst_case_over_all_neighbours(text: str, n: int) -> None:
    """Every dataset of {0, ½, 1}ⁿ and every replacement: the claim is reached (extremes lie at the ends) and never passed."""
    query = parse_query(text)
    values = (0.0, 0.5, 1.0)
    sets = torch.tensor(list(itertools.product(values, repeat=n)), dtype=torch.float64)
    worst = 0.0
    before = query(sets.sort(1).values)
    for value in values:  # by symmetry it is enough to replace the first record
        other = sets.clone()
        other[:, 0] = value
        worst = max(worst, float((query(other.sort(1).values) - before).abs().max()))
    assert worst == pytest.approx(float(query.sensitivity(n)), abs=1e-12)


def test_anchor_sensitivities() -> None:
    assert parse_query("mean").sensitivity(100) == Fraction(1, 100)
    assert parse_query("variance").sensitivity(100) == Fraction(99, 10_000)
    assert parse_query("median").sensitivity(100) == parse_query("p10").sensitivity(100) == Fraction(1, 2)
    assert parse_query("median").sensitivity(101) == 1


@pytest.mark.parametrize("bad", ["mode", "p101", "quantile:2", "", "quantile:x"])
def test_unknown_queries_are_refused(bad: str) -> None:
    with pytest.raises(ConfigurationError):
        parse_query(bad)


def test_names() -> None:
    assert [parse_query(text).name for text in ("median", "p10", "quantile:0.5", "p2.5")] == ["median", "p10", "median", "p2.5"]
    assert parse_query(Query("mean")).name == "mean"
