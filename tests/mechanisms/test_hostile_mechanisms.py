"""Every field of a saved mechanism with hostile values: refused clearly, or harmless, never a raw exception.

Harmless: the noise that a release draws is for a sensitivity that neighbouring datasets do not exceed, at the ε that it charges and
reports. Each edit is tried as it is, when the digest gives it away, and with a digest made to match.
"""

from __future__ import annotations

import contextlib
import functools
import math
from fractions import Fraction

import pytest
import torch

from lipdp.digest import content_digest
from lipdp.errors import CheckpointError, LipdpError
from lipdp.mechanisms import BudgetLedger, Problem, learn_columns, learn_vector, load, load_columns, load_vector, truths
from lipdp.mechanisms import mechanism as module
from lipdp.mechanisms.experts import additive, constant, moments, rank_utility, selection
from lipdp.mechanisms.intervals import PARTS, IntervalMechanism
from lipdp.mechanisms.mechanism import AdditiveMechanism, SelectionMechanism
from lipdp.mechanisms.networks import LaplaceNetwork, UtilityNetwork
from lipdp.mechanisms.paper import laplace_mechanism, utility_mechanism
from lipdp.mechanisms.postprocess import Network, Plain, Sample, Table
from lipdp.mechanisms.problem import Query
from lipdp.mechanisms.statistics import PiecewiseSum, QueryStatistic
from lipdp.mechanisms.truths import SquaresMechanism
from lipdp.mechanisms.utilities import CountNetwork, LearnedUtility
from lipdp.mechanisms.vector import VectorMechanism

from ..hostile import all_edits, refused_or
from .common import BOUNDS, TINY, N, datasets, private


@functools.cache
def made(name):
    """A mechanism of each kind, and how it is loaded."""
    median, mean, variance = (Problem.of(query, 1.0, N, BOUNDS) for query in ("median", "mean", "variance"))
    t = datasets(80, seed=3)
    torch.manual_seed(0)
    if name == "constant":
        return constant(median, Sample.of(median, t)), load
    if name == "query":
        return additive(mean, "x", QueryStatistic(mean.query, N, (0.1, 0.9)), "staircase", Sample.of(mean, t)), load
    if name == "clipped mean for a median":
        return additive(median, "x", QueryStatistic(Query("mean"), N), "laplace", Sample.of(median, t)), load
    if name == "moments":
        sample = Sample.of(variance, t)
        mechanism = additive(variance, "x", moments(0.1, 0.9, 0.5), "laplace", sample)
        return module.replace(mechanism, report={"expected_loss": 0.25, "seed": 1, "ratios": [1.0, 2.0]}), load
    if name == "sums":
        knots = torch.linspace(0, 1, 9, dtype=torch.float64)
        statistic = PiecewiseSum.quantised(knots, torch.stack([knots, knots**2, (3 * knots).sin()], 1))
        return AdditiveMechanism(median, "x", statistic, "laplace", Network(3, 1, 8).eval()), load
    if name == "rank":
        return selection(median, "x", rank_utility(median, 12), "permute_and_flip", Sample.of(median, t)), load
    if name == "learned":
        utility = LearnedUtility(rank_utility(median, 12).grid, Fraction(N, 2), CountNetwork(12, 4, 3).double())
        return selection(median, "x", utility, "exponential", Sample.of(median, t)).for_size(2 * N).for_size(N), load
    if name == "laplace network":
        return laplace_mechanism(mean, LaplaceNetwork(N, 0.1, 6, "groupsort", True).double()), load
    if name == "utility network":
        return utility_mechanism(median, UtilityNetwork(N, 0.5, 6).double()), load
    if name == "plain":
        axis = torch.linspace(-1, 2, 7, dtype=torch.float64)
        decoder = Plain(1.0, Table((axis,), 0.01 * axis.sin()))
        return AdditiveMechanism(mean, "x", QueryStatistic(mean.query, N), "laplace", decoder), load
    if name == "interval":
        return IntervalMechanism.tilted(median, torch.linspace(1, 2, PARTS), 0.01 * torch.ones(PARTS), (0.1, 0.2), 0.5), load
    if name == "squares":
        return SquaresMechanism.of(variance, 8, 0.25, 48), load
    if name == "split":
        return learn_vector(["mean", "variance"], 2.0, N, BOUNDS, settings=TINY), load_vector
    if name == "joint":
        knots = torch.linspace(0, 1, 9, dtype=torch.float64)
        statistic, network = PiecewiseSum.quantised(knots, torch.stack([knots, knots**2], 1)), Network(2, 2, 8).eval()
        one = AdditiveMechanism(mean, "x", statistic, "laplace", network)
        return VectorMechanism((mean, variance), 1.0, (one,), network, {"expected_loss": {"mean": 1.0}}), load_vector
    return learn_columns("mean", 2.0, N, [(0, 10), (-1, 1)], settings=TINY), load_columns


