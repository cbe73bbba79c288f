"""Statistics: the measured sensitivity against the claimed one."""

from __future__ import annotations

import itertools

import pytest
import torch

from lipdp.errors import ConfigurationError
from lipdp.mechanisms.problem import parse_query
from lipdp.mechanisms.statistics import PiecewiseSum, QueryStatistic, hats, knot_sensitivity


def table(m: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inner = torch.rand(9, dtype=torch.float64, generator=generator).sort().values
    knots = torch.cat([torch.zeros(1, dtype=torch.float64), inner, torch.ones(1, dtype=torch.float64)])
    return knots, torch.randn(11, m, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("m", [1, 2, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sum_sensitivity_over_all_pairs_of_records(m: int, seed: int) -> None:
    """n − 1 records cancel, so all pairs of one record's values are all neighbours: 1500 places and the knots, every pair."""
    knots, values = table(m, seed)
    statistic = PiecewiseSum.quantised(knots, values)
    places = torch.cat([torch.linspace(0, 1, 1500, dtype=torch.float64), knots])
    own = statistic.contributions(places)
    worst = max(int((own[i : i + 100, None] - own[None]).abs().sum(-1).max()) for i in range(0, len(own), 100))
    assert worst <= statistic.sensitivity
    assert worst >= (1 - 1e-6) * statistic.sensitivity
    assert statistic.sensitivity * statistic.unit == pytest.approx(float(knot_sensitivity(values)), rel=1e-5)


def test_sum_under_ascent_between_the_knots() -> None:
    """Gradient ascent on the real-valued φ from 300 random pairs does not pass the largest pair of knots."""
    knots, values = table(3, 7)
    pairs = torch.rand(2, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimiser = torch.optim.Adam([pairs], lr=0.02)
    for _ in range(100):
        inside = pairs.clamp(0, 1)
        phi = torch.stack([hats(row[:, None], knots) for row in inside]) @ values
        gap = (phi[0] - phi[1]).abs().sum(-1)
        optimiser.zero_grad()
        (-gap.sum()).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    best = float(gap.detach().max())
    assert 0.9 * float(knot_sensitivity(values)) < best <= float(knot_sensitivity(values)) * (1 + 1e-12)


def test_sum_is_the_hats_times_the_table() -> None:
    knots, values = table(2, 3)
    t = torch.rand(6, 40, dtype=torch.float64).sort(1).values
    statistic = PiecewiseSum.quantised(knots, values)
    want = hats(t, knots) @ (values - values[:1])
    assert torch.allclose(statistic.integers(t).double() * statistic.unit, want, atol=1e-4)


@pytest.mark.parametrize("text", ["mean", "variance", "median", "p25"])
@pytest.mark.parametrize("window", [(0.0, 1.0), (0.1, 0.7)])
def test_query_sensitivity_in_lattice_steps(text: str, window: tuple[float, float]) -> None:
    n = 4
    statistic = QueryStatistic(parse_query(text), n, window)
    values = (0.0, 0.1, 0.4, 0.7, 1.0)
    sets = torch.tensor(list(itertools.product(values, repeat=n)), dtype=torch.float64)
    before, worst = statistic.integers(sets.sort(1).values), 0
    for value in values:
        other = sets.clone()
        other[:, 0] = value
        worst = max(worst, int((statistic.integers(other.sort(1).values) - before).abs().max()))
    assert 0.999 * statistic.sensitivity < worst <= statistic.sensitivity


def test_bad_tables_are_refused() -> None:
    knots = torch.linspace(0, 1, 3)
    with pytest.raises(ConfigurationError, match="sensitivity 0"):
        PiecewiseSum.quantised(knots, torch.ones(3, 1))
    with pytest.raises(ConfigurationError, match="span"):
        PiecewiseSum.quantised(knots / 2, torch.rand(3, 1))
    with pytest.raises(ConfigurationError, match="increasing"):
        PiecewiseSum.quantised(knots.flip(0), torch.rand(3, 1))
    with pytest.raises(ConfigurationError, match="nan"):
        PiecewiseSum.quantised(knots, torch.full((3, 1), float("nan")))
