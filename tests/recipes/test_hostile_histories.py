"""Histories that are read back (``lipdp pareto``), every field with hostile values: refused clearly, or harmless."""

from __future__ import annotations

import json
import math

import pytest

from lipdp.errors import DataError
from lipdp.recipes.pareto import best_by_epsilon, front, grouped, read_dots

from ..hostile import all_edits, refused_or

RUN = {
    "recipe": "digits",
    "dataset": "digits",
    "model": "mlp",
    "method": "clipless",
    "delta": 1e-5,
    "epsilon": 3.0,
    "steps": 20,
    "seconds": 1.5,
    "evaluated_on": "validation",
    "accuracy": 0.9,
    "certified": {"0.1": 0.5},
    "history": {
        "step": [10.0, 20.0],
        "epsilon": [2.0, 3.0],
        "validation_accuracy": [0.8, math.nan],
        "certified 0.2": [0.3, 0.4],
    },
    "settings": {"epochs": 3},
}


def check(dots):
    assert all(dot.epsilon >= 0 and 0 <= dot.score <= 1 and math.isfinite(dot.epsilon) for dot in dots)
    assert all(isinstance(getattr(dot, name), str) for dot in dots for name in ("recipe", "model", "method", "dataset"))
    grouped(dots, lambda dot: dot.recipe)
    best_by_epsilon(dots, [1.0, 3.0])
    front(dots)


@pytest.mark.parametrize("folder", [False, True])
def test_edited_histories_are_refused_or_harmless(tmp_path, folder):
    outcomes, failures = {"refused": 0, "harmless": 0}, []

    def use(run):
        if not folder:
            (tmp_path / "runs").write_text(json.dumps(run) + "\n")
            return read_dots([tmp_path / "runs"])
        history = {"delta": 1e-5, "epsilon": 3.0, **({"metrics": run.pop("history")} if "history" in run else {})}
        (tmp_path / "result.json").write_text(json.dumps(run))
        (tmp_path / "history.json").write_text(json.dumps(history))
        return read_dots([tmp_path])

    check(use(dict(RUN)))
    for what, edited in all_edits(RUN, 3):
        try:
            outcomes[refused_or(what, use, edited, check)] += 1
        except AssertionError as error:
            failures.append(f"{what}: {error}")
    assert not failures, "\n".join(failures[:40])
    print(outcomes)
    assert min(outcomes.values()) > 0


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b'{"a": 1, "a": 2}', b"1" * 5000, b"null", b"[]"])
def test_what_is_no_history_is_refused(tmp_path, content):
    (tmp_path / "result.json").write_bytes(content)
    (tmp_path / "history.json").write_bytes(content)
    for path in (tmp_path, tmp_path / "result.json"):
        with pytest.raises(DataError):
            read_dots([path])
