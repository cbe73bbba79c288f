"""`lipdp audit` and `lipdp train --audit`."""

import dataclasses
import json

import pytest

import lipdp as package
from lipdp import losses, nn

MODEL = """
import torch
from lipdp import losses, nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3)), losses.CrossEntropy()

def alone():
    return make()[0]

def other():
    return 3
"""
LONG = ("--seconds", "1800")  # what ends an attack is its schedule, not how busy the machine is
QUICK = (*LONG, "--guesses", "30")


@pytest.fixture
def written(tmp_path):
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    model = nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3))
    plan = package.plan(
        model, losses.CrossEntropy(), dataset_size=50, batch_size=25, delta=1e-3, noise_multiplier=2.0, steps=4, accountant="rdp"
    )
    (tmp_path / "plan.json").write_text(plan.to_json(), encoding="utf-8")
    return tmp_path, plan


def test_a_plan_that_stands(lipdp, written):
    folder, _ = written
    done = lipdp("audit", f"{folder / 'model.py'}:make", "--plan", folder / "plan.json", *QUICK, "--json")
    assert done.code == 0, done.stdout
    assert done.json["refuted"] is False
    assert {row["name"] for row in done.json["sensitivities"]["rows"]} == {"1.weight", "1.bias", "whole gradient"}
    assert done.json["epsilon"]["guesses"] >= 1
    assert done.json["release"]["faults"] == []


def test_sensitivities_alone_and_a_violation_is_loud(lipdp, written):
    folder, plan = written
    target = f"{folder / 'model.py'}:alone"
    done = lipdp("audit", target, "--lipschitz", "1.0", *LONG)
    assert done.code == 0
    assert "no bound was beaten" in done.stdout
    groups = tuple(dataclasses.replace(g, sensitivity=g.sensitivity / 2) for g in plan.groups)
    (folder / "false.json").write_text(dataclasses.replace(plan, groups=groups).to_json(), encoding="utf-8")
    done = lipdp("audit", target, "--lipschitz", "1.4142", "--plan", folder / "false.json", *LONG, "--json")
    assert done.code == 4
    assert done.json["refuted"] is True
    assert "refutes" in done.stderr


@pytest.mark.parametrize(
    ("target", "more", "says"),
    [
        ("nowhere.py:make", (), "no file"),
        ("{}:nothing", (), "no function"),
        ("{}:other", (), "must return"),
        ("{}:alone", (), "--lipschitz"),
        ("{}:make", ("--lipschitz", "1"), "leave --lipschitz out"),
        ("{}:make", ("--input-shape", "4,x"), "--input-shape"),
        ("digits", ("--lipschitz", "1"), "its own plan"),
    ],
)
def test_what_can_not_be_audited_is_refused(lipdp, written, target, more, says):
    done = lipdp("audit", target.format(written[0] / "model.py"), *more)
    assert done.code == 2
    assert says in done.stderr


def test_a_run_is_audited_before_it_is_trained(lipdp, monkeypatch):
    from lipdp.cli import audit as command

    kept = command.audit_recipe
    monkeypatch.setattr("lipdp.cli.train.audit_recipe", lambda *a, **how: kept(*a, **{**how, "seconds": 1.0, "guesses": 5}))
    short = ("--batch-size", "256", "--delta", "1e-4", "--set", "options.hidden=16", "--epochs", "1", "--noise-multiplier", "3")
    done = lipdp("train", "digits-mlp", *short, "--audit", "--json")
    assert done.code == 0, done.stderr
    assert done.json["audit"]["refuted"] is False
    assert json.dumps(done.json["audit"])
