"""Poisson samples and the randomness behind them. Seeds are fixed; false-alarm rates are those for a fresh seed."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from scipy import stats

from lipdp import privacy
from lipdp.errors import ConfigurationError
from lipdp.privacy import sampling
from lipdp.privacy.randomness import chacha_bytes

SEED = 123_456_789


def memberships(size, q, steps):
    sampler = privacy.PoissonSampler(size, q, SEED, reproducible=True)
    inside = torch.zeros(steps, size)
    for step in range(steps):
        inside[step, sampler.indices(step)] = 1
    return inside


def test_counts_are_binomial():
    """Total membership, per-step spread and per-record spread of 1500 steps over 400 records; 1e-6 each, both tails."""
    size, q, steps = 400, 0.07, 1500
    inside = memberships(size, q, steps)
    assert stats.binomtest(int(inside.sum()), size * steps, q).pvalue > 1e-6
    for counts, n, m in [(inside.sum(1), size, steps), (inside.sum(0), steps, size)]:
        chi2 = float(((counts - n * q) ** 2).sum()) / (n * q * (1 - q))  # about chi-square with m degrees of freedom
        assert stats.chi2.ppf(5e-7, m) < chi2 < stats.chi2.isf(5e-7, m)


def test_records_and_steps_are_pairwise_independent():
    """Largest of all k(k−1)/2 correlations below the Bonferroni bound at 1e-6 in all."""
    inside = memberships(60, 0.3, 4000)
    for table, length in [(inside.T, 4000), (memberships(4000, 0.3, 60), 4000)]:
        k = table.shape[0]
        largest = float((torch.corrcoef(table) - torch.eye(k)).abs().max())
        assert largest < stats.norm.isf(1e-6 / (k * (k - 1))) / math.sqrt(length)


@pytest.mark.parametrize("q", [1e-9, 1e-3, 0.05, 0.5, 2 / 3, 1.0])
def test_a_record_is_in_where_its_word_is_below_q(q):
    for size in (1, 17, 5000):
        stream = privacy.generator(SEED, 3, "t")
        words = np.frombuffer(chacha_bytes(privacy.generator(SEED, 3, "t").next_key("poisson", size, q), 4 * size), dtype="<u4")
        expected = [place for place, word in enumerate(words.tolist()) if word < q * 2**32]
        found = privacy.poisson_indices(size, q, stream)
        assert found.dtype == torch.int64
        assert found.tolist() == expected


@pytest.mark.parametrize("q", [2 / 3, 0.1, 1e-12, 3 * 2.0**-60, 2.0**-40 + 2.0**-90])
def test_ties_are_decided_by_further_bits(q, monkeypatch):
    """Where all first words are those of q, records enter with the probability that is left: 512 more bits against the rest of
    q.
    """
    below = math.floor(q * 2**32)
    rest = q * 2**32 - below
    monkeypatch.setattr(
        sampling, "fill_with_chacha", lambda place, *_: place.cast("I").__setitem__(slice(None), _words(below, len(place)))
    )
    found = privacy.poisson_indices(4000, q, privacy.generator(SEED, 0, "t"))
    assert stats.binomtest(len(found), 4000, rest).pvalue > 1e-6
    assert rest == 0 or 0 < rest < 1


def _words(value, size):
    return memoryview(np.full(size // 4, value, dtype=np.uint32))


def test_a_rate_that_words_hold_exactly_has_no_ties(monkeypatch):
    monkeypatch.setattr(sampling, "_resolve", lambda *_: pytest.fail("nothing to decide"))
    privacy.poisson_indices(1000, 0.375, privacy.generator(SEED, 0, "t"))


def test_indices_are_sorted_unique_longs():
    found = privacy.poisson_indices(1000, 0.5, privacy.generator(SEED, 0, "t"))
    assert found.dtype == torch.int64
    assert found.ndim == 1
    assert torch.equal(found, torch.unique(found))
    assert 0 <= int(found.min()) <= int(found.max()) < 1000


def test_everything_nothing_and_tiny_rates():
    g = privacy.generator(SEED, 0, "t")
    assert torch.equal(privacy.poisson_indices(1000, 1.0, g), torch.arange(1000))
    empty = privacy.poisson_indices(0, 0.5, g)
    assert empty.shape == (0,)
    assert empty.dtype == torch.int64
    assert privacy.poisson_indices(10, 1e-12, g).shape == (0,)


def test_pieces_are_joined(monkeypatch):
    whole = privacy.poisson_indices(3000, 0.3, privacy.generator(SEED, 0, "t"))
    monkeypatch.setattr(sampling, "_PIECE", 64)
    assert torch.equal(privacy.poisson_indices(3000, 0.3, privacy.generator(SEED, 0, "t")), whole)


def test_a_step_can_be_repeated():
    sampler, again = (privacy.PoissonSampler(500, 0.1, SEED, reproducible=True) for _ in range(2))
    later = [again.indices(step) for step in (5, 3, 4)]
    assert all(torch.equal(sampler.indices(step), found) for step, found in zip((5, 3, 4), later, strict=True))
    assert not torch.equal(sampler.indices(3), sampler.indices(4))
    assert not torch.equal(sampler.indices(3), privacy.PoissonSampler(500, 0.1, SEED + 1, reproducible=True).indices(3))


def test_sampler_tells_its_expectation_and_hides_its_seed():
    sampler = privacy.PoissonSampler(500, 0.1, SEED, reproducible=True)
    assert sampler.expected_size == pytest.approx(50)
    assert str(SEED) not in repr(sampler)


@pytest.mark.parametrize(
    ("size", "q", "seed", "match"),
    [(-1, 0.1, 0, "size"), (2.0, 0.1, 0, "size"), (10, 0.0, 0, "rate"), (10, 1.5, 0, "rate"), (10, math.nan, 0, "rate"),
     (10, 0.1, -1, "seed"), (10, 0.1, 1.5, "seed"), (True, 0.1, 0, "size")],
)  # fmt: skip
def test_bad_samplers(size, q, seed, match):
    with pytest.raises(ConfigurationError, match=match):
        privacy.PoissonSampler(size, q, seed, reproducible=True)


def test_a_seed_alone_is_refused_and_none_is_drawn_from_the_system():
    with pytest.raises(ConfigurationError, match="reproducible=True"):
        privacy.PoissonSampler(10, 0.5, 3)
    one, two = privacy.PoissonSampler(500, 0.5), privacy.PoissonSampler(500, 0.5)
    assert torch.equal(one.indices(1), one.indices(1))
    assert not torch.equal(one.indices(1), two.indices(1))


def test_bad_indices():
    for size, q in [(-1, 0.5), (1.5, 0.5), (10, 0), (10, 2)]:
        with pytest.raises(ConfigurationError):
            privacy.poisson_indices(size, q, privacy.Stream())
    with pytest.raises(ConfigurationError, match="Stream"):
        privacy.poisson_indices(10, 0.5, torch.Generator())


def test_derived_seeds_are_the_documented_hash():
    """A fixed point: checkpoints of one version have to resume in the next."""
    digest = hashlib.sha256(b"lipdp/42/7/noise").digest()
    assert privacy.derive_seed(42, 7, "noise") == int.from_bytes(digest, "big") >> (256 - 63)


def test_derived_seeds_are_distinct():
    """63 bits: 30,000 seeds collide with probability 5e-11."""
    triples = [(s, t, p) for s in (0, 1, 11, 2**100) for t in range(2500) for p in ("noise", "sample", "1/noise")]
    seeds = {privacy.derive_seed(*triple) for triple in triples}
    assert len(seeds) == len(triples)
    assert all(0 <= seed < 2**63 for seed in seeds)


def draw(*triple):
    return privacy.generator(*triple).uniforms(8)


def test_streams_are_functions_of_the_triple():
    assert torch.equal(draw(SEED, 3, "noise"), draw(SEED, 3, "noise"))
    for other in [(SEED + 1, 3, "noise"), (SEED, 4, "noise"), (SEED, 3, "sample")]:
        assert not torch.equal(draw(SEED, 3, "noise"), draw(*other))


def test_first_draws_of_many_streams_are_uniform():
    firsts = [float(privacy.generator(SEED, t, "u").uniforms(1)) for t in range(5000)]
    assert stats.kstest(firsts, "uniform").pvalue > 1e-6


@pytest.mark.parametrize("triple", [(-1, 0, "a"), (1.0, 0, "a"), (0, -1, "a"), (0, 0.5, "a"), (0, 0, ""), (0, 0, None)])
def test_bad_triples(triple):
    with pytest.raises(ConfigurationError):
        privacy.derive_seed(*triple)
    with pytest.raises(ConfigurationError):
        privacy.generator(*triple)


# ---------------------------------------------------------------- very many records


def test_gaps_give_binomial_counts_and_even_places():
    """10 M records at q = 1e-3: counts of 40 samples, and of 50 equal stretches; 1e-6 each, both tails."""
    size, q, steps = 10**7, 1e-3, 40
    samples = [privacy.poisson_indices(size, q, privacy.generator(SEED, step, "gaps")) for step in range(steps)]
    assert all(bool((sample.diff() > 0).all()) and 0 <= int(sample[0]) <= int(sample[-1]) < size for sample in samples)
    counts = torch.tensor([len(sample) for sample in samples]).double()
    stretches = torch.histc(torch.cat(samples).double(), bins=50, min=0, max=size)
    for found, n, m in [(counts, size, steps), (stretches, size * steps / 50, 50)]:
        chi2 = float(((found - n * q) ** 2).sum()) / (n * q * (1 - q))
        assert stats.chi2.ppf(5e-7, m) < chi2 < stats.chi2.isf(5e-7, m)
    again = privacy.poisson_indices(size, q, privacy.generator(SEED, 0, "gaps"))
    assert torch.equal(again, samples[0])


@pytest.mark.parametrize("q", [1 / 16, 1e-3, 1e-7])
def test_gaps_are_geometric(q):
    """Of 20,000 gaps by the float64 logarithm: against the law, by Kolmogorov and Smirnov, and against whole numbers."""
    key = hashlib.sha256(b"gaps").digest()
    found = sampling._by_gaps(int(20_000 / q), q, key)
    gaps = np.diff(found) - 1
    uniform = np.random.default_rng(0).random(len(gaps))
    smoothed = 1 - (1 - q) ** gaps * (1 - q * uniform)  # uniform, where gaps are geometric
    assert stats.kstest(smoothed, "uniform").pvalue > 1e-6
    words = np.frombuffer(chacha_bytes(key, 8 * 200, nonce=(2, 0, 0)), dtype="<u8")
    exact = [
        sampling._exact_gap(int(word), q, 0 if q > 0.01 else int(gap), key, place)
        for place, (word, gap) in enumerate(zip(words, [found[0], *gaps[:199]], strict=True))
    ]
    assert exact == [found[0], *gaps[:199]]


def test_a_gap_is_decided_in_whole_numbers_where_floats_can_not():
    """Words at the very edges of (1−q)^k, on either side: what counts is the exact power, and the bits behind the word."""
    from fractions import Fraction

    q, key = 1e-3, bytes(32)
    for k in (1, 7, 700, 5000):
        edge = (1 - Fraction(q)) ** k * 2**64
        below, above = math.floor(edge) - 1, math.floor(edge) + 1
        for guess in (k - 1, k, k + 1):
            assert sampling._exact_gap(below, q, guess, key, 0) == k
            assert sampling._exact_gap(above, q, guess, key, 0) == k - 1


def test_some_of_very_many_records_are_all_different():
    found = privacy.sample_indices(10**8, 1e-5, privacy.generator(SEED, 0, "t"), privacy.Sampling("fixed_size", 10**8, 1000))
    assert len(set(found.tolist())) == 1000
    assert bool((found.diff() > 0).all())
    many = torch.cat(
        [
            privacy.sample_indices(
                2**20 + 5, 0.05, privacy.generator(SEED, s, "t"), privacy.Sampling("fixed_size", 2**20 + 5, 50_000)
            )
            for s in range(4)
        ]
    )
    counts = torch.histc(many.double(), bins=40, min=0, max=2**20 + 5)
    chi2 = float(((counts - 5000) ** 2).sum()) / 5000
    assert chi2 < stats.chi2.isf(1e-6, 39)
