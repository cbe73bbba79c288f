"""Intervals of answers lie in what is possible: short datasets, tied columns, counts with a public n."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lipdp.errors import ConfigurationError, DataError, LipdpError
from lipdp.mechanisms import Settings, answer, learn, unknown_size
from lipdp.mechanisms.questions import laplace_error
from lipdp.privacy import Budget

QUICK = Settings.quick()


@pytest.mark.parametrize("column", [[3.0, 3.0], [3.0] * 40, [0.0] * 30 + [10.0] * 10])
@pytest.mark.parametrize("given", [{"epsilon": 0.5}, {"rho": 0.01}], ids=["epsilon", "rho"])
def test_intervals_stay_in_what_is_possible(column: list[float], given: dict[str, Any]) -> None:
    """A variance of numbers of 0 to 10 is at most 25, and had intervals up to 92; a count had more than all records."""
    most = {"variance": 25.0, "std": 5.0, "count:2,4": float(len(column)), "mean": 10.0}
    for one in answer(torch.tensor(column), list(most), bounds=(0, 10), settings=QUICK, **given):
        assert one.interval is not None
        low, high = one.interval
        assert 0 <= low <= one.value <= high <= most[one.question] + 1e-9, one


def test_histograms_of_a_public_n_hold_no_more_than_all_records() -> None:
    for _ in range(20):
        (one,) = answer(torch.tensor([1.0, 1.0]), "histogram:0,5,10", bounds=(0, 10), epsilon=0.05)
        assert isinstance(one.value, list)
        assert 0 <= min(one.value) <= max(one.value) <= 2


def test_one_record_is_refused_by_name() -> None:
    with pytest.raises(LipdpError, match="n is 1"):
        answer(torch.tensor([3.0]), "mean", bounds=(0, 10), epsilon=1.0)


@pytest.mark.parametrize("epsilon", [0.01, 0.3, 1.0, 1.49, 1.51, 2.9, 3.0, 3.1, 6.0, 40.0])
@pytest.mark.parametrize("confidence", [0.8, 0.95, 0.99])
def test_whole_noise_stays_within_its_error_as_often_as_said_and_no_smaller_one_does(epsilon: float, confidence: float) -> None:
    """The quantile of continuous noise was taken: at ε = 1, 92.7% for 95, at ε = 3, 90.5%."""
    error, a = laplace_error(1.0, epsilon, confidence), math.exp(-epsilon)

    def within(k: int) -> float:
        chances = [(1 - a) / (1 + a) * a ** abs(z) for z in range(-k, k + 1)]
        return math.fsum(chances)

    assert within(error) >= confidence - 1e-12
    assert error == 0 or within(error - 1) < confidence


@pytest.mark.parametrize("adjacency", ["replace_one", "add_remove"])
def test_counts_have_whole_errors(adjacency: Any) -> None:
    column = torch.arange(200) / 20.0
    for question in ("count:2,4", "histogram:0,5,10"):
        (one,) = answer(column, question, bounds=(0, 10), epsilon=3.0, adjacency=adjacency)
        assert one.interval is not None
        changes = 2 if adjacency == "replace_one" and question.startswith("histogram") else 1
        error, (low, high) = laplace_error(changes, 3.0), one.interval
        middle = 0.0 if isinstance(one.value, list) else one.value
        assert (low - middle, high - middle) == (-error, error)


def test_more_records_than_a_choice_is_made_for_are_refused_before_the_charge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_size, "_MOST_RANKED", 10)
    budget = Budget(tmp_path / "budget.json", epsilon=10, delta=0.0, dataset="some", adjacency="add_remove")
    with pytest.raises(DataError, match="10 at most"):
        answer([0.5] * 20, "median", (0, 1), 1.0, adjacency="add_remove", budget=budget)
    assert budget.spent == 0.0


def test_settings_and_datasets_that_are_none_are_named() -> None:
    with pytest.raises(ConfigurationError, match="settings is a dict"):
        answer([0.1, 0.2], "mean", (0, 1), 1.0, settings={})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="robust is 0"):
        Settings(robust=0)
    mechanism = learn("mean", 5.0, 3, (0, 1), settings=QUICK)
    for datasets in ("a", torch.zeros(3), torch.zeros(2, 4), torch.full((2, 3), float("nan"))):
        with pytest.raises(DataError):
            mechanism.expected_loss(datasets)
    assert mechanism.expected_loss([[0.1, 0.2, 0.3]]) > 0
