"""What an attack on the released paths found, and holds now: exact ε, exact queries, plans that cost what they say, bad data."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
import torch

from lipdp import mechanisms
from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.answering import Plan
from lipdp.mechanisms.problem import Problem, Query, share_of
from lipdp.mechanisms.statistics import QueryStatistic


@pytest.mark.parametrize("epsilon", [0.1, 0.3, 1.1, 2.3, 1.0, 1e-7])
def test_noise_is_for_no_more_than_what_is_charged(epsilon: float) -> None:
    """The float 0.1 is above a tenth: ten releases of it must not spend more than 1."""
    assert Problem.of("mean", epsilon, 10, (0, 1)).exact_epsilon <= Fraction(repr(epsilon))
    for count in (1, 2, 3, 7, 10):
        assert count * Fraction(share_of(epsilon, count)) <= min(Fraction(epsilon), Fraction(repr(epsilon)))
        assert share_of(epsilon, count) == pytest.approx(epsilon / count, rel=1e-14)


@pytest.mark.parametrize("kind", ["mean", "variance", "quantile"])
@pytest.mark.parametrize("window", [(0.0, 1.0), (0.1, 0.7), (0.3, 0.3 + 1e-9)])
def test_queries_are_computed_in_whole_numbers(kind: str, window: tuple[float, float]) -> None:
    """Of records on the lattice, exactly: and so neighbours differ by the sensitivity at most, whatever n is."""
    n = 5000
    statistic = QueryStatistic(Query(kind), n, window)
    t = torch.rand(6, n, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    t[1], t[2, : n // 2] = t[1].round(), 0.0
    other = t.clone()
    other[:, 0] = 1 - t[:, 0].round()
    one, two = (statistic.integers(data.sort(-1).values) for data in (t, other))
    assert int((one - two).abs().max()) <= statistic.sensitivity
    for row, got in zip(t.sort(-1).values, one[:, 0].tolist(), strict=True):
        places = [Fraction(round(min(max(float(x), window[0]), window[1]) * 2**30), 2**30) for x in row]
        mean = sum(places) / n
        want = {"mean": mean, "variance": sum(p * p for p in places) / n - mean**2, "quantile": (places[2499] + places[2500]) / 2}
        assert abs(want[kind] * 2**36 - got) <= Fraction(1, 2)


def test_a_variance_of_many_records_stays_inside_its_sensitivity() -> None:
    """In floating point, 10⁷ records were off by two lattice steps, where one is allowed for."""
    n = 2_000_000
    statistic = QueryStatistic(Query("variance"), n)
    t = torch.cat([torch.zeros(1, n // 2, dtype=torch.float64), torch.ones(1, n // 2, dtype=torch.float64)], 1)
    assert int(statistic.integers(t)) == 2**34
    t[0, n // 2] = 0.0
    share = Fraction(n // 2 - 1, n)
    assert int(statistic.integers(t)) == round(share * (1 - share) * 2**36)


def test_a_plan_costs_what_its_parts_cost() -> None:
    made = mechanisms.plan("histogram:0,5,10", 1.0, 20, (0, 10))
    with pytest.raises(ConfigurationError, match="cost more than its epsilon"):
        dataclasses.replace(made, epsilon=1e-9)
    with pytest.raises(ConfigurationError, match="cost more than its epsilon"):
        Plan(1.0, made.problem, (), ())
    with pytest.raises(ConfigurationError, match="other data"):
        dataclasses.replace(made, problem=dataclasses.replace(made.problem, high=5.0))


@pytest.mark.parametrize("high", [7.0, 100.0, 120.0])
def test_records_at_an_edge_are_in_the_cell_that_begins_there(high: float) -> None:
    x = torch.arange(high + 1, dtype=torch.float64)
    edges = ",".join(str(k) for k in range(int(high) + 1))
    (answer,) = mechanisms.answer(x, f"histogram:{edges}", (0, high), 1e4)
    assert answer.value == [1.0] * (int(high) - 1) + [2.0]


def test_what_is_no_column_of_numbers_is_refused() -> None:
    problem = Problem.of("mean", 1.0, 4, (0, 10))
    good = [1.0, 2.0, 3.0, 4.0]
    for data in (
        np.ma.array(good, mask=[0, 1, 0, 0]),
        np.array([1 + 2j, 2, 3, 4]),
        torch.tensor([1 + 2j, 2, 3, 4]),
        [*map(str, good)],
        np.array([1, 2, None, 4], dtype=object),
        np.array([1, 2, "3", 4], dtype=object),
        pd.Series([1, 2, None, 4], dtype="Int64"),
        [1, 2, 10**400, 4],
        np.array(["2020-01-01"] * 4, dtype="datetime64[D]"),
        [1, 2, float("nan"), 4],
        {1, 2, 3, 4},
        b"1234",
        (value for value in good),
        [[1], [2, 3], 4, 5],
    ):
        with pytest.raises(DataError):
            problem.dataset(data, clamp=True)
    for data in (
        pd.Series(good, index=[5, 6, 7, 8]),
        pd.array([1, 2, 3, 4], dtype="Int64"),
        [1, 2, 3, 4],
        [torch.tensor(value) for value in good],
        np.ma.array(good, mask=False),
        torch.tensor(good, dtype=torch.bfloat16),
    ):
        assert problem.dataset(data)[0].tolist() == [0.1, 0.2, 0.3, 0.4]
    assert float(problem.dataset([1, 2, 3, 2**70], clamp=True)[0, 3]) == 1.0
