"""The noise that really reaches the optimiser: its size, its law, when it is drawn and when it must not repeat.

Statistical tests have fixed seeds; the false-alarm rates say how surprising a failure would be after a change of the stream.
"""

from __future__ import annotations

import copy

import pytest
import torch
from scipy import stats

from lipdp.privacy import Stream
from lipdp.training.query import Answer

from .common import BATCH, Spy, empty, engine_of, first_gradient, free, planned, quiet, same, small, toy

FALSE_ALARM = 1e-6


def pure_noise(model, plan, steps, **options):
    """The noise of ``steps`` empty batches, in units of the planned std."""
    engine = engine_of(model, plan, **options)
    for _ in range(steps):
        engine.step(*empty(), sample="own")
    stds = plan.noise_stds
    return {name: torch.stack([g[name] for g in engine.optimizer.seen]).double() * BATCH / stds[name] for name in stds}


@pytest.mark.parametrize("allocation", ["global", "per_layer", "optimal"])
def test_every_group_has_the_planned_standard_deviation(allocation):
    plan = planned(free(), steps=200, allocation=allocation)
    assert allocation == "global" or len({round(s, 9) for s in plan.noise_stds.values()}) > 1
    for name, noise in pure_noise(free(), plan, 200, seed=3).items():
        law = stats.chi2(noise.numel())
        energy = float((noise**2).sum())
        assert law.ppf(FALSE_ALARM / 2) < energy < law.isf(FALSE_ALARM / 2), name
        assert abs(float(noise.sum())) < stats.norm.isf(FALSE_ALARM / 2) * noise.numel() ** 0.5, name
        assert stats.kstest(noise.flatten().numpy(), "norm").pvalue > FALSE_ALARM, name


def test_the_chi_square_test_sees_three_percent():
    noise = pure_noise(free(), planned(free(), steps=200), 200, seed=3)["1.weight"]
    law = stats.chi2(noise.numel())
    assert float((noise**2).sum()) / 1.06**2 < law.ppf(FALSE_ALARM / 2)


def test_noise_of_steps_and_parameters_is_uncorrelated():
    torch.manual_seed(0)
    noise = pure_noise(free(width=6), planned(free(width=6), steps=100), 100, seed=5)
    rows = torch.cat([n.flatten(1) for n in noise.values()], 1)
    limit = stats.norm.isf(FALSE_ALARM / 2)
    for lag in (1, 2, 3, 10):
        product = rows[lag:] * rows[:-lag]
        assert abs(float(product.sum())) < limit * product.numel() ** 0.5
    parts = [noise["1.weight"].flatten(), noise["3.weight"].flatten()]
    count = min(len(p) for p in parts)
    assert abs(float(parts[0][:count] @ parts[1][:count])) < limit * count**0.5
    assert len(torch.unique(rows)) > 0.999 * rows.numel()


def test_one_draw_per_step_whatever_the_microbatch():
    x, y = toy(100).tensors
    for model in (free(), small()):
        plan = planned(model)
        gradients = [first_gradient(model, plan, (x, y), microbatch_size=size) for size in (8, 64, 512)]
        noises = [first_gradient(model, plan, empty(), microbatch_size=size) for size in (8, 64, 512)]
        for other, noise in zip(gradients[1:], noises[1:], strict=True):
            assert same(noise, noises[0])
            for name, gradient in gradients[0].items():
                assert torch.allclose(other[name] * BATCH, gradient * BATCH, atol=1e-5 * len(x), rtol=1e-5)


def test_the_microbatch_changes_nothing_to_five_digits_of_the_sum():
    x, y = toy(100).tensors
    plan, model = quiet(free()), free()
    sums = [{n: g * BATCH for n, g in first_gradient(model, plan, (x, y), microbatch_size=size).items()} for size in (8, 512)]
    for name in sums[0]:
        assert torch.allclose(sums[0][name], sums[1][name], atol=2e-5)


