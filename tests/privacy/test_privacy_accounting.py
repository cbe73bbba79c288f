"""ε and δ against dp-accounting called directly and against Opacus, and the properties any accountant has."""

from __future__ import annotations

import itertools
import math
import warnings

import dp_accounting
import numpy as np
import pytest
from dp_accounting import pld, rdp
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp import privacy
from lipdp.errors import ConfigurationError, LipdpError

RELATIONS = {
    "add_remove": dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    "replace_one": dp_accounting.NeighboringRelation.REPLACE_ONE,
}


def run_event(sigma, q, steps):
    return dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma)), steps)


@pytest.mark.parametrize("adjacency", RELATIONS)
@pytest.mark.parametrize(("sigma", "q", "steps"), [(1.0, 0.01, 1000), (3.0, 0.3, 100), (5.0, 1.0, 20), (2.0, 0.1, 1)])
def test_pld_is_dp_accounting(adjacency, sigma, q, steps):
    direct = pld.PLDAccountant(RELATIONS[adjacency])
    direct.compose(run_event(sigma, q, steps))
    run = {"noise_multiplier": sigma, "sampling_rate": q, "steps": steps, "adjacency": adjacency}
    # The same grid; ours has what rounding may hide on top, and theirs may be off by the rounding of its transforms.
    for d in (1e-5, 1e-8):
        assert privacy.epsilon(**run, delta=d) == pytest.approx(direct.get_epsilon(d), rel=2e-6)
    for e in (0.5, 3.0):
        assert privacy.delta(**run, epsilon=e) == pytest.approx(direct.get_delta(e), rel=1e-3, abs=1e-12)


@pytest.mark.parametrize(("sigma", "q", "steps"), itertools.product([0.7, 2.0], [0.01, 0.3, 1.0], [1, 1000]))
def test_rdp_is_dp_accounting(sigma, q, steps):
    direct = rdp.RdpAccountant()
    direct.compose(run_event(sigma, q, steps))
    run = {"noise_multiplier": sigma, "sampling_rate": q, "steps": steps, "accountant": "rdp"}
    assert privacy.epsilon(**run, delta=1e-5) == pytest.approx(direct.get_epsilon(1e-5), abs=1e-9)
    assert privacy.delta(**run, epsilon=2.0) == pytest.approx(direct.get_delta(2.0), abs=1e-9)


