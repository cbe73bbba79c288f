"""Copies with reach are private and evaluated as they are drawn; what is said of all datasets holds against searches for others."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lipdp.errors import ConfigurationError
from lipdp.mechanisms import Mechanism, Problem, Settings, learn
from lipdp.mechanisms.intervals import PARTS, IntervalMechanism
from lipdp.mechanisms.ranked import copies_of
from lipdp.mechanisms.worst import LEAST, exceeded, within_reach_of_a_proof
from tests.many import examples
from tests.mechanisms.common import lumps

ONES, NONE = torch.ones(PARTS, dtype=torch.float64), torch.zeros(PARTS, dtype=torch.float64)
RISING = torch.linspace(0, 3, PARTS, dtype=torch.float64)


def reaching(problem: Problem, reaches: tuple[int, ...] = (3, 200_000)) -> IntervalMechanism:
    near = [RISING, RISING.flip(0)][: len(reaches)]
    return IntervalMechanism.tilted(problem, ONES, NONE, ends=(0.01, 0.2), atoms=0.5, reaches=reaches, near=near)


@pytest.mark.parametrize("loss", ["squared", "quantile"])
def test_exact_losses_are_those_of_its_releases(loss: str) -> None:
    problem = Problem.of("p25", 0.8, 12, (0, 10), loss)
    mechanism = reaching(problem)
    x = torch.tensor([0.0, 0, 0, 2, 2.5, 2.5, 4, 7.77, 8, 9, 9, 10])
    answers = torch.tensor([mechanism.release(x) for _ in range(500)], dtype=torch.float64)
    q = float(problem.answer(problem.query(problem.unit(x)[None]))[0])
    low, high = answers.clamp(max=q), answers.clamp(min=q)
    costs = (answers - q) ** 2 if loss == "squared" else ((x > low[:, None]) & (x < high[:, None])).double().sum(1)
    error = float(costs.std()) / math.sqrt(len(costs))
    assert float(costs.mean()) == pytest.approx(mechanism.expected_loss(x[None]), abs=5 * error)


def _chances(mechanism: IntervalMechanism, places: Tensor) -> Callable[[int], float]:
    """The chance of a candidate by its copies with reach."""
    data = places.sort().values.numpy()
    blocks = list(mechanism._blocks_within(data))
    every = [*mechanism._blocks(data), *blocks]
    weights = [math.exp(-mechanism.epsilon / 2 * float(block.distance)) for block in every]
    total = sum(weight * block.copies for weight, block in zip(weights, every, strict=True))
    firsts = np.array([block.first for block in blocks])

    def chance(place: int) -> float:
        at = int(np.searchsorted(firsts, place, side="right")) - 1
        return math.exp(-mechanism.epsilon / 2 * float(blocks[at].distance)) * blocks[at].each / total

    return chance


@pytest.mark.parametrize("reach", [0, 1, 50_000, 400_000])
def test_neighbours_have_probabilities_within_epsilon(reach: int) -> None:
    """Every candidate beside a place where a weight changes, on neighbours with ties, at the ends, and a reach apart."""
    problem = Problem.of("p25", 0.9, 8, (0.0, 1.0))
    mechanism = IntervalMechanism.tilted(problem, ONES, NONE, atoms=0.5, reaches=(reach,), near=(5 * ONES,))
    generator, last, worst = torch.Generator().manual_seed(4), mechanism.lattice.last, 0.0
    for _ in range(40):
        values = torch.randint(last + 1, (2,), generator=generator)
        few = torch.cat([values, values + reach, values + 2 * reach + 1, torch.tensor([0, last])]).clamp(0, last)
        x = few[torch.randint(len(few), (8,), generator=generator)]
        other = x.clone()
        other[0] = few[int(torch.randint(len(few), (1,), generator=generator))]
        here, there = _chances(mechanism, x), _chances(mechanism, other)
        steps = [value + sign * reach + by for value in {*x.tolist(), *other.tolist()} for sign in (-1, 0, 1) for by in (-1, 0, 1)]
        for place in {min(max(step, 0), last) for step in steps}:
            worst = max(worst, abs(math.log(here(place) / there(place))))
    assert 0.5 < worst <= 0.9 + 1e-9


def test_reaches_and_their_copies_have_to_fit() -> None:
    problem = Problem.of("median", 1.0, 20, (0.0, 1.0))
    with pytest.raises(ConfigurationError, match="each reach has copies"):
        replace(IntervalMechanism.plain(problem), reaches=(5,))


def test_narrow_columns_gain_without_any_belief() -> None:
    problem = Problem.of("median", 1.0, 50, (0.0, 1.0))
    t = 0.3 + 0.002 * torch.rand(20, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64).sort(1).values
    near = IntervalMechanism.tilted(problem, ONES, NONE, atoms=1.0, reaches=(5000,), near=(0.2 * ONES,))
    assert float((near.losses(t) / IntervalMechanism.deep(problem).losses(t)).max()) < 0.1


# --- the bound over all datasets ----------------------------------------------------------------------------------------------


def hostile(n: int, below: int, count: int, seed: int) -> Tensor:
    """Records beside a quantile on any scale, some of them anywhere else; and lumps."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    q = torch.where(random(count) < 0.5, random(count), 10 ** (-5 * random(count)))
    q = torch.where(random(count) < 0.5, q, 1 - q)
    width = 10 ** (-5 * random(count))
    rows = torch.where(torch.arange(n) < below, (q - width)[:, None], (q + width * random(count))[:, None])
    place, few = torch.arange(n), 8 * random(2, count)
    far, farther = random(count, 1), random(count, 1)
    rows = torch.where(place < few[0][:, None], far.minimum(rows), rows)
    rows = torch.where(place >= n - few[1][:, None], farther.maximum(rows), rows)
    parameters = random(count, 6)
    parameters[:, 2:4] = 5 * parameters[:, 2:4] - 5
    return torch.cat([rows.clamp(0, 1).sort(1).values, lumps(parameters, n)])


