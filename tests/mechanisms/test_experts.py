"""Experts and decoders."""

from __future__ import annotations

import pytest
import torch

from lipdp.errors import UnsupportedError
from lipdp.mechanisms.experts import (
    Level,
    SmoothSensitivity,
    additive,
    best_experts,
    catalogue,
    constant,
    experts,
    heavy_density,
    heavy_quantile,
    levels_to,
    moments,
    smooth_sensitivity,
)
from lipdp.mechanisms.postprocess import Sample, Table, best_responses
from lipdp.mechanisms.problem import Problem, rank_between, response_loss, with_ends
from lipdp.mechanisms.statistics import QueryStatistic
from tests.mechanisms.common import BOUNDS, N, datasets, private


@pytest.mark.parametrize(("query", "loss"), [("mean", "squared"), ("variance", "squared"), ("median", "quantile")])
def test_no_textbook_expert_is_worse_than_blind(query: str, loss: str) -> None:
    """Every one is decoded for the prior, so on the datasets it was fitted to it can't lose to the best constant."""
    problem = Problem.of(query, 1.0, N, BOUNDS, loss)
    t = datasets(1200, 1)
    blind = float(constant(problem, Sample.of(problem, t)).losses(t).mean())
    for expert in experts(problem, t, "textbook"):
        if "undecoded" not in expert.title and "all numbers" not in expert.title:  # those assume nothing
            assert float(expert.losses(t).mean()) <= blind * 1.01, expert.title


def test_tuning_helps() -> None:
    problem = Problem.of("mean", 0.2, N, BOUNDS)
    t, validation, test = datasets(1000, 1), datasets(400, 2), datasets(1000, 3)
    textbook, tuned = (best_experts(problem, t, validation, (level,))[level].losses(test).mean() for level in ("textbook", "tuned"))
    assert float(tuned) < 0.97 * float(textbook)


def test_decoding_never_increases_squared_loss_where_it_was_fitted() -> None:
    problem = Problem.of("variance", 1.0, N, BOUNDS)
    t = datasets(3000, 4)
    mechanism = additive(problem, "x", QueryStatistic(problem.query, N), "laplace", Sample.of(problem, t))
    noisy = mechanism.noisy(t, 0, 16)[..., 0]
    raw = float(((noisy - problem.query(t)) ** 2).mean())
    assert float(mechanism.losses(t).mean()) < raw


def test_best_responses_minimise_the_expected_loss() -> None:
    t = datasets(200, 5)
    truth = t.median(1).values
    weights = torch.rand(200, 3, dtype=torch.float64)
    for loss in ("squared", "quantile"):
        values = best_responses(weights, Sample(t, truth, loss))  # type: ignore[arg-type]
        for r in range(3):
            others = torch.linspace(0, 1, 101, dtype=torch.float64)
            costs = (weights[:, [r]] * response_loss(loss, t, truth, others.expand(200, -1))).sum(0)  # type: ignore[arg-type]
            own = (weights[:, r] * response_loss(loss, t, truth, values[r].expand(200, 1))[:, 0]).sum()  # type: ignore[arg-type]
            assert float(own) <= float(costs.min()) * (1 + 1e-9)


def test_far_observations_still_get_their_best_answer() -> None:
    """Likelihoods far below what float32 holds: what counts is their ratio."""
    t = datasets(300, 5)
    truth = t.median(1).values
    weights = torch.rand(300, 4, dtype=torch.float64)
    for loss in ("squared", "quantile"):
        sample = Sample(t, truth, loss)  # type: ignore[arg-type]
        assert torch.equal(best_responses(weights * 2.0**-500, sample), best_responses(weights, sample))


def test_levels_contain_each_other_and_do_not_depend_on_what_else_is_asked_for() -> None:
    """learn()'s fallback has to be the tuned expert that a benchmark finds on the same draws, to the last bit."""
    problem = Problem.of("median", 1.0, N, BOUNDS)
    t, validation, test = datasets(150, 1), datasets(60, 2), datasets(50, 3)
    every: tuple[Level, ...] = ("textbook", "tuned", "strong")
    found = best_experts(problem, t, validation, every)
    losses = [float(found[level].losses(validation).mean()) for level in every]
    assert losses == sorted(losses, reverse=True)
    alone = best_experts(problem, t, validation, ("tuned",), releasable=False)["tuned"]
    assert torch.equal(alone.losses(test), found["tuned"].losses(test))
    members = [{place for place, expert in enumerate(catalogue(problem)) if expert.level in levels_to(level)} for level in every]
    assert members[0] < members[1] < members[2]


