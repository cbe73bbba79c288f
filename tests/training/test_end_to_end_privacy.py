"""An attack on the whole engine: does what leaves it tell D from D ∪ {x} any better than the plan allows?

With a learning rate of 0 the weights stay, so that each step of a run is a fresh draw of one and the same mechanism: Poisson
sampling, gradient sum, noise, division. x is the worst case that the bounds allow: an input on the sphere that the model gets
wrong with certainty, so its gradient has the norm Δ. The statistic is the inner product with that gradient.

A step is twenty draws: twenty such records, each along an axis of its own. Their gradients are orthogonal, so the statistic of each
sees that one record and no other, and records are drawn and noised independently.

An event S with P(S|D') > e^ε·P(S|D) + δ would disprove (ε, δ). Thresholds are chosen on the first half of the draws, and tested
on the second with Clopper–Pearson limits of 99.9% each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import pytest
import torch
from scipy import stats
from torch.utils.data import TensorDataset

from lipdp import losses, nn, privacy

from .common import Spy, engine_of, planned

SIZE, BATCH, DELTA, DRAWS, CONFIDENCE = 100, 50, 1e-3, 8000, 0.999
RECORDS = 20  # draws in a step
FEW = 2000  # enough to see a quarter of the noise


def a_model():
    model = nn.Sequential(nn.BoundedInput((RECORDS,), mode="sphere"), torch.nn.Linear(RECORDS, 2, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[30.0], [-30.0]]).expand(2, RECORDS))
    return model


WORST = torch.eye(RECORDS)  # logits (30, −30), label 1: the gradient of each is (1, −1) ⊗ x


@functools.cache
def draws(plan, with_record, noise=1.0, seed=0):
    """The attacker's statistic for every record and step of a run, in units of Δ."""
    model = a_model()
    x, y = torch.zeros(SIZE - 1, RECORDS), torch.zeros(SIZE - 1, dtype=torch.long)
    if with_record:  # beside those whose gradient is 0
        x, y = torch.cat([x[RECORDS - 1 :], WORST]), torch.cat([y[RECORDS - 1 :], torch.ones(RECORDS, dtype=torch.long)])
    engine = engine_of(model, plan, Spy(model, lr=0.0), losses.CrossEntropy(), seed=seed)
    if noise != 1.0:  # behind the back of the engine, which would refuse such a plan
        mechanism = engine._run.mechanism
        settings = mechanism.at(0)
        weaker = dataclasses.replace(settings, stds={name: noise * std for name, std in settings.stds.items()})
        mechanism._known = (mechanism._known[0], weaker)
    for batch in itertools.islice(engine.batches(TensorDataset(x, y)), (DRAWS if noise == 1.0 else FEW) // RECORDS):
        engine.step(*batch)
    released = torch.stack([gradient["1.weight"] for gradient in engine.optimizer.seen]).double()
    return (released[:, 0] - released[:, 1]).flatten() / math.sqrt(2) * BATCH / plan.sensitivity  # WORST is the identity


def limits(hits, count):
    """Clopper–Pearson, one-sided each way."""
    low = stats.beta.ppf(1 - CONFIDENCE, hits, count - hits + 1) if hits else 0.0
    high = stats.beta.ppf(CONFIDENCE, hits + 1, count - hits) if hits < count else 1.0
    return low, high


def lower_bound(absent, present):
    """The largest ε that the draws disprove, over events {t > c} and {t < c}, in both directions."""
    half = len(absent) // 2

    def at(c, sign, a, b):
        hits = int((sign * a > sign * c).sum()), int((sign * b > sign * c).sum())
        above, below = limits(hits[1], len(b))[0] - DELTA, limits(hits[0], len(a))[1]
        return math.log(above / below) if above > 0 else -math.inf

    best = -math.inf
    for a, b in ((absent, present), (present, absent)):
        places = torch.quantile(torch.cat([a[:half], b[:half]]), torch.linspace(0.01, 0.99, 60).double()).tolist()
        grid = [(c, sign) for c in places for sign in (1, -1)]
        c, sign = max(grid, key=lambda choice: at(*choice, a[:half], b[:half]))
        best = max(best, at(c, sign, a[half:], b[half:]))
    return best


@pytest.fixture(scope="module")
def plan():
    setting = {"dataset_size": SIZE, "batch_size": BATCH, "delta": DELTA, "steps": DRAWS // RECORDS, "noise_multiplier": 1.0}
    return planned(a_model(), losses.CrossEntropy(), **setting)


@pytest.fixture(scope="module")
def claimed(plan):
    return privacy.epsilon(noise_multiplier=plan.noise_multiplier, sampling_rate=0.5, steps=1, delta=DELTA)


def test_the_record_is_the_worst_case(plan):
    """The mean moves by q·Δ and no more: the attack is as strong as the bound allows."""
    shift = float(draws(plan, True, seed=33).mean() - draws(plan, False, seed=32).mean())
    assert shift == pytest.approx(0.5, abs=5 * math.sqrt(2.3 / DRAWS))


def test_nothing_leaks_more_than_is_claimed(plan, claimed):
    disproved = lower_bound(draws(plan, False, seed=32), draws(plan, True, seed=33))
    assert 0.3 < disproved <= claimed


def test_the_attack_would_notice_too_little_noise(plan, claimed):
    disproved = lower_bound(draws(plan, False, noise=0.25, seed=32), draws(plan, True, noise=0.25, seed=33))
    assert disproved > claimed
