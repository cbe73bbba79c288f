"""``learn``: what it returns, that it falls back, that mechanisms are saved, resized and released."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lipdp.errors import CheckpointError, ConfigurationError, DataError
from lipdp.mechanisms import BudgetLedger, Mixture, compare, learn, load
from lipdp.mechanisms.experts import additive, best_experts, moments, rank_utility
from lipdp.mechanisms.learn_parts import SumSettings, UtilitySettings, expert_table, grid_size, learn_sums, learn_utility, starts
from lipdp.mechanisms.learning import _beats, _Judge, expert_draws, loss_ratio
from lipdp.mechanisms.mechanism import AdditiveMechanism, ConstantMechanism, SelectionMechanism
from lipdp.mechanisms.postprocess import Sample
from lipdp.mechanisms.problem import Problem, Query
from lipdp.mechanisms.statistics import PiecewiseSum, QueryStatistic, knot_sensitivity
from lipdp.mechanisms.utilities import LearnedUtility
from tests.mechanisms.common import BOUNDS, TINY, N, compared, datasets, private

KINDS = [("mean", "squared"), ("variance", "squared"), ("median", "squared"), ("p10", "quantile")]


@pytest.mark.parametrize(("query", "loss"), KINDS)
def test_it_returns_the_better_one_and_says_which(query: str, loss: str) -> None:
    found = compared(query, loss)
    report = found.chosen.report
    assert found.chosen is (found.learned if report["returned"] == "learned" else found.expert)
    assert found.chosen.expected_loss() == report[f"{report['returned']}_loss"]
    assert found.chosen.expected_loss() <= report["expert_loss"]
    assert found.chosen.sensitivity > 0
    assert 0 <= found.chosen.release(private()) <= (25 if query == "variance" else 10)


def test_a_learned_mechanism_that_does_not_win_is_not_returned() -> None:
    """Not trained at all, the sum is the expert's own statistic: no better, so the expert comes back, and says so."""
    idle = replace(TINY, sums=SumSettings(screening=1, steps=1, rate=1e-12))
    found = compare("mean", 1.0, N, BOUNDS, robustness=None, settings=idle)
    assert found.chosen is found.expert
    assert found.chosen.report["returned"] == "expert"
    assert found.chosen.expected_loss() == found.expert.report["expert_loss"]


def test_a_belief_that_leaves_nothing_to_tell() -> None:
    """All datasets alike: the best constant loses nothing, and no ratio to it is computed."""

    def alike(count: int, n: int, generator: torch.Generator) -> Tensor:
        return torch.full((count, n), 3.0)

    found = compare("mean", 1.0, N, BOUNDS, alike, robustness=None, settings=TINY)
    assert found.chosen.expected_loss() < 1e-6
    assert found.chosen.report["learned_to_expert"] is None or found.chosen.report["learned_to_expert"] > 0
    assert (loss_ratio(0.0, 0.0), loss_ratio(1.0, 0.0), loss_ratio(1.0, 2.0)) == (1.0, None, 0.5)


def test_the_fallback_is_the_tuned_expert_of_the_same_draws() -> None:
    """So a benchmark that fits the tuned expert to learn()'s draws finds exactly what learn() falls back to."""
    idle = replace(TINY, expert="tuned", sums=SumSettings(screening=1, steps=1, rate=1e-12))
    idle = replace(idle, training=300, validation=100)
    found = compare("mean", 1.0, N, BOUNDS, robustness=None, settings=idle, seed=5)
    assert found.chosen is found.expert
    problem, t = found.chosen.problem, datasets(40, 6)
    again = best_experts(problem, *expert_draws(problem, idle, 5), ("textbook", "tuned"), releasable=False)["tuned"]
    assert torch.equal(again.losses(t, 3), found.chosen.losses(t, 3))
    assert again.title == found.tuned.title == found.expert.title