def opacus_epsilon(sigma, q, steps, d):
    accountants = pytest.importorskip("opacus.accountants")
    ledger = accountants.RDPAccountant()
    ledger.history = [(sigma, q, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ledger.get_epsilon(d)


@pytest.mark.parametrize(
    ("sigma", "q", "steps"),
    [(1.0, 0.001, 5000), (1.0, 0.01, 10_000), (1.0, 0.01, 100), (2.0, 0.01, 5000), (2.0, 0.1, 100), (5.0, 0.1, 5000)],
)
def test_rdp_is_opacus(sigma, q, steps):
    """Same conversion (Balle et al. 2020, Theorem 21), and dp-accounting's default orders contain Opacus'."""
    ours = privacy.epsilon(noise_multiplier=sigma, sampling_rate=q, steps=steps, delta=1e-5, accountant="rdp")
    assert ours == pytest.approx(opacus_epsilon(sigma, q, steps, 1e-5), abs=1e-4)


def test_where_rdp_differs_from_opacus():
    """At fractional orders dp-accounting sums the series' absolute values, an upper bound (and drops orders where that does
    not converge); Opacus sums it signed. So where the best order is a small fraction dp-accounting is higher, never lower.
    Where the best order is above 63, Opacus' last one, dp-accounting (up to 1024) is lower."""
    q, s = {"delta": 1e-5, "accountant": "rdp"}, {"steps": 100, "sampling_rate": 0.3}
    assert 0 < privacy.epsilon(noise_multiplier=1.0, **s, **q) - opacus_epsilon(1.0, 0.3, 100, 1e-5) + 1e-9 < 1
    assert privacy.epsilon(noise_multiplier=5.0, sampling_rate=0.01, steps=1, **q) < opacus_epsilon(5.0, 0.01, 1, 1e-5)


def test_opacus_orders_are_among_ours():
    accountants = pytest.importorskip("opacus.accountants")
    assert set(accountants.RDPAccountant.DEFAULT_ALPHAS) <= set(rdp.RdpAccountant().orders.tolist())


@pytest.mark.parametrize(("accountant", "expected"), [("rdp", 6.713), ("pld", 6.188)])
def test_anchor(accountant, expected):
    run = {"noise_multiplier": 1.0, "sampling_rate": 0.01, "steps": 10_000, "delta": 1e-5}
    assert privacy.epsilon(**run, accountant=accountant) == pytest.approx(expected, abs=5e-4)


def test_full_batch_pld_is_the_analytic_gaussian():
    """q = 1: T steps are one Gaussian of σ/√T, whose ε is known in closed form (Balle & Wang 2018)."""
    exact = dp_accounting.get_epsilon_gaussian(8.0 / math.sqrt(16), 1e-6)
    ours = privacy.epsilon(noise_multiplier=8.0, sampling_rate=1.0, steps=16, delta=1e-6)
    assert exact <= ours <= exact + 1e-3
    replaced = privacy.epsilon(noise_multiplier=8.0, sampling_rate=1.0, steps=16, delta=1e-6, adjacency="replace_one")
    assert replaced == pytest.approx(dp_accounting.get_epsilon_gaussian(4.0 / math.sqrt(16), 1e-6), abs=1e-3)  # 2Δ


def test_replace_one_is_not_twice_the_sensitivity():
    """Two steps at q = 0.8: at the δ the naive account promises, the true ε is larger by far more than the grid's 1e-4."""
    naive = {"noise_multiplier": 1.0, "sampling_rate": 0.8, "steps": 2}  # s = 2, sensitivity 2Δ, add/remove
    right = {"noise_multiplier": 2.0, "sampling_rate": 0.8, "steps": 2, "adjacency": "replace_one"}
    d = privacy.delta(**naive, epsilon=0.001)
    assert d > 0.4
    assert privacy.epsilon(**right, delta=d) > privacy.epsilon(**naive, delta=d) + 3e-3
    assert privacy.delta(**right, epsilon=0.001) > d + 1e-3


@settings(max_examples=6, deadline=None)
@given(
    sigma=st.floats(0.8, 5.0),
    q=st.floats(0.001, 0.5),
    steps=st.integers(1, 2000),
    factor=st.floats(1.05, 2.0),
    accountant=st.sampled_from(["rdp", "rdp", "pld"]),
)
def test_monotone(sigma, q, steps, factor, accountant):
    def spent(sigma=sigma, q=q, steps=steps, d=1e-5):
        return privacy.epsilon(noise_multiplier=sigma, sampling_rate=q, steps=steps, delta=d, accountant=accountant)

    base, slack = spent(), 1e-9
    assert spent(sigma=sigma * factor) <= base + slack
    assert spent(steps=math.ceil(steps * factor)) >= base - slack
    assert spent(d=1e-5 * factor) <= base + slack
    if accountant == "pld":  # dp-accounting drops RDP orders that fail to converge, which may make a smaller q dearer
        assert spent(q=min(1.0, q * factor)) >= base - 1e-3


def test_nothing_costs_nothing():
    run = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 0}
    assert privacy.epsilon(**run, delta=1e-5) == 0.0
    assert privacy.delta(**run, epsilon=1.0) == 0.0


def test_what_delta_hides_costs_nothing():
    """All steps together hold the record with probability T·q at most: where that is below δ, ε is 0, however little the noise."""
    assert privacy.epsilon(noise_multiplier=0.01, sampling_rate=1e-12, steps=10**7, delta=1.1e-5) == 0.0
    assert privacy.epsilon(noise_multiplier=0.01, sampling_rate=1e-12, steps=10**7, delta=0.9e-5) > 1.0


def test_no_steps_are_no_event():
    assert privacy.event(1.0, 0.1, 0) == dp_accounting.NoOpDpEvent()


def test_event_describes_the_run():
    assert privacy.event(1.5, 0.1, 7) == run_event(1.5, 0.1, 7)


def test_numpy_numbers_are_numbers():
    plain = privacy.epsilon(noise_multiplier=2.0, sampling_rate=0.5, steps=3, delta=1e-5, accountant="rdp")
    kinds = {"noise_multiplier": np.float64(2), "sampling_rate": np.float32(0.5), "steps": np.int64(3), "delta": 1e-5}
    assert privacy.epsilon(**kinds, accountant="rdp") == plain


def test_rdp_replace_one_is_refused():
    with pytest.raises(ConfigurationError, match="pld"):
        privacy.epsilon(noise_multiplier=1, sampling_rate=0.1, steps=1, delta=1e-5, accountant="rdp", adjacency="replace_one")


BAD = {
    "noise_multiplier": [0, -1.0, math.inf, math.nan, True, "1", None],
    "sampling_rate": [0, -0.1, 1.0001, math.nan, True, "x"],
    "steps": [-1, 1.0, True, math.nan, "3", None],
    "delta": [0, 1, -1e-5, 2.0, math.nan, True, None],
    "accountant": ["gdp", None],
    "adjacency": ["zero_out", None],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in BAD.items() for v in values])
