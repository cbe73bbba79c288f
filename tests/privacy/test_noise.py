"""Noise on the grid: its law, its exactness, and what it does not tell.

Keys are fixed; false-alarm rates are those for a fresh key.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from lipdp import privacy
from lipdp.errors import ConfigurationError
from lipdp.privacy import noise
from lipdp.privacy.noise import grid, grid_factor, is_under, mantissa_of, noised_on_processor, table, whole_noise

KEY = bytes(range(7, 39))
STDS = [1.0, 1.3, 1.999]
FALSE_ALARM = 1e-6


def drawn(count, std=1.3, key=KEY):
    return whole_noise(table(mantissa_of(std)), key, 0, count) * (grid(std) / std)


# ---------------------------------------------------------------- the law


@pytest.mark.parametrize("std", STDS)
def test_bins_are_filled_as_they_should_be(std):
    """Chi-square over 160 bins of equal probability, and over the low bits' own bins, at 1e-6 each."""
    z = drawn(2**20, std)
    counts = np.bincount((stats.norm.cdf(z) * 160).astype(int), minlength=160)
    assert stats.chisquare(counts).pvalue > FALSE_ALARM
    steps = whole_noise(table(mantissa_of(std)), KEY, 0, 2**20)
    for shift in (0, 8, 20, 29):
        assert stats.chisquare(np.bincount((steps >> shift) & 127, minlength=128)).pvalue > FALSE_ALARM


def test_moments():
    """To 1e-3, where chance has standard deviations of 2.4e-4 (mean), 3.5e-4 (variance), 6e-4 (third), 1.2e-3 (kurtosis)."""
    z = np.concatenate([drawn(2**22, key=bytes([n]) * 32) for n in range(4)])
    square = z * z
    assert abs(float(z.mean())) < 1e-3
    assert abs(float(square.mean()) - 1) < 1e-3
    assert abs(float((square * z).mean())) < 3e-3
    assert abs(float((square * square).mean()) / 3 - 1) < 3e-3
    for size in (3, 4, 5):  # binomial tails at 1e-6
        beyond = int(np.count_nonzero(square > size**2))
        assert stats.binomtest(beyond, len(z), 2 * stats.norm.sf(size)).pvalue > FALSE_ALARM


