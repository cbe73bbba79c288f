"""The variance from two noisy sums: sensitivity attacked, losses simulated, the worst ratio searched on other datasets."""

import math
from itertools import product

import numpy as np
import pytest
import torch

from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.mechanisms import Problem, Settings, answer, learn, load
from lipdp.mechanisms.centred import CentredMechanism
from lipdp.mechanisms.truths import SquaresMechanism
from lipdp.mechanisms.worst import KINDS, noisy_query, truth_losses
from tests.mechanisms.common import plain_mechanisms


def made(weight=8, less=0.25, epsilon=1.0, n=50, bounds=(0.0, 1.0)):
    return SquaresMechanism.of(Problem.of("variance", epsilon, n, bounds), weight, less)


@pytest.mark.parametrize("weight", [1, 4, 7, 8, 10, 16])
def test_no_record_moves_the_sums_further_than_their_noise_is_for_and_some_do_as_far(weight):
    """All pairs of a fine grid, and of odd places, where squares round."""
    places = torch.cat(
        [torch.linspace(0, 1, 129, dtype=torch.float64), torch.rand(300, dtype=torch.float64), torch.tensor([1e-9, 1 - 1e-9])]
    )
    mechanism = made(weight, n=2)
    sums = np.array(mechanism.statistic(torch.stack([places, torch.full_like(places, 0.3)], 1)), dtype=object)
    moved = np.abs(sums[:, None] - sums[None]).sum(2).max()
    assert moved <= mechanism.moves
    assert moved > 0.999 * mechanism.moves
    assert mechanism.sensitivity == pytest.approx((1 + weight / 16) ** 2, rel=1e-8)


def test_the_sums_are_those_of_the_records():
    t = torch.rand(2, 77, dtype=torch.float64)
    z = 2 * t - 1
    for row, (total, squares) in zip(z, made(5, n=77).statistic(t), strict=True):
        assert total / (5 * 2**30) == pytest.approx(float(row.sum()), abs=1e-6)
        assert squares / (8 * 2**30) == pytest.approx(float((row**2).sum()), abs=1e-6)


@pytest.mark.parametrize(("wide", "middle", "less"), [(0.0, 0.02, 0.0), (0.4, 0.1, 0.5), (1.0, 0.5, 0.25)])
def test_its_losses_are_those_of_its_releases(wide, middle, less):
    mechanism = made(epsilon=1.0, n=40, less=less)
    t = (middle + wide * (torch.linspace(0, 1, 40, dtype=torch.float64) - 0.5)).clamp(0, 1)[None]
    answers = torch.tensor([float(mechanism._respond(t, "auto")) for _ in range(3000)], dtype=torch.float64)
    costs = (answers - t.var(1, correction=0)) ** 2
    assert float(costs.mean()) == pytest.approx(float(mechanism.losses(t)), abs=5 * float(costs.std()) / math.sqrt(3000))


@pytest.mark.parametrize(("epsilon", "n"), [(0.3, 50), (1.0, 50)])
def test_few_records_take_it_and_no_mean_and_variance_lose(epsilon, n):
    mechanism = learn("variance", epsilon, n, (0, 1), settings=Settings(robust=200))
    assert isinstance(mechanism, SquaresMechanism)
    assert mechanism.report["worst_ratio"] <= 1.25
    assert mechanism.report["worst_case"] == "of all datasets"
    generator = torch.Generator().manual_seed(n)
    means = torch.rand(600, dtype=torch.float64, generator=generator) ** 2
    means = torch.cat([means, 1 - means, torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)])
    shares = torch.rand(len(means), dtype=torch.float64, generator=generator) ** 2
    variances = shares * means * (1 - means)
    plain = torch.stack([truth_losses(one, variances) for one in plain_mechanisms(mechanism.problem)]).amin(0)
    ratios = mechanism.losses_of(means, variances) / plain
    assert float(ratios.max()) <= 1.25
    assert float(ratios.max()) <= mechanism.report["worst_ratio"] + 0.01
    assert float(ratios.min()) < 0.5


def test_many_records_take_a_centre():
    assert isinstance(learn("variance", 1.0, 5000, (0, 1), settings=Settings(robust=200)), CentredMechanism)


