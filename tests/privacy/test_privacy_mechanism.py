"""Noise over groups: the allocation identities, and the law of the noise that is really added."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lipdp import privacy
from lipdp.errors import ConfigurationError, UnboundedError

ALLOCATIONS = ["global", "per_layer", "optimal"]
GROUPS = st.dictionaries(
    st.text("abc", min_size=1, max_size=4),
    st.tuples(st.one_of(st.just(0.0), st.floats(1e-6, 1e6)), st.integers(1, 10**8)),
    min_size=1,
    max_size=8,
)


def split(groups):
    return {n: d for n, (d, _) in groups.items()}, {n: p for n, (_, p) in groups.items()}


def noise(name="noise", step=0):
    return privacy.generator(20_240_501, step, name)


@given(groups=GROUPS, sigma=st.floats(1e-2, 1e3), allocation=st.sampled_from(ALLOCATIONS))
def test_every_allocation_has_the_multiplier_asked_for(groups, sigma, allocation):
    deltas, sizes = split(groups)
    stds = privacy.allocate(deltas, sizes, sigma, allocation)
    assert list(stds) == list(deltas)
    assert all((stds[n] == 0) == (deltas[n] == 0) for n in deltas)
    effective = privacy.effective_multiplier(deltas, stds)
    assert effective == (pytest.approx(sigma, rel=1e-12) if any(deltas.values()) else math.inf)


@given(groups=GROUPS, sigma=st.floats(1e-2, 1e3))
def test_optimal_has_the_least_energy(groups, sigma):
    """And it attains the Cauchy–Schwarz bound σ²(Σ Δ√p)²."""
    deltas, sizes = split(groups)
    energy = {a: privacy.noise_energy(privacy.allocate(deltas, sizes, sigma, a), sizes) for a in ALLOCATIONS}
    assert energy["optimal"] <= min(energy.values()) * (1 + 1e-12)
    assert energy["optimal"] == pytest.approx((sigma * sum(d * math.sqrt(sizes[n]) for n, d in deltas.items())) ** 2, rel=1e-9)


def test_allocation_by_hand():
    deltas, sizes = {"w": 3.0, "b": 4.0, "frozen": 0.0}, {"w": 16, "b": 1, "frozen": 9}
    assert privacy.allocate(deltas, sizes, 2.0, "global") == {"w": 10.0, "b": 10.0, "frozen": 0.0}
    per_layer = privacy.allocate(deltas, sizes, 2.0, "per_layer")
    assert per_layer == pytest.approx({"w": 6 * math.sqrt(2), "b": 8 * math.sqrt(2), "frozen": 0.0})
    optimal = privacy.allocate(deltas, sizes, 2.0, "optimal")  # s² = 4·(3·4 + 4·1)·Δ/√p
    assert optimal == pytest.approx({"w": math.sqrt(48), "b": math.sqrt(256), "frozen": 0.0})
    assert privacy.noise_energy(optimal, sizes) == pytest.approx(4 * 16**2)


def test_a_layer_multiplier_of_the_paper_is_smaller_over_all():
    """s_d = σ₀Δ_d on D groups is an effective σ₀/√D."""
    deltas = {"a": 1.0, "b": 0.1, "c": 7.0, "d": 2.0}
    assert privacy.effective_multiplier(deltas, {n: 3.0 * d for n, d in deltas.items()}) == pytest.approx(1.5)


def test_forgotten_noise_is_no_privacy():
    assert privacy.effective_multiplier({"a": 1.0, "b": 1.0}, {"a": 5.0, "b": 0.0}) == 0.0
    assert privacy.effective_multiplier({"a": 1.0, "b": 0.0}, {"a": 5.0, "b": 0.0}) == 5.0


@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_no_groups_and_untouched_groups(allocation):
    assert privacy.allocate({}, {}, 1.0, allocation) == {}
    assert privacy.allocate({"a": 0.0}, {"a": 0}, 1.0, allocation) == {"a": 0.0}


@pytest.mark.parametrize("allocation", ALLOCATIONS)
@pytest.mark.parametrize(
    ("value", "error"), [(math.inf, UnboundedError), (-1.0, ConfigurationError), (math.nan, ConfigurationError)]
)
def test_bad_sensitivities(allocation, value, error):
    with pytest.raises(error, match="'conv1'"):
        privacy.allocate({"conv1": value, "b": 1.0}, {"conv1": 1, "b": 1}, 1.0, allocation)
    with pytest.raises(error, match="'conv1'"):
        privacy.effective_multiplier({"conv1": value}, {"conv1": 1.0})


def test_bad_allocations():
    one, size = {"a": 1.0}, {"a": 3}
    for call, match in [
        (lambda: privacy.allocate(one, size, 0.0, "global"), "noise_multiplier"),
        (lambda: privacy.allocate(one, size, math.nan, "global"), "noise_multiplier"),
        (lambda: privacy.allocate(one, size, 1.0, "uniform"), "allocation"),
        (lambda: privacy.allocate(one, {"b": 3}, 1.0, "global"), "'a', 'b'"),
        (lambda: privacy.allocate(one, {"a": 0}, 1.0, "global"), "size of group 'a'"),
        (lambda: privacy.allocate(one, {"a": 2.5}, 1.0, "global"), "size of group 'a'"),
        (lambda: privacy.allocate({"a": 1e308, "b": 1e308}, {"a": 1, "b": 1}, 10.0, "global"), "floating point"),
        (lambda: privacy.allocate({"a": 1e-320, "b": 1e300}, {"a": 1, "b": 1}, 1.0, "optimal"), "floating point"),
        (lambda: privacy.effective_multiplier(one, {"a": -1.0}), "std of group 'a'"),
        (lambda: privacy.effective_multiplier(one, {}), "same groups"),
        (lambda: privacy.noise_energy({"a": math.inf}, size), "std of group 'a'"),
        (lambda: privacy.noise_energy(one, {}), "same groups"),
    ]:
        with pytest.raises(ConfigurationError, match=match):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_noise_has_the_std_asked_for(dtype):
    """Σ z²/s² over n draws is chi-square with n degrees of freedom; both tails together 1e-6, so a false alarm in a
    million (the seed is fixed besides). The mean is normal, tested at the same level."""
    n, stds = 200_000, {"a": 0.5, "b": 3.0}
    sums = {"a": torch.ones(n, dtype=dtype), "b": torch.full((n // 4, 4), -2.0, dtype=dtype)}
    noised = privacy.add_noise(sums, stds, noise())
    for name, std in stds.items():
        assert noised[name].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert noised[name].shape == sums[name].shape
        z = ((noised[name].double() - sums[name].double()) / std).flatten()
        assert stats.chi2.ppf(5e-7, n) < float(z.square().sum()) < stats.chi2.isf(5e-7, n)
        assert abs(float(z.mean())) < stats.norm.isf(5e-7) / math.sqrt(n)
    assert stats.kstest(z.numpy(), "norm").pvalue > 1e-6


def test_groups_and_steps_have_independent_noise():
    """Correlations of n independent normals are about N(0, 1/n): 6/√n is a false alarm of 2e-9 for each of 3."""
    n = 100_000
    zeros, ones = {"a": torch.zeros(n), "b": torch.zeros(n)}, {"a": 1.0, "b": 1.0}
    first, second = privacy.add_noise(zeros, ones, noise()), privacy.add_noise(zeros, ones, noise(step=1))
    for x, y in [(first["a"], first["b"]), (first["a"], second["a"]), (first["b"], second["b"])]:
        assert abs(float(torch.corrcoef(torch.stack([x, y]))[0, 1])) < 6 / math.sqrt(n)


def test_noise_does_not_depend_on_the_order_of_names():
    sums = {"b": torch.zeros(5), "a": torch.zeros(3), "c": torch.zeros(2)}
    stds = {"c": 1.0, "a": 2.0, "b": 3.0}
    one = privacy.add_noise(sums, stds, noise())
    other = privacy.add_noise(dict(sorted(sums.items())), stds, noise())
    assert list(one) == ["b", "a", "c"]
    assert all(torch.equal(one[n], other[n]) for n in sums)


def test_a_group_without_noise_draws_nothing_and_is_copied():
    sums = {"a": torch.ones(4, requires_grad=True), "z": torch.zeros(6)}
    noised = privacy.add_noise(sums, {"a": 0.0, "z": 1.0}, noise())
    alone = privacy.add_noise({"z": torch.zeros(6)}, {"z": 1.0}, noise())
    assert torch.equal(noised["a"], torch.ones(4))
    assert noised["a"] is not sums["a"]
    assert not noised["a"].requires_grad
    assert torch.equal(noised["z"], alone["z"])
    assert torch.equal(sums["z"], torch.zeros(6))


def test_noise_is_refused_where_it_would_be_wrong():
    g = noise()
    for sums, stds, match in [
        ({"a": torch.zeros(2)}, {"b": 1.0}, "same groups"),
        ({"a": torch.zeros(2, dtype=torch.int64)}, {"a": 1.0}, "floating-point"),
        ({"a": torch.zeros(2, dtype=torch.complex64)}, {"a": 1.0}, "floating-point"),
        ({"a": torch.zeros(2).to_sparse()}, {"a": 1.0}, "dense"),
        ({"a": torch.zeros(2, device="meta")}, {"a": 1.0}, "device 'meta'"),
        ({"a": torch.zeros(2)}, {"a": math.nan}, "std of group 'a'"),
        ({"a": torch.zeros(2)}, {"a": -1.0}, "std of group 'a'"),
        ({"a": torch.zeros(2)}, {"a": 1e-50}, "range"),
        ({"a": torch.zeros(2)}, {"a": 1e39}, "range"),
    ]:
        with pytest.raises(ConfigurationError, match=match):
            privacy.add_noise(sums, stds, g)


@settings(max_examples=20)
@given(shape=st.lists(st.integers(0, 4), max_size=3))
def test_any_shape(shape):
    assert privacy.add_noise({"a": torch.zeros(shape)}, {"a": 1.0}, noise())["a"].shape == torch.Size(shape)
