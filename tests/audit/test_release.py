"""The release path from outside: sound ones stand, and every planted fault is seen by the check that is about it."""

from __future__ import annotations

import json

import pytest
import torch

import lipdp
from lipdp import audit, losses, nn
from lipdp.audit.release import _dispersion
from lipdp.errors import AuditError

from .common import LONG, faults, full, network


def names(report):
    return " | ".join(check.name for check in report.faults)


@pytest.mark.parametrize("kind", ["mlp", pytest.param("conv", marks=full), pytest.param("clipping", marks=full)])
def test_a_sound_path_stands(kind):
    model, loss, plan = network(kind)
    report = audit.release_path(plan, model, loss)
    assert not report.refuted, str(report)
    content = json.loads(report.to_json())
    assert content["faults"] == []
    assert len(content["checks"]) == len(report.checks) > 8


@pytest.mark.parametrize(
    ("plant", "kind", "expected"),
    [
        pytest.param(faults.noise_divided, "mlp", "noise on 1.weight", marks=full),
        (faults.realised_batch_size, "mlp", "noise on 1.weight"),
        (faults.no_projection, "mlp", "weights are back in their sets"),
        (faults.shuffled, "mlp", "each record is sampled anew in every step"),
        (faults.noise_reused, "mlp", "noise of two steps is independent"),
        (faults.one_without_noise, "mlp", "noise on 3.bias"),
        pytest.param(faults.clipped_too_far, "clipping", "Δ of all parameters", marks=full),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_planted_faults_are_seen(plant, kind, expected):
    model, loss, plan = network(kind)
    with plant():
        report = audit.release_path(plan, model, loss)
    assert expected in names(report), str(report)
    assert "REFUTED" in str(report)


def test_noise_that_is_the_same_in_two_runs_is_seen(monkeypatch):
    """As from a seed that is set at the beginning of each run."""
    from lipdp.training import step_mechanism

    model, loss, plan = network()
    calls = iter(range(10_000))

    def seeded(sums, stds, stream):
        draw = torch.Generator().manual_seed(next(calls) % plan.steps)
        return {name: s + torch.randn(s.shape, generator=draw, dtype=s.dtype) * stds[name] for name, s in sums.items()}

    monkeypatch.setattr(step_mechanism, "add_noise", seeded)
    assert "noise of two runs is independent" in names(audit.release_path(plan, model, loss))


@full
def test_noise_of_another_shape_is_seen(monkeypatch):
    from lipdp.training import step_mechanism

    model, loss, plan = network()

    def uniform(sums, stds, stream):
        return {name: s + (2 * torch.rand_like(s) - 1) * stds[name] * 3**0.5 for name, s in sums.items()}

    monkeypatch.setattr(step_mechanism, "add_noise", uniform)
    assert "noise is Gaussian" in names(audit.release_path(plan, model, loss))


@pytest.mark.parametrize("q", [0.01, 0.3])
def test_the_dispersion_of_samples(q):
    draw = torch.Generator().manual_seed(1)
    low = []
    for _ in range(100):
        present = torch.rand(50, 2000, generator=draw) < q
        low += [_dispersion("", present.sum(0).double(), 50, q).p_value, _dispersion("", present.sum(1).double(), 2000, q).p_value]
    assert sum(p < 0.01 for p in low) <= 8  # of 200: about 2 are expected
    fixed = torch.full((50,), round(2000 * q)).double()
    assert _dispersion("", fixed, 2000, q).p_value < 1e-6


def test_a_plan_of_full_batches_and_phases():
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((4,)), torch.nn.Linear(4, 3))
    loss = losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=40, batch_size=40, delta=1e-4, noise_multiplier=2.0, steps=6)
    report = audit.release_path(plan, model, loss)
    assert not report.refuted, str(report)
    assert any(check.name == "every record is in every step" for check in report.checks)


@full
def test_all_audits_in_one_call():
    plan, model, loss = setting("clipping")
    told = []
    found = audit.check(plan, model, loss, seconds=LONG, guesses=20, progress=told.append)
    assert not found.refuted, str(found)
    assert found.sensitivities is None
    assert len(told) == len(found.parts) == 2
    assert json.loads(found.to_json())["release"]["faults"] == []


def test_a_refuted_plan_is_an_error_where_that_is_asked_for():
    with faults.no_root_m():
        plan, model, loss = setting("conv")
        with pytest.raises(AuditError, match=r"1\.weight"):
            audit.check(plan, model, loss, seconds=LONG, guesses=10, strict=True)


def setting(kind):
    model, loss, plan = network(kind)
    return plan, model, loss


def test_weights_that_are_far_outside_are_a_finding_and_no_crash():
    """Where nothing can be proved any more, because outputs overflow, the report still comes."""
    model, loss, plan = network("mlp")
    with faults.no_projection():
        report = audit.release_path(plan, model, loss, steps=2, travel=1e25)
    assert "weights are back in their sets" in names(report)
