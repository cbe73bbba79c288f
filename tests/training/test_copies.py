"""Augmentation multiplicity: the mean over copies, the same bound, one forward pass."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.data import Flip, PrecomputedCopies, RandomCrop
from lipdp.errors import DataError
from lipdp.training.query import Sample
from lipdp.training.seats import Copies

from .common import engine_of, planned

LOSS = losses.CrossEntropy(tau=4.0)


def image_model(clip=None):
    torch.manual_seed(0)
    layers = [nn.BoundedInput((1, 6, 6)), nn.SpectralConv2d(1, 4, 3), nn.GroupSort(2), nn.Flatten(), nn.SpectralLinear(64, 3)]
    return nn.Sequential(*layers, *([] if clip is None else [nn.ClipGradient(clip)])).double()


def plain_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(64, 3)).double()


def images(count=10):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(count, 1, 6, 6, generator=draw, dtype=torch.float64), torch.randint(0, 3, (count,), generator=draw)


def rows_of(x, augmentation):
    return augmentation(x, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("microbatch", [4, 100])
def test_a_proved_sum_is_that_of_the_mean_over_copies(clip, microbatch):
    model = image_model(clip)
    plan = planned(model, LOSS)
    engine = engine_of(model, plan, loss=LOSS, augmentation=Flip())
    x, y = images()
    sample = Sample(x, y, microbatch, torch.device("cpu"), Copies(Flip(), None, (1, 6, 6)))
    parameters = dict(model.named_parameters())
    found = engine._run.query.ask(parameters, sample, {}).sums
    expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i in range(len(x)):
        copies = rows_of(x[i : i + 1], Flip())[0]
        one = [torch.autograd.grad(LOSS(model(c[None]), y[i : i + 1]).sum(), list(parameters.values())) for c in copies]
        for (name, total), *grads in zip(expected.items(), *one, strict=True):
            mean = sum(grads) / len(grads)
            assert float(mean.norm()) <= plan.sensitivities[name] * (1 + 1e-9)
            total += mean
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("method", ["bookkeeping", "reweight", "ghost", "multiloss", "naive"])
def test_a_clipped_sum_clips_the_mean_over_copies(method):
    model = plain_model()
    loss = torch.nn.CrossEntropyLoss(reduction="none")
    plan = planned(model, loss, method=method, max_grad_norm=0.3, input_shape=(1, 6, 6))
    engine = engine_of(model, plan, loss=loss, augmentation=Flip(), input_shape=(1, 6, 6))
    x, y = images()
    sample = Sample(x, y, 8, torch.device("cpu"), Copies(Flip(), None, (1, 6, 6)))
    parameters = dict(model.named_parameters())
    found = engine._run.query.ask(parameters, sample, {}).sums
    expected = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for i in range(len(x)):
        copies = rows_of(x[i : i + 1], Flip())[0]
        grads = torch.autograd.grad(loss(model(copies), y[i].expand(2)).mean(), list(parameters.values()))
        norm = float(torch.cat([g.flatten() for g in grads]).norm())
        for (_, total), g in zip(expected.items(), grads, strict=True):
            total += g * min(1.0, 0.3 / norm)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, rtol=1e-8, atol=1e-12)


def test_random_copies_repeat_on_resume_and_stored_ones_are_checked():
    model = image_model().float()
    x, y = images(256)
    data = TensorDataset(x.float(), y)
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        again = image_model().float()
        engine = engine_of(again, planned(again, LOSS), loss=LOSS, augmentation=RandomCrop(1, copies=3))
        for batch in engine.batches(data):
            engine.step(*batch)
        runs.append(torch.stack([g["1.weight"].flatten() for g in engine.optimizer.seen]))
    assert torch.equal(*runs)
    stored = engine_of(model, planned(model, LOSS), loss=LOSS, augmentation=PrecomputedCopies(2))
    stored.step(torch.stack([x, x], 1).float(), y, sample="own")
    with pytest.raises(DataError):
        stored.step(x.float(), y, sample="own")


def test_runs_that_differ_in_their_copies_do_not_share_noise():
    """The difference of two releases with the same noise would be free of it."""
    x, y = images(0)
    gradients = []
    for augmentation in (None, Flip()):
        model = image_model()
        engine = engine_of(model, planned(model, LOSS), loss=LOSS, augmentation=augmentation, seed=7)
        engine.step(x, y, sample="own")
        gradients.append(engine.optimizer.seen[0]["1.weight"])
    assert not torch.equal(*gradients)


def test_tail_average_is_the_mean_of_the_last_weights():
    model = image_model().float()
    x, y = images(256)
    data = TensorDataset(x.float(), y)
    plan = planned(model, LOSS)
    engine = engine_of(model, plan, torch.optim.SGD(model.parameters(), lr=0.5), LOSS, tail_average=0.5)
    seen = []
    for batch in engine.batches(data):
        engine.step(*batch)
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    for name, value in engine.average.weights.items():
        mean = torch.stack([w[name] for w in seen[plan.steps // 2 :]]).mean(0)
        assert torch.allclose(value, mean, atol=1e-6)
    with pytest.raises(lipdp.errors.ConfigurationError, match="give one"):
        engine_of(image_model(), tail_average=0.5, ema_decay=0.9)
