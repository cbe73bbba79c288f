"""What people do to their models: torch.compile, activation checkpointing, bfloat16 parameters, channels last. Each trains, or is
refused with a reason, whichever the method is (docs/your_model.md)."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.errors import UnsupportedError

LOSS = losses.CrossEntropy(tau=4.0)
PIXELS = TensorDataset(torch.randn(64, 1, 6, 6, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3)


class _Block(torch.nn.Module):
    def __init__(self, reentrant=None):
        super().__init__()
        self.first = torch.nn.Conv2d(1, 2, 1)
        self.inner, self.reentrant = torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3), torch.nn.Tanh()), reentrant

    def forward(self, x):
        x = self.first(x)
        return self.inner(x) if self.reentrant is None else checkpoint(self.inner, x, use_reentrant=self.reentrant)


def _plain(reentrant=None):
    torch.manual_seed(0)
    return torch.nn.Sequential(_Block(reentrant), torch.nn.Flatten(), torch.nn.Linear(64, 3))


def _lipschitz():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.BoundedInput((1, 6, 6)), nn.SpectralConv2d(1, 4, 3), nn.GroupSort(2), nn.Flatten(), nn.SpectralLinear(64, 3)
    )


def _trained(model, method="bookkeeping", data=PIXELS, **settings):
    clip = {} if method == "clipless" else {"method": method, "max_grad_norm": 0.5}
    plan = lipdp.plan(
        model,
        LOSS,
        dataset_size=64,
        batch_size=64,
        delta=1e-3,
        noise_multiplier=1e-6,
        steps=2,
        accountant="rdp",
        **clip,
        **settings,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    lipdp.fit(model, LOSS, optimizer, plan, data, seed=0, reproducible=True, microbatch_size=8)
    return [p.detach().float().clone() for p in model.parameters()]


def _apart(a, b):
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_checkpointed_activations_change_nothing():
    assert _apart(_trained(_plain(False)), _trained(_plain())) < 1e-6
    with pytest.raises(UnsupportedError, match="reentrant"):
        _trained(_plain(True))


def test_channels_last_changes_nothing_but_rounding():
    laid = TensorDataset(PIXELS.tensors[0].to(memory_format=torch.channels_last), PIXELS.tensors[1])
    for build, method in ((_plain, "bookkeeping"), (_lipschitz, "clipless")):
        expected = _trained(build(), method)
        assert _apart(_trained(build().to(memory_format=torch.channels_last), method, laid), expected) < 1e-5
        assert _apart([p.detach() for p in build().parameters()], expected) > 1e-3, "nothing was trained"


def test_a_compiled_model_trains_or_is_refused_with_a_reason():
    compiled = torch.compile(_plain(), backend="eager")
    assert _apart(_trained(compiled), _trained(_plain())) < 1e-6
    with pytest.raises(UnsupportedError, match="OptimizedModule can't be traced"):  # a proof is of the model inside
        _trained(torch.compile(_lipschitz(), backend="eager"), "clipless")


def test_parameters_of_bfloat16_train():
    whole = _trained(_plain())
    coarse = _trained(_plain().to(torch.bfloat16))
    assert 0 < _apart(coarse, whole) < 0.02
