"""The names that outside checks rely on, in the shapes they rely on."""

from __future__ import annotations

import inspect

import pytest
import torch

import lipdp
from lipdp import losses, nn
from lipdp.errors import LipdpWarning


def small_model():
    return nn.Sequential(
        nn.BoundedInput((1, 8, 8), norm=1.0),
        nn.SpectralConv2d(1, 4, kernel_size=3, padding=1),
        nn.GroupSort(2),
        nn.L2NormPool2d(2),
        nn.Flatten(),
        nn.SpectralLinear(64, 10, bias=False),
    )


def toy(count=512):
    x = torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(x, x.flatten(1)[:, :10].argmax(1))


def a_plan(model, loss, **changes):
    settings = {"dataset_size": 512, "batch_size": 64, "epsilon": 3.0, "delta": 1e-4, "epochs": 2}
    return lipdp.plan(model, loss, **{**settings, **changes})


def test_bounds():
    model = small_model()
    delta = lipdp.sensitivities(model, losses.CrossEntropy(tau=10.0))
    assert set(delta) == {name for name, _ in model.named_parameters()}
    assert all(isinstance(value, float) and 0 < value < float("inf") for value in delta.values())
    assert lipdp.parametrize.project_(model) is None


def test_plan():
    p = a_plan(small_model(), losses.CrossEntropy(tau=10.0))
    assert p.epsilon <= 3.0
    assert p.delta == 1e-4
    assert p.steps == 16
    assert abs(p.sampling_rate - 0.125) < 1e-12
    assert set(p.noise_stds) == set(p.sensitivities)
    assert p.sensitivity > 0
    assert p.noise_multiplier > 0
    assert lipdp.PrivacyPlan.from_json(p.to_json()) == p
    assert "weight" in str(p)


def test_fit():
    model, loss, data = small_model(), losses.CrossEntropy(tau=10.0), toy()
    p = a_plan(model, loss)
    with pytest.warns(LipdpWarning, match="validation holds records of train"):
        history = lipdp.fit(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), p, data, validation=data)
    assert history.epsilon == p.epsilon
    assert history.metrics


def test_loop():
    model, loss, data = small_model(), losses.CrossEntropy(tau=10.0), toy()
    p = a_plan(model, loss, epochs=1)
    engine = lipdp.PrivacyEngine(model, loss, torch.optim.Adam(model.parameters(), lr=0.01), p)
    for batch in engine.batches(data):
        engine.step(*batch)
    engine.load_state_dict(engine.state_dict())
    assert engine.epsilon == p.epsilon <= 3.0


def test_accounting():
    run = {"sampling_rate": 0.01, "steps": 1000, "delta": 1e-5}
    sigma = lipdp.privacy.calibrate_noise(epsilon=1.0, **run)
    assert isinstance(sigma, float)
    for options in ({}, {"accountant": "pld", "adjacency": "add_remove"}):
        assert 0.99 < lipdp.privacy.epsilon(noise_multiplier=sigma, **run, **options) <= 1.0


def test_data():
    train, test, metadata = lipdp.data.load("digits")
    assert len(train) > len(test) > 0
    assert metadata.classes == 10


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (lipdp.plan, "model loss dataset_size batch_size delta epsilon noise_multiplier epochs steps method max_grad_norm "
                     "allocation adjacency accountant"),
        (lipdp.fit, "model loss optimizer plan train validation callbacks seed device"),
        (lipdp.PrivacyEngine, "model loss optimizer plan"),
        (lipdp.sensitivities, "model loss"),
        (nn.BoundedInput, "shape norm mode"),
        (nn.SpectralLinear, "in_features out_features bias"),
        (nn.SpectralConv2d, "in_channels out_channels kernel_size stride padding dilation groups bias padding_mode"),
        (nn.GroupSort, "group_size"),
        (nn.L2NormPool2d, "kernel_size"),
        (nn.ClipGradient, "max_norm"),
        (nn.Boundary, "norm cotangent"),
        (nn.Residual, "module"),
        (losses.CrossEntropy, "tau"),
        (losses.BCE, "tau"),
        (losses.MulticlassHinge, "margin"),
        (losses.HKR, "alpha margin"),
    ],
)  # fmt: skip
def test_signatures(function, names):
    """In this order, and positionally where the design writes them so."""
    found = list(inspect.signature(function).parameters)
    wanted = names.split()
    assert [name for name in found if name in wanted] == wanted


@pytest.mark.parametrize(
    "loss", [losses.CrossEntropy(), losses.MulticlassHinge(), losses.MulticlassKR(), losses.HKR(1.0, 1.0)], ids=lambda v: str(v)
)
def test_losses_give_one_value_per_example(loss):
    values = loss(torch.randn(7, 4), torch.arange(7) % 4)
    assert values.shape == (7,)
    assert loss.lipschitz > 0


def test_every_public_name_is_there():
    for name in lipdp.__all__:
        assert getattr(lipdp, name) is not None