def test_bad_arguments(name, value):
    good = {"noise_multiplier": 1.0, "sampling_rate": 0.1, "steps": 1, "delta": 1e-5}
    with pytest.raises(ConfigurationError, match=name):
        privacy.epsilon(**{**good, name: value})


@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, True, None])
def test_bad_epsilon(value):
    with pytest.raises(ConfigurationError, match="epsilon"):
        privacy.delta(noise_multiplier=1.0, sampling_rate=0.1, steps=1, epsilon=value)
    with pytest.raises(ConfigurationError, match="epsilon"):
        privacy.calibrate_noise(epsilon=value, delta=1e-5, sampling_rate=0.1, steps=1)
    with pytest.raises(ConfigurationError, match="epsilon"):
        privacy.max_steps(epsilon=value, delta=1e-5, sampling_rate=0.1, noise_multiplier=1.0)


def test_hardly_any_noise_has_an_answer():
    """A loss of thousands, on a grid that is as coarse as it has to be; at q = 1 it is known in closed form."""
    run = {"noise_multiplier": 0.1, "sampling_rate": 0.1, "steps": 100, "delta": 1e-5}
    assert 500 < privacy.epsilon(**run) < privacy.epsilon(**run, accountant="rdp")
    whole = privacy.epsilon(noise_multiplier=1e-3, sampling_rate=1.0, steps=100, delta=1e-5)
    exact = dp_accounting.get_epsilon_gaussian(1e-4, 1e-5)
    assert exact * (1 - 1e-12) <= whole <= exact * (1 + 1e-3)


def test_dropped_orders_are_not_logged(caplog):
    privacy.epsilon(noise_multiplier=1.01, sampling_rate=0.3, steps=10, delta=1e-5, accountant="rdp")
    assert not caplog.records


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("noise", [5e-324, 1e-300, 1e-160, 1e41, 1e300])
def test_noise_that_floating_point_has_no_room_for_is_refused(noise, accountant):
    """At 1e-160 dp-accounting's Rényi divergences are NaN, and its ε is 0."""
    with pytest.raises(ConfigurationError, match="noise_multiplier"):
        privacy.epsilon(noise_multiplier=noise, sampling_rate=0.1, steps=3, delta=1e-5, accountant=accountant)


def test_a_budget_that_floating_point_has_no_room_for_is_refused():
    with pytest.raises(LipdpError, match="epsilon"):
        privacy.calibrate_noise(epsilon=1e-300, delta=1e-5, sampling_rate=0.1, steps=3)
