"""Off the belief, a mechanism loses little to textbook ones that assume nothing; those are written out here, independently."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.mechanisms import ColumnMechanism, Everyday, Mechanism, Problem, Settings, World, learn, load, load_columns
from lipdp.mechanisms import intervals as intervals_module
from lipdp.mechanisms.beyond import BeyondMechanism
from lipdp.mechanisms.centred import CentredMechanism
from lipdp.mechanisms.distributions import KINDS, draw
from lipdp.mechanisms.intervals import PARTS, IntervalMechanism
from lipdp.mechanisms.learning import robust_mechanism
from lipdp.mechanisms.mechanism import AdditiveMechanism, from_content
from lipdp.mechanisms.problem import COPIES, Lattice, Query
from lipdp.mechanisms.statistics import QueryStatistic
from lipdp.mechanisms.truths import SquaresMechanism, on_the_query
from lipdp.mechanisms.worst import truth_losses
from lipdp.privacy.quantile import quantile_probabilities
from tests.many import examples
from tests.mechanisms.common import lumps, plain_mechanisms

SMALL = Settings(robust=250)
MORE = [("p25", 0.3, 500), ("median", 1.0, 100), ("p10", 0.5, 100), ("p90", 0.3, 50)] if examples(1) > 1 else []
QUANTILES = pytest.mark.parametrize(
    ("query", "epsilon", "n"), [("p90", 0.3, 2000), ("p10", 1.0, 500), ("median", 0.3, 300), ("p25", 0.3, 50), *MORE]
)


@cache
def learned(query: str, epsilon: float, n: int, loss: str = "squared") -> Mechanism:
    return learn(query, epsilon, n, (0, 10), loss=loss, settings=SMALL)


def columns(n: int) -> dict[str, Tensor]:
    """Those that the default mechanism used to lose on, in [0, 10]."""
    some = torch.Generator().manual_seed(0)
    uniform = torch.rand(n, dtype=torch.float64, generator=some)
    return {
        "zeros": torch.zeros(n, dtype=torch.float64),
        "tens": torch.full((n,), 10.0, dtype=torch.float64),
        "nine tenths zeros": torch.where(uniform < 0.9, 0.0, 10 * uniform),
        "ratings": torch.tensor([0.0, 5.0, 10.0], dtype=torch.float64)[(3 * uniform).long()],
        "whole numbers": (10 * uniform).round(),
        "narrow": 7.123 + 0.001 * uniform,
        "heavy tail": (0.02 / uniform.clamp(min=1e-3)).clamp(max=10.0),
        "two ends": torch.where(uniform < 0.5, 0.0, 10.0).to(torch.float64),
    }


def laplace_loss(problem: Problem, x: Tensor) -> float:
    """Of query + Laplace noise, clamped to the range: by integration over the noise's quantiles."""
    unit = problem.unit(x)[None]
    q, most = float(problem.query(unit)), 0.25 if problem.query.kind == "variance" else 1.0
    size = float(problem.query.sensitivity(problem.n)) / problem.epsilon
    u = (np.arange(20_000) + 0.5) / 20_000
    return float(((np.clip(q + stats.laplace.ppf(u) * size, 0, most) - q) ** 2).mean())


def continuous_loss(problem: Problem, x: Tensor) -> float:
    """Of the continuous exponential mechanism: uniform inside each gap between neighbouring values."""
    t = problem.unit(x)
    edges, chances = quantile_probabilities(t, float(problem.query.p), (0.0, 1.0), epsilon=problem.epsilon, adjacency="replace_one")
    q = float(problem.query(t[None]))
    a, b = edges[:-1] - q, edges[1:] - q
    return float((chances * (a * a + a * b + b * b) / 3).sum())


