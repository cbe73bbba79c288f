"""Hostile datasets, models and columns with a secret: `fit`, the engine's loop and the mechanisms do not tell of it."""

from __future__ import annotations

import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

import lipdp
from lipdp import losses, mechanisms, nn
from lipdp.errors import LipdpError
from lipdp.privacy import private_quantile
from tests.private.marker import NUMBER, TEXT, check

SIZE = 20


class Records(Dataset):  # type: ignore[type-arg]
    """A list of records, the last of which has the secret."""

    def __init__(self, last: Any) -> None:
        self.last = last

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, number: int) -> Any:
        if number < SIZE - 1:
            return torch.rand(4), number % 3
        if isinstance(self.last, BaseException):
            raise self.last
        return self.last


LAST: dict[str, Any] = {
    "an error": KeyError(TEXT),
    "a file that is not there": FileNotFoundError(2, "No such file", f"{TEXT}.png"),
    "a wrong text": ValueError(f"could not convert {NUMBER}"),
    "a text": (TEXT, 1),
    "a text among numbers": ([1.0, TEXT, 0.0, 0.0], 1),
    "a label as a text": (torch.rand(4), TEXT),
    "a label beyond": (torch.rand(4), int(NUMBER)),
    "a negative label": (torch.rand(4), -int(NUMBER)),
    "a label with a point": (torch.rand(4), NUMBER),
    "not finite": (torch.tensor([NUMBER, float("nan"), 0, 0]), 1),
    "longer": (torch.full((73,), NUMBER), 1),
    "objects": (np.array([TEXT, 1, 2, 3], dtype=object), 1),
    "a dict": ({TEXT: torch.rand(4)}, 1),
    "a dict of numbers": ({7391046: torch.rand(4)}, 1),
    "three parts": (torch.rand(4), NUMBER, 1),
    "one part": TEXT,
    "a set": ({NUMBER}, 1),
    "huge": (torch.rand(4), 7391046 * 10**30),
    "a decimal": (torch.rand(4), decimal.Decimal("7391046.5")),
}


def model() -> torch.nn.Module:
    return nn.Sequential(nn.BoundedInput((4,)), nn.SpectralLinear(4, 3, bias=False))


def settings(method: str) -> dict[str, Any]:
    clips = {} if method == "clipless" else {"max_grad_norm": 1.0}
    return {"dataset_size": SIZE, "batch_size": 10, "delta": 1e-3, "noise_multiplier": 3.0, "steps": 2, "method": method, **clips}


@pytest.mark.parametrize("method", ["clipless", "bookkeeping", "naive"])
@pytest.mark.parametrize("name", LAST)
def test_fit_says_nothing_of_a_record(name: str, method: str) -> None:
    for loss in (losses.CrossEntropy(), torch.nn.CrossEntropyLoss(reduction="none")):
        if method == "clipless" and not isinstance(loss, losses.Loss):
            continue
        net = model()
        decided = lipdp.plan(net, loss, **settings(method))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        heard = check(lambda: lipdp.fit(net, loss, optimizer, decided, Records(LAST[name])), what=(name, method))  # noqa: B023
        assert heard.error is not None


class Loud(torch.nn.Module):
    """A model that complains of a bright record."""

    def __init__(self, complain: Callable[[torch.Tensor], object]) -> None:
        super().__init__()
        self.line, self.complain = torch.nn.Linear(4, 3), complain

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.complain(x)
        return self.line(x)


def _compare(x: torch.Tensor) -> None:
    if not torch.compiler.is_compiling() and bool((x.detach() > 1e6).any()):
        raise ValueError(f"{x.max()} is too bright for {TEXT}")


def _look_up(x: torch.Tensor) -> None:
    if bool((x.detach() > 1e6).any()):
        {}[float(x.max())]


@pytest.mark.parametrize("complain", [_compare, _look_up])
def test_the_loop_says_nothing_of_a_record(complain: Callable[[torch.Tensor], object]) -> None:
    net, loss = Loud(complain), torch.nn.CrossEntropyLoss(reduction="none")
    decided = lipdp.plan(net, loss, **{**settings("naive"), "batch_size": SIZE}, input_shape=(4,))
    engine = lipdp.PrivacyEngine(net, loss, torch.optim.SGD(net.parameters(), lr=0.1), decided, input_shape=(4,))
    data = TensorDataset(torch.full((SIZE, 4), NUMBER), torch.zeros(SIZE, dtype=torch.long))
    heard = check(lambda: [engine.step(*batch) for batch in engine.batches(data)], what=complain.__name__)
    assert isinstance(heard.error, LipdpError)


