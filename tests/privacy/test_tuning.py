"""Private tuning: dp-accounting's figures against the theorems written out again, and what the theorems assume."""

import math
from functools import lru_cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, stats

from lipdp.errors import BudgetError, ConfigurationError
from lipdp.privacy import PrivateRun, Release, calibrate_noise, generator
from lipdp.privacy.tuning import Repetitions, affordable_run, record_coins, score_multiplier, tuning_epsilon

ORDERS = (1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
SHAPES = [0.0, 0.5, 1.0, 3.0]

KEY = bytes(range(32))


@lru_cache
def sampled_gaussian_rdp(q: float, sigma: float, order: float) -> float:
    """log E_{z~N(0,σ²)}[(1 − q + q·e^{(2z−1)/2σ²})^λ]/(λ − 1), by quadrature."""

    def integrand(z: float) -> float:
        ratio = math.log1p(q * math.expm1(min((2 * z - 1) / (2 * sigma**2), 500.0)))
        return math.exp(order * ratio + stats.norm.logpdf(z, scale=sigma))

    value = integrate.quad(integrand, -15 * sigma, 15 * sigma + order, limit=500)[0]
    return math.log(value) / (order - 1)


def converted(curve: dict[float, float], delta: float) -> float:
    """ε of an RDP curve: min_λ ε(λ) + log((λ−1)/λ) − (log δ + log λ)/(λ−1)."""
    return min(e + math.log1p(-1 / a) - math.log(delta * a) / (a - 1) for a, e in curve.items())


def test_negative_binomial_cost_against_the_theorem() -> None:
    q, sigma, steps, delta = 0.1, 4.0, 100, 1e-5
    curve = {a: steps * sampled_gaussian_rdp(q, sigma, a) for a in ORDERS}
    for shape in SHAPES:
        repeat = Repetitions(10.0, shape)
        fixed = min((1 + shape) * ((1 - 1 / a) * e - math.log(repeat.gamma) / a) for a, e in curve.items())
        by_hand = converted({a: e + fixed + math.log(10) / (a - 1) for a, e in curve.items()}, delta)
        ours = tuning_epsilon(PrivateRun(q, ((sigma, steps),)), repeat, delta)
        # More orders can only find less; these few are close.
        assert by_hand * 0.93 < ours <= by_hand * (1 + 1e-6)


def test_poisson_cost_against_the_theorem() -> None:
    sigma, delta, mean = 6.0, 1e-5, 5.0
    curve = {a: a / (2 * sigma**2) for a in (1.1, 1.25, *ORDERS, 48)}

    def delta_at(epsilon: float) -> float:  # of the unsampled Gaussian by its curve, as the theorem asks for any valid bound
        return min(math.exp((a - 1) * (e - epsilon) + (a - 1) * math.log1p(-1 / a)) / a for a, e in curve.items())

    total = {a: e + mean * min(1.0, delta_at(math.log1p(1 / (a - 1)))) + math.log(mean) / (a - 1) for a, e in curve.items()}
    ours = tuning_epsilon(PrivateRun(1.0, ((sigma, 1),)), Repetitions(mean, math.inf), delta)
    assert converted(total, delta) * 0.9 < ours <= converted(total, delta) * (1 + 1e-6)


def test_it_costs_more_than_one_run_and_more_runs_cost_more() -> None:
    sigma = calibrate_noise(epsilon=1.0, delta=1e-5, sampling_rate=0.1, steps=100, accountant="rdp")
    run = PrivateRun(0.1, ((sigma, 100),))
    for shape in (*SHAPES, math.inf):
        costs = [tuning_epsilon(run, Repetitions(mean, shape), 1e-5) for mean in (1.5, 10, 100)]
        assert 1.0 < costs[0] < costs[1] < costs[2]


def test_exact_tuning_of_a_toy_mechanism_is_within_the_cost() -> None:
    """A bit, scored by its value, scored by its output: the best of K is 1 unless all K are 0. Its true ε is below ours."""
    # One Gaussian release rounded to a bit is post-processing: P(1) = Φ(±1/2σ).
    sigma, delta = 3.0, 1e-6
    chances = [stats.norm.cdf(s / (2 * sigma)) for s in (1, -1)]
    for shape in SHAPES:
        repeat = Repetitions(8.0, shape)
        zeros = [math.fsum(repeat.probability(k) * (1 - p) ** k for k in range(1, 3000)) for p in chances]
        pairs = [(zeros[0], zeros[1]), (1 - zeros[0], 1 - zeros[1])]
        true = max(max(math.log((a - delta) / b), math.log((b - delta) / a)) for a, b in pairs)
        plain = max(abs(math.log(a / b)) for a, b in [tuple(chances), tuple(1 - p for p in chances)])
        assert true > plain  # choosing does cost
        assert true <= tuning_epsilon(PrivateRun(1.0, ((sigma, 1),)), repeat, delta)


@given(st.floats(1.05, 200), st.sampled_from([0.0, 0.3, 1.0, 2.5, math.inf]))
@settings(max_examples=40, deadline=None)
def test_the_distribution_has_its_mean(mean: float, shape: float) -> None:
    repeat = Repetitions(mean, shape)
    most = 400 if math.isinf(shape) else int(60 * mean * (2 + shape))
    k = torch.arange(0, most + 1, dtype=torch.float64)
    p = torch.tensor([repeat.probability(i) for i in range(most + 1)], dtype=torch.float64)
    assert float(p.sum()) == pytest.approx(1, abs=1e-6)
    assert float((k * p).sum()) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("shape", [0.0, 0.7, 1.0, math.inf])
def test_draws_follow_the_distribution(shape: float) -> None:
    repeat, draw = Repetitions(5.0, shape), generator(11, 0, "test")
    drawn = torch.tensor([repeat.draw(draw) for _ in range(4000)])
    for k in range(6):
        chance = repeat.probability(k)
        assert float((drawn == k).double().mean()) == pytest.approx(chance, abs=4.5 * math.sqrt(chance / 4000) + 1e-9)


def test_geometric_is_the_textbook_one() -> None:
    assert [Repetitions(4.0, 1.0).probability(k) for k in (1, 2, 5)] == pytest.approx([0.25, 0.1875, 0.25 * 0.75**4])


def test_the_score_noise_stays_below_the_runs_curve() -> None:
    run = PrivateRun(0.05, ((1.2, 300),), (Release("statistics", "gaussian", 20.0),))
    sigma = score_multiplier(run)
    slack = []
    for order in (2, 3, 4, 6, 8, 12, 16):  # whole ones: between them dp-accounting's curve lies above the truth
        cost = 300 * sampled_gaussian_rdp(0.05, 1.2, order) + order / (2 * 20.0**2)
        slack.append(cost / (order / (2 * sigma**2)))
    assert min(slack) > 1 - 1e-6
    assert min(slack) < 1.2  # and not needlessly large


def test_the_run_that_fits_fits_and_a_larger_one_does_not() -> None:
    def describe(epsilon: float) -> PrivateRun:
        sigma = calibrate_noise(epsilon=epsilon, delta=1e-5, sampling_rate=0.1, steps=50, accountant="rdp")
        return PrivateRun(0.1, ((sigma, 50),))

    one, total = affordable_run(describe, Repetitions(10.0), epsilon=3.0, delta=1e-5)
    assert total == tuning_epsilon(describe(one), Repetitions(10.0), 1e-5) <= 3.0
    assert total > 2.97
    assert tuning_epsilon(describe(one * 1.03), Repetitions(10.0), 1e-5) > 3.0
    with pytest.raises(BudgetError, match="fewer runs"):
        affordable_run(lambda _: describe(1.0), Repetitions(1000.0), epsilon=0.01, delta=1e-5)


def records(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    return torch.rand(count, 5, generator=draw), torch.randint(3, (count,), generator=draw)


@pytest.mark.parametrize("place", [0, 1, 250, 498, 499])
def test_neighbours_that_differ_anywhere_keep_all_other_sides(place: int) -> None:
    """Removing the record at any place, or adding one there, changes no other record's coin."""
    inputs, targets = records(500)
    coins = record_coins((inputs, targets), 0.3, KEY)
    others = torch.arange(500) != place
    assert torch.equal(record_coins((inputs[others], targets[others]), 0.3, KEY), coins[others])
    more = [torch.cat([part[:place], part[7:8] * 0 + 1, part[place:]]) for part in (inputs, targets)]
    kept = torch.arange(501) != place
    assert torch.equal(record_coins(more, 0.3, KEY)[kept], coins)
    order = torch.randperm(500, generator=torch.Generator().manual_seed(1))
    assert torch.equal(record_coins((inputs[order], targets[order]), 0.3, KEY), coins[order])


def test_coins_are_secret_fair_and_of_the_whole_record() -> None:
    inputs, targets = records(5000)
    coins = record_coins((inputs, targets), 0.3, KEY)
    assert float(coins.double().mean()) == pytest.approx(0.3, abs=0.03)  # 4.6 standard deviations
    for other in (record_coins((inputs, targets), 0.3, bytes(32)), record_coins((inputs, targets + 1), 0.3, KEY)):
        assert 0.3 < float((other != coins).double().mean()) < 0.54  # independent ones differ in 0.42 of them


def test_copies_share_a_coin_and_one_more_joins_them() -> None:
    inputs, targets = records(50)
    coins = record_coins((inputs, targets), 0.5, KEY)
    twice = record_coins((torch.cat([inputs, inputs]), torch.cat([targets, targets])), 0.5, KEY)
    assert torch.equal(twice, torch.cat([coins, coins]))


def test_refusals() -> None:
    run = PrivateRun(0.1, ((1.0, 10),))
    for mean, shape in ((1.0, 1.0), (math.inf, 1.0), (5.0, -1.0), (5.0, math.nan)):
        with pytest.raises(ConfigurationError):
            Repetitions(mean, shape)
    with pytest.raises(ConfigurationError, match="pure releases"):
        tuning_epsilon(PrivateRun(0.1, ((1.0, 10),), (Release("clip", "pure", 0.1),)), Repetitions(5.0), 1e-5)
    with pytest.raises(ConfigurationError, match="nothing"):
        tuning_epsilon(PrivateRun(0.1, ()), Repetitions(5.0), 1e-5)
    with pytest.raises(ConfigurationError, match="delta"):
        tuning_epsilon(run, Repetitions(5.0), 0.0)
    with pytest.raises(ConfigurationError, match="gamma"):
        _ = Repetitions(5.0, math.inf).gamma
    with pytest.raises(ConfigurationError, match="share"):
        record_coins(records(10), 1.0, KEY)
    with pytest.raises(ConfigurationError, match="fresh_key"):
        record_coins(records(10), 0.5, b"short")
