from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy import Stream, generator
from lipdp.privacy import quantile as quantiles
from lipdp.privacy.quantile import (
    above_threshold,
    clip_search,
    crossing_scales,
    private_quantile,
    quantile_probabilities,
    rank_sensitivity,
)
from lipdp.privacy.randomness import exp_of_minus

SLACK = 1e-9


def _generator(seed: int = 0) -> Stream:
    return generator(seed, 0, "test")


def _density(values: list[float], quantile: float, epsilon: float, adjacency: str, at: np.ndarray) -> np.ndarray:
    """The mechanism's density at some places, from its interval probabilities."""
    edges, probabilities = quantile_probabilities(values, quantile, (0.0, 1.0), epsilon=epsilon, adjacency=adjacency)  # type: ignore[arg-type]
    interval = np.clip(np.searchsorted(edges, at, side="right") - 1, 0, len(probabilities) - 1)
    return probabilities[interval] / np.diff(edges)[interval]


def crossing_probabilities(
    queries: Sequence[float],
    threshold: float,
    *,
    epsilon: float,
    sensitivity: float = 1.0,
    monotone: bool = False,
) -> Any:
    """P(index = 0), …, P(index = last), P(None) of :func:`above_threshold`, by numerical integration over the threshold's noise.

    P(k) = ∫ p(ρ)·Π_{i<k} P(q_i + ν < T + ρ)·P(q_k + ν ≥ T + ρ) dρ, summed over an even grid of ρ that leaves out e⁻⁴⁰.
    """
    threshold_scale, query_scale = crossing_scales(epsilon, sensitivity, monotone=monotone)
    reach = 40 * threshold_scale
    rho = np.linspace(-reach, reach, 20_001)
    mass = np.exp(-np.abs(rho) / threshold_scale)
    mass /= mass.sum()
    asked = np.asarray(queries, dtype=np.float64)
    gap = (threshold + rho[:, None] - asked[None, :]) / query_scale
    half = np.exp(-np.abs(gap)) / 2
    below, above = np.where(gap < 0, half, 1 - half), np.where(gap < 0, 1 - half, half)
    before = np.cumprod(np.concatenate([np.ones((len(rho), 1)), below], axis=1), axis=1)
    each = before * np.concatenate([above, np.ones((len(rho), 1))], axis=1)
    return mass @ each


def _between(*datasets: list[float]) -> np.ndarray:
    """One place inside every interval of all datasets together."""
    edges = np.unique(np.clip(np.concatenate([[0.0, 1.0], *datasets]), 0, 1))
    return (edges[1:] + edges[:-1]) / 2


numbers = st.lists(st.floats(-0.5, 1.5).map(lambda v: round(v, 3)), max_size=12)


@given(values=numbers, other=st.floats(0, 1).map(lambda v: round(v, 3)), quantile=st.floats(0, 1), epsilon=st.floats(0.05, 4))
@settings(max_examples=150, deadline=None)
def test_density_ratio_of_neighbours_stays_below_epsilon(
    values: list[float], other: float, quantile: float, epsilon: float
) -> None:
    """Exact densities of both neighbours at every interval: |log ratio| ≤ ε, for both adjacencies."""
    pairs = [("add_remove", values, [*values, other])]
    if values:
        pairs.append(("replace_one", values, [other, *values[1:]]))
    for adjacency, left, right in pairs:
        at = _between(left, right)
        ratio = np.log(_density(left, quantile, epsilon, adjacency, at) / _density(right, quantile, epsilon, adjacency, at))
        assert np.abs(ratio).max() <= epsilon + SLACK


@pytest.mark.parametrize("quantile", [0.5, 0.9, 0.2])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_rank_sensitivity_is_reached_and_never_passed(quantile: float, adjacency: str) -> None:
    rng = np.random.default_rng(0)
    most = 0.0
    for _ in range(300):
        values = rng.random(rng.integers(1, 8))
        other = np.append(values, rng.random()) if adjacency == "add_remove" else np.append(values[1:], rng.random())
        for r in _between(values.tolist(), other.tolist()):
            before, after = (-abs((v < r).sum() - quantile * len(v)) for v in (values, other))
            most = max(most, abs(before - after))
    claimed = rank_sensitivity(quantile, adjacency)  # type: ignore[arg-type]
    assert most <= claimed + SLACK
    assert most == pytest.approx(claimed)


@pytest.mark.parametrize(
    ("adjacency", "left", "right"),
    [("add_remove", [0.9999], [0.0, 0.9999]), ("replace_one", [0.9999, 1.0], [0.0, 0.9999])],
)
@pytest.mark.parametrize("epsilon", [0.2, 1.0])
def test_privacy_of_the_quantile_is_tight(adjacency: str, left: list[float], right: list[float], epsilon: float) -> None:
    """Nearly all of ε is used by the worst neighbours: with any less noise than there is, the guarantee would not hold.

    The new record lowers the utility above 0.9999, and raises it by as much below, where nearly all of the mass is.
    """
    at = _between(left, right)
    ratio = np.log(_density(left, 0.5, epsilon, adjacency, at) / _density(right, 0.5, epsilon, adjacency, at))
    assert 0.999 * epsilon < np.abs(ratio).max() <= epsilon + SLACK