def test_tables_interpolate() -> None:
    a, b = torch.linspace(0, 2, 5, dtype=torch.float64), torch.linspace(-1, 1, 9, dtype=torch.float64)
    plane = Table((a, b), 3 * a[:, None] - b[None] + a[:, None] * b[None])
    points = torch.tensor([[0.3, 0.1], [1.9, -0.77], [5.0, 0.0]], dtype=torch.float64)
    x, y = points[:, 0].clamp(0, 2), points[:, 1]
    assert torch.allclose(plane(points), 3 * x - y + x * y)
    assert torch.allclose(Table((a,), a**2)(torch.tensor([[0.5], [9.0]], dtype=torch.float64)), torch.tensor([0.25, 4.0]).double())


def test_moment_sensitivity_is_joint() -> None:
    """(λz, z²) on [−1, 1]: max over a, b of λ|a−b| + |a²−b²|, by hand: 2λ at (−1, 1) or, for λ < ½, more at (0.., 1)."""
    z = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    for weight in (0.25, 1.0):
        statistic = moments(0.0, 1.0, weight)
        want = (weight * (z[:, None] - z[None]).abs() + (z[:, None] ** 2 - z[None] ** 2).abs()).max()
        assert statistic.sensitivity * statistic.unit == pytest.approx(float(want), rel=1e-5)


def test_quantile_error_counts_points_strictly_between() -> None:
    t = torch.tensor([[0.1, 0.2, 0.3, 0.6]], dtype=torch.float64)
    truth = torch.tensor([0.2], dtype=torch.float64)
    answers = torch.tensor([[0.2, 0.3, 0.35, 0.05, 0.9]], dtype=torch.float64)
    assert response_loss("quantile", t, truth, answers).tolist() == [[0, 0, 1, 1, 2]]


def test_distances_of_ranks_follow_the_count_and_have_a_slope() -> None:
    """What sums are trained with for the quantile error."""
    t = datasets(50, 6, n=200)
    truth = t[:, 100]
    answers = torch.rand(50, 1, dtype=torch.float64, requires_grad=True)
    ends = with_ends(t)
    smooth = (rank_between(ends, answers) - rank_between(ends, truth[:, None])).abs()
    assert float((smooth.detach() - response_loss("quantile", t, truth, answers.detach())).abs().max()) <= 2
    smooth.sum().backward()  # type: ignore[no-untyped-call]
    assert answers.grad is not None
    assert float(answers.grad.abs().min()) > 0


def test_smooth_sensitivity_is_smooth_and_above_the_local_one() -> None:
    """S(x) ≤ exp(β)·S(x') for neighbours, and |q(x) − q(x')| ≤ S(x): what the mechanism's proof needs."""
    problem = Problem.of("median", 1.0, N, BOUNDS)
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(2000, N, dtype=torch.float64, generator=generator) ** 3
    other = x.clone()
    other[:, 0] = torch.rand(2000, dtype=torch.float64, generator=generator).round()
    a, b = x.sort(1).values, other.sort(1).values
    s, r = smooth_sensitivity(a, problem), smooth_sensitivity(b, problem)
    assert float((s / r).log().abs().max()) <= problem.epsilon / 10 + 1e-9
    assert bool(((problem.query(a) - problem.query(b)).abs() <= torch.minimum(s, r) + 1e-12).all())
    u = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    z = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    inside = float(torch.trapezoid(heavy_density(z), z))
    assert float((heavy_quantile(u).abs() <= 1).double().mean()) == pytest.approx(inside, abs=1e-3)


def test_smooth_sensitivity_is_not_released() -> None:
    problem = Problem.of("median", 1.0, N, BOUNDS)
    t = datasets(300, 1)
    (smooth,) = [expert for expert in experts(problem, t, "textbook") if isinstance(expert, SmoothSensitivity)]
    with pytest.raises(UnsupportedError, match="comparison only"):
        smooth.release(private())
    assert not isinstance(best_experts(problem, t, t, ("textbook",))["textbook"], SmoothSensitivity)