def test_a_gain_that_is_lost_under_shift_is_no_gain() -> None:
    """The judge wants to see a confirmed gain on the belief, and no loss on the pool of shifted datasets."""
    problem = Problem.of("mean", 1.0, N, BOUNDS)

    def answering(losses: list[float]) -> Fixed:
        return Fixed(problem, "fixed", 0.0, of={id(part): value for part, value in zip(parts, losses, strict=True)})

    parts = [datasets(50, seed) for seed in (1, 2, 3)]
    judge = _Judge(parts[0], parts[1:], 0)
    old = answering([1.0, 1.0, 1.0])
    assert judge.prefers(answering([0.9, 0.9, 1.0]), old)
    assert judge.prefers(answering([0.9, 0.5, 1.1]), old)
    assert not judge.prefers(answering([0.9, 0.8, 1.3]), old)
    assert not judge.prefers(answering([1.0, 0.5, 0.5]), old)
    assert judge.shifted_ratios(answering([0.9, 0.5, 1.1]), old) == pytest.approx([0.5, 1.1])


@dataclass(frozen=True)
class Fixed(ConstantMechanism):
    """A mechanism whose losses on given datasets are given."""

    of: dict[int, float] = field(default_factory=dict)

    def losses(self, t: Tensor, seed: int = 0) -> Tensor:
        return torch.full((t.shape[0],), self.of[id(t)], dtype=torch.float64)


def test_learning_can_begin_at_the_expert() -> None:
    """φ taken from a clipped mean and from moments: the same released sums, up to scale and constant."""
    knots = torch.linspace(0, 1, 65, dtype=torch.float64)
    problem, t = Problem.of("median", 1.0, N, BOUNDS), datasets(200, 7)
    clipped = QueryStatistic(Query("mean"), N, (0.25, 0.75))
    for statistic in (clipped, moments(0.25, 0.75, 0.5)):
        table = expert_table(statistic, knots)
        assert table is not None
        assert float(knot_sensitivity(table)) == pytest.approx(1.0)
        mine = PiecewiseSum.quantised(knots, table).integers(t).double()
        theirs = statistic.integers(t).double()
        for column in range(statistic.dimension):
            both = torch.stack([mine[:, column], theirs[:, column]])
            assert float(torch.corrcoef(both)[0, 1]) == pytest.approx(1.0, abs=1e-3)
    assert expert_table(QueryStatistic(Query("quantile"), N), knots) is None
    sample = Sample.of(problem, t)
    summed = additive(problem, "", clipped, "laplace", sample)
    ranks = SelectionMechanism(problem, "", rank_utility(problem, 8), "exponential", torch.zeros(8))
    assert len(starts(problem, knots, [summed, ranks])) == len(starts(problem, knots)) + 1


def test_the_grid_follows_the_question() -> None:
    """More ε resolves more: the quantile error wants a finer grid at ε = 20 than at ε = 0.2."""
    t = datasets(600, 8, n=50)
    low, high = (grid_size(Problem.of("median", e, 50, BOUNDS, "quantile"), t, (8, 100)) for e in (0.2, 20.0))
    assert (low, high) == (8, 100)


def test_beats_is_paired_and_wants_more_than_chance() -> None:
    generator = torch.Generator().manual_seed(0)
    expert = torch.rand(400, generator=generator) * 10
    noise = 0.01 * torch.randn(400, generator=generator)
    assert _beats(expert - 0.01 + noise, expert)  # far below the spread of the losses, but paired
    assert not _beats(expert + noise - noise.mean(), expert)
    assert not _beats(expert + 0.01, expert)


def test_training_makes_sums_better_than_their_start() -> None:
    problem = Problem.of("variance", 1.0, N, BOUNDS)
    t, validation = datasets(1500, 1), datasets(500, 2)
    short, long = (
        learn_sums(problem, t, validation, SumSettings(screening=5, steps=steps, batch=128, width=32), 0)[1] for steps in (1, 300)
    )
    assert long < 0.95 * short


def test_training_makes_utilities_better_than_the_expert_they_start_at() -> None:
    problem = Problem.of("median", 1.0, N, BOUNDS)
    t, validation = datasets(1500, 1), datasets(800, 2)
    small = {"batch": 64, "responses": (24,), "channels": 8, "kernel": 5}
    short, long = (
        learn_utility(problem, t, UtilitySettings(steps=steps, **small), 0).losses(validation).mean()  # type: ignore[arg-type]
        for steps in (1, 120)
    )
    assert float(long) < 0.9 * float(short)


