"""Poisson samples and the randomness behind them. Seeds are fixed; false-alarm rates are those for a fresh seed."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from scipy import stats

from lipdp import privacy
from lipdp.errors import ConfigurationError
from lipdp.privacy import sampling

SEED = 123_456_789


def memberships(size, q, steps):
    sampler = privacy.PoissonSampler(size, q, SEED)
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


@pytest.mark.parametrize("q", [1e-3, 0.05, 0.5, 1.0])
def test_a_record_is_in_where_its_uniform_is_below_q(q):
    for size in (1, 17, 5000):
        uniforms = torch.rand(size, dtype=torch.float64, generator=privacy.generator(SEED, 3, "t"))
        expected = [place for place, value in enumerate(uniforms.tolist()) if value < q]
        found = privacy.poisson_indices(size, q, privacy.generator(SEED, 3, "t"))
        assert found.dtype == torch.int64
        assert found.tolist() == expected


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


def test_small_rates_are_not_rounded(monkeypatch):
    """Uniforms of float32 are multiples of 2⁻²⁴: at q = 1.25·2⁻²⁴ they would sample 2/1.25 of what they should."""
    asked = []
    original = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *a, **k: asked.append(k["dtype"]) or original(*a, **k))
    privacy.poisson_indices(10, 1.25 * 2**-24, privacy.generator(SEED, 0, "t"))
    assert asked == [torch.float64]


def test_blocks_are_joined(monkeypatch):
    monkeypatch.setattr(sampling, "_BLOCK", 7)
    assert torch.equal(privacy.poisson_indices(50, 1.0, privacy.generator(SEED, 0, "t")), torch.arange(50))


def test_a_step_can_be_repeated():
    sampler, again = privacy.PoissonSampler(500, 0.1, SEED), privacy.PoissonSampler(500, 0.1, SEED)
    later = [again.indices(step) for step in (5, 3, 4)]
    assert all(torch.equal(sampler.indices(step), found) for step, found in zip((5, 3, 4), later, strict=True))
    assert not torch.equal(sampler.indices(3), sampler.indices(4))
    assert not torch.equal(sampler.indices(3), privacy.PoissonSampler(500, 0.1, SEED + 1).indices(3))


def test_sampler_tells_its_expectation_and_hides_its_seed():
    sampler = privacy.PoissonSampler(500, 0.1, SEED)
    assert sampler.expected_size == pytest.approx(50)
    assert str(SEED) not in repr(sampler)


@pytest.mark.parametrize(
    ("size", "q", "seed", "match"),
    [(-1, 0.1, 0, "size"), (2.0, 0.1, 0, "size"), (10, 0.0, 0, "rate"), (10, 1.5, 0, "rate"), (10, math.nan, 0, "rate"),
     (10, 0.1, -1, "seed"), (10, 0.1, 1.5, "seed"), (True, 0.1, 0, "size")],
)  # fmt: skip
def test_bad_samplers(size, q, seed, match):
    with pytest.raises(ConfigurationError, match=match):
        privacy.PoissonSampler(size, q, seed)


def test_bad_indices():
    for size, q in [(-1, 0.5), (1.5, 0.5), (10, 0), (10, 2)]:
        with pytest.raises(ConfigurationError):
            privacy.poisson_indices(size, q, torch.Generator())


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


def test_fresh_seeds():
    seeds = [privacy.fresh_seed() for _ in range(100)]
    assert len(set(seeds)) == 100
    assert 2**120 < max(seeds) < 2**128  # 100 seeds all below 2¹²⁰: probability 2⁻⁸⁰⁰


def draw(*triple):
    return torch.rand(8, dtype=torch.float64, generator=privacy.generator(*triple))


def test_generators_are_functions_of_the_triple():
    assert torch.equal(draw(SEED, 3, "noise"), draw(SEED, 3, "noise"))
    for other in [(SEED + 1, 3, "noise"), (SEED, 4, "noise"), (SEED, 3, "sample")]:
        assert not torch.equal(draw(SEED, 3, "noise"), draw(*other))
    assert privacy.generator(SEED, 3, "noise").initial_seed() == privacy.derive_seed(SEED, 3, "noise")


def test_cpu_generators_use_more_than_32_bits(monkeypatch):
    """torch's CPU generator ignores the upper half of its seed; ours differ even where the derived seeds agree."""
    low = torch.rand(8, generator=torch.Generator().manual_seed(5))
    assert torch.equal(low, torch.rand(8, generator=torch.Generator().manual_seed(5 + 2**32)))  # why we take the trouble
    monkeypatch.setattr("lipdp.privacy.randomness.derive_seed", lambda *_: 5)
    assert not torch.equal(draw(SEED, 3, "noise"), draw(SEED, 4, "noise"))


def test_generators_of_a_step_stay_good_generators():
    """Uniformity over the first draw of 5,000 generators and over 50,000 draws of one; Kolmogorov–Smirnov at 1e-6."""
    firsts = [float(torch.rand((), dtype=torch.float64, generator=privacy.generator(SEED, t, "u"))) for t in range(5000)]
    many = torch.rand(50_000, dtype=torch.float64, generator=privacy.generator(SEED, 0, "u")).numpy()
    assert stats.kstest(firsts, "uniform").pvalue > 1e-6
    assert stats.kstest(many, "uniform").pvalue > 1e-6


def test_unknown_state_layouts_are_refused(monkeypatch):
    monkeypatch.setattr("lipdp.privacy.randomness._MT_OFFSET", 4)
    with pytest.raises(ConfigurationError, match="32 bits"):
        privacy.generator(SEED, 0, "noise")


@pytest.mark.parametrize("triple", [(-1, 0, "a"), (1.0, 0, "a"), (0, -1, "a"), (0, 0.5, "a"), (0, 0, ""), (0, 0, None)])
def test_bad_triples(triple):
    with pytest.raises(ConfigurationError):
        privacy.derive_seed(*triple)