def worst_found(mechanism: IntervalMechanism, seed: int, rounds: int = 6) -> float:
    """By a search: the worst columns are varied, record by record and in lumps, and the worst of these again."""
    problem, plain = mechanism.problem, IntervalMechanism.plain(mechanism.problem)
    generator = torch.Generator().manual_seed(seed)

    def ratios(t: Tensor) -> Tensor:
        return mechanism.losses(t) / plain.losses(t).clamp(min=LEAST)

    t = hostile(problem.n, math.floor(problem.rank()), 150, seed)
    for number in range(rounds):
        best = t[ratios(t).topk(12).indices]
        noise = torch.randn(4, *best.shape, generator=generator, dtype=torch.float64) * 0.1 / 3**number
        lump = torch.rand(4, *best.shape, generator=generator, dtype=torch.float64) < 0.1
        moved = [best, *(best + torch.where(lump, noise, 0.0)), *(best + noise[:, :, :1])]
        t = torch.cat(moved).clamp(0, 1).sort(1).values
    return float(ratios(t).max())


def test_the_plain_mechanism_is_nearly_its_own_bound() -> None:
    for query in ("median", "p90"):
        assert exceeded(copies_of(IntervalMechanism.plain(Problem.of(query, 0.3, 50, (0.0, 1.0)))), 1.05) is None


@pytest.mark.parametrize("seed", range(3))
def test_what_is_proved_no_search_refutes_and_what_a_search_refutes_is_not_proved(seed: int) -> None:
    """Mechanisms with anything at all: tilts, shifts, ends, reaches."""
    problem = Problem.of(("median", "p90", "p10")[seed], 0.3, 30, (0.0, 1.0))
    generator = torch.Generator().manual_seed(seed)
    for part in (0.05, 0.3, 1.0):
        tilt = (part * torch.randn(PARTS, generator=generator, dtype=torch.float64)).exp()
        shift = 0.1 * part * torch.randn(PARTS, generator=generator, dtype=torch.float64)
        near = [part * torch.rand(PARTS, generator=generator, dtype=torch.float64)]
        mechanism = IntervalMechanism.tilted(
            problem, tilt, shift, ends=(part / 30, part / 40), atoms=part, reaches=(90_000,), near=near
        )
        found = worst_found(mechanism, seed)
        proved = next((ratio for ratio in (1.1, 1.3, 1.6, 2.0, 3.0) if exceeded(copies_of(mechanism), ratio) is None), math.inf)
        assert found <= proved * (1 + 1e-4)
        assert part != 0.05 or proved < math.inf
        assert exceeded(copies_of(mechanism), found * 0.999) is not None


@cache
def learned(query: str, epsilon: float) -> Mechanism:
    return learn(query, epsilon, 50, (0.0, 1.0), settings=Settings(robust=200), seed=3)


@pytest.mark.parametrize(("query", "epsilon"), [("median", 0.3), ("p90", 1.0)])
def test_learned_quantiles_keep_to_the_bound_on_what_a_search_finds(query: str, epsilon: float) -> None:
    """Searches found 1.35 and 1.42 times where 1.25 had been asked for, and held by a search alone."""
    mechanism = learned(query, epsilon)
    assert isinstance(mechanism, IntervalMechanism)
    assert mechanism.report["worst_case"] == "of all datasets"
    assert mechanism.report["worst_ratio"] <= 1.25
    assert worst_found(mechanism, 77) <= 1.25


@hypothesis.settings(max_examples=examples(20), deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-6, 1e-3, 0.02, 0.3, 0.5, 0.7, 0.99, 1.0]), min_size=50, max_size=50), st.floats(0, 1))
def test_learned_quantiles_keep_to_the_bound_on_any_column(values: list[float], scale: float) -> None:
    mechanism = learned("median", 0.3)
    t = (scale * torch.tensor(values, dtype=torch.float64)).sort().values[None]
    plain = IntervalMechanism.plain(mechanism.problem).losses(t).clamp(min=LEAST)
    assert float(mechanism.losses(t) / plain) <= 1.25


def test_where_there_are_too_many_cells_no_proof_is_tried() -> None:
    assert within_reach_of_a_proof(0.3, 25, 50)
    assert not within_reach_of_a_proof(1.0, 2500, 5000)
    for query, loss in (("p10", "squared"), ("median", "quantile")):
        mechanism = learn(query, 1.0, 350, (0.0, 1.0), loss=loss, settings=Settings(robust=100))
        assert mechanism.report["worst_case"] == "of all datasets"
        assert mechanism.report["worst_ratio"] <= 1.25
        assert not mechanism.shift.any()  # type: ignore[attr-defined]
