"""Small models, data, plans and a spying optimiser for the tests of training."""

from __future__ import annotations

import copy

import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn

SIZE, BATCH = 256, 32


def toy(count=SIZE, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    return TensorDataset(x, x[:, :3].argmax(1))


def small(seed=0, dropout=0.0, clip=None):
    """Constrained weights."""
    torch.manual_seed(seed)
    layers = [nn.BoundedInput((6,)), nn.SpectralLinear(6, 8), nn.GroupSort(2)]
    layers += [torch.nn.Dropout(dropout)] if dropout else []
    layers += [nn.SpectralLinear(8, 3, bias=False)]
    return nn.Sequential(*layers, *([] if clip is None else [nn.ClipGradient(clip)]))


def free(seed=0, width=16):
    """Weights that nothing projects, with four different sensitivities."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.BoundedInput((6,), norm=2.0), torch.nn.Linear(6, width), nn.Boundary(norm=0.7, cotangent=0.3), torch.nn.Linear(width, 3)
    )


def planned(model, loss=None, **changes):
    settings = {"dataset_size": SIZE, "batch_size": BATCH, "delta": 1e-4, "accountant": "rdp"}
    if not {"epsilon", "noise_multiplier"} & changes.keys():
        settings["noise_multiplier"] = 1.0
    if not {"steps", "epochs"} & changes.keys():
        settings["steps"] = 12
    return lipdp.plan(model, losses.CrossEntropy(tau=4.0) if loss is None else loss, **{**settings, **changes})


def quiet(model, loss=None, **changes):
    """A plan with hardly any noise: what comes out is the sum. Noise follows the batch, so that no other run's can be
    subtracted.
    """
    return planned(model, loss, **{"noise_multiplier": 1e-6, **changes})


class Spy(torch.optim.SGD):
    """SGD that keeps every gradient it was handed."""

    def __init__(self, model, lr=0.0, **options):
        super().__init__(model.parameters(), lr=lr, **options)
        self.named = dict(model.named_parameters())
        self.seen = []

    def step(self, closure=None):
        self.seen.append({name: p.grad.clone() for name, p in self.named.items() if p.grad is not None})
        return super().step(closure)


def engine_of(model, plan=None, optimizer=None, loss=None, seed=0, **options):
    plan = planned(model, loss) if plan is None else plan
    optimizer = Spy(model) if optimizer is None else optimizer
    options.setdefault("reproducible", seed is not None)
    return lipdp.PrivacyEngine(model, losses.CrossEntropy(tau=4.0) if loss is None else loss, optimizer, plan, seed=seed, **options)


def empty():
    return torch.empty(0, 6), torch.empty(0, dtype=torch.long)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def first_gradient(model, plan, batch, **options):
    """What the optimiser gets in the first step, from a copy of the model."""
    engine = engine_of(copy.deepcopy(model), plan, **options)
    engine.step(*batch)
    return engine.optimizer.seen[0]