@pytest.mark.parametrize("spread", [0.05, 1.0])
def test_its_intervals_hold_the_truth(spread):
    mechanism = made(epsilon=0.5, n=60)
    t = (0.5 + spread * (torch.linspace(0, 1, 60, dtype=torch.float64) - 0.5))[None]
    truth = float(t.var(1, correction=0))
    inside = 0
    for _ in range(300):
        value, off = mechanism.respond_within(t, 0.9)
        inside += abs(float(value) - truth) <= off
    assert inside >= 255  # 270 would be 90%


def test_likelihood_ratios_of_what_is_released_stay_below_e_to_the_epsilon():
    """Exact: the noise is discrete Laplace on two sums, so the worst answer's ratio is e^(ε·|move|/moves)."""
    mechanism = made(6, epsilon=0.7, n=3)
    ends = torch.tensor([0.0, 0.3125, 0.5, 0.6875, 1.0], dtype=torch.float64)
    worst = 0.0
    for a, b, c in product(ends, ends, ends):
        one, other = (mechanism.statistic(torch.stack([a, b, last])[None])[0] for last in (c, torch.tensor(1.0).double()))
        worst = max(worst, 0.7 * (abs(one[0] - other[0]) + abs(one[1] - other[1])) / mechanism.moves)
    assert 0.69 < worst <= 0.7


def test_files_and_refusals(tmp_path):
    mechanism = made(n=30, bounds=(0.0, 10.0))
    mechanism.save(tmp_path / "m")
    again = load(tmp_path / "m")
    t = torch.rand(4, 30, dtype=torch.float64)
    assert torch.equal(again.losses(t), mechanism.losses(t))
    assert again.describe() == mechanism.describe()
    assert 0 <= again.release(10 * t[0]) <= 25
    assert again.for_size(60).problem.n == 60
    with pytest.raises(ConfigurationError, match="answer the variance"):
        SquaresMechanism.of(Problem.of("mean", 1.0, 10, (0, 1)), 8, 0.0)
    for weight, less in ((0, 0.0), (17, 0.0), (8, -1.0), (8, math.nan)):
        with pytest.raises((ConfigurationError, CheckpointError)):
            made(weight, less)


def test_answers_say_their_error():
    (one,) = answer(torch.linspace(2, 8, 50), ["variance"], bounds=(0, 10), epsilon=1.0)
    assert one.interval[0] <= one.value <= one.interval[1]
    assert one.interval[1] - one.interval[0] > 1


@pytest.mark.parametrize(("epsilon", "n"), [(0.1, 1500), (0.3, 500), (1.0, 150), (1.0, 5000)])
def test_no_mean_and_variance_between_those_looked_at_loses_more_than_the_bound(epsilon, n):
    """Found by search: 1.264 where 1.25 was said to hold for all datasets, between the points of too coarse a grid."""
    mechanism = learn("variance", epsilon, n, (0, 1), settings=Settings(robust=400), robustness=0.25)
    noises = [noisy_query(mechanism.problem, kind) for kind in KINDS]
    some = torch.Generator().manual_seed(7)

    def uniform(count):
        return torch.rand(count, generator=some, dtype=torch.float64)

    means = torch.where(uniform(1500) < 0.7, 10 ** (-5 * uniform(1500)), 1.0) / 2
    parts = torch.where(uniform(1500) < 0.4, 1.0, uniform(1500) ** 4)
    for _ in range(4):
        variances = parts * means * (1 - means)
        plain = torch.stack([truth_losses(one, variances) for one in noises]).amin(0)
        ratios = mechanism.losses_of(means, variances) / plain
        assert float(ratios.max()) <= 1.25
        worst = ratios.topk(30).indices.repeat(50)  # and again around the worst ones
        means = (means[worst] * torch.exp(0.1 * (uniform(1500) - 0.5))).clamp(max=0.5)
        parts = (parts[worst] * torch.exp(0.1 * (uniform(1500) - 0.5))).clamp(max=1.0)
    assert float(ratios.max()) <= 1.002 * mechanism.report["worst_ratio"]
