"""Answers for (ε, δ) and for ρ: sensitivities attacked, noise and intervals simulated, parts and charges added up exactly."""

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch
from scipy.stats import norm

import lipdp
from lipdp.errors import BudgetError, ConfigurationError
from lipdp.mechanisms import GaussianPlan, JointQuantiles, OpenPlan, Plan, Spending, answer, plan
from lipdp.mechanisms.gaussian import SQUARES, split
from tests.many import examples

MANY = ["mean", "sum", "std", "variance", "histogram:0,2,5,10", "count:1,4", "count:3,9", "count:0,5"]


def planned(questions, n=50, rho=0.5, **kept):
    return plan(questions, None, n, (0, 10), rho=rho, **kept)


def test_squares_beside_a_number_cost_nothing():
    z = np.linspace(-1, 1, 801)
    one, other = np.meshgrid(z, z)
    moved = (one - other) ** 2 + SQUARES**2 * (one**2 - other**2) ** 2
    assert moved.max() <= 4 + 1e-12
    assert ((one - other) ** 2 + 1.02 * 2.7725 * (one**2 - other**2) ** 2).max() > 4


@pytest.mark.parametrize("questions", [["mean"], ["variance"], ["histogram:0,2,5,10"], ["count:1,4"], MANY])
def test_no_record_moves_the_sums_further_than_the_noise_is_for(questions):
    own = planned(questions, n=8)
    generator, furthest = torch.Generator().manual_seed(1), 0.0
    spots = [0.0, 1.0, 0.5, 0.4, 0.4 - 1e-9, 0.1, 0.9, 0.2, float(torch.rand(1, generator=generator))]
    for old, new in product(spots, spots):
        base = torch.rand(7, dtype=torch.float64, generator=generator)
        pair = [own.totals(torch.cat([base, base.new_tensor([value])])[None]) for value in (old, new)]
        furthest = max(furthest, float(np.linalg.norm(pair[0] - pair[1])))
    groups = len(own.groups)
    assert furthest <= math.sqrt(groups) * (1 + 1e-12)
    assert furthest >= 0.9 * math.sqrt(groups) or groups > 1


def test_the_noise_is_that_of_the_whole_spending():
    for epsilon, delta in [(1.0, 1e-6), (0.2, 1e-3), (5.0, 1e-9)]:
        own = GaussianPlan(Spending(epsilon, delta), planned("mean").problem, ("mean", "count:0,5"), None)
        mu = math.sqrt(2) / own.std  # two groups, each of sensitivity 1
        reached = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
        assert 0.99 * delta < reached <= delta
    own = planned(["mean", "count:0,5", "median"], rho=0.3)
    left = Fraction(repr(0.3)) - Fraction(own.joint.exact_epsilon) ** 2 / 8
    assert 2 / (2 * own.std**2) <= left
    assert 2 / (2 * own.std**2) == pytest.approx(0.2, rel=1e-6)


@pytest.mark.parametrize(("sums", "quantiles"), [(1, 1), (3, 2), (0, 4), (7, 1)])
def test_parts_are_never_more_than_the_whole(sums, quantiles):
    for whole in (0.1, 0.3, 1.0, 1e-4, 7.77):
        own, epsilon = split(Spending(whole, 1e-6), sums, quantiles)
        assert Fraction(epsilon) + (Fraction(own.epsilon) if sums else 0) <= min(Fraction(whole), Fraction(repr(whole)))
        own, epsilon = split(Spending(None, rho=whole), sums, quantiles)
        assert Fraction(epsilon) ** 2 / 8 + (Fraction(own.rho) if sums else 0) <= min(Fraction(whole), Fraction(repr(whole)))


def test_the_joint_choice_has_a_bounded_range():
    """What ρ pays for it rests on: log ratios of neighbours lie in an interval of length ε, not only in [−ε, ε]."""
    made = JointQuantiles((Fraction(1, 4), Fraction(1, 2)), 1.3, 6, 0.0, 1.0, step=0.25)
    generator = np.random.default_rng(2)

    def logs(x):
        counts = [sum(v <= c for v in x) for c in np.arange(5) / 4]
        chosen = [(a, b) for a in range(5) for b in range(a, 5)]
        gaps = [(counts[a], counts[b] - counts[a], len(x) - counts[b]) for a, b in chosen]
        weights = np.array([-made.slope * sum(abs(g - t) for g, t in zip(gap, made.targets, strict=True)) for gap in gaps])
        return weights - np.log(np.exp(weights).sum())

    widest = 0.0
    for _ in range(examples(200)):
        x = generator.integers(0, 5, 6) / 4
        other = x.copy()
        other[0] = generator.integers(0, 5) / 4
        away = logs(x) - logs(other)
        widest = max(widest, away.max() - away.min())
    assert 0.9 < widest <= 1.3