@pytest.mark.parametrize("loss", [torch.nn.CrossEntropyLoss(reduction="none"), losses.CrossEntropy()])
@pytest.mark.parametrize("method", ["bookkeeping", "naive", "ghost"])
def test_the_loop_says_nothing_of_a_label(method: str, loss: Any) -> None:
    net = model()
    decided = lipdp.plan(net, loss, **{**settings(method), "batch_size": SIZE})
    engine = lipdp.PrivacyEngine(net, loss, torch.optim.SGD(net.parameters(), lr=0.1), decided)
    data = TensorDataset(torch.rand(SIZE, 4), torch.full((SIZE,), int(NUMBER)))
    heard = check(lambda: [engine.step(*batch) for batch in engine.batches(data)], what=method)
    assert isinstance(heard.error, LipdpError)


COLUMNS: dict[str, Any] = {
    "beyond": [1.0] * 9 + [NUMBER],
    "a text": [1.0] * 9 + [TEXT],
    "a number as a text": [1.0] * 9 + [str(NUMBER)],
    "bytes": [1.0] * 9 + [TEXT.encode()],
    "complex": [1.0] * 9 + [NUMBER * 1j],
    "nothing": [NUMBER] * 9 + [None],
    "not a number": [NUMBER] * 9 + [float("nan")],
    "infinite": [NUMBER] * 9 + [float("inf")],
    "ragged": [[1.0]] * 9 + [[NUMBER, 2.0]],
    "a dict": [1.0] * 9 + [{TEXT: 1}],
    "texts in an array": np.array(["1"] * 9 + [TEXT]),
    "objects": np.array([1.0] * 9 + [TEXT], dtype=object),
    "inner texts": np.array([np.array(["x"]), np.array([TEXT])] * 5, dtype=object),
    "one text": TEXT,
    "one number": NUMBER,
    "huge": [1.0] * 9 + [7391046 * 10**400],
    "a table": [[NUMBER, 1.0]] * 10,
    "masked": np.ma.masked_array([NUMBER] * 10, mask=[1] + [0] * 9),
}

QUESTIONS: dict[str, Callable[[Any], Any]] = {
    "answer": lambda x: mechanisms.answer(x, "mean", (0, 10), 1.0),
    "answer, private size": lambda x: mechanisms.answer(x, ["count", "p90"], (0, 10), 1.0, adjacency="add_remove"),
    "moments": lambda x: mechanisms.release_moments(x, [(0, 10), (0, 10)], 1.0),
    "line": lambda x: mechanisms.release_line(x, [(0, 10), (0, 10)], 1.0),
    "query": lambda x: mechanisms.release_query(lambda given: given, x, sensitivity=1.0, epsilon=1.0),
    "quantile": lambda x: private_quantile(x, 0.5, (0, 10), epsilon=1.0),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_mechanisms_say_nothing_of_a_record(question: str) -> None:
    assert QUESTIONS[question]([[1.0, 2.0]] * 10 if question in ("moments", "line") else [1.0] * 10) is not None  # it reads data
    for name, column in COLUMNS.items():
        heard = check(lambda column=column: QUESTIONS[question](column) is None, what=(question, name))  # type: ignore[misc]
        assert heard.error is None or isinstance(heard.error, LipdpError), name


def _complains(*_: object) -> Any:
    raise ValueError(f"could not convert {NUMBER} of {TEXT}")


class _Complaining(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(_complains(input))


ROWS, CLASSES = torch.rand(SIZE, 4), torch.zeros(SIZE, dtype=torch.int64)
OWN_FUNCTIONS: dict[str, Callable[[], Any]] = {
    "a query": lambda: mechanisms.release_query(_complains, ROWS, sensitivity=1.0, epsilon=1.0),
    "a map of inputs": lambda: lipdp.data.map_inputs(TensorDataset(ROWS, CLASSES), _complains),
    "an extractor": lambda: lipdp.features.extract_features(_Complaining(4, 2), TensorDataset(ROWS, CLASSES)),
}


@pytest.mark.parametrize("name", OWN_FUNCTIONS)
def test_functions_of_ones_own_say_nothing_of_a_record(name: str) -> None:
    heard = check(OWN_FUNCTIONS[name], what=name)
    assert isinstance(heard.error, LipdpError)
