"""The mean by records beyond a cut: ratios attacked with datasets and tampered tables, losses and the worst ratio searched."""

import math
from fractions import Fraction
from itertools import product

import pytest
import torch

import lipdp
from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.mechanisms import Settings, World, learn
from lipdp.mechanisms.beyond import CELLS, BeyondMechanism, candidate, counted, fitted
from lipdp.mechanisms.problem import Problem
from lipdp.mechanisms.worst import truth_losses
from lipdp.privacy.randomness import Stream
from tests.many import examples
from tests.mechanisms.common import plain_mechanisms

PLACES, SCALE = CELLS * 2**28, 2**60


def made(n=60, epsilon=1.0, cut=4, high=True, bounds=(0.0, 1.0), rows=5):
    """Of datasets with sums far from the ends, half of them clear of the cut."""
    chances = ((0.0, 0.5, 0.0), *[(0.0, 0.5 / (rows - 1), 0.0)] * (rows - 1))
    table = fitted(epsilon, cut, chances, (0.0, n / 2, float(n)), n, 1.2)
    return BeyondMechanism.of(Problem.of("mean", epsilon, n, bounds), cut, high, table)


def least_exp(epsilon):
    """e^ε from below, by its series: independent of what the proof uses."""
    return sum(Fraction(epsilon) ** k / math.factorial(k) for k in range(40))


def chance(mechanism, t, moved, answer):
    """P(released cell = answer | dataset, U), exactly, from the table alone."""
    places = [round(float(x) * PLACES) if mechanism.high else round((1 - float(x)) * PLACES) for x in t]
    cell = PLACES // CELLS
    row = mechanism.table[min(sum(p > mechanism.cut * cell for p in places), len(mechanism.table) - 1)].tolist()
    rho = Fraction(fall_of(mechanism), SCALE)
    total = sum(row) + (row[0] + row[-1]) * rho / (1 - rho)
    z, half = answer - (sum(places) + moved) // cell, len(row) // 2
    inside = row[max(min(z, half), -half) + half]
    return inside * rho ** max(abs(z) - half, 0) / total


def fall_of(mechanism):
    from lipdp.mechanisms.beyond import _fall

    return _fall(mechanism.problem.exact_epsilon)


def hostile_pairs(n, generator):
    """Datasets in which a record goes from one place to another: at the ends, at the cuts, beside them."""
    spots = [0.0, 1.0, 0.8, 0.8 + 1e-9, 0.6, 0.2, 0.2 - 1e-9, float(torch.rand(1, generator=generator))]
    for old, new in product(spots, spots):
        base = [spots[int(k)] for k in torch.randint(len(spots), (n - 1,), generator=generator)]
        few = int(torch.randint(4, (1,), generator=generator))
        base = [x if place < few else 0.3 for place, x in enumerate(base)]
        yield [*base, old], [*base, new]


