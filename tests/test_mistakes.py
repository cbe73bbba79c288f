"""Typical mistakes of a first hour: each is told by an error of lipdp (or a warning) that names it; none is silent."""

from __future__ import annotations

import datetime
import math

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.errors import LipdpError, LipdpNotice, LipdpWarning

LOSS = losses.CrossEntropy()


def model(inputs=4, classes=3):
    return nn.Sequential(nn.BoundedInput((inputs,)), nn.SpectralLinear(inputs, classes, bias=False))


def data(count=50, inputs=4, classes=3):
    return TensorDataset(torch.rand(count, inputs), torch.randint(0, classes, (count,)))


def plan(net=None, loss=LOSS, **changes):
    settings = {"dataset_size": 50, "batch_size": 20, "delta": 1e-3, "noise_multiplier": 2.0, "steps": 2, **changes}
    return lipdp.plan(model() if net is None else net, loss, **settings)


def fit(net=None, train=None, loss=LOSS, decided=None, optimizer=None, **options):
    net = model() if net is None else net
    decided = plan(net, loss) if decided is None else decided
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if optimizer is None else optimizer
    return lipdp.fit(net, loss, optimizer, decided, data() if train is None else train, **options)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data())


class Failing(torch.utils.data.Dataset):
    def __len__(self):
        return 50

    def __getitem__(self, number):
        raise KeyError("secret")


class Mixing(torch.nn.Module):
    def forward(self, x):
        return x - x.mean(0)