@pytest.mark.parametrize(
    ("query", "epsilon", "n"), [("mean", 1.5, 500), ("mean", 0.15, 50), ("variance", 1.0, 500), ("variance", 0.3, 50)]
)
def test_no_worse_than_laplace_noise_on_any_column(query: str, epsilon: float, n: int) -> None:
    mechanism = learned(query, epsilon, n)
    assert isinstance(mechanism, AdditiveMechanism | BeyondMechanism | CentredMechanism | SquaresMechanism)
    for name, x in columns(n).items():
        t = mechanism.problem.unit(x)[None]
        added = isinstance(mechanism, AdditiveMechanism)
        loss = truth_losses(mechanism, mechanism.problem.query(t)) if added else mechanism.losses(t)
        ratio = float(loss) / laplace_loss(mechanism.problem, x)
        assert ratio <= 1.26, name


@QUANTILES
def test_no_worse_than_the_continuous_exponential_mechanism_on_any_column(query: str, epsilon: float, n: int) -> None:
    mechanism = learned(query, epsilon, n)
    for name, x in columns(n).items():
        mine = float(mechanism.losses(mechanism.problem.unit(x)[None]))
        assert mine <= 1.3 * continuous_loss(mechanism.problem, x) + 1e-12, name


@QUANTILES
def test_columns_of_few_values_and_columns_close_beside_an_end_lose_little(query: str, epsilon: float, n: int) -> None:
    """A column with 89% zeros and all else 0.00004 beside them lost 60 times by answers that were drawn to the end."""
    mechanism = learned(query, epsilon, n)
    plain = IntervalMechanism.plain(mechanism.problem)
    generator = torch.Generator().manual_seed(n)
    rank, rows = mechanism.problem.rank(), []
    for _ in range(400):
        beside = 10 ** (-5 + 4 * float(torch.rand(1, generator=generator)))
        short = 1 + float(torch.rand(1, generator=generator)) ** 2 * min(rank, n - rank)
        place, first = torch.arange(n), [rank - short, rank + short][int(torch.randint(2, (1,), generator=generator))]
        row = torch.where(place < first, 0.0, beside).to(torch.float64)
        far = place > n - int(torch.randint(1, max(n // 20, 2), (1,), generator=generator))
        row = torch.where(far & (place > rank + short), torch.rand(n, dtype=torch.float64, generator=generator), row).sort().values
        rows += [row, (1 - row).flip(0), row.round(decimals=4) * 0 + round(beside, 5)]
    t = torch.stack(rows)
    ratios = mechanism.losses(t) / plain.losses(t).clamp(min=1e-12)
    assert float(ratios.max()) <= 1.3


def test_atoms_are_answered_exactly() -> None:
    mechanism = learned("p10", 1.0, 500)
    zeros = columns(500)["nine tenths zeros"]
    assert Counter(round(mechanism.release(zeros), 6) for _ in range(20)).most_common(1)[0] == (0.0, 20)
    assert float(mechanism.losses(mechanism.problem.unit(columns(500)["zeros"])[None])) < 1e-10


@pytest.mark.parametrize(("query", "epsilon"), [("mean", 0.15), ("variance", 0.3)])
def test_the_worst_case_is_that_of_all_truths(query: str, epsilon: float) -> None:
    """Recomputed here on other truths, with other draws, against both plain noises."""
    problem = Problem.of(query, epsilon, 50, (0, 10))
    found = on_the_query(problem, problem.query(draw(Everyday(0, 10), problem, 300, 1)), 0.25)
    assert isinstance(found.mechanism, AdditiveMechanism)
    most = 0.25 if query == "variance" else 1.0
    truths = torch.linspace(0, most, 223, dtype=torch.float64)
    plain = torch.stack([truth_losses(each, truths) for each in plain_mechanisms(found.mechanism.problem)]).amin(0)  # type: ignore[arg-type]
    ratios = truth_losses(found.mechanism, truths) / plain
    assert float(ratios.max()) <= 1.25
    assert float(ratios.max()) == pytest.approx(found.ratio, abs=0.02)
    assert float(ratios.min()) < 0.95  # it gains somewhere
    assert float(truth_losses(found.mechanism, truths).max()) <= found.loss * 1.02


@pytest.mark.parametrize("epsilon", [0.15, 1.0])
def test_more_tolerance_gains_more(epsilon: float) -> None:
    problem = Problem.of("mean", epsilon, 50, (0, 10))
    narrow = stats.norm(4, 0.3)
    losses = [
        learn("mean", epsilon, 50, (0, 10), narrow, robustness=tau, settings=SMALL).expected_loss() for tau in (0.05, 0.25, 1.0)
    ]
    assert losses[0] > losses[1] > losses[2]
    assert losses[0] < 1.01 * float(plain_mechanisms(problem)[0].losses(draw(Everyday(0, 10), problem, 200, 0)).mean()) * 100


def test_quantiles_hold_against_datasets_they_were_not_fitted_to() -> None:
    """Other draws of the world, and another search: two lumps, thousands of them."""
    problem = Problem.of("median", 0.3, 50, (0, 10))
    found = robust_mechanism(problem, World(0, 10), 0.25, 600, 3)
    assert found.mechanism is not found.plain
    some = torch.Generator().manual_seed(99)
    parameters = torch.rand(1500, 6, dtype=torch.float64, generator=some)
    parameters[:, 2:4] = 5 * parameters[:, 2:4] - 5
    hostile = torch.cat([draw(World(0, 10), problem, 600, 98), lumps(parameters, 50)])
    ratios = found.mechanism.losses(hostile) / found.plain.losses(hostile).clamp(min=1e-13)
    assert float(ratios.max()) <= 1.3
    assert float(ratios.median()) < 0.95


def test_the_report_says_what_it_costs_and_where() -> None:
    described = learned("mean", 1.5, 500).describe()
    assert described["robustness"] == 0.25
    assert described["worst_ratio"] <= 1.25
    assert described["worst_loss"] >= described["expected_loss"]
    assert "any dataset whose mean is" in described["worst_loss_at"]
    assert described["worst_case"] == "of all datasets"
    assert learned("p25", 0.3, 50).describe()["worst_case"] == "of all datasets"


def test_beliefs_are_data_scipys_laws_or_callables() -> None:
    public = np.concatenate([np.zeros(70), np.arange(30) / 10])
    for belief in (public, public.tolist(), torch.as_tensor(public).reshape(2, 50), stats.expon(scale=1.0), World(0, 10)):
        mechanism = learn("mean", 0.15, 50, (0, 10), belief, settings=SMALL)
        low, high = (float(truth_losses(mechanism, torch.tensor([q], dtype=torch.float64))) for q in (0.05, 0.95))  # type: ignore[arg-type]
        assert low < high  # all of these say that small means are likely
    for wrong in ("many", [1.0, math.nan], object(), [[[1.0, 2.0]]]):
        with pytest.raises(ConfigurationError, match="public data"):
            learn("mean", 0.15, 50, (0, 10), wrong, settings=SMALL)
    with pytest.raises(ConfigurationError, match="robustness"):
        learn("mean", 0.15, 50, (0, 10), robustness=-0.1)


def test_every_kind_of_column_is_in_the_range_and_its_own() -> None:
    problem = Problem.of("median", 1.0, 40, (-3, 5))
    for kind in KINDS:
        t = draw(World(-3, 5, (kind,)), problem, 30, 1)
        assert t.shape == (30, 40)
        assert float(t.var(0).sum()) > 0
    with pytest.raises(ConfigurationError, match="no world"):
        World(0, 1, ("strange",))


def test_a_file_shows_that_its_sensitivity_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A statistic whose sensitivity were too small by a step would be refused when it is read."""
    own = learned("mean", 0.15, 50)
    own.save(tmp_path / "m")
    ColumnMechanism((own,), own.epsilon).save(tmp_path / "columns")
    load(tmp_path / "m")
    load_columns(tmp_path / "columns")
    true = QueryStatistic(Query("mean"), 50).sensitivity
    monkeypatch.setattr(QueryStatistic, "sensitivity", property(lambda self: true // 2))
    for read, name in ((load, "m"), (load_columns, "columns")):
        with pytest.raises(CheckpointError, match="one record moves what it noises"):
            read(tmp_path / name)


# --- the mechanism by intervals ------------------------------------------------------------------------------------------------


def test_candidates_are_decimals_and_reach_both_ends() -> None:
    own = Lattice.of(-1.5, 0.7)
    assert (float(own.first * own.step), float(own.last * own.step)) == (-1.5, 0.7)
    assert 0 <= COPIES - own.each * (own.last - own.first + 1) <= own.last - own.first
    far = Lattice.of(1e15, 1e15 + 1)
    assert (far.origin, far.first, far.last) == (1e15, 0, 10**6)


@pytest.mark.parametrize("loss", ["squared", "quantile"])
def test_exact_losses_are_those_of_its_releases(loss: str) -> None:
    problem = Problem.of("p25", 0.8, 12, (0, 10), loss)
    tilt = torch.linspace(1.0, 2.0, PARTS, dtype=torch.float64)
    shift = (
        torch.linspace(0.03, -0.03, PARTS, dtype=torch.float64) if loss == "squared" else torch.zeros(PARTS, dtype=torch.float64)
    )
    mechanism = IntervalMechanism.tilted(problem, tilt, shift, ends=(2e-3, 1e-4), atoms=0.5)
    x = torch.tensor([0.0, 0, 0, 2, 2.5, 2.5, 4, 7.77, 8, 9, 9, 10])
    t = problem.unit(x)[None]
    answers = torch.tensor([mechanism.release(x) for _ in range(700)], dtype=torch.float64)
    q = float(problem.answer(problem.query(t))[0])
    low, high = answers.clamp(max=q), answers.clamp(min=q)
    costs = (answers - q) ** 2 if loss == "squared" else ((x > low[:, None]) & (x < high[:, None])).double().sum(1)
    error = float(costs.std()) / math.sqrt(len(costs))
    assert float(costs.mean()) == pytest.approx(mechanism.expected_loss(x[None]), abs=5 * error)


def _law(mechanism: IntervalMechanism, places: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Where runs of candidates begin, and the chances of one copy of theirs: shifted, by depth, and for being an end, (runs, 3)."""
    blocks = list(mechanism._blocks(places.sort().values.numpy()))
    assert [blocks[0].first, blocks[-1].last] == [mechanism.lattice.first, mechanism.lattice.last]
    weights = [math.exp(-mechanism.epsilon / 2 * float(block.distance)) for block in blocks]
    total = sum(weight * block.copies for weight, block in zip(weights, blocks, strict=True))
    starts = np.unique([block.first for block in blocks])
    chances = np.zeros((len(starts), 3))
    for weight, block in zip(weights, blocks, strict=True):
        row = chances[np.searchsorted(starts, block.first)]
        row[int(block.deep)] += weight * (mechanism.atoms if block.deep else int(mechanism.tilt[block.part])) / total
        row[2] += weight * block.extra / total
    return starts, chances


@pytest.mark.parametrize("kind", ["tilted", "deep", "ends"])
def test_neighbours_have_probabilities_within_epsilon(kind: str) -> None:
    """From the blocks that a release draws from: every answer's exact chance, on hostile neighbours (ties, ends)."""
    problem = Problem.of("p25", 0.9, 8, (0.0, 1.0))
    even, nothing = torch.ones(PARTS), torch.zeros(PARTS)
    mechanism = {
        "tilted": IntervalMechanism.tilted(problem, torch.linspace(1, 3, PARTS), nothing),
        "deep": IntervalMechanism.deep(problem),
        "ends": IntervalMechanism.tilted(problem, even, nothing + 0.01, ends=(0.3, 2.0), atoms=0.5),
    }[kind]
    generator, last, worst = torch.Generator().manual_seed(4), mechanism.lattice.last, 0.0
    for number in range(150):
        values = torch.randint(last + 1, (3,), generator=generator)
        few = torch.cat([values, torch.tensor([0, last])])[torch.randint(5, (8,), generator=generator)]
        x = few if number % 3 else torch.randint(last + 1, (8,), generator=generator)
        other = x.clone()
        other[0] = int(torch.cat([values, torch.tensor([0, last])])[int(torch.randint(5, (1,), generator=generator))])
        (starts, chance), (others, there) = _law(mechanism, x), _law(mechanism, other)
        merged = np.union1d(starts, others)
        here = chance[np.searchsorted(starts, merged, side="right") - 1]
        away = there[np.searchsorted(others, merged, side="right") - 1]
        there_are = here[:, :2].any(0)
        assert bool(((here[:, :2] > 0) == there_are).all())
        assert bool(((away[:, :2] > 0) == there_are).all())
        at_ends = np.isin(merged, [0, last])  # the others have no copies for being one
        assert bool(((here[:, 2] > 0) == (away[:, 2] > 0))[at_ends].all())
        known = (here > 0) & (away > 0)
        known[~at_ends, 2] = False
        worst = max(worst, np.abs(np.log(here[known] / away[known])).max())
    assert 0.5 < worst <= 0.9 + 1e-9


@pytest.mark.parametrize(("level", "epsilon", "n"), [("median", 1.0, 60), ("p10", 1.0, 200), ("p90", 2.0, 41)])
def test_by_depth_no_dataset_loses_and_no_wrong_number_is_likelier(level: str, epsilon: float, n: int) -> None:
    problem = Problem.of(level, epsilon, n, (0.0, 1.0))
    deep, plain = IntervalMechanism.deep(problem), IntervalMechanism.plain(problem)
    t = torch.cat([draw(World(0, 1), problem, 400, 8), (draw(World(0, 1), problem, 400, 9) * 7).round() / 7])
    ratios = deep.losses(t) / plain.losses(t).clamp(min=1e-13)
    assert float(ratios.max()) <= 1 + 1e-6
    assert float(ratios.min()) < 0.5  # ties are what it gains from
    for row in t[::80]:
        places = deep.lattice.places(row)
        (starts, chance), (_, before) = _law(deep, places), _law(plain, places)
        right = starts == int(deep.lattice.places(problem.query(row[None]))[0])
        assert bool((chance[:, :2].sum(1) <= before[:, :2].sum(1) * (1 + 1e-6))[~right].all())


def test_the_draw_follows_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """release_block against the formula; and where distances are beyond L, all weigh the same."""
    from fractions import Fraction

    from lipdp.mechanisms.noise import deepest, release_block

    epsilon = Fraction(3, 2)
    blocks = [(Fraction(0), 3), (Fraction(1, 4), 5), (Fraction(5, 4), 40), (Fraction(9, 4), 7)]
    counts = Counter(release_block(blocks, epsilon)[0] for _ in range(4000))
    weights = np.array([copies * math.exp(-0.75 * float(distance)) for distance, copies in blocks])
    for index, share in enumerate(weights / weights.sum()):
        assert counts[index] == pytest.approx(4000 * share, abs=5 * math.sqrt(4000 * share))
    far = [(deepest(epsilon) + 1, 1), (deepest(epsilon) + 1000, 1)]
    assert 400 < Counter(release_block(far, epsilon)[0] for _ in range(1000))[0] < 600


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    for mechanism in (learned("p25", 0.3, 50), learned("mean", 1.5, 500)):
        mechanism.save(tmp_path / "m")
        again = load(tmp_path / "m")
        t = draw(World(0, 10), mechanism.problem, 20, 1)
        assert torch.equal(again.losses(t, 2), mechanism.losses(t, 2))
        assert again.describe() == mechanism.describe()
    assert 0 <= load(tmp_path / "m").release(torch.zeros(500)) <= 10
    with pytest.raises(ConfigurationError, match="opendp"):
        learned("p25", 0.3, 50).release(torch.zeros(50), sampler="opendp")
    with pytest.raises(ConfigurationError, match="ranks answer quantiles"):
        IntervalMechanism.plain(Problem.of("mean", 1.0, 50, (0, 10)))
    assert len(learned("p25", 0.3, 50).tilt) == intervals_module.PARTS  # type: ignore[attr-defined]


def test_a_file_of_before_is_read_unless_it_liked_round_numbers() -> None:
    mechanism = IntervalMechanism.deep(Problem.of("median", 1.0, 20, (0, 1)))
    content = mechanism.content()
    for rounds in (False, True):
        old = {**content, "state": {**content["state"], "rounds": rounds}}
        if rounds:
            with pytest.raises(ConfigurationError, match="round numbers"):
                from_content(old)
        else:
            assert torch.equal(from_content(old).tilts, mechanism.tilts)
