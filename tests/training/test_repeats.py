"""A second run over the same data in one process does not go unsaid."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import lipdp
from lipdp import losses
from lipdp._texts import upwards
from lipdp.errors import LipdpWarning, RepeatedRunWarning
from lipdp.privacy import Budget
from lipdp.training import Callback
from lipdp.training.account import data_marks, forget_runs, several_runs

from .common import BATCH, SIZE, Restless, engine_of, planned, small, toy

pytestmark = [pytest.mark.counts_runs, pytest.mark.filterwarnings("error::lipdp.errors.RepeatedRunWarning")]
LOSS = losses.CrossEntropy(tau=4.0)


def fit(data, seed=None, **options):
    model = small()
    plan = planned(model, steps=4, noise_multiplier=3.0, accountant="pld")
    return lipdp.fit(model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), plan, data, seed=seed, **options)


def test_the_composed_epsilon_is_said():
    data = toy()
    fit(data)
    with pytest.warns(LipdpWarning, match=r"this is run 2 over the same data .* in this process, and no budget") as caught:
        fit(data)
    together = lipdp.privacy.epsilon(noise_multiplier=3.0, sampling_rate=BATCH / SIZE, steps=8, delta=1e-4)
    assert f"epsilon {upwards(together)} at delta 0.0001" in str(caught[0].message)
    with pytest.warns(RepeatedRunWarning, match="run 3"):
        fit(data)


@pytest.mark.parametrize(
    "again",
    [
        lambda data: data,
        lambda data: TensorDataset(*data.tensors),
        lambda data: TensorDataset(*(tensor.clone() for tensor in data.tensors)),
        lambda data: Subset(data, range(len(data))),
        lambda data: list(zip(*data.tensors, strict=True)),
        lambda data: TensorDataset(*(tensor.flip(0) for tensor in data.tensors)),
        lambda data: TensorDataset(*(tensor[torch.randperm(SIZE)] for tensor in data.tensors)),
        lambda data: TensorDataset(data.tensors[0], 2 - data.tensors[1]),
        lambda data: TensorDataset(data.tensors[0].double(), data.tensors[1]),
        lambda data: TensorDataset(data.tensors[0].roll(7, 0), data.tensors[1].roll(3, 0)),
        lambda data: TensorDataset(
            *(torch.cat([tensor[: SIZE // 2], new]) for tensor, new in zip(data.tensors, half(), strict=True))
        ),
    ],
)
def test_the_same_data_in_other_clothes(again):
    data = toy()
    fit(data)
    with pytest.warns(RepeatedRunWarning):
        fit(again(data))


def half():
    """Other records for the second half."""
    return toy(SIZE - SIZE // 2, seed=9).tensors


@pytest.mark.filterwarnings("ignore:the dataset has")
@pytest.mark.parametrize("part", [slice(0, SIZE // 2), slice(SIZE // 2, None), slice(None, None, 3)])
def test_some_of_the_records_are_recognised(part):
    data = toy()
    fit(data)
    with pytest.warns(RepeatedRunWarning):
        fit(TensorDataset(*(tensor[part] for tensor in data.tensors)))


def test_data_that_are_mostly_alike_are_not_told_apart_by_their_records():
    """A few kinds of rows are in everybody's tables."""
    x, y = (toy().tensors[0] > 0).float(), toy().tensors[1]
    assert x.unique(dim=0).shape[0] <= 64 < SIZE / 2
    fit(TensorDataset(x, y))
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(0))
    fit(TensorDataset(x[order], y))


@pytest.mark.filterwarnings("ignore:the records of this Restless change")
def test_records_that_change_are_known_by_their_object():
    data = Restless()
    fit(data)
    fit(Restless())
    with pytest.warns(RepeatedRunWarning):
        fit(data)


def test_other_data_are_other_data():
    fit(toy())
    fit(toy(seed=1))
    one = toy(seed=2)
    assert set(data_marks(one)) & set(data_marks(one))
    assert not set(data_marks(one)) & set(data_marks(toy(seed=3)))
    assert not set(data_marks(toy(10))) & set(data_marks(toy(11, seed=4)))


def test_only_what_was_released_counts():
    data = toy()
    engine = engine_of(small(), seed=None)
    next(engine.batches(data))  # drawn, never used

    class Fail(Callback):
        def on_start(self, run):
            raise KeyError

    with pytest.raises(KeyError):
        fit(data, callbacks=[Fail()])
    fit(data)
    with pytest.warns(RepeatedRunWarning, match="run 2"):
        engine.step(*next(engine.batches(data)))


def test_the_same_secret_is_the_same_release(tmp_path):
    data = toy()
    fit(data, seed=5, reproducible=True)
    fit(data, seed=5, reproducible=True)

    class Stop(Callback):
        def on_step(self, run):
            if run.engine.steps == 2:
                raise KeyError

    forget_runs()
    with pytest.raises(KeyError):
        fit(data, checkpoint=tmp_path / "run", callbacks=[Stop()])
    fit(data, checkpoint=tmp_path / "run", resume=True)
    with pytest.warns(RepeatedRunWarning):
        fit(data, seed=6, reproducible=True)


def test_a_warning_that_is_an_error_stops_before_the_release():
    data = toy()
    fit(data)
    engine = engine_of(small(), seed=None)
    for _ in range(2):
        with pytest.raises(RepeatedRunWarning):
            engine.step(*next(engine.batches(data)))
    assert engine.steps == 0


def test_with_a_budget_it_is_the_budget_that_adds_up(tmp_path):
    data = toy()
    budget = Budget(tmp_path / "a", epsilon=5.0, delta=1e-4, dataset="toy")
    fit(data, budget=budget)
    fit(data, budget=budget)
    with pytest.warns(RepeatedRunWarning, match="run 3"):
        fit(data)
    with pytest.warns(RepeatedRunWarning, match="was not charged for all of them"):
        fit(data, budget=budget)


def test_runs_that_are_meant_to_be_several():
    data = toy()
    with several_runs(), warnings.catch_warnings():
        warnings.simplefilter("error")
        fit(data)
        fit(data)
    with pytest.warns(RepeatedRunWarning, match="run 3"):
        fit(data)


def test_statistics_and_settled_data_count_for_the_data_they_were_made_of():
    from lipdp import nn

    data = toy()

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.BoundedInput((6,)), nn.Standardize(6, radius=1.0), nn.Boundary(norm=2.0), torch.nn.Linear(6, 3))
        plan = planned(model, noise_multiplier=None, epsilon=2.0, steps=2, statistics_budget=0.1)
        lipdp.fit(model, LOSS, torch.optim.SGD(model.parameters(), lr=0.1), plan, data, settle=True)

    run()
    with pytest.warns(RepeatedRunWarning, match="run 2") as caught:
        run()
    assert len(caught) == 1


def test_an_engine_that_becomes_another_run_has_made_two():
    """What it released before it was given another run's state is not forgotten with it."""
    plan = planned(small(), steps=4)
    other = engine_of(small(), plan, seed=None)
    engine = engine_of(small(), plan, seed=None)
    engine.step(*next(engine.batches(toy())))
    engine.load_state_dict(other.state_dict())
    with pytest.warns(RepeatedRunWarning, match="run 2"):
        engine.step(*next(engine.batches(toy())))
