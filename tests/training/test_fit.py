"""The whole run in one call, its history, and evaluation."""

from __future__ import annotations

import builtins
import importlib.util

import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.errors import ConfigurationError, DataError, LipdpWarning
from lipdp.training import Callback, History, ProgressBar, evaluate, predict

from .common import SIZE, free, planned, quiet, same, small, toy, weights

LOSS = losses.CrossEntropy(tau=4.0)


class StopAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_step(self, run):
        run.stop = run.engine.steps == self.step


def fit(model, plan=None, data=None, lr=0.2, **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return lipdp.fit(model, LOSS, optimizer, planned(model) if plan is None else plan, toy() if data is None else data, **options)


@pytest.mark.parametrize(("accountant", "adjacency"), [("pld", "add_remove"), ("pld", "replace_one"), ("rdp", "add_remove")])
def test_the_realised_epsilon_is_the_planned_one(accountant, adjacency):
    model = small()
    plan = planned(model, epsilon=2.0, epochs=1, accountant=accountant, adjacency=adjacency)
    history = fit(model, plan, evaluations=2)
    assert history.epsilon == plan.epsilon
    assert history.epsilon <= 2.0
    assert history.delta == plan.delta
    assert history.metrics["epsilon"][-1] == plan.epsilon
    assert history.metrics["step"][-1] == plan.steps


def test_it_learns_and_is_reproducible():
    data = toy(2000)
    ends = []
    for _ in range(2):
        model = small(clip=0.3)
        plan = planned(model, dataset_size=2000, batch_size=200, delta=1e-5, epsilon=8.0, steps=60)
        history = fit(model, plan, data, lr=2.0, validation=toy(500, seed=4), seed=11, reproducible=True)
        ends.append((weights(model), history.metrics))
    assert same(ends[0][0], ends[1][0])
    assert ends[0][1] == ends[1][1]
    assert history.last["validation_accuracy"] > 0.7 > evaluate(small(clip=0.3), LOSS, toy(500, seed=4))["accuracy"]


def test_seeds_are_secret_and_fresh_by_default():
    ends = []
    for seed in (None, None, 1, 1, 2):  # a seed alone does not make the noise known
        model = small()
        history = fit(model, seed=seed)
        assert history.private
        ends.append(weights(model))
    assert not any(same(a, b) for i, a in enumerate(ends) for b in ends[:i])


def test_a_reproducible_run_says_that_it_is_not_private(tmp_path):
    model = small()
    history = fit(model, seed=1, reproducible=True, checkpoint=tmp_path / "run", callbacks=[StopAt(4)])
    assert not history.private
    assert "NOT PRIVATE" in str(history)
    assert history.state_dict()["private"] is False
    again = fit(small(), checkpoint=tmp_path / "run", resume=True)  # as it began
    assert not again.private
    assert "NOT PRIVATE" not in str(fit(small(), seed=1))
    with pytest.raises(ConfigurationError, match="pass seed="):
        fit(small(), reproducible=True)


def test_data_with_a_nan_are_refused_before_anything_changes(tmp_path):
    model = small()
    with torch.no_grad():
        model[1].weight.mul_(3)  # so that even a projection would show
    x, y = (t.clone() for t in toy().tensors)
    x[200, 1] = float("nan")
    plan, before, bad = planned(model), weights(model), TensorDataset(x, y)
    for data in (bad, Subset(bad, [1, 200]), list(zip(x, y, strict=True))):
        with pytest.raises(DataError, match="NaN"):
            fit(model, plan, data, checkpoint=tmp_path / "run")
    assert same(before, weights(model))
    assert not list(tmp_path.iterdir())


def test_any_map_style_dataset():
    x, y = toy().tensors
    ends = []
    for data in (toy(), Subset(TensorDataset(x.repeat(2, 1), y.repeat(2)), range(SIZE)), list(zip(x, y, strict=True))):
        model = small()
        fit(model, quiet(model), data=data, seed=3, reproducible=True)
        ends.append(weights(model))
    for end in ends[1:]:  # the same samples; noise, of which there is hardly any, depends on how a batch is handed over
        assert all(torch.allclose(end[name], value, atol=1e-4) for name, value in ends[0].items())


@pytest.mark.parametrize("data", [DataLoader(toy()), 3])
def test_data_that_can_not_be_sampled_are_refused(data):
    with pytest.raises(ConfigurationError):
        fit(small(), data=data)
    model = small()
    before = weights(model)
    with pytest.raises(ConfigurationError):
        fit(model, validation=data)  # before the first step, not after the first evaluation
    assert same(before, weights(model))


def test_a_dataset_of_another_size_warns():
    with pytest.warns(LipdpWarning, match="records"):
        fit(small(), data=toy(100))


def test_rows_are_spread_and_the_last_is_the_end():
    for evaluations, steps in ((1, [12]), (0, [12]), (3, [4, 8, 12]), (100, list(range(1, 13))), (5, [2, 4, 6, 8, 10, 12])):
        assert fit(small(), evaluations=evaluations).metrics["step"] == steps
    model = small()
    assert fit(model, planned(model, steps=7), evaluations=2).metrics["step"] == [4, 7]
    rows = fit(small(), validation=toy(30)).metrics
    assert set(rows) == {"step", "epoch", "epsilon", "validation_loss", "validation_accuracy"}
    assert len({len(values) for values in rows.values()}) == 1
    assert rows["epsilon"] == sorted(rows["epsilon"])


class Diary(Callback):
    def __init__(self, stop_at=None, fail_at=None):
        self.events, self.stop_at, self.fail_at = [], stop_at, fail_at

    def on_start(self, run):
        self.events.append("start")

    def on_step(self, run):
        self.events.append(run.engine.steps)
        run.stop = run.engine.steps == self.stop_at
        if run.engine.steps == self.fail_at:
            raise KeyError

    def on_evaluation(self, run, row):
        self.events.append(("row", int(row["step"])))

    def on_end(self, run):
        self.events.append("end")


def test_callbacks_are_told():
    diary = Diary()
    fit(small(), callbacks=[diary], evaluations=1)
    assert diary.events == ["start", *range(1, 13), ("row", 12), "end"]


def test_stopping_early_spends_less():
    diary, model = Diary(stop_at=5), small()
    plan = planned(model)
    history = fit(model, plan, callbacks=[diary], evaluations=1)
    assert diary.events == ["start", 1, 2, 3, 4, 5, ("row", 5), "end"]
    assert 0 < history.epsilon < plan.epsilon
    run = {"noise_multiplier": 1.0, "sampling_rate": plan.sampling_rate, "delta": plan.delta, "accountant": "rdp"}
    assert history.epsilon == lipdp.privacy.epsilon(steps=5, **run)


def test_callbacks_are_told_of_an_end_by_error():
    diary = Diary(fail_at=3)
    with pytest.raises(KeyError):
        fit(small(), callbacks=[diary])
    assert diary.events[-1] == "end"


def test_the_progress_bar_shows_steps_and_epsilon():
    import io

    from rich.console import Console

    text = io.StringIO()
    fit(small(), validation=toy(30), callbacks=[ProgressBar(Console(file=text, force_terminal=True, width=150))])
    assert "12/12" in text.getvalue()
    assert "validation" in text.getvalue()
    assert "ε =" in text.getvalue()


def test_a_scheduler_steps_with_the_run():
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    lipdp.fit(model, LOSS, optimizer, planned(model), toy(), scheduler=scheduler)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5**12)


