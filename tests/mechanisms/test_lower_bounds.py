"""The lower bounds of the benchmark are below what mechanisms do, and below what linear programmes find."""

from __future__ import annotations

import importlib
import itertools
import math
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from scipy import sparse
from scipy.optimize import linprog

from lipdp.mechanisms import Problem
from lipdp.mechanisms.intervals import IntervalMechanism

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "learned"


@pytest.fixture
def bounds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("lower_bounds")


def best_of_all(costs: np.ndarray, epsilon: float) -> float:
    """The least Σ P(r | k)·cost over all mechanisms on a chain, by a linear programme."""
    cells, count = costs.shape
    steps = [
        (r * count + k, r * count + j) for r in range(cells) for k, j in itertools.permutations(range(count), 2) if abs(k - j) == 1
    ]
    rows = np.arange(len(steps)).repeat(2)
    values = np.tile([1.0, -math.exp(epsilon)], len(steps))
    private = sparse.csr_matrix((values, (rows, np.array(steps).ravel())), shape=(len(steps), costs.size))
    places = np.tile(np.arange(count), cells), np.arange(costs.size)
    whole = sparse.csr_matrix((np.ones(costs.size), places), shape=(count, costs.size))
    found = linprog(costs.ravel(), A_ub=private, b_ub=np.zeros(len(steps)), A_eq=whole, b_eq=np.ones(count), method="highs")
    return float(found.fun)


@pytest.mark.parametrize(("epsilon", "count"), [(1.0, 9), (0.3, 15), (3.0, 7)])
def test_it_is_below_the_best_of_all_mechanisms(bounds: ModuleType, epsilon: float, count: int) -> None:
    generator = np.random.default_rng(count)
    for truths in (np.linspace(0.2, 0.4, count), np.sort(generator.random(count)), np.round(np.sort(generator.random(count)), 1)):
        plain = generator.uniform(0.04, 0.06, count)
        best = best_of_all(bounds.cell_costs(truths, plain) / count, epsilon)
        bound = bounds.chain_bound(truths, plain, epsilon)
        assert bound <= best * (1 + 1e-9)
        assert bound >= 0.45 * best
        # One that knows the chain is above it.
        assert best <= float(bounds.ranks_at_random(truths, plain, epsilon).mean())


@pytest.mark.parametrize(("epsilon", "count"), [(1.0, 17), (0.3, 25)])
def test_it_is_near_to_the_best_on_even_records(bounds: ModuleType, epsilon: float, count: int) -> None:
    truths, plain = np.linspace(0.2, 0.4, count), np.full(count, 0.05)
    best = best_of_all(bounds.cell_costs(truths, plain) / count, epsilon)
    assert bounds.chain_bound(truths, plain, epsilon) >= 0.9 * best


def test_the_recursion_is_the_least_over_all_extreme_rays(bounds: ModuleType) -> None:
    slack = np.random.default_rng(0).normal(size=(40, 6))
    rays = [np.cumsum((0, *signs)) for signs in itertools.product((-0.7, 0.7), repeat=5)]
    least = np.min([slack @ np.exp(ray) for ray in rays], axis=0)
    assert bounds.least_over_the_cone(slack, 0.7) == pytest.approx(least)


@pytest.mark.parametrize("epsilon", [0.3, 1.0])
def test_no_mechanism_of_the_library_is_below_it(bounds: ModuleType, epsilon: float) -> None:
    """Neighbours are next to each other in a chain, and the mechanisms' average over it is above the bound."""
    problem = Problem.of("p25", epsilon, 60, (0.0, 1.0))
    t = torch.rand(60, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).sort().values
    near = bounds.chain(t, 12)
    for one, other in itertools.pairwise(near):
        both = np.concatenate([one.numpy(), other.numpy()])
        shared = sum(min((one == value).sum(), (other == value).sum()).item() for value in np.unique(both))
        assert shared == 59
    assert torch.equal(near[12], t)
    truths, plain = problem.query(near), IntervalMechanism.plain(problem).losses(near)
    bound = bounds.chain_bound(truths.numpy(), plain.numpy(), epsilon)
    assert 0 < bound < float((IntervalMechanism.deep(problem).losses(near) / plain).mean())


def test_losses_below_the_floor_count_as_the_floor(bounds: ModuleType) -> None:
    truths = np.full(5, 0.3)
    assert bounds.chain_bound(truths, np.zeros(5), 1.0) == 1.0
    assert bounds.chain_bound(truths, np.array([0.0, 0.0, 1.0, 1.0, 1.0]), 1.0) == pytest.approx(0.4)


def test_small_domains_leave_room_below_the_exponential_mechanism(bounds: ModuleType) -> None:
    worst, average = bounds.small_domain(3, 4, 1.0)
    assert worst == pytest.approx(0.760, abs=2e-3)
    assert average == pytest.approx(0.363, abs=2e-3)