def encoded(bins, choices, draw):
    """Words and further bits that make these choices (of rectangle or box), with all other bits random."""
    starts = [0, *bins.ends, 2**128]
    spans = [(starts[choice], starts[choice + 1] - starts[choice]) for choice in choices.tolist()]
    return with_choices([low + int.from_bytes(draw.bytes(17), "big") * length // 2**136 for low, length in spans], draw)


def with_choices(numbers, draw):
    words = draw.integers(0, 2**64, len(numbers), dtype=np.uint64) & np.uint64(2**63 | (2**36 - 1))
    more = draw.integers(0, 2**40, len(numbers), dtype=np.uint64)
    words |= np.array([number >> 101 << 36 for number in numbers], dtype=np.uint64)
    more |= np.array([(number >> 77 & (2**24 - 1)) << 40 for number in numbers], dtype=np.uint64)
    tails = [
        (number & (2**77 - 1), int.from_bytes(draw.bytes(12), "big") >> 4, int.from_bytes(draw.bytes(11), "big"))
        for number in numbers
    ]
    return words, more, tails.__getitem__


@pytest.mark.parametrize("std", STDS)
def test_tails_beyond_six_standard_deviations(std):
    """Choices beyond 4.5 are made directly, in proportion to their areas; what comes out of them has the tail's own law up to 7.

    Chi-square at 1e-6 over the bins that are expected to get at least 10 of 24,000. (P(|Z| > 6) = 2e-9: waiting for it takes 1e10.)
    """
    bins = table(mantissa_of(std))
    width = 2.0**36 * grid(std) / std
    first = math.ceil(4.5 / width)
    starts = [0, *bins.ends, 2**128]
    areas = np.array([float(b - a) for a, b in itertools.pairwise(starts)])
    numbers = np.arange(2 * bins.bins)
    areas[numbers % bins.bins < first] = 0
    draw = np.random.default_rng(5)
    # Flattened, so that the far tail is visited as often as the near one; undone by weights, which are exact.
    tilt = np.exp(((numbers % bins.bins) * width) ** 2 / 2)
    choices = draw.choice(numbers, 24_000, p=areas * tilt / (areas * tilt).sum())
    words, more, rest = encoded(bins, choices, draw)
    chosen, fine = noise._settled(bins, words, more, rest)
    assert np.array_equal(np.where(chosen < 0, ~chosen, chosen), choices % bins.bins)
    assert abs((chosen < 0).mean() - 0.5) < 0.02
    kept = np.bincount((choices % bins.bins)[fine], minlength=bins.bins)
    edges = np.arange(bins.bins + 1) * width
    expected = (stats.norm.sf(edges[:-1]) - stats.norm.sf(edges[1:])) * tilt[: bins.bins]
    expected[:first] = 0
    far = (edges[:-1] < 7) & (expected > 0)
    counts, law = kept[far], expected[far] / expected[far].sum()
    assert edges[:-1][far].max() > 6.5
    assert law.min() * counts.sum() > 10
    assert stats.chisquare(counts, law * counts.sum()).pvalue > FALSE_ALARM
    # Within the bins: the place from the side of 0, by the probability integral.
    place = np.where(chosen < 0, ~words.view(np.int64), words.view(np.int64)) & (2**36 - 1)
    x = ((choices % bins.bins) + place / 2**36) * width
    low, high = edges[choices % bins.bins], edges[choices % bins.bins + 1]
    u = (stats.norm.sf(x) - stats.norm.sf(high)) / (stats.norm.sf(low) - stats.norm.sf(high))
    assert stats.kstest(u[fine & (x < 7)], "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("std", STDS)
def test_areas_are_those_of_the_curve(std):
    """Against mpmath: where each choice ends, how high each box is, to 2⁻¹²⁰; and that the bins reach 13 standard deviations."""
    mp = pytest.importorskip("mpmath").mp
    with mp.workprec(300):
        bins = table(mantissa_of(std))
        ratio = mp.mpf(2) ** 36 * mp.mpf(grid(std)) / mp.mpf(std)
        assert mp.mpf(1) / 64 < ratio <= mp.mpf(1) / 32
        assert bins.bins * ratio >= 13
        curve = [mp.exp(-((k * ratio) ** 2) / 2) for k in range(bins.bins + 1)]
        total = mp.fsum(curve[:-1])
        areas = [*curve[1:], *(a - b for a, b in itertools.pairwise(curve[:-1]))]
        end = mp.mpf(0)
        for found, area in zip(bins.ends, areas, strict=True):
            end += area / total
            assert abs(found / mp.mpf(2) ** 128 - end) < mp.mpf(2) ** -120
        for k, height in enumerate(bins.heights):
            assert abs(height / mp.mpf(2) ** 128 - (1 - curve[k + 1] / curve[k])) < mp.mpf(2) ** -120
        assert abs(bins.half_square / mp.mpf(2) ** 128 - ratio**2 / 2) < mp.mpf(2) ** -120


# ---------------------------------------------------------------- what floating point can't decide


@pytest.mark.parametrize("std", STDS)
def test_whole_numbers_decide_as_floating_point_does_where_it_may(std, monkeypatch):
    """Every height compared in 128 bits, every choice made with all bits: the same noise."""
    bins = table(mantissa_of(std))
    expected = whole_noise(bins, KEY, 0, 6000)
    monkeypatch.setattr(noise, "_SURE", 4.0)
    asked = []
    monkeypatch.setattr(noise, "is_under", lambda *numbers: asked.append(numbers) or is_under(*numbers))
    assert np.array_equal(whole_noise(bins, KEY, 0, 6000), expected)
    assert len(asked) > 20
    slow = copy.copy(bins)
    object.__setattr__(slow, "cells", np.full_like(bins.cells, noise.SLOW))
    assert np.array_equal(whole_noise(slow, KEY, 0, 6000), expected)


@pytest.mark.parametrize("std", STDS)
def test_the_comparison_is_right_to_2_to_the_minus_115(std):
    """Heights within a hair of the curve, 2⁻¹¹⁴ to 2⁻¹⁰² of the box: always on the right side of it."""
    mpmath = pytest.importorskip("mpmath")
    draw = random.Random(4)
    bins, asked = table(mantissa_of(std)), 0
    with mpmath.mp.workprec(400):
        one = mpmath.mpf(2) ** 128
        h = mpmath.mpf(2) ** 93 / mpmath.mpf(mantissa_of(std)) ** 2
        for _ in range(150):
            chosen, place = draw.randrange(bins.bins), draw.randrange(2**128)
            v = place / one
            left = -mpmath.expm1(-h * v * (2 * chosen + v))
            full = -mpmath.expm1(-h * (2 * chosen + 1))
            height = int(left / full * one) + draw.choice((-1, 1)) * 2 ** draw.randrange(14, 26)
            distance = height / one * full - left
            if 0 <= height < 2**128 and abs(distance) > mpmath.mpf(2) ** -115:
                asked += 1
                assert is_under(bins.half_square, bins.heights[chosen], chosen, place, height) == (distance > 0)
    assert asked > 100


def test_choices_that_only_the_last_bits_decide():
    """Boxes of the far tail are smaller than 2⁻⁶⁴; and numbers exactly at an end, or one before it."""
    bins = table(mantissa_of(1.3))
    halves = [end >> 64 for end in bins.ends]
    twin = next(n for n in range(len(halves) - 1) if halves[n] == halves[n + 1])
    draw = np.random.default_rng(1)
    for choice in (twin, twin + 1, twin + 2, 40, bins.bins, bins.bins + 3):
        words, more, rest = encoded(bins, np.full(20, choice), draw)
        chosen, _ = noise._settled(bins, words, more, rest)
        assert set(np.where(chosen < 0, ~chosen, chosen).tolist()) == {choice % bins.bins}
    for end in (0, 40, bins.bins - 1, bins.bins, 2 * bins.bins - 2):
        words, more, rest = with_choices([bins.ends[end], bins.ends[end] - 1], draw)
        chosen, _ = noise._settled(bins, words & np.uint64(2**63 - 1), more, rest)
        assert chosen.tolist() == [(end + 1) % bins.bins, end % bins.bins]


def test_no_bit_is_read_twice(monkeypatch):
    """First words, further ones and the rest have nonces of their own in every attempt, and the places are the values'."""
    seen = []

    def fill(place, key, counter, nonce, real=noise.fill_with_chacha):
        seen.extend((nonce, counter + n) for n in range(-(-len(place) // 64)))
        return real(place, key, counter, nonce)

    def words(key, places, nonce, real=noise.chacha_words):
        seen.extend((nonce, place // 8, place % 8) for place in places.tolist())
        return real(key, places, nonce)

    def block(key, count, *, counter, nonce, real=noise.chacha_bytes):
        seen.append((nonce, counter))
        return real(key, count, counter=counter, nonce=nonce)

    monkeypatch.setattr(noise, "_SURE", 4.0)  # every height is read to the end
    for name, spy in (("fill_with_chacha", fill), ("chacha_words", words), ("chacha_bytes", block)):
        monkeypatch.setattr(noise, name, spy)
    whole_noise(table(mantissa_of(1.0)), KEY, 0, 40_000, 3)
    assert {nonce for nonce, *_ in seen} >= {(kind, 3, attempt) for kind in (0, 1, 2) for attempt in (0, 1)}
    assert {nonce[1] for nonce, *_ in seen} == {3}
    assert len(seen) == len(set(seen))
    assert all(len(place) == 1 for nonce, *place in seen if nonce[2] == 0 and nonce[0] in (0, 2))
    assert all(len(place) == 2 for nonce, *place in seen if nonce[0] == 1)


def test_a_place_gives_the_same_noise_whatever_is_drawn_with_it(monkeypatch):
    bins = table(mantissa_of(1.3))
    whole = whole_noise(bins, KEY, 0, 50_000)
    assert np.array_equal(whole_noise(bins, KEY, 16_384, 1000), whole[16_384:17_384])
    sums = np.linspace(-5, 5, 50_000)
    released = noised_on_processor(sums, 1.3, KEY)
    monkeypatch.setattr(noise, "_CHUNK", 2**12)
    monkeypatch.setattr(noise, "_PIECE", 2**9)
    monkeypatch.setattr(noise, "_kept", noise._Kept())
    assert np.array_equal(noised_on_processor(sums, 1.3, KEY), released)
    own = sums.copy()
    assert noised_on_processor(own, 1.3, KEY, place=own) is own
    assert np.array_equal(own, released)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert np.array_equal(noised_on_processor(sums, 1.3, KEY), released)


def test_float32_sums_get_the_noise_of_float64_rounded_once_more():
    sums = np.random.default_rng(0).normal(size=70_001).astype(np.float32)
    sums[:3] = math.nan, math.inf, -math.inf
    for std in STDS:
        with np.errstate(over="ignore"):
            expected = noised_on_processor(sums.astype(np.float64), std, KEY, 2).astype(np.float32)
        assert np.array_equal(noised_on_processor(sums, std, KEY, 2), expected)


def test_several_threads_draw_the_same(monkeypatch):
    """Twelve draws at once, each in several threads, with memory of their own."""
    sums = np.linspace(-5, 5, 300_000)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    expected = [noised_on_processor(sums, 1.3, bytes([n]) * 32) for n in range(12)]
    with ThreadPoolExecutor(12) as workers:
        found = list(workers.map(lambda n: noised_on_processor(sums, 1.3, bytes([n]) * 32), range(12)))
    assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True))


def test_segments_have_noise_of_their_own():
    bins = table(mantissa_of(1.0))
    one, two = whole_noise(bins, KEY, 0, 50_000, 0), whole_noise(bins, KEY, 0, 50_000, 1)
    assert abs(np.corrcoef(one, two)[0, 1]) < 6 / math.sqrt(50_000)


# ---------------------------------------------------------------- the grid


@given(std=st.floats(1e-30, 1e30))
def test_the_grid_is_a_power_of_two_below_the_noise(std):
    spacing = grid(std)
    assert math.frexp(spacing)[0] == 0.5
    assert 2**41 <= std / spacing < 2**42


@given(std=st.floats(1e-6, 1e6), seed=st.integers(0, 999))
@settings(max_examples=30, deadline=None)
def test_releases_lie_on_the_grid_and_round_by_half_a_step_at_most(std, seed):
    sums = np.random.default_rng(seed).normal(size=50) * std * 100
    spacing = grid(std)
    released = noised_on_processor(sums, std, KEY)
    steps = released / spacing - 0.5
    assert np.array_equal(steps, np.rint(steps))
    rounded = steps - whole_noise(table(mantissa_of(std)), KEY, 0, 50)
    assert np.abs(rounded - sums / spacing).max() <= 0.5


@pytest.mark.parametrize("std", [0.0, 5e-324, 1e-300, 2.0**-901, 2.0**901, 1.7e308, math.inf, math.nan])
def test_noise_that_has_no_grid_is_refused(std):
    """With 1/g = ∞ every sum but 0 was brought to the end of the numbers: 0 and 1e-300 could be told apart for certain."""
    with pytest.raises(ConfigurationError, match="can't be drawn"):
        noised_on_processor(np.array([0.0, 1e-300]), std, KEY)


def test_what_is_not_finite_or_out_of_range():
    sums = torch.tensor([math.nan, math.inf, -math.inf, 1e300, -1e300, 0.0], dtype=torch.float64)
    for std in (1.0, 1e-200, 1e200):
        released = privacy.add_noise({"a": sums}, {"a": std}, privacy.Stream(KEY))["a"]
        assert bool(torch.isfinite(released).all())
        assert abs(float(released[0])) < 14 * std
        assert released[1:3].sign().tolist() == [1, -1]
        assert float(released[1]) > 1e90 * std
    assert released[3:5].tolist() == [1e300, -1e300]


def test_sums_far_beyond_the_noise_are_released_as_well():
    """At a noise of 1e-12 of the sum, what comes out is the sum: rounded once, not cut off."""
    sums = torch.linspace(-3, 3, 100, dtype=torch.float64) + 1e-3
    released = privacy.add_noise({"a": sums}, {"a": 1e-12}, privacy.Stream(KEY))["a"]
    assert torch.allclose(released, sums, rtol=0, atol=1e-11)
    assert not torch.equal(released, sums)


@given(multiplier=st.floats(0.01, 1000), size=st.integers(1, 10**9))
def test_the_grid_costs_what_is_said(multiplier, size):
    """Noise larger by the factor, distance larger by the rounding: the multiplier asked for, exactly.

    The rounding is that of the grid, and that of sums of several processes before it, 2^-22 of it.
    """
    factor = grid_factor(multiplier, size)
    distance = 1 / (multiplier * factor) + 2.0**-41 * (1 + 2.0**-22) * math.sqrt(size)
    assert 1 / distance == pytest.approx(multiplier, rel=1e-12)
    assert factor - 1 < 2 * multiplier * math.sqrt(size) * 2**-41 + 1e-15


def test_the_grid_costs_less_than_a_millionth():
    assert grid_factor(10.0, 10**10) - 1 < 1e-6
    assert math.isinf(grid_factor(1e13, 10**4))


# ---------------------------------------------------------------- attacks on low bits


def finest(values):
    """The largest power of two that all these values are multiples of (as an exponent)."""
    mantissas, exponents = np.frexp(values[values != 0].astype(np.float64))
    whole = (mantissas * 2**53).astype(np.int64)
    zeros = np.array([(int(w) & -int(w)).bit_length() - 1 for w in whole])
    return int((exponents - 53 + zeros).min())


def membership(release, count=12):
    """Right answers of someone who knows that the sum is 0, or 0.3 with the record, in 40,000 coordinates of one step at ε = 1.

    He looks at what came out close to 0. Of noise in floating point around 0 such values have all bits; those that came from −0.3
    + 0.3 have lost theirs.
    """
    right = 0
    for number in range(count):
        member = number % 2 == 1
        x = release(0.3 if member else 0.0, number)
        close = x[np.abs(x) < 2.0**-6]
        right += (finest(close) > -30) == member
    return right


def test_low_bits_do_not_tell_membership():
    """12 of 12 for torch's noise in float32, whatever ε is; 6 of 12 (every answer the same) for ours."""

    def by_torch(total, number):
        draw = torch.Generator().manual_seed(number)
        return (torch.full((40_000,), total) + torch.randn(40_000, generator=draw)).numpy()

    def ours(total, number, dtype=torch.float32):
        stream = privacy.Stream(bytes([number]) * 32)
        return privacy.add_noise({"a": torch.full((40_000,), total, dtype=dtype)}, {"a": 1.0}, stream)["a"].numpy()

    assert membership(by_torch) == 12
    assert membership(ours) == 6
    assert membership(lambda total, number: ours(total, number, torch.float64)) == 6


@pytest.mark.parametrize("total", [0.0, 0.1, -1 / 3, 1e-9])
def test_low_bits_are_coins_whatever_the_sum(total):
    """Chi-square of the lowest 8 bits of the steps, at 1e-6."""
    released = privacy.add_noise({"a": torch.full((100_000,), total, dtype=torch.float64)}, {"a": 1.0}, privacy.Stream(KEY))["a"]
    steps = (released / grid(1.0) - 0.5).long().numpy()
    assert stats.chisquare(np.bincount(steps & 255, minlength=256)).pvalue > FALSE_ALARM


# ---------------------------------------------------------------- noise that is bound to what it is added to


def released(sums, stds, **options):
    return privacy.add_noise(sums, stds, privacy.Stream(KEY, **options))


def test_other_sums_never_get_the_same_noise():
    """The difference of two releases of one draw is not the difference of what was released. Without binding it is."""
    one = {"a": torch.zeros(1000, dtype=torch.float64), "b": torch.ones(10, dtype=torch.float64)}
    two = {"a": one["a"].clone(), "b": one["b"].clone()}
    two["b"][3] += 1e-9
    stds = {"a": 1.0, "b": 2.0}
    assert all(torch.equal(x, y) for x, y in zip(released(one, stds).values(), released(one, stds).values(), strict=True))
    difference = released(two, stds)["a"] - released(one, stds)["a"]
    assert float(difference.std()) == pytest.approx(math.sqrt(2), rel=0.15)
    loose = released(two, stds, bound=False)["a"] - released(one, stds, bound=False)["a"]
    assert torch.equal(loose, torch.zeros_like(loose))


@pytest.mark.parametrize("bound", [True, False])
def test_other_noise_levels_names_and_shapes_get_other_noise(bound):
    """Or the sum could be solved for: S + Z and S + 2Z."""
    sums = {"a": torch.zeros(24, dtype=torch.float64)}
    base = released(sums, {"a": 1.0}, bound=bound)["a"]
    others = [
        released(sums, {"a": 2.0}, bound=bound)["a"] / 2,
        released({"b": sums["a"]}, {"b": 1.0}, bound=bound)["b"],
        released({"a": sums["a"].reshape(4, 6)}, {"a": 1.0}, bound=bound)["a"].flatten(),
        released(sums | {"b": sums["a"]}, {"a": 1.0, "b": 1.0}, bound=bound)["a"],
    ]
    for other in others:
        assert not torch.isclose(base, other).any()


def test_torchs_own_generators_are_refused():
    with pytest.raises(ConfigurationError, match="predicted"):
        privacy.add_noise({"a": torch.zeros(2)}, {"a": 1.0}, torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("count", [1, 3])
def test_the_sums_stay_as_they_are(dtype, count):
    """Noise is drawn into the memory of a copy, where there is one: never into the caller's."""
    sums = {f"{number}": torch.randn(40, 30, dtype=dtype).T for number in range(count)}
    sums |= {"flat": torch.randn(50, dtype=dtype)}
    stds = dict.fromkeys(sums, 1.5) | {"flat": 2.5}
    before = {name: total.clone() for name, total in sums.items()}
    released = privacy.add_noise(sums, stds, privacy.generator(0, 0, "here"))
    assert all(torch.equal(sums[name], total) for name, total in before.items())
    assert all(not torch.equal(released[name], total) for name, total in before.items())
    apart = {name: total.untyped_storage().data_ptr() for name, total in released.items()}
    assert not set(apart.values()) & {total.untyped_storage().data_ptr() for total in sums.values()}