def test_the_average_is_what_is_validated_and_returned():
    model = small()
    data = toy(80, seed=2)
    history = fit(model, lr=3.0, ema_decay=0.8, validation=data, evaluations=1, seed=1, reproducible=True)
    assert evaluate(model, LOSS, data)["loss"] == pytest.approx(history.last["validation_loss"], rel=1e-6)
    plain = small()
    fit(plain, lr=3.0, seed=1, reproducible=True)
    assert not same(weights(plain), weights(model))


def test_models_without_a_bounded_input():
    torch.manual_seed(0)
    model = torch.nn.Sequential(nn.Boundary(norm=1.0), torch.nn.Linear(6, 3))
    plan = planned(model, input_shape=(6,))
    with pytest.raises(ConfigurationError, match="shape"):
        fit(model, plan)
    assert fit(model, plan, input_shape=(6,)).epsilon == plan.epsilon


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_evaluate_by_hand():
    model, data = small(), toy(70)
    x, y = data.tensors
    found = evaluate(model, LOSS, data, batch_size=32)
    with torch.no_grad():
        logits = model(x)
    assert found["accuracy"] == pytest.approx(float((logits.argmax(1) == y).double().mean()))
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(4 * logits, y) / 4), rel=1e-5)
    assert evaluate(model, torch.nn.CrossEntropyLoss(reduction="none"), Subset(data, [1, 2]))["loss"] > 0


