"""A line by medians over pairs, or from moments."""

import math

import numpy as np
import pytest
import torch

from lipdp.errors import BudgetError, ConfigurationError, DataError
from lipdp.mechanisms import lines, release_line
from lipdp.mechanisms.intervals import IntervalMechanism
from lipdp.mechanisms.lines import pairs, shuffled, values_at
from lipdp.mechanisms.problem import Problem, least_of, share_of
from lipdp.privacy import Budget


def table(n=600, noise=0.05):
    some = np.random.default_rng(2)
    x = some.uniform(0, 20, n)
    return np.stack([x, (3 + 0.5 * x + some.normal(0, noise, n)).clip(-10, 30)], 1)


BOUNDS = [(0.0, 20.0), (-10.0, 30.0)]


@pytest.mark.parametrize("n", [2, 3, 50, 51])
def test_a_record_is_in_one_pair_of_each_matching(n):
    matched = pairs(n, 5)
    assert matched.shape == (5 * (n // 2), 2)
    assert int(torch.bincount(matched.reshape(-1)).max()) <= 5
    assert bool((matched[:, 0] != matched[:, 1]).all())
    assert torch.equal(pairs(n, 5), matched)  # by n alone


def test_a_replaced_record_moves_its_pairs_and_no_others():
    some = torch.Generator().manual_seed(3)
    one = torch.rand(40, 2, dtype=torch.float64, generator=some)
    matched = pairs(40)
    for hostile in ([0.0, 0.0], [1.0, 1.0], one[5].tolist(), [float(one[5, 0]), 1.0]):
        other = one.clone()
        other[7] = torch.tensor(hostile, dtype=torch.float64)
        for place in (0.25, 0.75):
            here, there = values_at(one, matched, place), values_at(other, matched, place)
            assert bool(torch.isfinite(there).all())
            assert int((here != there).sum()) <= 8


def test_the_law_of_neighbours_is_within_epsilon():
    """Every candidate's exact chance, on the medians of pairs of two tables that differ in a record: half of ε each."""
    epsilon, n = 1.2, 12
    matched = pairs(n)
    problem = Problem.of("median", share_of(epsilon, 16), len(matched), (-0.5, 1.5))
    mechanism = IntervalMechanism.deep(problem)
    assert 16 * least_of(problem.epsilon) <= least_of(epsilon)

    def law(rows):
        values = mechanism.lattice.places(values_at(rows, matched, 0.25).clamp(-0.5, 1.5)).sort().values
        blocks = [block for block in mechanism._blocks(values.numpy()) if block.deep]
        weights = np.array([math.exp(-problem.epsilon / 2 * float(block.distance)) for block in blocks])
        total = (weights * np.array([float(block.copies) for block in blocks])).sum()
        return np.array([block.first for block in blocks]), np.log(weights / total)

    worst, some = 0.0, torch.Generator().manual_seed(1)
    for number in range(40):
        one = torch.rand(n, 2, dtype=torch.float64, generator=some)
        if number % 2:
            one = one.round()
        other = one.clone()
        other[0] = torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 1.0], [1.0, 0.0]][number % 4], dtype=torch.float64)
        (starts, chance), (others, there) = law(one), law(other)
        merged = np.union1d(starts, others)
        gap = chance[np.searchsorted(starts, merged, side="right") - 1] - there[np.searchsorted(others, merged, side="right") - 1]
        worst = max(worst, float(np.abs(gap).max()))
    assert 0.2 * epsilon < worst <= epsilon / 2 + 1e-9


def test_it_finds_the_line_and_says_how():
    few = release_line(table(), BOUNDS, 1.0)
    assert few.method == "pairs"
    assert (few.slope, few.intercept) == (pytest.approx(0.5, abs=0.05), pytest.approx(3, abs=0.5))
    many = release_line(table(), BOUNDS, 3.0)
    assert many.method == "moments"
    assert few(np.array([0.0, 10.0]))[1] == pytest.approx(8, abs=0.4)


def test_strange_records_do_not_move_pairs_far():
    rows = table()
    rows[:40] = [20.0, -10.0]
    assert release_line(rows, BOUNDS, 1.0, method="pairs").slope == pytest.approx(0.5, abs=0.1)
    flat = np.full((50, 2), 4.0)  # all of one x
    assert math.isfinite(release_line(flat, BOUNDS, 1.0, method="pairs").slope)


def test_it_is_paid_for_first_and_refuses_what_is_outside(tmp_path):
    budget = Budget(tmp_path / "b", epsilon=1.5, delta=0.0, dataset="x", adjacency="replace_one")
    release_line(table(), BOUNDS, 1.0, budget=budget)
    with pytest.raises(BudgetError):
        release_line(table(), BOUNDS, 1.0, budget=budget)
    with pytest.raises(DataError):
        release_line(table() * 3, BOUNDS, 0.1, budget=budget)
    release_line(table() * 3, BOUNDS, 0.5, budget=budget, clamp=True)  # there is still this much: a refusal costs nothing
    with pytest.raises(DataError, match="shape"):
        release_line(table()[:, :1], BOUNDS[:1], 1.0)
    with pytest.raises(ConfigurationError, match="method"):
        release_line(table(), BOUNDS, 1.0, method="guess")


def test_rows_come_in_any_order_with_the_same_chance():
    rows = torch.arange(3.0)[:, None]
    counts = {}
    for _ in range(6000):
        order = tuple(shuffled(rows)[:, 0].tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert all(abs(count - 1000) < 6 * math.sqrt(1000) for count in counts.values())


def test_a_sorted_table_is_shuffled_before_rows_are_paired(monkeypatch):
    """By numbers of rows as they came, one other record moves the ranks of a sorted table's pairs by more than its 8 pairs."""
    some, grid, moved = np.random.default_rng(0), torch.linspace(-0.5, 1.5, 400, dtype=torch.float64), 0
    for _ in range(60):
        one = np.stack([np.sort(some.uniform(0, 1, 40)), some.integers(0, 2, 40)], 1)
        other = np.concatenate([one[1:], [[1.0, one[0, 1]]]])  # one record, and all others a row further up
        here, there = (values_at(torch.tensor(rows), pairs(40), 0.25).sort().values for rows in (one, other))
        moved = max(moved, int((torch.searchsorted(here, grid) - torch.searchsorted(there, grid)).abs().max()))
    assert moved > 12
    paired = []
    monkeypatch.setattr(lines, "values_at", lambda rows, *other: paired.append(rows) or values_at(rows, *other))
    for _ in range(2):
        release_line(one, [(0, 1), (0, 1)], 1.0)
    assert not torch.equal(paired[0], paired[2])
    assert torch.equal(paired[0], paired[1])  # both medians are about the same pairs
    assert torch.equal(paired[0][:, 0].sort().values, torch.tensor(one[:, 0]))


@pytest.mark.parametrize(("bounds", "epsilon"), [(None, 1.0), (5, 1.0), (BOUNDS, 1e200)])
def test_what_is_no_bound_or_no_epsilon(bounds, epsilon):
    with pytest.raises(ConfigurationError):
        release_line(table(4), bounds, epsilon, method="pairs" if epsilon > 1e10 else None)