def test_releases_follow_the_exact_distribution() -> None:
    """5,000 releases against the interval probabilities: without noise, or with another ε, they would differ at once."""
    values, draw = [0.1, 0.4, 0.45, 0.8], _generator()
    edges, probabilities = quantile_probabilities(values, 0.5, (0.0, 1.0), epsilon=2.0)
    released = np.array([private_quantile(values, 0.5, (0.0, 1.0), epsilon=2.0, generator=draw).value for _ in range(5_000)])
    counts = np.histogram(released, edges)[0]
    expected = 5_000 * probabilities
    assert ((counts - expected) ** 2 / expected).sum() < 25  # χ² of 4 degrees of freedom: 1e-4
    inside = released[(released > 0.45) & (released < 0.8)]
    assert abs(inside.mean() - 0.625) < 0.02  # uniform within an interval


def test_quantile_is_accurate_and_costs_what_it_says() -> None:
    values = torch.rand(5_000, generator=torch.Generator().manual_seed(3)) * 3
    release = private_quantile(values, 0.9, (0.0, 10.0), epsilon=1.0, generator=_generator(4))
    assert release.epsilon == 1.0
    assert release.value == pytest.approx(2.7, rel=0.05)
    assert release == private_quantile(values, 0.9, (0.0, 10.0), epsilon=1.0, generator=_generator(4))
    assert private_quantile(values, 0.9, (0.0, 10.0), epsilon=1.0).value != release.value  # from fresh randomness


def test_awkward_values() -> None:
    edges, probabilities = quantile_probabilities([], 0.5, (2.0, 3.0), epsilon=1.0)
    assert edges.tolist() == [2.0, 3.0]
    assert probabilities.tolist() == [1.0]
    for values in ([math.nan, math.inf, -math.inf], [0.5] * 5, [0.0, 1.0]):
        edges, probabilities = quantile_probabilities(values, 0.5, (0.0, 1.0), epsilon=1.0)
        assert np.isfinite(probabilities).all()
        assert probabilities.sum() == pytest.approx(1)
        assert 0 <= private_quantile(values, 0.5, (0.0, 1.0), epsilon=1.0, generator=_generator()).value <= 1
    with pytest.raises(DataError, match="one number per record"):
        private_quantile(torch.zeros(3, 2), 0.5, (0.0, 1.0), epsilon=1.0)
    for arguments in ({"quantile": 1.5}, {"bounds": (1.0, 1.0)}, {"epsilon": 0.0}, {"adjacency": "zero_out"}):
        with pytest.raises(ConfigurationError):
            private_quantile([0.5], **{"quantile": 0.5, "bounds": (0.0, 1.0), "epsilon": 1.0, **arguments})  # type: ignore[arg-type]