@pytest.mark.parametrize("sampler", ["exact", "auto"])
@pytest.mark.parametrize(
    ("query", "which"), [("variance", "learned"), ("mean", "expert"), ("median", "learned"), ("p10", "expert")]
)
def test_releases_follow_what_is_simulated(query: str, which: str, sampler: str) -> None:
    """Many releases about one dataset against the mechanism's own expectation: the integers and the real noise fit together."""
    mechanism = getattr(compared(query), which)
    x = private(3)
    answers = torch.tensor([mechanism.release(x, sampler=sampler) for _ in range(300)], dtype=torch.float64)
    t = mechanism.problem.dataset(x)
    if isinstance(mechanism, SelectionMechanism):
        chances = mechanism.probabilities(x)
        mean = float((chances * mechanism.responses).sum())
        std = float((chances * (mechanism.responses - mean) ** 2).sum().sqrt())
    else:
        assert isinstance(mechanism, AdditiveMechanism)
        simulated = mechanism.problem.answer(mechanism.simulate(t, 0, 4000))
        mean, std = float(simulated.mean()), float(simulated.std())
    assert abs(float(answers.mean()) - mean) < 5 * std / 300**0.5
    assert 0.7 * std < float(answers.std()) < 1.4 * std


@pytest.mark.parametrize(("query", "loss"), KINDS)
@pytest.mark.parametrize("which", ["learned", "expert"])
def test_saved_mechanisms_are_the_same(tmp_path: Path, query: str, loss: str, which: str) -> None:
    mechanism = getattr(compared(query, loss), which)
    mechanism.save(tmp_path / "m")
    again = load(tmp_path / "m")
    t = datasets(50, 5)
    assert torch.equal(again.losses(t, 1), mechanism.losses(t, 1))
    assert again.describe() == mechanism.describe()
    assert again.expected_loss() == mechanism.expected_loss()