def clipped(inputs):
    """A network whose plan has not seen the shape of a record."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 3))
    own = {"dataset_size": 50, "batch_size": 10, "steps": 2, "delta": 1e-3, "noise_multiplier": 2.0}
    decided = lipdp.plan(net, losses.CrossEntropy(), method="bookkeeping", max_grad_norm=1.0, **own)
    lipdp.fit(net, losses.CrossEntropy(), torch.optim.SGD(net.parameters(), lr=0.1), decided, data(inputs=inputs))


def seq(*layers):
    return nn.Sequential(nn.BoundedInput((4,)), *layers)


MISTAKES = {
    # plans
    "epsilon below 0": (lambda: plan(noise_multiplier=None, epsilon=-1.0), "epsilon"),
    "epsilon as text": (lambda: plan(noise_multiplier=None, epsilon="3"), "epsilon"),
    "delta above 1": (lambda: plan(delta=3), "delta"),
    "delta above 1/N": (lambda: plan(delta=0.1), "delta"),
    "batch above N": (lambda: plan(batch_size=60), "batch_size"),
    "no length": (lambda: plan(steps=None), "epochs or steps"),
    "three of three": (lambda: plan(epsilon=0.01), "epsilon"),
    "steps and epochs": (lambda: plan(epochs=2), "epochs"),
    "steps of 1.5": (lambda: plan(steps=1.5), "steps"),
    "unknown method": (lambda: plan(method="dpsgd"), "method"),
    "clipping without a norm": (lambda: plan(method="bookkeeping"), "max_grad_norm"),
    "a norm without clipping": (lambda: plan(max_grad_norm=1.0), "max_grad_norm"),
    "unknown accountant": (lambda: plan(accountant="moments"), "accountant"),
    "unknown neighbours": (lambda: plan(adjacency="swap"), "adjacency"),
    "unknown allocation": (lambda: plan(allocation="even"), "allocation"),
    "everything frozen": (lambda: plan(model().requires_grad_(False)), "trainable"),
    "a run that can't learn": (lambda: plan(model(4, 300), batch_size=1, noise_multiplier=5.0), "can't learn"),
    # models and losses
    "no bound on the input": (lambda: plan(torch.nn.Sequential(torch.nn.Linear(4, 3)), input_shape=(4,)), "BoundedInput"),
    "an unconstrained hidden layer": (lambda: plan(seq(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3))), "Linear"),
    "batch normalisation": (lambda: plan(seq(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))), "BatchNorm"),
    "a layer that mixes examples": (lambda: plan(seq(Mixing(), torch.nn.Linear(4, 3))), "mean"),
    "a layer without a rule": (lambda: plan(seq(torch.nn.Softplus(), torch.nn.LSTM(4, 3))), "LSTM"),
    "a mean over the batch": (lambda: plan(loss=torch.nn.CrossEntropyLoss()), "reduction"),
    "a loss without a constant": (lambda: plan(loss=torch.nn.MSELoss(reduction="none")), "Lipschitz constant"),
    "a function as loss": (lambda: plan(loss=lambda z, y: z.sum()), "loss"),
    "unknown model": (lambda: lipdp.models.create("resnet19", input_shape=(1, 8, 8), classes=2), "resnet18"),
    "unknown option": (lambda: lipdp.models.create("mlp", input_shape=(1, 8, 8), classes=2, widht=3), "hidden"),
    "no classes": (lambda: lipdp.models.create("mlp", input_shape=(1, 8, 8), classes=0), "classes"),
    # data
    "a DataLoader": (lambda: fit(train=DataLoader(data())), "loader.dataset"),
    "a stream": (lambda: fit(train=Stream()), "__len__"),
    "no data": (lambda: fit(train=TensorDataset(torch.rand(0, 4), torch.zeros(0).long())), "empty"),
    "a NaN": (lambda: fit(train=TensorDataset(torch.full((50, 4), math.nan), torch.zeros(50).long())), "NaN"),
    "inputs of another shape": (lambda: fit(train=data(inputs=5)), "shape"),
    "inputs of another shape, clipped": (lambda: clipped(inputs=5), "another shape"),
    "one tensor": (lambda: fit(train=TensorDataset(torch.rand(50, 4))), "pair"),
    "class numbers in floating point": (lambda: fit(train=TensorDataset(torch.rand(50, 4), torch.rand(50))), "class"),
    "labels as texts": (lambda: fit(train=[(torch.rand(4), "cat")] * 50), "number the classes"),
    "texts as inputs": (lambda: fit(train=[("row", 1)] * 50), "input"),
    "complex inputs": (lambda: fit(train=TensorDataset(torch.rand(50, 4).to(torch.complex64), torch.zeros(50).long())), "complex"),
    "unknown dataset": (lambda: lipdp.data.load("minst"), "mnist"),
    # runs
    "a plan for another model": (lambda: fit(decided=plan(model(4, 7))), "plan"),
    "an optimiser of another model": (lambda: fit(optimizer=torch.optim.SGD(model().parameters(), lr=1.0)), "parameters"),
    "LBFGS": (lambda: fit((net := model()), optimizer=torch.optim.LBFGS(net.parameters())), "LBFGS"),
    "an unknown device": (lambda: fit(device="gpu"), "device"),
    "a budget that is not there": (lambda: fit(budget="nowhere.budget"), "budget"),
    "reproducible without a seed": (lambda: fit(reproducible=True), "seed"),
    "a cache without storing": (lambda: fit(cache="here"), "settle"),
    # files and the rest
    "a file that is not there": (lambda: lipdp.load("nowhere.lipdp"), "nowhere.lipdp"),
    "a plan that is no plan": (lambda: lipdp.PrivacyPlan.from_json("{}"), "plan"),
    "an unknown recipe": (lambda: lipdp.recipes.get("mnits"), "mnist"),
    "an unknown setting": (lambda: lipdp.recipes.get("digits").but(lr=3), "learning_rate"),
    "noise of 0": (lambda: lipdp.privacy.epsilon(noise_multiplier=0, sampling_rate=0.1, steps=1, delta=1e-5), "noise_multiplier"),
    "a rate above 1": (lambda: lipdp.privacy.epsilon(noise_multiplier=1, sampling_rate=2, steps=1, delta=1e-5), "sampling_rate"),
    "a quantile of 90": (lambda: lipdp.privacy.private_quantile([1.0], 90, (0, 1), epsilon=1), "share between 0 and 1"),
    "bounds the wrong way": (lambda: lipdp.privacy.private_quantile([1.0], 0.5, (1, 0), epsilon=1), "lower one first"),
    "a certificate without a constant": (
        lambda: lipdp.certify(torch.nn.Conv2d(1, 1, 1), torch.rand(1, 4), torch.zeros(1).long()),
        "",
    ),
    "a table of texts": (
        lambda: lipdp.PrivateClassifier(schema={0: ["a"]}).fit(np.array([["a", "b"]] * 9, object), [0, 1, 0] * 3),
        "categor",
    ),
    "ranges the wrong way": (
        lambda: lipdp.PrivateClassifier(schema={0: (1, 0)}).fit(np.zeros((9, 1)), [0, 1, 0] * 3),
        "lower one first",
    ),
    "a column that is not there": (
        lambda: lipdp.PrivateClassifier(schema={"age": (0, 1)}).fit(np.zeros((9, 1)), [0, 1, 0] * 3),
        "'age'",
    ),
    "a path of a table": (lambda: tables("people.csv"), "read_csv"),
    "a list of dicts": (lambda: tables([{"age": 3}] * 9), "DataFrame"),
    "one column, not a table": (lambda: tables(Series([1.0] * 9)), "to_frame"),
    "texts where numbers are": (lambda: tables(np.array([["secret"]] * 9, object)), "texts"),
    "a text in a column of numbers": (lambda: tables(np.array([["secret"]] * 9, object), schema={0: (0, 1)}), "no number"),
    "complex numbers in a table": (lambda: tables(np.full((9, 1), 1j)), "complex"),
    "missing labels": (lambda: tables(y=np.array([None, "a", "b"] * 3, object)), "missing labels"),
    "labels that are not numbers": (lambda: tables(y=[math.nan, 1.0, 2.0] * 3), "missing labels"),
    "labels of two types": (lambda: tables(y=np.array([1, "a", "b"] * 3, object)), "int, str"),
    "one class": (lambda: tables(y=["yes"] * 9), "classes=[…]"),
    "numbers as classes": (lambda: tables(y=np.linspace(0, 1, 9) ** 2), "PrivateRegressor"),
    "classes as numbers": (lambda: regressed(["old"] * 9), "PrivateClassifier"),
    "dates as numbers": (lambda: regressed(np.arange(9).astype("datetime64[D]")), "days since"),
    "a date in a schema": (lambda: tables(schema={0: (datetime.date(2020, 1, 1), datetime.date(2021, 1, 1))}), "dates"),
    "a GPU that is not there": (lambda: tables(device="cuda" if not torch.cuda.is_available() else "gpu"), "device"),
    "pictures of several sizes in a list": (lambda: tables([np.zeros((9, 9)), np.zeros((8, 9))]), "one size"),
    "a range or categories": (lambda: tables(schema=[0, 1]), "numeric(low, high)"),
    "a sparse matrix": (lambda: tables(__import__("scipy.sparse").sparse.csr_matrix(np.eye(9))), "toarray"),
    "rows of several lengths": (lambda: tables([[1.0]] * 8 + [[1.0, 2.0]]), "different lengths"),
    "the labels as classes": (lambda: tables(classes=["secret", "b", "c"] * 3), "list of 9"),
    "a table as epsilon": (lambda: lipdp.PrivateClassifier(np.zeros((9, 1))).fit(np.zeros((9, 1)), [0, 1, 0] * 3), "epsilon"),
    "a table of three dimensions": (lambda: regressed_images(), "images"),
    "two columns of labels": (lambda: tables(y=[[0, 1]] * 9), "1d array"),
    "a record's text as a label": (lambda: fit(train=TensorDataset(torch.rand(50, 4), torch.full((50,), 7))), "0 to 2"),
    "a dataset that fails": (lambda: fit(train=Failing()), "LIPDP_DEBUG"),
    "a report of nothing": (lambda: __import__("lipdp.report").report.read_run("nowhere"), "plan.json"),
    "a rate for a head at 0": (lambda: lipdp.suggest_optimizer((net := seq(_zero())), plan(net)), "start at 0"),
}


def tables(rows=None, y=(0, 1, 0) * 3, **options):
    return lipdp.PrivateClassifier(**{"schema": None, **options}).fit(np.zeros((9, 1)) if rows is None else rows, y)


def regressed(y):
    return lipdp.PrivateRegressor(schema={0: (0, 1)}, target=(0, 1)).fit(np.zeros((9, 1)), y)


def regressed_images():
    return lipdp.PrivateRegressor(target=(0, 1)).fit(np.zeros((9, 9, 9)), [0.0] * 9)


class Series(list):
    """As much of pandas' as is looked at."""

    ndim, index = 1, ()


def _zero():
    layer = torch.nn.Linear(4, 3, bias=False)
    torch.nn.init.zeros_(layer.weight)
    return layer


def test_there_are_sixty() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("name", MISTAKES)
@pytest.mark.filterwarnings("error::lipdp.errors.LipdpNotice")
def test_a_mistake_is_told(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    act, thing = MISTAKES[name]
    with pytest.raises((LipdpError, LipdpWarning, LipdpNotice)) as told:
        act()
    text = str(told.value)
    assert thing.lower() in text.lower(), text
    assert len(text.split()) >= 7, f"it says too little: {text}"
    assert "traceback" not in text.lower()
    assert "secret" not in text, "it shows somebody's record"
