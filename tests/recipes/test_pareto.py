"""Fronts and hulls against brute force; histories written, read and refused."""

import csv
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lipdp.errors import ConfigurationError, DataError
from lipdp.recipes import get, train
from lipdp.recipes.pareto import Dot, append_history, best_by_epsilon, front, grouped, hull, read_dots, write_csv

DOT = Dot(1.0, 0.5, "accuracy", 0.0, "r", "mlp", "clipless", "digits", 1e-5, "validation", 1)
CLOUDS = st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=25).map(
    lambda pairs: [replace(DOT, epsilon=a / 4, score=b / 30) for a, b in pairs]
)


@given(CLOUDS)
@settings(max_examples=150, deadline=None)
def test_front_by_brute_force(dots: list[Dot]) -> None:
    def dominated(dot: Dot) -> bool:
        return any(
            o.epsilon <= dot.epsilon and o.score >= dot.score and (o.epsilon, o.score) != (dot.epsilon, dot.score) for o in dots
        )

    expected = {(d.epsilon, d.score) for d in dots if not dominated(d)}
    assert [(d.epsilon, d.score) for d in front(dots)] == sorted(expected)


@given(CLOUDS)
@settings(max_examples=150, deadline=None)
def test_no_dot_lies_above_the_hull(dots: list[Dot]) -> None:
    corners = hull(dots)
    slopes = [(b.score - a.score) / (b.epsilon - a.epsilon) for a, b in pairwise(corners)]
    assert all(first > second for first, second in pairwise(slopes))
    assert max(d.score for d in dots) == corners[-1].score
    assert min(d.epsilon for d in dots) == corners[0].epsilon
    for dot in dots:
        for a, b in pairwise(corners):
            if a.epsilon <= dot.epsilon <= b.epsilon:
                line = a.score + (b.score - a.score) * (dot.epsilon - a.epsilon) / (b.epsilon - a.epsilon)
                assert dot.score <= line + 1e-12


def test_best_for_each_budget() -> None:
    dots = [replace(DOT, epsilon=e, score=s, recipe=f"{e}") for e, s in ((0.5, 0.4), (1.0, 0.7), (2.0, 0.6), (4.0, 0.9))]
    best = best_by_epsilon(dots, (0.1, 1, 3, 8))
    assert {budget: dot.score for budget, dot in best.items()} == {1: 0.7, 3: 0.7, 8: 0.9}
    assert list(grouped(dots, lambda d: d.recipe)) == ["0.5", "1.0", "2.0", "4.0"]


def test_histories_of_real_runs(tmp_path: Path) -> None:
    recipe = get("digits-mlp").but(epochs=1, batch_size=512)
    result = train(recipe, epsilon=3.0, seed=77, reproducible=True, accountant="rdp", validation_fraction=0.25, evaluations=2)
    file = tmp_path / "deep" / "runs.jsonl"
    append_history(file, recipe, result, evaluated_on="validation", certified={0.1: 0.25})
    append_history(file, recipe, result, evaluated_on="test")
    dots = read_dots([file])
    by_validation = [d for d in dots if d.evaluated_on == "validation" and d.radius == 0]
    assert [d.epsilon for d in by_validation] == result.history.metrics["epsilon"]
    assert [d.score for d in by_validation] == result.history.metrics["validation_accuracy"]
    assert [(d.radius, d.score) for d in dots if d.radius] == [(0.1, 0.25)]
    # A history of validation figures is no evidence for the test set.
    assert [(d.score, d.epsilon) for d in dots if d.evaluated_on == "test"] == [(result.accuracy, result.epsilon)]
    assert "77" not in json.dumps({k: v for k, v in json.loads(file.read_text().splitlines()[0]).items() if "seed" in k})
    assert "seed" not in file.read_text()
    write_csv(dots, tmp_path / "dots.csv")
    with (tmp_path / "dots.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    assert [float(row["score"]) for row in rows] == [d.score for d in dots]


def test_certified_accuracies_of_every_evaluation_are_dots(tmp_path: Path) -> None:
    history = {"step": [1, 2], "epsilon": [0.5, 0.7], "validation_accuracy": [0.6, 0.8]}
    run = {"recipe": "r", "model": "mlp", "method": "clipless", "dataset": "digits", "evaluated_on": "validation", "delta": 1e-5,
           "epsilon": 0.7, "steps": 2, "history": {**history, "certified 0.25": [0.1, 0.4], "certified 1": [0.0, 0.2]}}  # fmt: skip
    file = tmp_path / "h.jsonl"
    file.write_text(json.dumps(run) + "\n")
    found = {(d.radius, d.epsilon, d.score) for d in read_dots([file])}
    assert found == {
        (0.0, 0.5, 0.6), (0.0, 0.7, 0.8), (0.25, 0.5, 0.1), (0.25, 0.7, 0.4), (1.0, 0.5, 0.0), (1.0, 0.7, 0.2)
    }  # fmt: skip
    # A figure for the end of the run stands for itself: it may have been computed otherwise.
    file.write_text(json.dumps({**run, "certified": {"1": 0.3}}) + "\n")
    assert [(d.epsilon, d.score) for d in read_dots([file]) if d.radius == 1.0] == [(0.7, 0.3)]


def test_refusals(tmp_path: Path) -> None:
    file = tmp_path / "h.jsonl"
    with pytest.raises(DataError, match="there is no"):
        read_dots([file])
    file.write_text('{"recipe": "a"}\n{"rec')
    with pytest.raises(DataError, match="line 2"):
        read_dots([file])
    file.write_text('{"recipe": "a"}\n')
    with pytest.raises(DataError, match="model"):
        read_dots([file])
    file.write_text("")
    with pytest.raises(DataError, match="no accuracy"):
        read_dots([file])
    with pytest.raises(ConfigurationError, match="metric"):
        read_dots([file], "f1")
    with pytest.raises(DataError, match="not a folder of"):
        read_dots([tmp_path])