def test_evaluate_restores_modes_also_after_an_error():
    model = small(dropout=0.5)
    model[1].eval()
    modes = [m.training for m in model.modules()]
    assert evaluate(model, LOSS, toy(20)) == evaluate(model, LOSS, toy(20))  # no dropout inside
    assert [m.training for m in model.modules()] == modes
    with pytest.raises(DataError):
        evaluate(model, LOSS, TensorDataset(torch.zeros(3, 9), torch.zeros(3, dtype=torch.long)))
    assert [m.training for m in model.modules()] == modes


def test_predictions_of_one_output():
    assert predict(torch.tensor([[0.3], [-0.2]])).tolist() == [1, 0]
    assert predict(torch.tensor([0.3, -0.2])).tolist() == [1, 0]
    assert predict(torch.tensor([[0.3, 0.1], [-0.2, 0.9]])).tolist() == [0, 1]
    torch.manual_seed(0)
    model = nn.Sequential(nn.BoundedInput((6,)), nn.SpectralLinear(6, 1))
    x = toy(40).tensors[0]
    with torch.no_grad():
        truth = (model(x)[:, 0] > 0).long()
    for targets in (truth, 2 * truth - 1):
        assert evaluate(model, losses.KR(), TensorDataset(x, targets))["accuracy"] == 1.0
    assert set(evaluate(model, losses.MAE(), TensorDataset(x, torch.zeros(40, 1)))) == {"loss"}


# ------------------------------------------------------------------------------------------------------------- history


def a_history():
    history = History(delta=1e-5, epsilon=2.0)
    for step in (1, 2):
        history.add({"step": float(step), "epsilon": float(step), "validation_accuracy": 0.1234 * step})
    return history


def test_a_history_is_a_table():
    text = str(a_history())
    for word in ("step", "epsilon", "validation accuracy", "0.1234", "0.2468"):
        assert word in text
    assert a_history().last == {"step": 2.0, "epsilon": 2.0, "validation_accuracy": 0.2468}
    assert History(delta=1e-5).last == {}
    str(History(delta=1e-5))
    assert History.from_state(a_history().state_dict()) == a_history()


def test_plotting_without_matplotlib_says_what_to_do(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match="needs matplotlib: pip install"):
        a_history().plot()


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="matplotlib is not installed; lipdp does not need it")
def test_plotting(tmp_path):
    figure = a_history().plot(tmp_path / "history.png")
    assert (tmp_path / "history.png").stat().st_size > 1000
    assert figure.axes[0].get_ylabel() == "validation accuracy"


def test_a_free_model_trains_too():
    model = free()
    assert fit(model).metrics["step"][-1] == 12


@pytest.mark.parametrize("label", [-1, 3, 1000])
@pytest.mark.parametrize("method", ["clipless", "bookkeeping"])
def test_a_label_that_is_no_class_is_refused_before_anything_is_released(label, method):
    """It would be noticed only in the step that draws its record, if ever."""
    x, y = toy().tensors
    y = y.clone()
    y[17] = label
    model = free()
    plan = planned(model, method=method, **({"max_grad_norm": 1.0} if method == "bookkeeping" else {}))
    before = weights(model)
    with pytest.raises(DataError, match=r"a record has a target .*classes must be 0 to 2"):
        fit(model, plan, TensorDataset(x, y))
    assert same(before, weights(model))


def test_labels_that_a_loss_leaves_out_are_fine():
    x, y = toy().tensors
    y = y.clone()
    y[17] = -100
    model, loss = free(), losses.CrossEntropy(tau=4.0, reduction="mean", ignore_index=-100)
    plan = planned(model, loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert lipdp.fit(model, loss, optimizer, plan, TensorDataset(x, y)).epsilon == plan.epsilon
