"""What a budget adds up is what dp-accounting says, whatever the order and the grouping, and never less."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import dp_accounting
import pytest
from dp_accounting import dp_event, pld
from dp_accounting.pld import common, privacy_loss_distribution
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp.errors import BudgetError, ConfigurationError
from lipdp.privacy import Approximate, PrivateRun, Pure, Release
from lipdp.privacy._analyses import Figure
from lipdp.privacy._step_losses import SampledGaussian
from lipdp.privacy.composition import Composition, Totals, _merged, check_event
from lipdp.privacy.costs import from_data, from_key, parts, to_data, to_key
from tests.privacy.exact_losses import exact_epsilon

DELTA = Fraction(1, 10**5)
RELATIONS = {
    "add_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def sampled(q: float, sigma: float) -> Any:
    return dp_event.PoissonSampledDpEvent(q, dp_event.GaussianDpEvent(sigma))


def totals(*costs: Any, adjacency: Any = "add_remove") -> Totals:
    made = Totals(adjacency)
    for cost in costs:
        for event, count in parts(cost):
            made.add({to_key(event): count})
    return made


def epsilon(*costs: Any, adjacency: Any = "add_remove", delta: Fraction = DELTA) -> float:
    return Composition(delta, adjacency).epsilon(totals(*costs, adjacency=adjacency))


def direct(events: list[tuple[Any, int]], pure: list[float], adjacency: str = "add_remove", delta: float = 1e-5) -> float:
    """dp-accounting, called as its documentation says."""
    accountant = pld.PLDAccountant(RELATIONS[adjacency])
    for event, count in events:
        accountant.compose(event, count)
    distribution = accountant._pld
    for value in pure:
        stated = common.DifferentialPrivacyParameters(value, 0)
        distribution = distribution.compose(privacy_loss_distribution.from_privacy_parameters(stated))
    return float(distribution.get_epsilon_for_delta(delta))


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_training_statistics_and_two_mechanisms_are_dp_accountings_own_number(adjacency: str) -> None:
    run = PrivateRun(0.02, ((2.6, 200), (2.2, 50)), (Release("statistics", "gaussian", 25.0),))
    found = epsilon(run, Pure(0.2, "replace_one"), Pure(0.35, "replace_one"), adjacency=adjacency)
    events = [(sampled(0.02, 2.6), 200), (sampled(0.02, 2.2), 50), (sampled(1.0, 25.0), 1)]
    expected = direct(events, [0.2, 0.35], adjacency)
    assert found == pytest.approx(expected, abs=1e-9)
    assert direct(events, [], adjacency) < expected < direct(events, [], adjacency) + 0.55


def test_in_any_order_and_in_any_pieces() -> None:
    whole = epsilon(PrivateRun(0.02, ((2.6, 300),)), 0.3, PrivateRun(0.01, ((2.0, 50),)))
    pieces = epsilon(0.1, PrivateRun(0.02, ((2.6, 100),)), PrivateRun(0.01, ((2.0, 50),)), 0.2, PrivateRun(0.02, ((2.6, 200),)))
    assert pieces < whole < pieces + 0.1  # 0.1 and 0.2 apart cost less than any 0.3 may
    composition, growing = Composition(DELTA, "add_remove"), Totals("add_remove")
    for cost in (PrivateRun(0.02, ((2.6, 100),)), 0.3, PrivateRun(0.02, ((2.6, 1),)), PrivateRun(0.01, ((2.0, 50),))):
        growing.add({to_key(event): count for event, count in parts(cost)})
        composition.epsilon(growing)  # the composition goes on from here
    for _ in range(10):
        growing.add({to_key(sampled(0.02, 2.6)): 19})
        growing.add({to_key(sampled(0.02, 2.6)): 1})
        composition.epsilon(growing)
    growing.add({to_key(sampled(0.02, 2.6)): -1})  # and back
    assert composition.epsilon(growing) == pytest.approx(whole, abs=1e-9)


sigmas = st.floats(1.5, 50)
noises = st.builds(lambda q, s, n: PrivateRun(q, ((s, n),)), st.sampled_from([1e-3, 0.03, 1.0]), sigmas, st.integers(1, 300))
pures = st.builds(lambda e, a: Pure(e, a), st.floats(1e-4, 0.5), st.sampled_from([None, "add_remove", "replace_one"]))


@settings(max_examples=6, deadline=None)
@given(st.lists(noises, min_size=1, max_size=2), st.lists(pures, max_size=3), st.sampled_from([1e-4, 1e-6, 1e-9]))
def test_the_quick_bound_is_never_below_the_tight_one(runs: list[Any], stated: list[Any], delta: float) -> None:
    exact = Fraction(delta)
    have, composition = totals(*runs, *stated), Composition(exact, "add_remove")
    tight, quick = composition.epsilon(have), have.quick({}, exact)
    assert 0 <= tight <= quick * (1 + 1e-9) + 1e-6
    assert quick == pytest.approx(totals(*runs).quick({k: n for c in stated for k, n in totals(c).counts.items()}, exact)) or len(
        stated
    ) != len({to_key(c) for c in stated})
    if math.isfinite(tight):
        assert composition.fits(have, {}, Fraction(tight) * Fraction("1.000001"))
        assert not composition.fits(have, {}, Fraction(tight) * Fraction("0.7")) or tight == 0


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(1e-3, 1.0), min_size=1, max_size=6), st.sampled_from([1e-5, 1e-9]))
def test_pure_releases_cost_at_most_their_sum_and_at_least_what_randomised_response_costs(
    values: list[float], delta: float
) -> None:
    found = epsilon(*values, delta=Fraction(delta))
    total = sum(Fraction(repr(value)) for value in values)
    assert found <= float(total)
    # Randomised response is ε-DP: the composition of as many has to be covered. By enumeration.
    losses, mass = [0.0], [1.0]
    for value in values:
        up = 1 / (1 + math.exp(-value))
        losses = [x + s * value for x in losses for s in (1, -1)]
        mass = [m * p for m in mass for p in (up, 1 - up)]
    spent = sum(m * max(0.0, -math.expm1(found - x)) for x, m in zip(losses, mass, strict=True))
    assert spent <= delta * (1 + 1e-6) + 1e-15


def test_adjacencies() -> None:
    assert epsilon(Pure(0.25, "add_remove"), adjacency="replace_one") == pytest.approx(0.5, abs=1e-4)
    assert epsilon(Pure(0.25, "replace_one"), adjacency="replace_one") == pytest.approx(0.25, abs=1e-4)
    assert epsilon(Pure(0.25), adjacency="replace_one") == pytest.approx(0.25, abs=1e-4)
    assert epsilon(Pure(0.25, "add_remove")) == epsilon(Pure(0.25, "replace_one")) == pytest.approx(0.25, abs=1e-4)
    assert epsilon(dp_event.LaplaceDpEvent(8.0), adjacency="replace_one") == pytest.approx(0.25, abs=1e-4)
    twice = totals(Approximate(0.25, 1e-7, "add_remove"), adjacency="replace_one")
    assert (twice.stated, float(twice.slack)) == (Fraction(1, 2), pytest.approx(1e-7 * (1 + math.exp(0.25))))


def test_approximate_releases_use_up_delta() -> None:
    stated = Approximate(1.0, 4e-6)
    assert epsilon(stated) == pytest.approx(1.0, abs=1e-4)
    assert epsilon(stated, stated) <= 2.0
    assert epsilon(stated, stated, stated) == math.inf  # 1.2e-5 of δ = 1e-5
    run = PrivateRun(0.02, ((2.6, 300),))
    assert direct([(sampled(0.02, 2.6), 300)], []) < epsilon(run, stated) <= direct([(sampled(0.02, 2.6), 300)], [], delta=6e-6) + 1
    assert epsilon(Approximate(0.0, 1e-5)) == 0.0
    assert Composition(DELTA, "add_remove").fits(totals(stated), {}, Fraction(1))
    assert not Composition(Fraction(0), "add_remove").fits(totals(stated), {}, Fraction(100))


def test_many_kinds_are_merged_upwards() -> None:
    values = [0.001 + 1e-6 * number for number in range(200)]
    have = totals(*values)
    merged = _merged(have.counts)
    assert len(merged) < 30
    assert sum(merged.values()) == 200
    assert sum(n * from_key(k).epsilon for k, n in merged.items()) >= have.stated
    found = epsilon(*values)
    assert epsilon([0.001] * 200) <= found <= epsilon([0.00121] * 200)


def test_a_finer_grid_is_asked_where_the_first_one_refuses() -> None:
    event, steps = sampled(1e-3, 11.6), 100_000
    key = to_key(event)
    fine = pld.PLDAccountant(value_discretization_interval=1e-5).compose(event, steps).get_epsilon(1e-5)
    coarse = pld.PLDAccountant().compose(event, steps).get_epsilon(1e-5)
    total = Fraction((fine + coarse) / 2)
    assert fine < coarse * 0.99
    composition = Composition(DELTA, "add_remove")
    assert composition.fits(Totals("add_remove"), {key: steps}, total)
    spent = composition.epsilon(totals(dp_event.SelfComposedDpEvent(event, steps)), total)
    assert fine * 0.998 < spent <= fine  # the grid of plans is finer still
    assert not composition.fits(Totals("add_remove"), {key: steps}, Fraction(fine * 0.99))


def test_a_plan_for_all_of_the_budget_fits_whatever_it_was_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planning accountant may be tighter than the grid here: its own figure counts."""
    import lipdp.privacy.composition as module

    run = PrivateRun(0.02, ((2.6, 50), (2.2, 10)), (Release("statistics", "gaussian", 25.0), Release("clip", "pure", 0.05)))
    asked = []

    def tighter(steps: list[tuple[SampledGaussian, int]], delta: float, adjacency: str) -> Figure:
        asked.append(([(step.sigma, step.rate, count) for step, count in steps], delta, adjacency))
        return Figure(0.123)

    exact = epsilon(run)
    monkeypatch.setattr(module, "parts_epsilon", tighter)
    composition, more = Composition(DELTA, "add_remove"), totals(run).counts
    assert composition.fits(Totals("add_remove"), more, Fraction(exact) * Fraction("0.95"))
    ((steps, delta, adjacency),) = asked
    assert (delta, adjacency) == (1e-5, "add_remove")
    assert steps == [(2.6, 0.02, 50), (2.2, 0.02, 10), (pytest.approx(25.0), 1.0, 1)]
    other = totals(run, sampled(0.5, 90.0)).counts  # two rates
    assert composition.fits(Totals("add_remove"), other, Fraction(exact) * Fraction("0.95"))
    assert not composition.fits(Totals("add_remove"), totals(run, dp_event.LaplaceDpEvent(50.0)).counts, Fraction(exact))
    assert len(asked) == 2