def test_same_seed_same_noise_and_other_seed_other_noise():
    model, plan = free(), planned(free())
    assert same(first_gradient(model, plan, empty(), seed=1), first_gradient(model, plan, empty(), seed=1))
    assert not same(first_gradient(model, plan, empty(), seed=1), first_gradient(model, plan, empty(), seed=2))
    assert not same(first_gradient(model, plan, empty(), seed=None), first_gradient(model, plan, empty(), seed=None))


def fresh(model, plan, seed=1, **options):
    model = copy.deepcopy(model)
    return engine_of(model, plan, Spy(model, **options), seed=seed)


def test_runs_that_differ_never_share_noise_even_from_one_seed():
    """Or the difference of two releases would be a difference of exact gradients."""
    model, plan = free(), planned(free())
    base = first_gradient(model, plan, empty(), seed=1)
    for options in ({"lr": 0.1}, {"lr": 0.0, "momentum": 0.5}, {"lr": 0.0, "weight_decay": 0.1}):
        engine = fresh(model, plan, **options)
        engine.step(*empty(), sample="own")
        assert not same(engine.optimizer.seen[0], base)
    assert not same(first_gradient(free(seed=1), plan, empty(), seed=1), base)
    other = planned(free(), noise_multiplier=1.0001)
    assert not same(first_gradient(model, other, empty(), seed=1), base)


def test_a_learning_rate_that_differed_once_keeps_the_noise_apart():
    """A warm-up in one run: from the second step on settings are equal, but weights are not."""
    engines = fresh(free(), planned(free()), lr=0.1), fresh(free(), planned(free()), lr=0.2)
    for _ in range(3):
        for engine in engines:
            engine.step(*empty(), sample="own")
            engine.optimizer.param_groups[0]["lr"] = 0.05
    first, second = (engine.optimizer.seen for engine in engines)
    for a, b in zip(first, second, strict=True):
        assert not any(torch.allclose(a[name], b[name]) for name in a)


def test_sampling_noise_and_dropout_have_their_own_streams():
    engine = engine_of(free(), planned(free(), steps=50))
    streams, seen = engine._run.streams, set()
    for step in range(50):
        seen.add(streams.sample(step).key)
        seen.add(streams.noise(streams.prepare(step, engine.optimizer, [], *empty())).key)
        begin, restore = streams.model(step)
        for microbatch in range(2):
            begin(microbatch)
            seen.add(bytes(torch.random.get_rng_state()[:200]))
        restore()
        seen.add(bytes(streams.draw(step, "augment").get_state()[:200]))
    assert len(seen) == 250
    assert streams.key not in seen


def test_the_callers_random_state_is_left_alone_and_does_not_matter():
    model = small(dropout=0.5)
    plan, batch = planned(model), toy(20).tensors
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = first_gradient(model, plan, batch)
    assert torch.equal(state, torch.get_rng_state())
    torch.manual_seed(2)
    assert same(first, first_gradient(model, plan, batch))


def test_noise_in_half_precision_is_drawn_in_float32():
    """Rounded noise is no Gaussian; the gradient is rounded only afterwards."""
    model = free().to(torch.bfloat16)
    plan = planned(model)
    assert plan.precision == "bfloat16"
    engine = engine_of(model, plan)
    x, y = toy(20).tensors
    engine.step(x.bfloat16(), y, sample="own")
    assert {g.dtype for g in engine.optimizer.seen[0].values()} == {torch.bfloat16}
    sums = {name: torch.zeros_like(p) for name, p in engine._run.parameters.items()}
    released = engine._run.mechanism.draw(Answer(sums), engine._run.mechanism.at(5), Stream())
    assert {t.dtype for t in released.values()} == {torch.float32}


def test_noise_in_double_precision():
    model = free().double()
    engine = engine_of(model)
    x, y = toy(20).tensors
    engine.step(x.double(), y, sample="own")
    gradient = engine.optimizer.seen[0]["1.weight"]
    assert gradient.dtype == torch.float64
    assert not torch.equal(gradient, gradient.float().double())