@pytest.mark.parametrize("x", [torch.zeros(50), torch.full((50,), 10.0), torch.linspace(0, 10, 50), torch.tensor([0.0, 10.0] * 25)])
def test_intervals_hold_whatever_the_data_are(x):
    own, inside, releases = planned(MANY), dict.fromkeys(MANY, 0), 150
    truth = {"mean": x.mean(), "sum": x.sum(), "std": x.std(correction=0), "variance": x.var(correction=0)}
    truth |= {"count:1,4": ((x >= 1) & (x < 4)).sum(), "count:3,9": ((x >= 3) & (x < 9)).sum(), "count:0,5": (x < 5).sum()}
    for _ in range(releases):
        for one in own.release(x):
            if one.question in truth:
                low, high = one.interval
                inside[one.question] += low - 1e-4 <= float(truth[one.question]) <= high + 1e-4
                assert low <= one.value <= high or one.question.startswith("count")
    assert all(inside[question] >= 0.86 * releases for question in truth)  # 95% of 150 are fewer in 6e-6 of all tries


def test_a_delta_is_used_where_it_pays():
    assert isinstance(plan("count:0,5", 1.0, 100, (0, 10), delta=1e-6), Plan)
    own = plan([*MANY, "count:2,8", "count:0,1", "count:4,6"], 1.0, 100, (0, 10), delta=1e-6)
    assert isinstance(own, GaussianPlan)
    laplace = 9 * math.sqrt(2) * 2  # nine releases, replacing a record moves two cells
    assert own.describe()["gaussian_noise_on_sums"]["histogram:0,2,5,10"] < laplace
    assert isinstance(plan(MANY[4:], 1.0, 100, (0, 10), delta=1e-60), Plan)  # no Gaussian noise is as good as that


def test_charges_are_those_of_the_noise(tmp_path):
    x = torch.linspace(0, 10, 100)
    budget = lipdp.privacy.Budget(tmp_path / "b", epsilon=1.01, delta=1e-6, dataset="x", adjacency="replace_one")
    asked = [*MANY, "count:2,8", "count:0,1", "median"]
    answers = answer(x, asked, (0, 10), 1.0, delta=1e-6, budget=budget)
    assert [one.question for one in answers] == asked
    assert 0.9 < budget.spent <= 1.01
    with pytest.raises(BudgetError):
        answer(x, MANY, (0, 10), 1.0, delta=1e-6, budget=budget)
    pure = lipdp.privacy.Budget(tmp_path / "p", epsilon=9.0, delta=0.0, dataset="x", adjacency="replace_one")
    with pytest.raises(BudgetError, match="delta"):
        answer(x, MANY, (0, 10), rho=0.1, budget=pure)
    assert pure.spent == 0


def test_quantiles_alone_and_what_makes_no_sense():
    x = torch.linspace(0, 10, 200)
    (median,) = answer(x, "median", (0, 10), rho=2.0)
    assert abs(median.value - 5) < 1.5
    (weak,) = answer(x, "median", (0, 10), 1e-4, delta=1e-3, settings=lipdp.mechanisms.Settings(robust=100))
    assert 0 <= weak.value <= 10
    for wrong in ({}, {"epsilon": 1.0, "rho": 1.0}, {"rho": 1.0, "delta": 1e-6}, {"epsilon": 1.0, "delta": 1.0}, {"rho": -1.0}):
        with pytest.raises(ConfigurationError):
            answer(x, "mean", (0, 10), **wrong)
    own = planned(["median", "count:0,5"])
    with pytest.raises(ConfigurationError, match="cost more"):
        GaussianPlan(Spending(None, rho=0.1), own.problem, own.questions, own.joint)
    with pytest.raises(ConfigurationError, match="other data"):
        GaussianPlan(own.spending, own.problem.resized(49), own.questions, own.joint)
    with pytest.raises(ConfigurationError, match="other questions"):
        GaussianPlan(own.spending, own.problem, ("count:0,5",), own.joint)


def test_mean_and_sum_variance_and_std_have_one_release_in_common():
    own = plan(["sum", "count:0,5", "mean", "std", "variance"], 0.6, 40, (0, 10), settings=lipdp.mechanisms.Settings(robust=150))
    assert isinstance(own, Plan)
    assert [part.questions for part in own.parts] == [("sum", "mean"), ("count:0,5",), ("std", "variance")]
    assert sum(part.exact_epsilon for part in own.parts) <= Fraction("0.6")
    total, count, mean, std, variance = own.release(torch.linspace(0, 10, 40))
    assert total.value == pytest.approx(40 * mean.value)
    assert std.value**2 == pytest.approx(variance.value)
    assert total.interval[1] == pytest.approx(40 * mean.interval[1])
    assert sum(one.epsilon for one in (total, count, mean, std, variance)) == pytest.approx(0.6)


