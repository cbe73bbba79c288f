"""Membership inference: it works on a model that remembers, and is chance on one that was trained privately."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import binom
from sklearn.metrics import roc_auc_score
from torch.utils.data import Subset, TensorDataset

import lipdp
from lipdp import audit, losses, nn
from lipdp.audit import inference as attacks
from lipdp.errors import CheckpointError, ConfigurationError, DataError

ATTACKS = {"loss", "confidence", "entropy", "modified entropy", "regression"}


def records(count, seed=0):
    """Labels that nothing but memory can know."""
    draw = torch.Generator().manual_seed(seed)
    return TensorDataset(torch.randn(count, 12, generator=draw), torch.randint(3, (count,), generator=draw))


def network():
    return nn.Sequential(nn.BoundedInput((12,)), torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))


def fresh():
    model = network()
    return model, losses.CrossEntropy(), torch.optim.SGD(model.parameters(), lr=1.0)


def planned(noise, steps=10, size=200, model=None):
    return lipdp.plan(
        network() if model is None else model,
        losses.CrossEntropy(),
        dataset_size=size,
        batch_size=50,
        delta=1e-3,
        noise_multiplier=noise,
        steps=steps,
        method="bookkeeping",
        max_grad_norm=1.0,
        accountant="rdp",
    )


@pytest.fixture(scope="module")
def overfitted():
    torch.manual_seed(0)
    model, data = network(), records(200)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(data.tensors[0]), data.tensors[1]).backward()
        optimizer.step()
    return model


@pytest.fixture(scope="module")
def shadows(tmp_path_factory):
    return audit.train_shadows(fresh, planned(1e-3), records(400, seed=9), 2, tmp_path_factory.mktemp("shadows"))


def test_a_model_that_remembers_is_told(overfitted, shadows):
    report = audit.membership(overfitted, records(200), records(200, seed=1), shadows=shadows)
    assert {row.name for row in report.rows} == ATTACKS | {"LiRA", "RMIA"}
    for name in ("loss", "modified entropy", "regression", "LiRA", "RMIA"):
        assert report[name].accuracy > 0.6, name
        assert report[name].auroc > 0.6, name
        assert not report[name].is_chance, name
    assert not report.is_chance
    assert report.best.advantage == pytest.approx(2 * report.best.accuracy - 1)
    assert "better than chance" in str(report)
    content = json.loads(report.to_json())
    assert content["best"] == report.best.name
    assert set(content["rows"][0]["tpr"]) == {"0.001", "0.01"}


def test_private_training_is_not_told(shadows):
    torch.manual_seed(0)
    model, data = network(), records(200)
    plan = planned(1.2, steps=20)
    assert plan.epsilon < 12
    lipdp.fit(model, losses.CrossEntropy(), torch.optim.SGD(model.parameters(), lr=0.5), plan, data)
    report = audit.membership(model, data, records(200, seed=1), shadows=shadows, confidence=0.999)
    assert report.is_chance, str(report)


def test_members_and_others_of_two_kinds_are_doubted(overfitted):
    """An attack that tells sorted halves of a table apart says nothing about the model: the inputs do."""
    own, same = records(200), records(200, seed=1)
    assert audit.membership(overfitted, own, same).doubts == ()
    moved = TensorDataset(same.tensors[0] + 1.0, same.tensors[1])
    report = audit.membership(network(), own, moved)  # a network that was never trained
    assert report.blind.auroc_interval[0] > 0.6
    assert "one kind" in report.doubts[0]
    assert report.doubts[0] in str(report)
    assert json.loads(report.to_json())["doubts"] == list(report.doubts)
    labels = TensorDataset(same.tensors[0], torch.zeros(200, dtype=torch.long))
    assert "one kind" in audit.membership(network(), own, labels).doubts[0]


def test_others_that_are_members_are_counted(overfitted):
    own, same = records(200), records(200, seed=1)
    mixed = TensorDataset(torch.cat([same.tensors[0], own.tensors[0][:7]]), torch.cat([same.tensors[1], own.tensors[1][:7]]))
    report = audit.membership(overfitted, own, mixed)
    assert report.shared == 7
    assert "7 of the others" in str(report)


class _Constant(torch.nn.Module):
    """The same outputs for every record."""

    def __init__(self, *outputs):
        super().__init__()
        self.outputs = torch.nn.Parameter(torch.tensor(outputs))

    def forward(self, x):
        return self.outputs.expand(len(x), -1)


@pytest.mark.parametrize("outputs", [(0.0, 0.0, 0.0), (100.0, -100.0, 0.0)])
def test_a_model_that_says_nothing_is_chance(outputs):
    """All scores are ties: no attack is above a half by the way it breaks them."""
    constant = _Constant(*outputs)
    report = audit.membership(constant, records(200), records(200, seed=1), shadows=[constant, constant])
    assert report.is_chance
    for row in report.rows:
        low, high = row.auroc_interval
        assert low <= 0.5 <= high or row.name in ("loss", "modified entropy", "LiRA", "RMIA", "regression")  # those see the label
        assert all(value <= 0.05 for value in row.tpr.values()), row.name
    with pytest.raises(DataError, match="NaN"):
        audit.membership(_Constant(0.0, math.nan, 0.0), records(200), records(200, seed=1))
    with pytest.raises(ConfigurationError, match="rates"):
        audit.membership(constant, records(200), records(200, seed=1), rates=(1.0,))


def test_an_attack_on_nothing_succeeds_as_often_as_its_interval_says():
    """Members and others of one kind, models that saw neither: at 95% an attack beats chance in 2.5% of cases at most."""
    beaten, trials = 0, 60
    for seed in range(trials):
        torch.manual_seed(seed)
        report = audit.membership(network(), records(60, seed=2 * seed), records(60, seed=2 * seed + 1), seed=seed)
        beaten += not report["loss"].is_chance
    assert binom.sf(beaten - 1, trials, 0.025) > 1e-3


def test_scores_mean_what_they_say():
    p, y = np.array([[0.9, 0.05, 0.05], [0.05, 0.9, 0.05], [0.4, 0.3, 0.3]]), np.array([0, 0, 0])
    scores = attacks._plain_scores(p, y)
    assert scores["loss"] == pytest.approx(np.log([0.9, 0.05, 0.4]))
    assert scores["entropy"][0] == scores["entropy"][1] > scores["entropy"][2]
    right, wrong, _ = scores["modified entropy"]
    assert wrong < right < 0
    assert right == pytest.approx(0.1 * math.log(0.9) + 2 * 0.05 * math.log(0.95))


def test_areas_and_their_intervals():
    draw = np.random.default_rng(0)
    covered = 0
    for _ in range(200):
        positive, negative = draw.normal(1.0, size=80).round(1), draw.normal(size=120).round(1)
        area, (low, high) = attacks._auroc(positive, negative, 0.95)
        covered += low <= 0.7602 <= high  # Φ(1/√2), and the ties of rounding count half
    exact = roc_auc_score(np.repeat([1, 0], [80, 120]), np.concatenate([positive, negative]))
    assert area == pytest.approx(exact)
    assert binom.cdf(covered, 200, 0.95) > 1e-3


def test_rates_at_few_false_positives():
    negative = np.arange(1000.0)
    assert attacks._tpr(np.array([998.5, 999.5, 5.0]), negative, 0.001) == 2
    assert attacks._tpr(np.array([998.5, 999.5, 5.0]), negative, 0.0) == 1


def test_thresholds_are_those_of_each_class():
    y = np.repeat([0, 1], 100)
    inside = np.tile([True, False], 100)
    scores = np.where(y == 0, 10.0, 0.0) + inside
    found = attacks._thresholds(scores, y, inside, np.ones(200, dtype=bool))
    assert ((scores >= found) == inside).all()


def test_shadows_are_kept_and_interrupted_ones_go_on(tmp_path):
    told, pool, plan = [], records(60), planned(1.0, steps=3, size=50)
    first = audit.train_shadows(fresh, plan, pool, 2, tmp_path, progress=lambda done, of: told.append((done, of)))
    assert told == [(0, 2), (1, 2), (2, 2)]
    again = audit.train_shadows(fresh, plan, pool, 2, tmp_path, progress=lambda done, of: told.append((done, of)))
    assert told[3:] == [(2, 2)]
    for one, two in zip(first, again, strict=True):
        assert all(map(torch.equal, one.parameters(), two.parameters()))
    assert not torch.equal(first[0][1].weight, first[1][1].weight)

    def stop(done, of):
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit.train_shadows(fresh, plan, pool, 4, tmp_path, progress=stop)
    assert len(audit.train_shadows(fresh, plan, pool, 4, tmp_path)) == 4
    with pytest.raises(CheckpointError, match="another seed"):
        audit.train_shadows(fresh, plan, pool, 2, tmp_path, seed=1)
    with pytest.raises(DataError, match="larger pool"):
        audit.train_shadows(fresh, plan, Subset(pool, range(20)), 2, tmp_path)
    with pytest.raises(ConfigurationError, match="count"):
        audit.train_shadows(fresh, plan, pool, 0, tmp_path)


def fresh_unless_told():
    """As :func:`fresh`; a folder is told which processes have made one, and can say that none shall be made."""
    folder = Path(os.environ["LIPDP_TEST_SHADOWS"])
    (folder / f"process-{os.getpid()}").touch()
    if os.getpid() != int(os.environ["LIPDP_TEST_PARENT"]) and (folder / "refuse").exists():
        raise RuntimeError("told to")
    return fresh()


def test_shadows_in_several_processes(tmp_path, monkeypatch):
    forked = multiprocessing.get_context("fork")  # quicker to start; nothing of this process is used by what is trained in them
    monkeypatch.setattr(multiprocessing, "get_context", {"spawn": forked}.__getitem__)
    told, pool, plan = [], records(60), planned(1e-6, steps=3, size=50)
    alone = audit.train_shadows(fresh, plan, pool, 3, tmp_path / "alone")
    monkeypatch.setenv("LIPDP_TEST_SHADOWS", str(tmp_path))
    monkeypatch.setenv("LIPDP_TEST_PARENT", str(os.getpid()))
    (tmp_path / "refuse").touch()
    with pytest.raises(RuntimeError, match="told to"):
        audit.train_shadows(fresh_unless_told, plan, pool, 1, tmp_path / "several", workers=2)
    (tmp_path / "refuse").unlink()
    shadows = audit.train_shadows(
        fresh_unless_told, plan, pool, 3, tmp_path / "several", workers=2, progress=lambda done, of: told.append((done, of))
    )
    assert told == [(0, 3), (1, 3), (2, 3), (3, 3)]
    others = {path.name for path in tmp_path.glob("process-*")} - {f"process-{os.getpid()}"}
    assert len(others) >= 2  # one that refused, and one or two that did not
    for one, two in zip(alone, shadows, strict=True):  # the same parts, the same first weights, other samples and hardly any noise
        assert one[1].weight.shape == two[1].weight.shape
        assert float((one[1].weight - two[1].weight).detach().norm() / one[1].weight.detach().norm()) < 0.5
    assert not torch.equal(shadows[0][1].weight, shadows[1][1].weight)
    with pytest.raises(ConfigurationError, match="top of a module"):
        audit.train_shadows(lambda: fresh(), plan, pool, 2, tmp_path / "never", workers=2)


def test_what_can_not_be_judged_is_refused(overfitted):
    with pytest.raises(DataError, match="too few"):
        audit.membership(overfitted, records(5), records(200))
    with pytest.raises(DataError, match="class numbers"):
        audit.membership(overfitted, records(50), TensorDataset(torch.zeros(50, 12), torch.full((50,), 7)))