def test_the_rounding_of_transforms_is_reckoned_with() -> None:
    """At δ = 1e-12, ten thousand steps: dp-accounting's own figure may be below the true one; what is charged is not."""
    event, delta, sigma = sampled(4e-3, 1.16329), 1e-12, 1.16329
    composition = Composition(Fraction(1, 10**12), "add_remove")
    spent = composition.epsilon(totals(dp_event.SelfComposedDpEvent(event, 10_000)))
    exact = exact_epsilon(sigma, 4e-3, 10_000, delta, spent)
    assert exact * (1 - 1e-6) <= spent <= exact * 1.001


def test_what_no_distribution_holds_is_bounded_otherwise_or_infinite() -> None:
    assert 5e6 < epsilon(PrivateRun(1.0, ((1e-3, 10),))) < 2e7
    assert 2e7 < epsilon(PrivateRun(1.0, ((1e-3, 10),)), adjacency="replace_one") < 8e7
    assert epsilon(PrivateRun(0.5, ((1e-3, 10),)), adjacency="replace_one") == math.inf
    assert epsilon(Pure(1e6)) == 1e6
    assert epsilon(Pure(1e6), PrivateRun(0.01, ((2.0, 10),))) > 1e6


def test_texts_are_the_events() -> None:
    for event in (
        Pure(0.1, "replace_one"),
        Approximate(0.5, 1e-7),
        sampled(0.1, 1.7),
        dp_event.LaplaceDpEvent(3.0),
        dp_event.MixtureOfGaussiansDpEvent(1.5, [0.0, 1.0], [0.5, 0.5]),
    ):
        assert from_key(to_key(event)) == event
        assert from_data(to_data(event)) == event
    assert to_key(Pure(0.5)) == to_key(Pure(Fraction(1, 2))) != to_key(Pure(0.5, "add_remove"))
    import numpy as np

    assert to_key(dp_event.GaussianDpEvent(np.float64(2.5))) == to_key(dp_event.GaussianDpEvent(2.5))
    nested = dp_event.ComposedDpEvent([dp_event.SelfComposedDpEvent(sampled(0.1, 2.0), 3), dp_event.NoOpDpEvent()])
    assert list(parts([dp_event.SelfComposedDpEvent(nested, 2), 0.5])) == [(sampled(0.1, 2.0), 6), (Pure(0.5), 1)]


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        ("one", "a cost is"),
        (None, "a cost is"),
        (True, "a cost is"),
        (0.0, "above 0"),
        (-1.0, "above 0"),
        (math.nan, "a cost is"),
        (math.inf, "a cost is"),
        ({"a": 1}, "a cost is"),
    ],
)
def test_what_is_no_cost(cost: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        list(parts(cost))


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (dp_event.NonPrivateDpEvent(), BudgetError),
        (dp_event.UnsupportedDpEvent(), BudgetError),
        (dp_event.GaussianDpEvent(0.0), BudgetError),
        (dp_event.GaussianDpEvent(-1.0), BudgetError),
        (dp_event.GaussianDpEvent(math.nan), BudgetError),
        (sampled(0.1, -1.0), BudgetError),
        (sampled(1.5, 1.0), ConfigurationError),
        (sampled(0.0, 1.0), ConfigurationError),
        (dp_event.LaplaceDpEvent(0.0), BudgetError),
        (dp_event.RepeatAndSelectDpEvent(sampled(0.1, 1.0), 10, 1), ConfigurationError),
    ],
)
def test_events_without_a_cost_are_refused(event: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        check_event(event, "add_remove", DELTA)


def test_a_pure_budget_pays_for_pure_releases_only() -> None:
    for event in (sampled(0.1, 1.0), Approximate(0.1, 1e-9), dp_event.LaplaceDpEvent(2.0)):
        with pytest.raises(BudgetError, match="delta 0"):
            check_event(event, "add_remove", Fraction(0))
    check_event(Pure(1.0), "add_remove", Fraction(0))
