"""Certified AUROC: what attacks on every example leave is never less."""

from __future__ import annotations

import pytest
import torch
from sklearn.metrics import roc_auc_score

import lipdp
from lipdp import nn
from lipdp.errors import ConfigurationError, DataError

RADII = (0.0, 0.05, 0.2, 0.5, 1.0)


def network(outputs, mode):
    torch.manual_seed(0)
    layers = nn.BoundedInput((6,), norm=2.0, mode=mode), nn.SpectralLinear(6, 8), nn.GroupSort(2), nn.SpectralLinear(8, outputs)
    model = nn.Sequential(*layers)
    lipdp.parametrize.project_(model)
    return model


def scores(model, x):
    outputs = model(x)
    return outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]


def attacked(model, x, y, radius, steps=40):
    """Every positive example's score pushed down, every negative one's up, inside the ball."""
    moved = torch.zeros_like(x)
    sign = torch.where(y > 0, -1.0, 1.0)
    for _ in range(steps):
        leaf = moved.clone().requires_grad_()
        (slope,) = torch.autograd.grad((sign * scores(model, x + leaf)).sum(), leaf)
        moved = moved + 0.25 * radius * slope / slope.norm(dim=1, keepdim=True).clamp_min(1e-12)
        moved = moved * (radius / moved.norm(dim=1, keepdim=True).clamp_min(1e-12)).clamp_max(1.0)
    return scores(model, x + moved).detach()


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("mode", ["ball", "sphere"])
def test_no_attack_goes_below_it(outputs, mode):
    model = network(outputs, mode)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(60, 6, generator=draw) * 1.5
    y = (scores(model, x) + 0.1 * torch.randn(60, generator=draw) > scores(model, x).median()).long()
    found = lipdp.certified_auroc(model, x, y, RADII)
    values = list(found.values())
    assert values == sorted(values, reverse=True)
    assert values[0] == pytest.approx(roc_auc_score(y, scores(model, x).detach()), abs=1e-3)
    assert values[0] > values[2]
    for radius in RADII[1:]:
        assert found[radius] <= roc_auc_score(y, attacked(model, x, y, radius)) + 1e-9


@pytest.mark.parametrize("options", [{"fourier": 40, "scale": 2.0}, {"landmarks": 20}, {}])
def test_networks_for_tables_are_certified_too(options):
    """A ball, fixed features, a sphere: the features' scores under attack stay inside what is certified."""
    torch.manual_seed(0)
    model = lipdp.models.create("tabular", input_shape=(6,), classes=2, radius=3.0, **options)
    torch.nn.init.normal_(next(layer for layer in model if isinstance(layer, torch.nn.Linear)).weight)
    draw = torch.Generator().manual_seed(1)
    x = torch.randn(60, 6, generator=draw)
    y = (scores(model, x) > scores(model, x).median()).long()
    radii = (0.0, 1e-4, 0.002, 0.01, 0.05)
    found = lipdp.certified_auroc(model, x, y, radii)
    assert found[0.0] > 0.98
    assert found[1e-4] > 0.8
    for radius in radii[1:]:
        assert found[radius] <= roc_auc_score(y, attacked(model, x, y, radius)) + 1e-9
    decided = lipdp.certify(model, x)
    assert (decided > 0).double().mean() > 0.9
    moved = lipdp.attack(model, x, None, 0.999 * decided.float(), steps=20)
    assert torch.equal(model(moved).argmax(1), model(x).argmax(1))


def test_a_linear_score_is_certified_exactly():
    model = nn.Sequential(nn.BoundedInput((2,), norm=10.0), nn.SpectralLinear(2, 1, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([[1.0, 0.0]]))
    x, y = torch.tensor([[3.0, 0.0], [2.0, 0.0], [1.0, 0.0], [0.0, 0.0]]), torch.tensor([1, 0, 1, 0])
    found = lipdp.certified_auroc(model, x, y, (0.0, 0.499, 0.501, 1.499, 1.501), input_lipschitz=1.0)
    assert list(found.values()) == [0.75, 0.75, 0.25, 0.25, 0.0]
    halved = lipdp.certified_auroc(model, x, y, (0.2494, 0.2506), input_lipschitz=2.0)
    assert list(halved.values()) == [0.75, 0.25]


def test_what_is_no_binary_task_is_refused():
    x = torch.randn(4, 6)
    with pytest.raises(DataError, match="both classes"):
        lipdp.certified_auroc(network(1, "ball"), x, torch.ones(4), (0.0,))
    with pytest.raises(ConfigurationError, match="two classes"):
        lipdp.certified_auroc(network(3, "ball"), x, torch.tensor([0, 1, 0, 1]), (0.0,))
    with pytest.raises(ConfigurationError, match="radii"):
        lipdp.certified_auroc(network(1, "ball"), x, torch.tensor([0, 1, 0, 1]), (-1.0,))
