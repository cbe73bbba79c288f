"""Joint quantiles: weights and draws against all tuples of a small range, neighbours, ties, and questions that use them."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from lipdp import mechanisms
from lipdp.errors import ConfigurationError, DataError
from lipdp.mechanisms.joint import Chain, JointQuantiles, _exactly, _trailing
from lipdp.mechanisms.questions import release_all
from lipdp.mechanisms.unknown_size import OpenPlan, _corners, _Noisy
from lipdp.privacy import Budget
from lipdp.privacy.randomness import Stream, generator

QUARTILES = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))


def all_weights(chain: Chain) -> dict[tuple[int, ...], float]:
    """By the definition: of each rising tuple, counted as often as it can be drawn in any order."""
    weights: dict[tuple[int, ...], float] = {}
    m = len(chain.targets) - 1
    for drawn in itertools.product(range(chain.size), repeat=m):
        rising = tuple(sorted(drawn))
        ranks = [0, *(int((chain.places <= r).sum()) for r in rising), len(chain.places)]
        off = sum(min(abs(b - a - t), chain.limit) for (a, b), t in zip(itertools.pairwise(ranks), chain.targets, strict=True))
        weights[rising] = weights.get(rising, 0.0) + math.exp(-chain.slope * off) / chain.size**m / math.factorial(m)
    return weights


@pytest.mark.parametrize(("length", "slope"), [(3, 0.5), (1, 0.2), (50, 0.1), (7, 0.0), (0, 1.0), (20, 1.9)])
def test_windows_with_geometric_weights(length: int, slope: float) -> None:
    values = np.random.default_rng(length).random(20)
    want = [sum(math.exp(-slope * i) * values[c - i] for i in range(min(length, c + 1))) for c in range(20)]
    assert np.allclose(_trailing(values, length, slope), want, rtol=1e-12, atol=0)


@pytest.mark.parametrize("seed", range(60))
def test_the_weight_of_all_tuples_is_their_sum(seed: int) -> None:
    some = np.random.default_rng(seed)
    m, size, n = int(some.integers(1, 4)), int(some.integers(4, 8)), int(some.integers(0, 8))
    targets = tuple(some.multinomial(max(n + int(some.integers(-2, 3)), 0), [1 / (m + 1)] * (m + 1)).tolist())
    places = np.sort(some.integers(0, size + 1, n))
    chain = Chain(places, size, targets, float(some.uniform(0.1, 1.5)), int(some.integers(1, 6)))
    assert chain.total == pytest.approx(sum(all_weights(chain).values()), rel=1e-12)


def test_draws_follow_the_weights() -> None:
    chain, stream, count = Chain(np.array([1, 1, 2, 4]), 5, (1, 2, 1), 0.6, 3), generator(5, 0, "joint"), 12_000
    drawn: dict[tuple[int, ...], int] = {}
    for _ in range(count):
        one = tuple(chain.draw(stream))
        drawn[one] = drawn.get(one, 0) + 1
    weights = all_weights(chain)
    total = sum(weights.values())
    assert set(drawn) <= set(weights)
    expected = {one: count * weight / total for one, weight in weights.items()}
    distance = sum((drawn.get(one, 0) - want) ** 2 / want for one, want in expected.items())
    assert distance < 38  # of 14 degrees of freedom: one seed in 2,000 is above


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_neighbours_are_told_apart_by_epsilon_at_most(adjacency: str) -> None:
    """All neighbours of some datasets, all tuples: the ratio of chances stays inside e^ε, and comes near on some."""
    joint, size, worst = JointQuantiles(QUARTILES[:2], 1.0, 4, 0.0, 1.0, adjacency), 4, 0.0  # type: ignore[arg-type]

    def chances(places: tuple[int, ...]) -> np.ndarray:
        weights = all_weights(Chain(np.array(sorted(places), dtype=np.int64), size, (2, 1, 1), joint.slope, 50))
        return np.array(list(weights.values())) / sum(weights.values())

    values = range(size + 1)
    for places in itertools.combinations_with_replacement(values, 3):
        others = [(*places[:2], value) for value in values] if adjacency == "replace_one" else [(*places, v) for v in values]
        own = chances(places)
        worst = max(worst, *(float(np.abs(np.log(chances(other) / own)).max()) for other in others))
    assert 0.6 < worst <= 1.0


def test_whole_numbers_are_chosen_in_proportion_however_small_they_are() -> None:
    stream = generator(1, 0, "choice")
    assert _exactly(np.array([0.0, 1e-290, 0.0]), stream) == 1
    drawn = [_exactly(np.array([3e-250, 1e-250, 0.0]), stream) for _ in range(800)]
    assert 140 < sum(drawn) < 260


def test_quantiles_rise_are_near_and_lie_on_atoms() -> None:
    x = torch.arange(2000, dtype=torch.float64) / 200
    for _ in range(20):
        released = JointQuantiles(QUARTILES, 1.0, 2000, 0.0, 10.0).respond(x)
        assert released == sorted(released)
        assert released == pytest.approx([2.5, 5.0, 7.5], abs=0.4)
    ratings = torch.tensor([1.0] * 600 + [3.7] * 900 + [5.0] * 500, dtype=torch.float64)
    assert JointQuantiles(QUARTILES, 1.0, 2000, 0.0, 5.0).respond(ratings) == [1.0, 3.7, pytest.approx(4.3, abs=0.71)]
    assert JointQuantiles(QUARTILES, 1.0, 2000, -1e6, 1e6).respond(torch.full((2000,), 3.0, dtype=torch.float64)) == [3.0] * 3


def test_no_number_is_too_small_for_a_float() -> None:
    """Eleven quantiles of equal records in a wide range, far from the ranks that are aimed at."""
    levels = tuple(Fraction(k, 12) for k in range(1, 12))
    joint = JointQuantiles(levels, 1.0, 3000, 0.0, 1.0)
    for x in (torch.zeros(3000), torch.ones(3000), (torch.arange(3000) % 2).float()):
        chain = joint.chain(x.double(), Stream())
        held = np.stack(chain._messages[1])
        assert float(held[held > 0].min()) > 1e-305
        assert bool((held[:, chain.lengths > 0] > 0).all())
        assert len(joint.respond(x.double())) == 11


def test_bad_levels_are_refused() -> None:
    half = Fraction(1, 2)
    for levels in ((), (half, half), (half, Fraction(1, 4)), (Fraction(3, 2),), tuple(Fraction(k, 40) for k in range(1, 40))):
        with pytest.raises(ConfigurationError):
            JointQuantiles(levels, 1.0, 100, 0.0, 1.0)
    for bad in ({"epsilon": 1e-4}, {"low": 2.0}, {"n": 0}, {"adjacency": "both"}):
        with pytest.raises(ConfigurationError):
            JointQuantiles(**{"levels": (half,), "epsilon": 1.0, "n": 100, "low": 0.0, "high": 1.0, **bad})  # type: ignore[arg-type]


def test_questions_about_ranks_share_one_choice(tmp_path: Path) -> None:
    x = torch.linspace(0, 100, 1001, dtype=torch.float64)
    budget = Budget(tmp_path / "b", epsilon=3.0, delta=0.0, dataset="d", adjacency="replace_one")
    asked = ["p75", "iqr", "p25", "max", "count:20,40"]
    answers = mechanisms.answer(x, asked, (0, 100), 2.5, budget=budget)
    assert budget.spent == pytest.approx(2.5)
    assert [one.question for one in answers] == asked
    values = {one.question: one.value for one in answers}
    assert values["iqr"] == pytest.approx(values["p75"] - values["p25"])
    assert values["iqr"] == pytest.approx(50, abs=10)
    assert 80 < values["max"] <= 100
    assert values["count:20,40"] == pytest.approx(200, abs=40)
    assert all(one.interval[0] <= one.value <= one.interval[1] for one in answers)
    planned = mechanisms.plan(asked, 2.5, 1001, (0, 100))
    assert sum(part.exact_epsilon for part in planned.parts) <= Fraction(5, 2)
    assert planned.describe()["questions"][-1]["levels"] == [0.25, 0.75, pytest.approx(1 - 3 / 1001)]
    for bad in ("count", "count:1,2,3", "count:5,1", "mode", ["mean", "mean"], []):
        with pytest.raises(ConfigurationError):
            mechanisms.plan(bad, 1.0, 10, (0, 10))


def test_a_private_number_of_records(tmp_path: Path) -> None:
    x = np.random.default_rng(0).uniform(0, 10, 4000)
    budget = Budget(tmp_path / "b", epsilon=20.0, delta=0.0, dataset="d")
    asked = ["count", "mean", "sum", "variance", "std", "median", "iqr", "histogram:0,5,10", "count:2,4"]
    answers = mechanisms.answer(x, asked, (0, 10), 10.0, adjacency="add_remove", budget=budget)
    assert budget.spent == pytest.approx(10.0)
    want = [4000, 5, 20_000, 100 / 12, math.sqrt(100 / 12), 5, 5, [2000, 2000], 800]
    for one, near in zip(answers, want, strict=True):
        assert one.value == pytest.approx(near, rel=0.1), one
    exact = {"count": 4000.0, "mean": x.mean(), "sum": x.sum(), "variance": x.var(), "std": x.std()}
    held = 0
    for _ in range(30):
        for one in mechanisms.answer(x, list(exact), (0, 10), 2.0, adjacency="add_remove"):
            held += one.interval[0] <= exact[one.question] <= one.interval[1]
    assert held >= 135  # of 150: at least 95% of them, but for chance
    for few in ([], [3.0]):
        answers = mechanisms.answer(few, ["count", "mean", "median", "std"], (0, 10), 1.0, adjacency="add_remove")
        assert all(0 <= one.value <= 200 for one in answers)


def test_open_plans_refuse_before_they_charge(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "b", epsilon=2.0, delta=0.0, dataset="d")
    for data in ([1.0, math.nan], [11.0], ["1"], [[1.0, 2.0]]):
        with pytest.raises(DataError):
            mechanisms.answer(data, "mean", (0, 10), 1.0, adjacency="add_remove", budget=budget)
    for bad in ("mode", "histogram:0,1", "count:3,1"):
        with pytest.raises(ConfigurationError):
            mechanisms.answer([1.0, 2.0], bad, (0, 10), 1.0, adjacency="add_remove", budget=budget)
    with pytest.raises(ConfigurationError, match="distribution"):
        mechanisms.answer([1.0, 2.0], "mean", (0, 10), 1.0, [1.0, 2.0], adjacency="add_remove", budget=budget)
    with pytest.raises(ConfigurationError, match="adjacency"):
        mechanisms.answer([1.0, 2.0], "mean", (0, 10), 1.0, adjacency="both", budget=budget)  # type: ignore[arg-type]
    mixed = [OpenPlan(1.0, 0.0, 10.0, ("mean",)), mechanisms.plan("histogram:0,10", 1.0, 2, (0, 10))]
    with pytest.raises(ConfigurationError, match="same neighbours"):
        release_all(mixed, [[1.0, 2.0]] * 2, budget=budget)
    assert budget.spent == 0
    shares = OpenPlan(1.1, 0.0, 10.0, ("mean", "std", "median", "p25", "sum")).shares
    assert sum(map(Fraction, shares.values())) <= Fraction("1.1")
    assert set(shares) == {"count", "z", "z2", "quantiles", "sum"}


@pytest.mark.parametrize("target", [0, 1, 2, 17, 60, 300])
@pytest.mark.parametrize("limit", [1, 2, 16, 59, 400])
def test_sums_over_ranks_are_those_of_the_whole_matrix(target: int, limit: int) -> None:
    n, slope = 120, 30 / limit
    chain = Chain(np.arange(n), n, (target, 0), slope, limit)
    weights = np.random.default_rng(target).random(n + 1) * 10.0 ** np.random.default_rng(limit).uniform(-150, 0, n + 1)
    apart = np.arange(n + 1)[:, None] - np.arange(n + 1)[None]
    want = np.where(apart > 0, np.exp(-slope * np.minimum(np.abs(apart - target), limit)), 0.0) @ weights
    assert np.allclose(chain._entered(weights, target), want, rtol=1e-11, atol=0)


def test_a_public_step_leaves_no_place_between(tmp_path: Path) -> None:
    ages = torch.tensor([18, 20, 20, 33, 33, 33, 35, 60] * 10, dtype=torch.float64)
    for adjacency in ("replace_one", "add_remove"):
        (median,) = mechanisms.answer(ages, "median", (0, 120), 3.0, step=1, adjacency=adjacency)  # type: ignore[arg-type]
        assert float(median.value).is_integer()
        answers = mechanisms.answer(ages, ["p10", "median", "p90"], (0, 120), 6.0, step=1, adjacency=adjacency)  # type: ignore[arg-type]
        assert all(float(one.value).is_integer() for one in answers)
    planned = mechanisms.plan("median", 3.0, 80, (0, 120), step=1)
    released = [planned.release(ages)[0].value for _ in range(40)]
    assert released.count(33.0) > 30
    tenths = mechanisms.answer(ages / 100, "median", (0, 1.2), 30.0, step=0.01)[0].value
    assert tenths == 0.33
    many = mechanisms.plan("median", 8.0, 800, (0, 120), step=1).release(ages.repeat(10))[0]
    assert many.value == 33.0
    assert many.interval is not None
    assert many.interval[1] - many.interval[0] <= 4  # what is believed in has steps, too
    planned = mechanisms.plan("median", 1.0, 80, (0, 120), step=1)
    assert planned.describe()["questions"][0]["mechanism"]["mechanism"] == "permute-and-flip by rank among the 121 multiples of 1"
    for bad in (0, -1.0, 121, 1e-9, math.nan, "1"):
        with pytest.raises(ConfigurationError, match="step"):
            mechanisms.plan("median", 1.0, 80, (0, 120), step=bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigurationError, match="step"):
            mechanisms.answer(ages, "median", (0, 120), 1.0, step=bad, adjacency="add_remove")  # type: ignore[arg-type]


def test_what_can_not_be_chosen_is_refused_before_it_is_paid_for(tmp_path):
    budget = Budget(tmp_path / "budget.json", epsilon=10, delta=1e-9, dataset="some", adjacency="add_remove")
    many = [f"p{level}" for level in range(1, 60, 2)]
    for questions, epsilon in ((["median"], 1e-3), (many, 1.0)):
        with pytest.raises(ConfigurationError):
            mechanisms.answer([0.2, 0.4], questions, (0, 1), epsilon, adjacency="add_remove", budget=budget)
    assert budget.spent == 0.0
    with pytest.raises(DataError, match="outside of the bounds"):
        mechanisms.answer([3.0, 4.0], "mean", (0, 1), 1.0, adjacency="add_remove", budget=budget)
    assert budget.spent == 0.0


def test_an_interval_of_a_variance_holds_all_that_the_noise_allows():
    """Of counts, sums and squares inside of their ends, none has a larger variance, or a smaller one."""
    some = np.random.default_rng(4)
    opened = OpenPlan(1.0, -1.0, 1.0, ("variance",))
    gained = 0
    for _ in range(60):
        middles, sizes = some.uniform((5, -8, 0), (12, 8, 10)), some.uniform(0.2, 4, 3)
        scale = math.log(3 / 0.05)
        numbers = [_Noisy(value, size / scale, 2.0**-40) for value, size in zip(middles.tolist(), sizes.tolist(), strict=True)]
        low, high = opened._by_sums("variance", dict(zip(("count", "z", "z2"), numbers, strict=True))).interval
        n, first, second = (middles[:, None] + sizes[:, None] * some.uniform(-1, 1, (3, 2000))).tolist()
        values = [opened._moment("variance", *each) for each in zip(n, first, second, strict=True)]
        assert low <= min(values)
        assert max(values) <= high * (1 + 1e-12)
        corners = [opened._moment("variance", *c) for c in _corners([own.ends(1 - 0.05 / 3) for own in numbers])]
        gained += high > max(corners)
    assert gained > 3  # a corner is not enough
