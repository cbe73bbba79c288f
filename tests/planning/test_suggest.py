"""The suggested optimiser: what it is made of, what the noise really does to the weights, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.errors import ConfigurationError

from ..training.common import free, planned, small


def rate(model, plan, **options):
    """In units of the sensitivity."""
    return lipdp.suggest_optimizer(model, plan, **options)[0].param_groups[0]["lr"] * plan.sensitivity


def drift(model, plan, noise_to_weights, momentum, seed):
    """How far noise alone carries the weights in a run, relative to their lengths: the root mean square over the matrices."""
    optimizer, scheduler = lipdp.suggest_optimizer(model, plan, noise_to_weights=noise_to_weights, momentum=momentum)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    draw = torch.Generator().manual_seed(seed)
    for step in range(plan.steps):
        for name, p in model.named_parameters():
            std = plan.noise_stds[name] * plan.phase(step).noise * plan.phase(step).clip
            p.grad = std * torch.randn(p.shape, generator=draw) / plan.batch_size
        optimizer.step()
        scheduler.step()
    moved = [float((p.detach() - start[n]).norm() / start[n].norm()) for n, p in model.named_parameters() if p.ndim > 1]
    return math.sqrt(sum(m * m for m in moved) / len(moved))


@pytest.mark.parametrize("options", [{}, {"allocation": "optimal"}, {"schedule": lipdp.Schedule(noise=((0, 1), (0.5, 3.0)))}])
@pytest.mark.parametrize(("share", "momentum"), [(2.0, 0.9), (0.5, 0.0)])
def test_noise_alone_carries_the_weights_as_far_as_asked(options, share, momentum):
    """By simulation: nothing of the formula is used here."""
    found = []
    for seed in range(3):
        model = free(seed, width=64)
        plan = planned(model, steps=150, **options)
        found.append(drift(model, plan, share, momentum, seed))
    assert sum(found) / len(found) == pytest.approx(share, rel=0.08)


def test_the_rate_is_in_units_of_the_sensitivity():
    rates = []
    for clip, tau in ((0.1, 4.0), (0.4, 4.0), (0.4, 50.0)):
        model = small(clip=clip)
        rates.append(rate(model, planned(model, losses.CrossEntropy(tau=tau))))
    assert rates == pytest.approx([rates[0]] * 3)
    clipped = [
        rate(free(), planned(free(), losses.CrossEntropy(), method="bookkeeping", max_grad_norm=norm)) for norm in (0.1, 1.0, 10.0)
    ]
    assert clipped == pytest.approx([clipped[0]] * 3)


def test_what_it_depends_on():
    model = small()
    base = rate(model, planned(model))
    assert rate(model, planned(model, noise_multiplier=2.0)) == pytest.approx(base / 2)
    assert rate(model, planned(model, batch_size=64)) == pytest.approx(2 * base, rel=0.01)  # longer sums, more slack
    long, longer = (rate(model, planned(model, steps=steps)) for steps in (400, 1600))
    assert longer == pytest.approx(long / 2, rel=0.05)  # noise adds up like the root of the steps
    assert rate(model, planned(model), noise_to_weights=1.0) == pytest.approx(base / 2)
    assert rate(model, planned(model, steps=400), momentum=0.0) == pytest.approx(10 * long, rel=0.1)
    # An embedding table whose entries are a hundred times as large is one of the weights, not all of them.
    odd = torch.nn.Sequential(torch.nn.Embedding(500, 8), torch.nn.Flatten(), torch.nn.Linear(32, 3))
    settings = {"method": "bookkeeping", "max_grad_norm": 1.0}
    before = rate(odd, planned(odd, losses.CrossEntropy(), **settings))
    with torch.no_grad():
        odd[0].weight.mul_(100.0)
    assert rate(odd, planned(odd, losses.CrossEntropy(), **settings)) == pytest.approx(before, rel=0.3)


def test_the_schedule_ends_with_the_run_and_nothing_of_the_model_changes():
    model = small()
    plan = planned(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer, scheduler = lipdp.suggest_optimizer(model, plan)
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert isinstance(optimizer, torch.optim.SGD)
    for _ in range(plan.steps):
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.0, abs=1e-12)
    lipdp.PrivacyEngine(model, losses.CrossEntropy(tau=4.0), optimizer, plan, seed=0)  # it is one that the engine takes


def test_biases_and_parameters_that_start_at_zero_do_not_count():
    model = small()
    base = rate(model, planned(model))
    with torch.no_grad():
        model[1].bias.fill_(50.0)
    assert rate(model, planned(model)) == pytest.approx(base)
    model = free()
    with torch.no_grad():
        model[3].weight.zero_()
    assert 0 < rate(model, planned(model)) < math.inf


def test_refusals():
    model = small()
    plan = planned(model)
    with pytest.raises(ConfigurationError, match=r"another model.*1\.bias"):
        lipdp.suggest_optimizer(nn.Sequential(*(nn.SpectralLinear(6, 8, bias=False),)), plan)
    for momentum in (1.0, -0.1, math.nan, "0.9"):
        with pytest.raises(ConfigurationError, match="momentum"):
            lipdp.suggest_optimizer(model, plan, momentum=momentum)
    for share in (0.0, -1.0, math.inf, "2"):
        with pytest.raises(ConfigurationError, match="noise_to_weights"):
            lipdp.suggest_optimizer(model, plan, noise_to_weights=share)
    head = nn.Sequential(nn.BoundedInput((6,)), torch.nn.Linear(6, 3, bias=False))
    with torch.no_grad():
        head[1].weight.zero_()
    with pytest.raises(ConfigurationError, match=r"start at 0.*in units of the sensitivity"):
        lipdp.suggest_optimizer(head, planned(head))