NAMES = (
    "constant",
    "query",
    "clipped mean for a median",
    "moments",
    "sums",
    "rank",
    "learned",
    "laplace network",
    "utility network",
    "plain",
    "interval",
    "squares",
    "split",
    "joint",
    "columns",
)


def neighbours(n, draws=40):
    """Unit datasets in pairs that differ in one record, hard ones among them."""
    draw = torch.Generator().manual_seed(5)
    t = torch.rand(draws, n, generator=draw, dtype=torch.float64)
    t[: draws // 4] = (t[: draws // 4] > 0.5).double()
    t[draws // 4 : draws // 2] = (torch.arange(n) < n // 2).double()
    t[-1], t[-2] = 0.0, 1.0
    other = t.clone()
    other[:, 0] = 1 - t[:, 0].round()
    return t.sort(-1).values, other.sort(-1).values


def check_part(part):
    """What is noised moves by at most the sensitivity that the noise is for."""
    n = part.problem.n
    if n > 10**5:
        return
    one, other = neighbours(n)
    if isinstance(part, AdditiveMechanism):
        moved = (part.statistic.integers(one) - part.statistic.integers(other)).abs().sum(1)
        assert int(moved.max()) <= part.statistic.sensitivity
        if isinstance(part.statistic, QueryStatistic) and part.statistic.window == (0.0, 1.0):
            true = part.statistic.query.sensitivity(n)
            assert part.statistic.sensitivity * Fraction(part.statistic.unit) >= true
    if isinstance(part, SelectionMechanism):
        moved = (part.utility.integers(one) - part.utility.integers(other)).abs()
        assert int(moved.max()) <= part.utility.sensitivity
    if isinstance(part, SquaresMechanism):
        check_part(part.other)
        pairs = zip(part.statistic(one), part.statistic(other), strict=True)
        assert max(abs(a[0] - b[0]) + abs(a[1] - b[1]) for a, b in pairs) <= part.moves


def noised_for(part):
    """The sensitivities that a release of it may draw noise for."""
    if isinstance(part, SquaresMechanism):
        return [part.moves, part.other.statistic.sensitivity]
    own = getattr(part, "statistic", getattr(part, "utility", None))
    return [] if own is None else [own.sensitivity]


def harmless(monkeypatch, folder, mechanism):
    """Everything that a release draws is for the sensitivity of its part, and together costs what is charged and reported."""
    parts = getattr(mechanism, "parts", (mechanism,))
    for part in parts:
        check_part(part)
    spent = []

    def noted(function):
        def call(kind, values, sensitivity, epsilon, sampler="auto"):
            assert sensitivity in [own for part in parts for own in noised_for(part)]
            spent.append(epsilon)
            if kind == "staircase" and epsilon > 20:
                return values  # exact draws take a second and more at such an epsilon
            return function(kind, values, sensitivity, epsilon, sampler)

        return call

    with monkeypatch.context() as patched:
        for name in ("release_noise", "release_selection"):
            patched.setattr(module, name, noted(getattr(module, name)))
        patched.setattr(truths, "release_noise", noted(truths.release_noise))
        n, low, high = (getattr(parts[0].problem, name) for name in ("n", "low", "high"))
        if n <= 10**5:
            x = low + (high - low) * torch.rand(n, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
            (folder / "ledger").unlink(missing_ok=True)
            ledger = BudgetLedger(folder / "ledger", budget=1e12, dataset="x")
            mechanism.release(_shaped(mechanism, x), ledger=ledger, clamp=True)
            assert ledger.spent == mechanism.epsilon
            assert sum(spent) <= Fraction(mechanism.epsilon)
    described = mechanism.describe()
    assert described["epsilon"] == mechanism.epsilon
    assert described["delta"] == 0.0
    if described.get("sensitivity") is not None:
        assert described["sensitivity"] == mechanism.sensitivity
    with contextlib.suppress(LipdpError):  # one that was not evaluated
        mechanism.expected_loss()
    assert str(described)


def _shaped(mechanism, x):
    return torch.stack([x] * len(mechanism.parts), 1) if type(mechanism).__name__ == "ColumnMechanism" else x


def run_case(name, seal, tmp_path, monkeypatch):
    mechanism, loader = made(name)
    file = tmp_path / "mechanism"
    mechanism.save(file)
    content = torch.load(file, weights_only=True)
    kept, outcomes, failures = dict(content), {"refused": 0, "harmless": 0}, []

    def use(edited):
        torch.save(edited, file)
        return loader(file)

    for what, edited in all_edits(content, 1, seed=NAMES.index(name) + 100 * seal):
        own = {key: value for key, value in edited.items() if key != "digest"}
        try:
            digest = content_digest(own).hex()
        except TypeError:
            continue  # nothing that torch would write
        if digest == kept["digest"] == edited.get("digest"):
            continue
        try:
            outcome = refused_or(
                what, use, {**own, "digest": digest} if seal else edited, functools.partial(harmless, monkeypatch, tmp_path)
            )
            outcomes[outcome] += 1
        except AssertionError as error:
            failures.append(f"{what}: {error}")
    assert not failures, f"{len(failures)} of {sum(outcomes.values()) + len(failures)}:\n" + "\n".join(failures[:40])
    print(name, "sealed" if seal else "as edited", outcomes)
    return outcomes


@pytest.mark.parametrize("name", NAMES)
def test_edited_mechanisms_are_refused(name, tmp_path, monkeypatch):
    assert run_case(name, False, tmp_path, monkeypatch)["harmless"] == 0


@pytest.mark.parametrize("name", NAMES)
def test_mechanisms_with_a_forged_digest_are_refused_or_harmless(name, tmp_path, monkeypatch):
    assert run_case(name, True, tmp_path, monkeypatch)["refused"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_harness_accepts_the_mechanism_as_it_is(name, tmp_path, monkeypatch):
    mechanism, loader = made(name)
    mechanism.save(tmp_path / "m")
    again = loader(tmp_path / "m")
    assert again.describe() == mechanism.describe()
    harmless(monkeypatch, tmp_path, again)


def test_the_size_of_the_data_is_said_once(tmp_path):
    """It stood beside the statistic too: 5,000 for 50 was released with a hundredth of the noise."""
    mechanism, _ = made("query")
    file = tmp_path / "m"
    mechanism.save(file)
    content = torch.load(file, weights_only=True)
    content["state"]["statistic"]["n"] = 100 * N
    torch.save(content, file)
    with pytest.raises(CheckpointError, match="'n'"):
        load(file)
    with pytest.raises(LipdpError, match="for 2000 records"):
        module.replace(mechanism, statistic=QueryStatistic(Query("mean"), 100 * N))


def test_a_report_does_not_overrule_the_guarantee(tmp_path):
    mechanism = module.replace(made("rank")[0], report={"epsilon": 1e-9, "sensitivity": 0.0, "delta": 1.0, "seed": 3})
    mechanism.save(tmp_path / "m")
    described = load(tmp_path / "m").describe()
    assert (described["epsilon"], described["delta"], described["seed"]) == (1.0, 0.0, 3)
    assert described["sensitivity"] == mechanism.sensitivity > 0


def test_an_interrupted_save_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    file = tmp_path / "m"
    made("query")[0].save(file)
    before = file.read_bytes()

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="full"):
        made("rank")[0].save(file)
    assert file.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_private_data_are_still_answered(tmp_path):
    made("query")[0].save(tmp_path / "m")
    assert math.isfinite(load(tmp_path / "m").release(private(1)))