# --- a private number of records -----------------------------------------------------------------------------------------------

OPEN = ("count", "mean", "sum", "std", "histogram:0,2,5,10", "count:1,4")


def test_no_record_more_moves_the_sums_further_than_the_noise_is_for():
    own = OpenPlan(None, 0.0, 10.0, OPEN, rho=0.5)
    generator, furthest = torch.Generator().manual_seed(2), 0.0
    for value in [0.0, 10.0, 4.0, 5.0, 2.0, 2.0 - 1e-9, 7.3, float(10 * torch.rand(1, generator=generator))]:
        base = 10 * torch.rand(6, dtype=torch.float64, generator=generator)
        pair = []
        for data in (base, torch.cat([base, base.new_tensor([value])])):
            totals = [own._total(own.checked(data, False), what) for what in own._by_noise.sizes]
            pair.append(np.array([step / total.most for total in totals for step in total.steps]))
        furthest = max(furthest, float(np.linalg.norm(pair[0] - pair[1])))
    groups = len(own._by_noise.sizes)
    assert groups == 6
    assert furthest <= math.sqrt(groups) * (1 + 2.0**-20)
    assert furthest > 0.9 * math.sqrt(groups)  # no record is in all cells
    assert groups / (2 * own._by_noise.std**2) <= 0.5  # ρ of a move by √G


@pytest.mark.parametrize(("epsilon", "delta"), [(1.0, 1e-6), (0.2, 1e-3)])
def test_an_open_plan_spends_delta_where_gaussian_noise_is_less(epsilon, delta):
    questions = (*OPEN, "count:0,5", "count:5,8", "histogram:0,1,10")
    own = OpenPlan(epsilon, 0.0, 10.0, questions, delta=delta)
    mu = math.sqrt(len(own._by_noise.sizes)) / own._by_noise.std
    reached = norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu)
    assert 0.99 * delta < reached <= delta
    assert own.describe()["delta"] == delta
    answers = answer([1.0, 7.0, 2.0], list(questions), (0, 10), epsilon, delta=delta, adjacency="add_remove")
    assert all(0 < one.epsilon < epsilon for one in answers)
    assert OpenPlan(epsilon, 0.0, 10.0, ("count",), delta=1e-12).describe()["delta"] == 0.0


def test_open_answers_for_rho_hold_and_are_paid_for(tmp_path):
    x = np.random.default_rng(0).uniform(0, 10, 4000)
    exact = {
        "count": 4000.0,
        "mean": x.mean(),
        "sum": x.sum(),
        "variance": x.var(),
        "std": x.std(),
        "count:2,4": ((x >= 2) & (x < 4)).sum(),
    }
    held = 0
    for _ in range(30):
        for one in answer(x, list(exact), (0, 10), rho=0.05, adjacency="add_remove"):
            held += one.interval[0] <= exact[one.question] <= one.interval[1]
            assert one.epsilon is None
    assert held >= 160  # of 180
    budget = lipdp.privacy.Budget(tmp_path / "b", epsilon=5.0, delta=1e-5, dataset="d", adjacency="add_remove")
    asked = ["count", "mean", "median", "p90", "histogram:0,5,10"]
    count, mean, median, p90, histogram = answer(x, asked, (0, 10), rho=0.2, adjacency="add_remove", budget=budget)
    assert (count.value, mean.value, median.value, p90.value) == pytest.approx((4000, 5, 5, 9), rel=0.1)
    assert histogram.value == pytest.approx([2000, 2000], rel=0.1)
    own = OpenPlan(None, 0.0, 10.0, tuple(asked), rho=0.2)
    gaussian = len(own._by_noise.sizes) / (2 * own._by_noise.std**2)
    assert gaussian + own.shares["quantiles"] ** 2 / 8 <= 0.2
    assert gaussian + own.shares["quantiles"] ** 2 / 8 > 0.1999
    assert 0 < budget.spent < 5
    for few in ([], [3.0]):
        assert all(
            0 <= one.value <= 500 for one in answer(few, ["count", "mean", "median"], (0, 10), rho=0.5, adjacency="add_remove")
        )
    for wrong in ({}, {"epsilon": 1.0, "rho": 1.0}, {"rho": 1.0, "delta": 1e-6}, {"epsilon": 1.0, "delta": 1.0}, {"rho": -1.0}):
        with pytest.raises(ConfigurationError):
            answer(x, "mean", (0, 10), adjacency="add_remove", **wrong)
