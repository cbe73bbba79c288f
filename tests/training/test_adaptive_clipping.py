"""Adaptive clipping inside the step's one mechanism: same ε, noise that follows C in the same step, a quantile that is found."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

import lipdp
from lipdp import Clipping, Schedule, losses, nn
from lipdp.errors import ConfigurationError, UnsupportedError
from lipdp.privacy import AdaptiveClip, effective_multiplier
from lipdp.privacy.adaptive import COUNT_SENSITIVITY
from lipdp.training import linear_schedule
from lipdp.training.gradients import centred_count

from .common import Spy, empty, engine_of, planned, toy

CLIP = AdaptiveClip(quantile=0.9, rate=0.3)


def adaptive_model(clip=0.5, width=8):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((6,)),
        nn.SpectralLinear(6, width),
        nn.GroupSort(2),
        nn.SpectralLinear(width, 3),
        nn.ClipGradient(clip, adaptive=True),
    )


def plain_model(width=8):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 3))


CROSS_ENTROPY = torch.nn.CrossEntropyLoss(reduction="none")


def clipped_plan(model, **changes):
    return planned(model, CROSS_ENTROPY, method="bookkeeping", max_grad_norm=0.5, **changes)


def test_the_same_epsilon_with_and_without_at_the_same_total_multiplier():
    model = adaptive_model()
    fixed = nn.Sequential(*list(model)[:-1], nn.ClipGradient(0.5))
    with_it, without = planned(model, clipping=Clipping(adaptive=CLIP)), planned(fixed)
    assert with_it.epsilon == without.epsilon
    assert with_it.noise_multiplier == without.noise_multiplier
    # What the counts take, the gradient's noise pays for: together they are one mechanism of the same multiplier.
    assert all(with_it.noise_stds[name] > without.noise_stds[name] for name in without.noise_stds)
    bounds = {**{g.name: g.sensitivity * with_it.slack for g in with_it.groups}, "count": COUNT_SENSITIVITY}
    stds = {**{g.name: g.noise_std for g in with_it.groups}, "count": with_it.adaptive.count_noise}
    assert effective_multiplier(bounds, stds) == pytest.approx(with_it.noise_multiplier, rel=1e-9)


def test_an_engine_refuses_a_plan_that_forgets_to_pay_for_the_count():
    """Fails if the accounting of the count is removed: the noise of a plan without adaptation is too little for one with it."""
    model = adaptive_model()
    plan = planned(model, clipping=Clipping(adaptive=CLIP))
    fixed = planned(nn.Sequential(*list(model)[:-1], nn.ClipGradient(0.5)))
    cheap = {group.name: group.noise_std for group in fixed.groups}
    groups = tuple(dataclasses.replace(group, noise_std=cheap[group.name]) for group in plan.groups)
    with pytest.raises(ConfigurationError, match="multiplier"):
        engine_of(model, dataclasses.replace(plan, groups=groups))


@pytest.mark.parametrize("kind", ["proved", "clipped"])
def test_when_the_clip_halves_the_noise_halves_in_the_same_step(kind):
    if kind == "proved":
        model = adaptive_model()
        plan, loss = planned(model, clipping=Clipping(adaptive=CLIP)), None
    else:
        model = plain_model()
        plan, loss = clipped_plan(model, clipping=Clipping(adaptive=CLIP)), CROSS_ENTROPY
    engine = engine_of(model, plan, loss=loss)
    before = engine._run.mechanism.at(0)
    (name,) = plan.adaptive_clips
    engine._run.mechanism.clips[name] /= 2
    after = engine._run.mechanism.at(0)
    for parameter, std in before.stds.items():
        assert after.stds[parameter] == pytest.approx(std / 2, rel=1e-12)
    assert after.count_std == before.count_std


@pytest.mark.parametrize("kind", ["proved", "clipped"])
def test_the_noise_that_is_really_drawn_follows_the_clip(kind):
    if kind == "proved":
        model = adaptive_model(width=80)
        plan, loss = planned(model, clipping=Clipping(adaptive=CLIP), steps=60), None
    else:
        model = plain_model(width=80)
        plan, loss = clipped_plan(model, clipping=Clipping(adaptive=CLIP), steps=60), CROSS_ENTROPY
    engine = engine_of(model, plan, loss=loss)
    (name,) = plan.adaptive_clips
    for step in range(60):  # empty batches: b̃ = ½ < 0.9 on average, so the norm drifts up from step to step; pin it
        engine._run.mechanism.clips[name] = 0.5 if step < 30 else 0.25
        engine.step(*empty(), sample="own")
    key = next(iter(plan.sensitivities))
    spread = [torch.stack([g[key] for g in part]).std().item() for part in (engine.optimizer.seen[:30], engine.optimizer.seen[30:])]
    assert spread[0] / spread[1] == pytest.approx(2.0, rel=0.05)


def test_the_released_count_is_really_noised():
    """Fails if the count's noise is removed: on empty batches b̃ is ½ plus nothing but noise of the planned size."""
    model = adaptive_model()
    plan = planned(model, clipping=Clipping(adaptive=CLIP), steps=300)
    engine = engine_of(model, plan)
    shares = []
    for _ in range(300):
        engine.step(*empty(), sample="own")
        shares.append(1 - engine.clipped_fraction)
    spread = torch.tensor(shares).std().item()
    assert spread == pytest.approx(plan.adaptive.count_noise / plan.batch_size, rel=0.2)


