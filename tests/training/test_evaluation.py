"""Evaluation runs the program that the calculus analyses, where there is one, and the model itself where there is none."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

import lipdp
from lipdp import losses, nn
from lipdp.errors import LipdpWarning
from lipdp.program import Program
from lipdp.training.evaluation import note_trained_records, outputs_of

LOSS = losses.CrossEntropy(tau=4.0)


class Watched(torch.nn.Module):
    """Keeps the numbers of examples that its forward was called with; in training it drops features."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bounded, self.hidden = nn.BoundedInput((6,)), nn.SpectralLinear(6, 8)
        self.drop, self.last = torch.nn.Dropout(0.5), nn.SpectralLinear(8, 3)
        object.__setattr__(self, "sizes", [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            self.sizes.append(len(x))
        h = self.hidden(self.bounded(x))
        return self.last(self.drop(h) if self.training else h.abs())


class Counted(Watched):
    """No program: what it does depends on the data."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if type(x) is torch.Tensor:
            self.sizes.append(len(x))
        return self.last(self.hidden(self.bounded(x))) if float(x.sum()) > -1e9 else x


def records(count: int = 250) -> TensorDataset:
    draw = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, 6, generator=draw), torch.randint(3, (count,), generator=draw))


def by_hand(model: torch.nn.Module, data: TensorDataset) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        logits = model(data.tensors[0])
    return {
        "loss": float(LOSS(logits, data.tensors[1]).mean()),
        "accuracy": float((logits.argmax(1) == data.tensors[1]).float().mean()),
    }


def test_the_program_is_evaluated_and_the_python_of_the_model_sees_no_data() -> None:
    model, data = Watched(), records()
    figures = lipdp.evaluate(model, LOSS, data, batch_size=100)
    assert set(model.sizes) <= {1, 2, 3}  # random examples, to compare with
    assert model.training
    assert figures == pytest.approx(by_hand(model, data), rel=1e-6)


def test_a_model_without_a_program_is_evaluated_itself() -> None:
    data = records()
    model = Counted()
    assert lipdp.evaluate(model, LOSS, data, batch_size=100) == pytest.approx(by_hand(model, data), rel=1e-6)
    assert model.sizes[-4:-1] == [100, 100, 50]
    normed = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))
    assert lipdp.evaluate(normed, LOSS, data) == pytest.approx(by_hand(normed, data), rel=1e-6)
    hooked, seen = Watched(), []
    hooked.hidden.register_forward_hook(lambda *arguments: seen.append(arguments))
    lipdp.evaluate(hooked, LOSS, data)
    assert seen


def test_a_program_is_made_anew_for_each_evaluation() -> None:
    """Buffers and settings that changed since count, other shapes too."""
    model = nn.Sequential(nn.BoundedInput((1, 8, 8)), nn.SpectralConv2d(1, 4, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
    model.eval()
    for size in (8, 8):
        compute = outputs_of(model, torch.rand(5, 1, size, size))
        assert isinstance(compute, Program)
        model[1].bias.data.add_(1.0)
        x = torch.rand(7, 1, size, size)
        assert torch.equal(compute(x), model(x))


def test_validation_in_a_run_is_by_the_program() -> None:
    model, data = Watched(), records()
    plan = lipdp.plan(model, LOSS, dataset_size=250, batch_size=25, noise_multiplier=3.0, steps=4, delta=1e-4)
    model.sizes.clear()
    history = lipdp.fit(
        model, LOSS, torch.optim.SGD(model.parameters(), 0.1), plan, data, validation=records(90), evaluations=2, microbatch_size=64
    )
    assert 90 not in model.sizes
    assert history.last["validation_loss"] == pytest.approx(by_hand(model, records(90))["loss"], rel=1e-5)


def test_validation_warns_of_records_that_are_trained_on_and_of_no_others():
    x, y = torch.randn(40, 6), torch.zeros(40)
    whole, again, first, rest = (TensorDataset(x[part], y[part]) for part in (slice(40), slice(40), slice(30), slice(30, 40)))
    train = Subset(whole, range(30))
    for validation in (whole, again, first, Subset(whole, [29, 30]), Subset(again, [29, 30]), Subset(first, [3])):
        with pytest.warns(LipdpWarning, match="validation holds records of train"):
            note_trained_records(train, validation)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for validation in (rest, Subset(whole, range(30, 40)), Subset(again, range(30, 40)), Subset(rest, [0, 3])):
            note_trained_records(train, validation)
            note_trained_records(validation, train)
        note_trained_records(first, rest)
        note_trained_records(train, TensorDataset(x.clone(), y))