@pytest.mark.parametrize(("epsilon", "cut", "high"), [(1.0, 4, True), (1.0, 3, False), (0.5, 4, True), (2.5, 3, True)])
def test_no_pair_of_neighbours_is_told_apart_by_more_than_epsilon(epsilon, cut, high):
    rows = {1.0: 5, 0.5: 9, 2.5: 3}[epsilon]
    mechanism = made(n=12, epsilon=epsilon, cut=cut, high=high, rows=rows)
    generator = torch.Generator().manual_seed(cut)
    limit, largest, half = least_exp(Fraction(repr(epsilon))), Fraction(0), mechanism.table.shape[1] // 2
    for one, other in list(hostile_pairs(12, generator))[:: 64 // examples(16) or 1]:
        moved = int(torch.randint(PLACES // CELLS, (1,), generator=generator))
        middle = round(CELLS * sum(one if high else [1 - x for x in one]))
        reach = [*range(-8, 9), -half - 9, -half - 1, -half, half, half + 1, half + 9]
        for place in reach:
            a, b = (chance(mechanism, t, moved, middle + place) for t in (one, other))
            largest = max(largest, a / b, b / a)
    assert 1 < largest <= limit


def test_the_whole_of_epsilon_is_used():
    mechanism = made()
    p, _ = mechanism.chances
    ratios = [abs(math.log(p[0][z] / p[0][z - mechanism.cut])) for z in range(mechanism.cut, p.shape[1])]
    assert 0.999 < max(ratios) <= 1.0


def test_no_table_passes_that_was_tampered_with():
    mechanism, generator = made(), torch.Generator().manual_seed(3)
    refused = 0
    for _ in range(examples(40)):
        table = mechanism.table.clone()
        row, place = (int(torch.randint(size, (1,), generator=generator)) for size in table.shape)
        table[row, place] = int(table[row, place] * float(1.4 + torch.rand(1, generator=generator)))
        try:
            BeyondMechanism.of(mechanism.problem, 4, True, table)
        except ConfigurationError:
            refused += 1
    assert refused >= 0.8 * examples(40)  # a cell in the middle may have room
    for table in (mechanism.table[[0, 0, 0, 0, 0]], mechanism.table[[0]], mechanism.table[:, ::2].contiguous()):
        with pytest.raises(ConfigurationError, match=r"not private|odd"):
            BeyondMechanism.of(mechanism.problem, 4, True, table)
    with pytest.raises(ConfigurationError, match="not private"):
        BeyondMechanism.of(Problem.of("mean", 0.99, 60, (0, 1)), 4, True, mechanism.table)
    with pytest.raises(ConfigurationError, match="not private"):
        BeyondMechanism.of(mechanism.problem, 5, True, mechanism.table)
    with pytest.raises(ConfigurationError, match="mean"):
        BeyondMechanism.of(Problem.of("median", 1.0, 60, (0, 1)), 4, True, mechanism.table)
    for bad in (mechanism.table * 0, -mechanism.table, mechanism.table * 2**6):
        with pytest.raises(ConfigurationError):
            BeyondMechanism.of(mechanism.problem, 4, True, bad)


def test_cells_are_drawn_as_the_table_says_tails_among_them():
    from lipdp.mechanisms.beyond import _drawn

    row, epsilon, stream = [3, 1, 2, 1, 1, 1, 1, 1, 1, 1, 2], Fraction(1), Stream()
    rho = Fraction(fall_of(made()), SCALE)
    drawn, total = [_drawn(row, epsilon, stream) for _ in range(4000)], sum(row) + 5 * rho / (1 - rho)
    for cell, weight in [(-5, 3), (0, 1), (5, 2), (6, 2 * rho), (-6, 3 * rho), (-8, 3 * rho**3)]:
        expected = float(weight / total)
        assert abs(drawn.count(cell) / 4000 - expected) < 4.5 * math.sqrt(expected / 4000)


@pytest.mark.parametrize(("place", "high"), [(0.0, True), (0.3, True), (0.9, True), (0.9, False), (1.0, False)])
def test_expected_losses_are_those_of_releases(place, high):
    mechanism = made(n=40, high=high, bounds=(-2.0, 3.0))
    t = torch.full((1, 40), place, dtype=torch.float64)
    answers = [mechanism.release(-2 + 5 * t[0]) for _ in range(3000)]
    simulated = sum((a - (-2 + 5 * place)) ** 2 for a in answers) / 3000
    expected = float(mechanism.losses(t)) * mechanism.problem.loss_scale
    assert simulated == pytest.approx(expected, rel=0.2)
    assert all(-2 <= a <= 3 for a in answers)
    within = sum(abs(a - (-2 + 5 * place)) <= mechanism.error(0.95) * 5 for a in answers) / 3000
    assert within > 0.935


@pytest.mark.parametrize(("epsilon", "n"), [(1.0, 30), (1.0, 3000), (2.0, 200)])
def test_no_dataset_loses_more_than_it_says(epsilon, n):
    mechanism = learn("mean", epsilon, n, (0, 1), World(), settings=Settings(robust=200))
    assert isinstance(mechanism, BeyondMechanism)
    assert mechanism.report["worst_case"] == "of all datasets"
    assert mechanism.report["worst_ratio"] <= 1.25
    generator = torch.Generator().manual_seed(n)
    levels = torch.tensor([0.0, 1.0, 0.8, 0.81, 0.79, 0.2, 0.19, 0.5], dtype=torch.float64)
    counts = torch.rand(300, 8, generator=generator, dtype=torch.float64) ** 6 * (torch.rand(300, 8, generator=generator) < 0.4)
    counts[:, 0] += 1e-9
    which = torch.multinomial(counts, n, replacement=True, generator=generator)
    t = torch.cat([levels[which].sort(1).values, levels[:, None].expand(8, n)])
    plain = torch.stack([truth_losses(one, t.mean(1)) for one in plain_mechanisms(mechanism.problem)]).amin(0)
    ratios = mechanism.losses(t) / plain
    assert float(ratios.max()) <= mechanism.report["worst_ratio"] + 0.01
    clear = (counted(t)[:, 2:] == 0).any(1)  # beyond .8, at either end
    assert float(ratios[clear].min()) < 0.85


def test_the_end_that_a_belief_is_clear_of_is_cut():
    problem = Problem.of("mean", 1.0, 300, (0, 1))
    for low, cut, high in [(0.0, 3, True), (0.5, 3, False)]:
        t = low + 0.5 * torch.rand(50, 300, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        found = candidate(problem, t.mean(1), counted(t), 0.2)
        assert (found.cut, found.high) == (cut, high)
        plain = torch.stack([truth_losses(one, t.mean(1)) for one in plain_mechanisms(problem)]).amin(0)
        assert float((found.losses(t) / plain).max()) < 0.62
    wide = torch.cat([0.7 * torch.rand(40, 300).double(), torch.rand(10, 300).double()])
    assert (candidate(problem, wide.mean(1), counted(wide), 0.2).cut) == 4
    assert candidate(Problem.of("mean", 0.05, 300, (0, 1)), t.mean(1), counted(t), 0.2) is None
    assert candidate(Problem.of("mean", 1.0, 5, (0, 1)), t.mean(1), counted(t[:, :5]), 0.2) is None


def test_files_are_proved_anew(tmp_path):
    mechanism = learn("mean", 1.0, 100, (0, 10), World(0, 10), settings=Settings(robust=200))
    mechanism.save(tmp_path / "mean.mechanism")
    again = lipdp.mechanisms.load(tmp_path / "mean.mechanism")
    assert isinstance(again, BeyondMechanism)
    assert torch.equal(again.table, mechanism.table)
    assert again.describe() == mechanism.describe()
    content = mechanism.content()
    content["state"]["table"] = mechanism.table.clone()
    content["state"]["table"][0, mechanism.table.shape[1] // 2] *= 2
    from lipdp.mechanisms.files import save_file

    save_file(content, tmp_path / "bad.mechanism", "lipdp mechanism 2")
    with pytest.raises(CheckpointError, match="not private"):
        lipdp.mechanisms.load(tmp_path / "bad.mechanism")
    resized = mechanism.for_size(70)
    assert 0 <= resized.release(torch.rand(70) * 10) <= 10
    with pytest.raises(ConfigurationError, match="opendp"):
        mechanism.release(torch.rand(100), sampler="opendp")


def test_answers_have_intervals_that_hold_whatever_the_data_are():
    plan = lipdp.mechanisms.plan("mean", 1.0, 50, (0, 10), World(0, 10), settings=Settings(robust=200))
    for x in (torch.zeros(50), torch.full((50,), 10.0), torch.linspace(0, 10, 50)):
        found = [plan.release(x)[0] for _ in range(150)]
        assert found[0].basis == "noise"
        assert sum(one.interval[0] - 1e-9 <= float(x.mean()) <= one.interval[1] + 1e-9 for one in found) >= 134