def test_one_example_moves_the_count_by_a_half_at_most_padding_by_nothing():
    norms = torch.tensor([0.1, 2.0, math.nan, math.inf, 0.3, 0.4])
    mask = torch.tensor([True, True, True, True, False, True])
    for row in range(6):
        without = mask.clone()
        without[row] = False
        moved = float(centred_count(norms, 0.5, mask) - centred_count(norms, 0.5, without))
        assert abs(moved) == (COUNT_SENSITIVITY if mask[row] else 0.0)
    copies = torch.tensor([0.1, 0.9, 0.1, 0.1])  # two examples of two copies: b = ½ and 1
    assert float(centred_count(copies, 0.5, torch.tensor([True, True]), copies=2)) == pytest.approx(0.5)


def quantile_run(model, plan, data, loss, norms_of):
    engine = engine_of(model, plan, Spy(model, lr=0.0), loss)
    (name,) = plan.adaptive_clips
    tail = []
    for number, batch in enumerate(engine.batches(data)):
        engine.step(*batch)
        if number >= plan.steps // 2:
            tail.append(engine.clipping[name])
    return sum(tail) / len(tail), float(torch.quantile(norms_of(data), 0.9))


def test_the_norm_converges_to_the_true_quantile_of_the_loss_gradients():
    """A stream whose gradient norms are spread out: the estimate is within 10% of the true 90% quantile, at the stated noise."""
    data = toy(2000)
    model = adaptive_model(clip=0.05)
    loss = losses.CrossEntropy(tau=8.0)
    plan = planned(
        model, loss, dataset_size=2000, batch_size=400, steps=60, clipping=Clipping(adaptive=AdaptiveClip(quantile=0.9, rate=0.3))
    )
    assert plan.adaptive.count_noise == pytest.approx(20.0)

    def norms_of(dataset):
        x, y = dataset.tensors
        logits = torch.nn.Sequential(*list(model)[:-1])(x).detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(logits, y).sum(), logits)
        return gradient.norm(dim=1)

    found, true = quantile_run(model, plan, data, loss, norms_of)
    assert found == pytest.approx(true, rel=0.1)


def test_the_norm_converges_to_the_true_quantile_of_whole_gradients():
    data = toy(2000)
    model = plain_model()
    plan = planned(
        model,
        CROSS_ENTROPY,
        dataset_size=2000,
        batch_size=400,
        steps=60,
        clipping=Clipping(adaptive=AdaptiveClip(quantile=0.9, rate=0.3)),
        method="bookkeeping",
        max_grad_norm=0.05,
    )
    found, true = quantile_run(
        model, plan, data, CROSS_ENTROPY, lambda d: lipdp.clipping.per_example_norms(model, CROSS_ENTROPY, *d.tensors)
    )
    assert found == pytest.approx(true, rel=0.1)


def test_it_resumes_exactly():
    def run(split):
        model = adaptive_model()
        plan = planned(model, clipping=Clipping(adaptive=CLIP))
        engine = engine_of(model, plan, torch.optim.SGD(model.parameters(), lr=0.1))
        for number, batch in enumerate(engine.batches(toy())):
            engine.step(*batch)
            if split and number == 4:
                state, fresh = engine.state_dict(), adaptive_model()
                engine = engine_of(fresh, plan, torch.optim.SGD(fresh.parameters(), lr=0.1))
                engine.load_state_dict(state)
                for later in engine.batches(toy()):
                    engine.step(*later)
                return engine
        return engine

    once, twice = run(False), run(True)
    assert once.clipping == twice.clipping
    for a, b in zip(once.model.parameters(), twice.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_clip_schedule_scales_the_noise_and_costs_nothing():
    model = nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 3, bias=False), nn.ClipGradient(0.5))
    plan = planned(model, schedule=Schedule(clip=((0.0, 1.0), (0.5, 0.25))))
    assert plan.epsilon == planned(model).epsilon
    engine = engine_of(model, plan)
    first, last = engine._run.mechanism.at(0), engine._run.mechanism.at(plan.steps - 1)
    assert last.stds["1.weight"] == pytest.approx(first.stds["1.weight"] / 4)
    for batch in engine.batches(toy()):
        engine.step(*batch)
    assert model[2].max_norm == pytest.approx(0.125)


def test_the_history_shows_the_clipping_norm_and_the_released_share_only_when_paid_for(tmp_path):
    data = toy()
    for adaptive in (None, CLIP):
        model = plain_model()
        plan = clipped_plan(model, clipping=Clipping(adaptive=adaptive))
        history = lipdp.fit(
            model, CROSS_ENTROPY, torch.optim.SGD(model.parameters(), lr=0.1), plan, data, seed=0, reproducible=True
        )
        assert ("clipped" in history.metrics) == (adaptive is not None)
        assert ("clip" in history.metrics) == (adaptive is not None)
    model = plain_model()
    history = lipdp.fit(
        model, CROSS_ENTROPY, torch.optim.SGD(model.parameters(), lr=0.1), clipped_plan(model), data, seed=0, public=True
    )
    assert all(0 <= share <= 1 for share in history.metrics["clipped"])