@given(
    values=st.lists(st.floats(0, 1), max_size=30),
    other=st.floats(0, 1),
    quantile=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    epsilon=st.sampled_from([0.01, 1.0, 40.0, 3000.0]),
)
@settings(max_examples=60, deadline=None)
def test_whole_weights_of_neighbours_stay_below_epsilon_exactly(
    values: list[float], other: float, quantile: float, epsilon: float
) -> None:
    """The whole numbers that a place is drawn from, of both neighbours, at every place where they change: |log ratio| ≤ ε, no
    slack.
    """

    def probabilities(data: list[float], at: list[int]) -> list[tuple[int, int]]:
        places = np.sort(np.floor(np.array(data) * 2**30).astype(np.int64) + 1) if data else np.empty(0, dtype=np.int64)
        blocks: list[tuple[int, int, int]] = []

        class Spy:
            def below(self, limit: int) -> int:
                self.limit = limit
                return 0

        spy = Spy()
        slope = Fraction(epsilon) * quantiles._LESS / (2 * max(Fraction(quantile), 1 - Fraction(quantile)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(quantiles, "_pick", lambda given, stream: blocks.extend(given) or 0)
            quantiles._choose_place(places, Fraction(quantile), slope, spy)  # type: ignore[arg-type]
        total = sum((stop - start) * weight for start, stop, weight in blocks)
        return [(next(weight for start, stop, weight in blocks if start <= place < stop), total) for place in at]

    more = [*values, other]
    at = sorted({0, 2**30, *(min(math.floor(v * 2**30) + d, 2**30) for v in more for d in (0, 1))})
    bound = exp_of_minus(Fraction(epsilon), 6000)  # in units of 2^-6000
    for (a, total_a), (b, total_b) in zip(probabilities(values, at), probabilities(more, at), strict=True):
        assert a * total_b * bound <= b * total_a << 6000
        assert b * total_a * bound <= a * total_b << 6000


# ---------------------------------------------------------------- sparse vector


@given(
    queries=st.lists(st.integers(-3, 3), min_size=1, max_size=4),
    moves=st.lists(st.sampled_from([-1, 0, 1]), min_size=4, max_size=4),
    epsilon=st.floats(0.2, 3),
    monotone=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_crossing_ratio_of_neighbours_stays_below_epsilon(
    queries: list[int], moves: list[int], epsilon: float, monotone: bool
) -> None:
    if monotone:
        moves = [abs(move) for move in moves]
    moved = [q + move for q, move in zip(queries, moves, strict=False)]
    left, right = (crossing_probabilities(q, 0.0, epsilon=epsilon, monotone=monotone) for q in (queries, moved))
    assert left.sum() == pytest.approx(1)
    assert np.abs(np.log(left / right)).max() <= epsilon * (1 + 1e-3) + 1e-4


@pytest.mark.parametrize("monotone", [False, True])
def test_privacy_of_the_crossing_is_tight(monotone: bool) -> None:
    """Many queries far below that move up, one far below that moves down (or stays): nearly all of ε is used."""
    epsilon = 1.0
    queries = [-2.0] * 200 + [-12.0]
    moved = [-1.0] * 200 + [-12.0 if monotone else -13.0]
    left, right = (crossing_probabilities(q, 0.0, epsilon=epsilon, monotone=monotone)[200] for q in (queries, moved))
    assert 0.8 * epsilon < math.log(left / right) <= epsilon * (1 + 1e-3)


def test_monotone_noise_is_too_little_for_other_queries() -> None:
    """What the flag stands for: with it, queries that move both ways leak more than ε."""
    queries, moved = [-2.0] * 200 + [-12.0], [-1.0] * 200 + [-13.0]
    left, right = (crossing_probabilities(q, 0.0, epsilon=1.0, monotone=True)[200] for q in (queries, moved))
    assert math.log(left / right) > 1.2


@pytest.mark.parametrize("monotone", [False, True])
def test_crossings_follow_the_distribution(monotone: bool) -> None:
    queries, draw = [-1.0, 0.5, -0.5, 1.0], _generator()
    expected = 4_000 * crossing_probabilities(queries, 0.25, epsilon=2.0, sensitivity=0.5, monotone=monotone)
    counts = np.zeros(5)
    for _ in range(4_000):
        found = above_threshold(queries, 0.25, epsilon=2.0, sensitivity=0.5, monotone=monotone, generator=draw)
        assert found.epsilon == 2.0
        counts[4 if found.index is None else found.index] += 1
    assert ((counts - expected) ** 2 / expected).sum() < 25


def test_scales_spend_exactly_epsilon() -> None:
    for monotone, moves in ((False, 2), (True, 1)):
        threshold, query = crossing_scales(0.7, 3.0, monotone=monotone)
        assert 3.0 / threshold + moves * 3.0 / query == pytest.approx(0.7)


def test_search_stops_at_the_first_crossing() -> None:
    seen = []

    def queries() -> object:
        for value in (-1000.0, 1000.0, 0.0):
            seen.append(value)
            yield value

    assert above_threshold(queries(), 0.0, epsilon=1.0, generator=_generator()).index == 1  # type: ignore[arg-type]
    assert seen == [-1000.0, 1000.0]
    with pytest.raises(DataError, match="a query is no finite number"):
        above_threshold([math.inf], 0.0, epsilon=1.0)


@given(norms=st.lists(st.floats(0, 2), min_size=1, max_size=10), other=st.floats(0, 2), add=st.booleans())
@settings(max_examples=60, deadline=None)
def test_counts_of_clip_search_are_monotone_of_sensitivity_one(norms: list[float], other: float, add: bool) -> None:
    grid = np.linspace(0.1, 1.9, 10)
    moved = [*norms, other] if add else [other, *norms[1:]]
    difference = np.array([sum(v > c for v in norms) - sum(v > c for v in moved) for c in grid])
    assert np.abs(difference).max() <= 1
    assert (difference >= 0).all() or (difference <= 0).all()


def test_clip_search_finds_the_quantile() -> None:
    norms = torch.rand(10_000, generator=torch.Generator().manual_seed(1)) * 2
    candidates = np.arange(0.1, 2.05, 0.1).tolist()
    found = clip_search(norms, candidates, quantile=0.9, dataset_size=10_000, epsilon=0.5, generator=_generator(2))
    assert found.epsilon == 0.5
    assert found.value is not None
    assert 1.6 <= found.value <= 1.9
    assert found.value == candidates[found.index]  # type: ignore[index]
    none = clip_search(torch.full((1000,), math.nan), [0.5, 1.0], dataset_size=1000, epsilon=1.0, generator=_generator())
    assert none.index is None
    assert none.value is None
    noisy = {clip_search(norms[:20], candidates, dataset_size=20, epsilon=0.1, generator=_generator(s)).index for s in range(20)}
    assert len(noisy) > 3  # it is not the deterministic answer
    for wrong in ([], [1.0, 1.0], [2.0, 1.0], [-1.0]):
        with pytest.raises(ConfigurationError):
            clip_search(norms, wrong, dataset_size=10, epsilon=1.0)
