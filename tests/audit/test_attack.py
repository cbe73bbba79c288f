"""Attacks on Δ: exact rules are reached, true bounds are not beaten, false ones are."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

import lipdp
from lipdp import audit, losses, nn
from lipdp.errors import AuditError, ConfigurationError

from .common import LONG, faults, network


def test_exact_bounds_are_reached_and_the_model_stays():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((5,), norm=2.0), nn.SpectralLinear(5, 4), nn.GroupSort(2), nn.SpectralLinear(4, 3))
    before = [p.detach().clone() for p in model.parameters()]
    report = audit.sensitivities(model, losses.CrossEntropy(tau=2.0), seconds=LONG)
    assert all(map(torch.equal, before, model.parameters()))
    assert min(row.tightness for row in report.rows) > 0.99
    assert max(row.tightness for row in report.rows) <= 1 + 1e-9
    assert report.whole.tightness <= 1 + 1e-9
    assert report["1.weight"].bound == pytest.approx(lipdp.sensitivities(model, losses.CrossEntropy(tau=2.0))["1.weight"])
    assert "no bound was beaten" in str(report)
    assert json.loads(report.to_json())["refuted"] is False


def test_bounds_that_are_two_percent_too_small_are_beaten():
    model, loss, plan = network()
    smaller = [dataclasses.replace(g, sensitivity=0.98 * g.sensitivity) for g in plan.groups]
    report = audit.sensitivities(model, loss, dataclasses.replace(plan, groups=tuple(smaller)), seconds=LONG, check=False)
    assert {row.name for row in report.violations} == {*plan.sensitivities, "whole gradient"}
    with pytest.raises(AuditError, match="Please report"):
        audit.sensitivities(model, loss, dataclasses.replace(plan, groups=tuple(smaller)), seconds=LONG)


def test_a_missing_root_m_is_found():
    with faults.no_root_m():
        model, loss, plan = network("conv")
        report = audit.sensitivities(model, loss, plan, seconds=LONG, check=False)
    assert report["1.weight"].tightness > 2
    assert report.refuted


def test_other_kinds_of_models():
    torch.manual_seed(0)
    tokens = torch.nn.Sequential(nn.BoundedEmbedding(7, 4), nn.Flatten(), nn.SpectralLinear(12, 2))
    assert not audit.sensitivities(tokens, losses.CrossEntropy(), input_shape=(3,), seconds=LONG).refuted
    cayley = nn.SpectralLinear(4, 4, constraint=lipdp.parametrize.Cayley())
    mapped = nn.Sequential(nn.BoundedInput((4,)), cayley, nn.SpectralLinear(4, 2))
    assert not audit.sensitivities(mapped, losses.CrossEntropy(), seconds=LONG).refuted
    layers = torch.nn.Linear(4, 4), nn.Boundary(norm=1.0, cotangent=0.5), torch.nn.Linear(4, 2)
    boundary = nn.Sequential(nn.BoundedInput((4,)), *layers)
    assert audit.sensitivities(boundary, 1.0, seconds=LONG)["1.weight"].tightness > 0.95


def test_plans_that_prove_nothing_or_are_of_another_model_are_refused():
    model, loss, plan = network("clipping")
    with pytest.raises(ConfigurationError, match="clips"):
        audit.sensitivities(network()[0], loss, plan)
    with pytest.raises(ConfigurationError, match="another model"):
        audit.sensitivities(network("conv")[0], loss, network()[2])
    with pytest.raises(ConfigurationError, match="steps"):
        audit.sensitivities(model, loss, steps=0)