def test_what_makes_no_sense_is_refused():
    with pytest.raises(ConfigurationError, match="say how"):
        planned(adaptive_model())
    with pytest.raises(ConfigurationError, match="this plan has none"):
        planned(nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 3)), clipping=Clipping(adaptive=CLIP))
    with pytest.raises(ConfigurationError, match="this plan has none"):
        planned(nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 3)), schedule=Schedule(clip=linear_schedule(0.5)))
    with pytest.raises(ConfigurationError, match="automatic"):
        clipped_plan(plain_model(), clipping=Clipping(adaptive=CLIP, clip="automatic"))
    with pytest.raises(ConfigurationError, match="leaves nothing for the gradient"):
        planned(adaptive_model(), clipping=Clipping(adaptive=AdaptiveClip(count_noise=0.1)))


def test_normalised_cotangents_have_exactly_the_norm_and_the_bound_says_so():
    model = nn.Sequential(
        nn.BoundedInput((6,), mode="sphere"), torch.nn.Linear(6, 3, bias=False), nn.ClipGradient(0.25, normalise=True)
    ).double()
    assert lipdp.sensitivities(model, losses.CrossEntropy()) == {"1.weight": pytest.approx(0.25)}
    # Also above the loss's own constant: normalising lengthens.
    longer = nn.Sequential(*list(model)[:-1], nn.ClipGradient(5.0, normalise=True))
    assert lipdp.sensitivities(longer, losses.CrossEntropy()) == {"1.weight": pytest.approx(5.0)}
    x, y = toy(50).tensors
    norms = lipdp.clipping.per_example_norms(model, losses.CrossEntropy(), x.double(), y)
    assert torch.allclose(norms, torch.full_like(norms, 0.25), rtol=1e-9)


def test_clipped_binary_cross_entropy_is_the_direction_of_kantorovich_rubinstein():
    """Proposition 2: with C ≤ σ(−τX_out) every logit gradient is clipped, so the step is parallel to the KR loss's step."""
    torch.manual_seed(0)
    tau, x = 2.0, torch.randn(40, 6, dtype=torch.float64)
    y = (torch.rand(40) < 0.5).long()
    body = nn.Sequential(
        nn.BoundedInput((6,)), nn.SpectralLinear(6, 8, bias=False), nn.GroupSort(2), nn.SpectralLinear(8, 1, bias=False)
    ).double()
    reach = float(lipdp.bounds.analyse(body, losses.KR()).output.norm)
    limit = 1 / (1 + math.exp(tau * reach))
    clipped = nn.Sequential(*body, nn.ClipGradient(limit))

    def gradient(model, loss):
        return torch.cat([g.flatten() for g in torch.autograd.grad(loss(model(x), y).sum(), list(body.parameters()))])

    ours, kr = gradient(clipped, losses.BCE(tau=tau)), gradient(body, losses.KR())
    assert torch.allclose(ours, limit * kr, rtol=1e-9, atol=1e-12)
    loose = nn.Sequential(*body, nn.ClipGradient(0.9))  # above every gradient: another direction
    other = gradient(loose, losses.BCE(tau=tau))
    assert torch.nn.functional.cosine_similarity(other, kr, dim=0) < 1 - 1e-6


class _Alias(torch.nn.Module):
    """One clipping layer under two names."""

    def __init__(self):
        super().__init__()
        self.bound, self.line = nn.BoundedInput((6,)), nn.SpectralLinear(6, 3)
        self.first = nn.ClipGradient(0.5, adaptive=True)
        self.second = self.first

    def forward(self, x):
        return self.second(self.line(self.bound(x)))


class _Opaque(torch.nn.Module):
    """A layer with a rule of its own that hides a clipping layer."""

    def __init__(self):
        super().__init__()
        self.inner = nn.ClipGradient(0.5, adaptive=True)

    def forward(self, x):
        return self.inner(x)


@lipdp.bounds.rule(_Opaque)
def _opaque(layer, call):
    return lipdp.bounds.Transfer(call.inputs[0], clip=layer.inner.max_norm)


@pytest.mark.parametrize(
    "model", [_Alias(), nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 3), _Opaque())], ids=["alias", "opaque"]
)
def test_a_clipping_layer_that_the_calculus_does_not_see_is_refused_or_its_bound_follows(model):
    """Where C grows and the bound stayed, the noise would be too little."""
    try:
        engine = engine_of(model, planned(model, clipping=Clipping(adaptive=CLIP)))
    except UnsupportedError as error:
        assert "does not see it" in str(error)  # noqa: PT017
        return
    (name,) = engine.plan.adaptive_clips
    before = engine._run.mechanism.at(0).stds
    engine._run.mechanism.clips[name] *= 2
    after = engine._run.mechanism.at(0).stds
    assert all(after[key] == pytest.approx(2 * std) for key, std in before.items())
