"""Loggers hand on what may be published, and nothing else unless they are asked to."""

from __future__ import annotations

import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.errors import ConfigurationError, LipdpNotice
from lipdp.training import Logger, MLflowLogger, TensorBoardLogger, WandbLogger
from lipdp.training.callbacks import safe_figures


def _fit(*callbacks, public=False):
    model = nn.Sequential(nn.BoundedInput((4,)), torch.nn.Linear(4, 2, bias=False))
    loss = losses.CrossEntropy()
    plan = lipdp.plan(model, loss, dataset_size=60, batch_size=20, delta=1e-3, noise_multiplier=3.0, steps=4,
                      method="bookkeeping", max_grad_norm=0.1)  # fmt: skip
    data = TensorDataset(torch.rand(60, 4), torch.randint(0, 2, (60,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    others = TensorDataset(torch.rand(20, 4), torch.randint(0, 2, (20,)))
    return lipdp.fit(model, loss, optimizer, plan, data, validation=others, evaluations=2, callbacks=callbacks, public=public)


class Kept(Logger):
    def __init__(self, **how) -> None:
        super().__init__(**how)
        self.rows, self.settings, self.closed = [], {}, False

    def open(self, settings) -> None:
        self.settings = settings

    def log(self, step, figures) -> None:
        self.rows.append((step, figures))

    def close(self) -> None:
        self.closed = True


def test_only_safe_figures_leave() -> None:
    safe, everything = Kept(), Kept(everything=True)
    history = _fit(safe, everything, public=True)
    assert "clipped" in history.metrics  # an exact count over training records
    assert all("clipped" not in row for _, row in safe.rows)
    assert all("clipped" in row for _, row in everything.rows)
    assert {"epsilon", "validation_accuracy"} <= safe.rows[-1][1].keys()
    assert safe.rows[-1][0] == 4
    assert safe.settings["noise_multiplier"] == 3.0
    assert safe.settings["private"] is True
    assert safe.closed
    assert safe_figures({"train_loss": 1.0, "epsilon": 2.0, "clip 3": 1.0}) == {"epsilon": 2.0, "clip 3": 1.0}


def test_tensorboard_gets_a_file(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    _fit(TensorBoardLogger(tmp_path / "logs"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert "epsilon" in read.Tags()["scalars"]
    assert [event.step for event in read.Scalars("epsilon")] == [2, 4]


def test_mlflow_and_wandb_are_called_as_they_want(monkeypatch) -> None:
    calls: list = []
    flow = SimpleNamespace(
        active_run=lambda: None,
        start_run=lambda: calls.append("start"),
        end_run=lambda: calls.append("end"),
        log_params=lambda settings: calls.append(("params", settings["method"])),
        log_metrics=lambda figures, step: calls.append((step, sorted(figures))),
    )
    monkeypatch.setitem(sys.modules, "mlflow", flow)
    _fit(MLflowLogger())
    assert calls[:2] == ["start", ("params", "bookkeeping")]
    assert calls[-1] == "end"
    assert all(" " not in name for name in calls[2][1])
    calls.clear()
    bias = SimpleNamespace(
        run=object(),
        config=SimpleNamespace(update=lambda settings: calls.append(settings["delta"])),
        log=lambda figures, step: calls.append(step),
        finish=lambda: calls.append("finish"),
    )
    monkeypatch.setitem(sys.modules, "wandb", bias)
    _fit(WandbLogger())
    assert calls == [1e-3, 2, 4]  # the run that was active goes on


def test_a_service_that_is_not_installed(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigurationError, match="needs wandb, which is not installed: pip install wandb"):
        _fit(WandbLogger())


def test_a_plan_that_can_not_learn_says_so() -> None:
    model = nn.Sequential(nn.BoundedInput((2000,)), nn.SpectralLinear(2000, 100, bias=False))
    with pytest.warns(LipdpNotice, match="this run can't learn"):
        plan = lipdp.plan(model, losses.CrossEntropy(), dataset_size=100, batch_size=2, delta=1e-3, epsilon=0.1, steps=5)
    assert plan.signal_to_noise < 1
    assert "too little to learn anything" in str(plan)
    group = plan.groups[0]
    by_hand = 2 * group.sensitivity * math.sqrt(5) / (group.noise_std * math.sqrt(group.size))
    assert plan.signal_to_noise == pytest.approx(by_hand)
