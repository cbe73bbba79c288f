"""Normalisation over the batch, replaced by one for each example."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lipdp
from lipdp import clipping
from lipdp.errors import ConfigurationError, UnsupportedError
from tests.clipping.helpers import quadratic


def network():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(8)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), norm, nn.Sequential(nn.InstanceNorm2d(8, track_running_stats=True)))


def test_a_refused_network_can_be_trained_afterwards():
    model, x = network(), torch.randn(4, 3, 6, 6)
    with pytest.raises(UnsupportedError, match="per_example_norms"):
        clipping.clipped_gradients(model, quadratic, x, torch.zeros(4), 1.0)
    changed, report = lipdp.convert.per_example_norms(model)
    clipping.clipped_gradients(changed, quadratic, x, torch.zeros(4), 1.0)
    assert isinstance(model[1], nn.BatchNorm2d)  # the model stays as it is
    assert [row.where for row in report.rows] == ["1", "4.0"]
    assert changed[1] is changed[3]  # one layer, used twice
    assert isinstance(changed[1], nn.GroupNorm)
    assert (changed[1].num_groups, changed[1].num_channels, changed[1].eps) == (2, 8, model[1].eps)
    assert not changed[4][0].track_running_stats
    assert "BatchNorm2d(8)" in str(report)


def test_scale_shift_types_and_modes_are_kept():
    model = nn.Sequential(nn.BatchNorm1d(6, affine=True), nn.BatchNorm1d(6, affine=False)).double().eval()
    nn.init.normal_(model[0].weight)
    model[0].bias.requires_grad_(False)
    changed = lipdp.convert.per_example_norms(model, groups=1).model
    assert torch.equal(changed[0].weight, model[0].weight)
    assert changed[0].weight.dtype == torch.float64
    assert not changed[0].bias.requires_grad
    assert changed[1].weight is None
    assert not changed[0].training


def test_nothing_to_do_and_bad_input():
    changed, report = lipdp.convert.per_example_norms(nn.Linear(2, 2))
    assert isinstance(changed, nn.Linear)
    assert "as it was" in str(report)
    assert isinstance(lipdp.convert.per_example_norms(nn.BatchNorm1d(8)).model, nn.GroupNorm)
    with pytest.raises(ConfigurationError, match="groups"):
        lipdp.convert.per_example_norms(nn.Linear(2, 2), groups=0)
    with pytest.raises(ConfigurationError, match="not initialised"):
        lipdp.convert.per_example_norms(nn.LazyBatchNorm1d())