def test_files_that_are_no_mechanism(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no mechanism at"):
        load(tmp_path / "none")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(CheckpointError, match="can't be read"):
        load(tmp_path / "text")
    torch.save({"format": "lipdp mechanism 99"}, tmp_path / "new")
    with pytest.raises(CheckpointError, match="99"):
        load(tmp_path / "new")


@pytest.mark.parametrize(
    ("query", "which"), [("variance", "learned"), ("mean", "expert"), ("median", "learned"), ("median", "expert")]
)
@pytest.mark.parametrize("n", [10, 60])
def test_other_sizes(query: str, which: str, n: int) -> None:
    """The rule for another n: it still answers well below the blind loss, and utilities still move by at most their sensitivity."""
    mechanism = getattr(compared(query, epsilon=4.0), which)
    other = mechanism.for_size(n)
    t = datasets(300, 9, n)
    truth = other.problem.query(t)
    assert float(other.losses(t).mean()) < 1.0 * float(truth.var())
    assert 0 <= other.release(private(1, n)) <= 25
    if isinstance(other, SelectionMechanism):
        moved = t.clone()
        moved[:, 0] = torch.rand(300, dtype=torch.float64)
        gap = (other.utility.integers(t) - other.utility.integers(moved.sort(1).values)).abs().max()
        assert int(gap) <= other.utility.sensitivity
    with pytest.raises(DataError, match=str(n)):
        other.release(private())


def test_a_distribution_of_the_users() -> None:
    def narrow(count: int, n: int, generator: torch.Generator) -> Tensor:
        return 4 + 2 * torch.rand(count, n, generator=generator)

    mechanism = learn("median", 0.1, N, BOUNDS, narrow, robustness=None, settings=TINY)
    # Almost everything is known beforehand: the loss is far below that of the default prior.
    assert mechanism.expected_loss() < 0.1
    assert 3.9 < mechanism.release(4 + 2 * torch.rand(N)) < 6.1


def test_a_wrong_belief_costs_accuracy_not_the_guarantee() -> None:
    mechanism = learn("median", 1.0, N, BOUNDS, Mixture(1, 0.0, 1.0), robustness=None, settings=TINY)
    answer = mechanism.release(torch.full((N,), 9.0))  # far from what was believed
    assert 0 <= answer <= 10


def test_same_seed_same_mechanism() -> None:
    first, second = (learn("variance", 1.0, N, BOUNDS, settings=TINY, seed=3) for _ in range(2))
    t = datasets(40, 1)
    assert torch.equal(first.losses(t), second.losses(t))


def test_expected_loss_of_given_datasets() -> None:
    mechanism = compared("median").chosen
    t = datasets(100, 4)
    assert mechanism.expected_loss(t * 10) == pytest.approx(float(mechanism.losses(t).mean()) * 100)


def test_probabilities_only_where_discrete() -> None:
    chances = (
        compared("median").learned.probabilities(private()) if isinstance(compared("median").learned, SelectionMechanism) else None
    )
    if chances is not None:
        assert float(chances.sum()) == pytest.approx(1)
    with pytest.raises(ConfigurationError, match="continuous"):
        compared("variance").learned.probabilities(private())


BAD = [
    ({"x": torch.full((N,), float("nan"))}, "NaN"),
    ({"x": torch.rand(N + 1)}, "shape"),
    ({"x": torch.rand(N, 2)}, "shape"),
    ({"x": torch.full((N,), 10.5)}, "outside"),
    ({"x": torch.full((N,), float("inf"))}, "outside"),
    ({"x": ["a"] * N}, "can't be read as numbers"),
]


@pytest.mark.parametrize(("given", "words"), BAD)
def test_bad_data_are_refused_and_cost_nothing(tmp_path: Path, given: dict[str, object], words: str) -> None:
    ledger = BudgetLedger(tmp_path / "a", budget=5.0, dataset="d")
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(DataError, match=words):
        compared("mean").chosen.release(given["x"], ledger=ledger)
    with pytest.raises(ConfigurationError, match="sampler"):
        compared("mean").chosen.release(private(), ledger=ledger, sampler="best")  # type: ignore[arg-type]
    assert (tmp_path / "a").read_bytes() == before


def test_clamping_is_asked_for() -> None:
    assert 0 <= compared("mean").chosen.release(torch.full((N,), 1e9), clamp=True) <= 10


def test_an_exhausted_ledger_refuses_before_noise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lipdp.errors import BudgetError

    ledger = BudgetLedger(tmp_path / "a", budget=1.5, dataset="d")
    mechanism = compared("mean").chosen
    mechanism.release(private(), ledger=ledger)
    assert ledger.remaining == 0.5
    monkeypatch.setattr(type(mechanism), "_respond", lambda *_: pytest.fail("noise was drawn"))
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(BudgetError):
        mechanism.release(private(), ledger=ledger)
    assert (tmp_path / "a").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epsilon": 0.0}, "epsilon"),
        ({"epsilon": -1.0}, "epsilon"),
        ({"epsilon": float("nan")}, "epsilon"),
        ({"n": 1}, "n is 1"),
        ({"n": 10.5}, "n is 10.5"),
        ({"bounds": (5.0, 5.0)}, "bounds"),
        ({"bounds": (0.0, float("inf"))}, "bounds"),
        ({"bounds": 3.0}, "bounds"),
        ({"query": "mode"}, "query 'mode'"),
        ({"loss": "absolute"}, "loss"),
        ({"query": "variance", "loss": "quantile"}, "variance"),
        ({"distribution": 3}, "callable"),
        ({"seed": -1}, "seed"),
    ],
)
def test_bad_questions(changes: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"query": "mean", "epsilon": 1.0, "n": N, "bounds": BOUNDS, "settings": TINY, **changes}
    with pytest.raises(ConfigurationError, match=words):
        learn(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda count, n, generator: torch.rand(count, n + 1),
        lambda count, n, generator: torch.rand(n, count),
        lambda count, n, generator: [[0.0] * n] * count,
        lambda count, n, generator: torch.full((count, n), 11.0),
        lambda count, n, generator: torch.full((count, n), float("nan")),
    ],
)
def test_a_distribution_of_the_wrong_shape_or_range(wrong: object) -> None:
    with pytest.raises(DataError, match="distribution"):
        learn("mean", 1.0, N, BOUNDS, wrong, settings=TINY)  # type: ignore[arg-type]


def test_diverged_training_falls_back() -> None:
    wild = replace(TINY, sums=replace(TINY.sums, rate=1e30), utility=replace(TINY.utility, rate=1e30))
    found = compare("median", 1.0, N, BOUNDS, robustness=None, settings=wild)
    assert found.chosen.expected_loss() <= found.expert.expected_loss()
    assert 0 <= found.learned.release(private()) <= 10


def test_a_broken_utility_is_not_released() -> None:
    learned = learn_utility(Problem.of("median", 1.0, N, BOUNDS), datasets(200, 1), TINY.utility, 0)
    assert isinstance(learned.utility, LearnedUtility)
    learned.utility.network.gate.fill_(float("nan"))
    with pytest.raises(ConfigurationError, match="NaN or infinite weights"):
        learned.release(private())
