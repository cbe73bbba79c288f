"""Small models, data, plans and a spying optimiser for the tests of training."""

from __future__ import annotations

import copy
import os
import weakref

import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn

SIZE, BATCH = 256, 32
_settings = weakref.WeakKeyDictionary()  # what a network of this file was made with
_plans = {}


def toy(count=SIZE, seed=0):
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 6, generator=draw)
    return TensorDataset(x, x[:, :3].argmax(1))


class Restless(torch.utils.data.Dataset):
    """Records that are never the same twice."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        return torch.tensor(list(os.urandom(6))).float() / 256, index % 3


def small(seed=0, dropout=0.0, clip=None):
    """Constrained weights."""
    model = _small(seed, dropout, clip)
    _settings[model] = "small", seed, dropout, clip
    return model


def _small(seed, dropout, clip):
    torch.manual_seed(seed)
    layers = [nn.BoundedInput((6,)), nn.SpectralLinear(6, 8), nn.GroupSort(2)]
    layers += [torch.nn.Dropout(dropout)] if dropout else []
    layers += [nn.SpectralLinear(8, 3, bias=False)]
    return nn.Sequential(*layers, *([] if clip is None else [nn.ClipGradient(clip)]))


def free(seed=0, width=16):
    """Weights that nothing projects, with four different sensitivities."""
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.BoundedInput((6,), norm=2.0), torch.nn.Linear(6, width), nn.Boundary(norm=0.7, cotangent=0.3), torch.nn.Linear(width, 3)
    )
    _settings[model] = "free", seed, width
    return model


def planned(model, loss=None, **changes):
    """A plan; for a network of this file as it was made, and the usual loss, the one that was made before with these settings."""
    settings = {"dataset_size": SIZE, "batch_size": BATCH, "delta": 1e-4, "accountant": "rdp"}
    if not {"epsilon", "noise_multiplier"} & changes.keys():
        settings["noise_multiplier"] = 1.0
    if not {"steps", "epochs"} & changes.keys():
        settings["steps"] = 12
    settings |= changes
    if loss is not None or model not in _settings:
        return lipdp.plan(model, losses.CrossEntropy(tau=4.0) if loss is None else loss, **settings)
    values = [(p.dtype, p.device, p.tolist(), p.requires_grad) for p in model.parameters()]
    attributes = [{**vars(module), "_parameters": list(module._parameters)} for module in model.modules()]
    key = repr((_settings[model], values, attributes, sorted(settings.items())))
    if key not in _plans or " at 0x" in key:  # of such an object nothing is known but its place
        _plans[key] = lipdp.plan(model, losses.CrossEntropy(tau=4.0), **settings)
    return _plans[key]


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
    engine.step(*batch, sample="own")
    return engine.optimizer.seen[0]
