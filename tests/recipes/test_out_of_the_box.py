"""The schedule behind the out-of-the-box table: equal effort for all cells, finals in time, nothing lost to a kill or a failure."""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from lipdp import models
from lipdp.certify import certified_accuracy, certify
from lipdp.parametrize import project_

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "accuracy"


@pytest.fixture
def schedule(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    if not BENCHMARKS.exists():
        pytest.skip("a distribution without benchmarks")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import out_of_the_box_schedule

    yield out_of_the_box_schedule
    for name in ("out_of_the_box_schedule", "out_of_the_box_runs"):
        sys.modules.pop(name, None)


def _cells(module: ModuleType) -> list[Any]:
    return [module.Cell("mnist", "mlp", method, epsilon) for epsilon in (3.0, 10.0) for method in ("clipless", "bookkeeping")]


STARTS = {
    ("mnist", "mlp", "clipless"): [{"temperature": 100.0, "options.clip": 0.2, "learning_rate": 3.0}],
    ("mnist", "mlp", "bookkeeping"): [
        {"temperature": 4.0, "max_grad_norm": 0.3, "learning_rate": 1.6, "options.activation": activation}
        for activation in ("tanh", "relu")
    ],
}


def _made(module: ModuleType, runs: list[dict[str, Any]], **changes: Any) -> Any:
    settings: dict[str, Any] = {"trials": 3, "steps": (100,), "workers": 2, "device": "cpu", **changes}
    return module.Schedule(_cells(module), runs, STARTS, **settings)


def _run(job: Any, accuracy: float, seconds: float = 10.0) -> dict[str, Any]:
    cell = job.cell
    return {
        "dataset": cell.dataset, "network": cell.network, "method": cell.method, "budget": cell.epsilon, "kind": job.kind,
        "number": job.number, "choice": job.choice, "changes": job.settings, "steps": job.steps, "accuracy": accuracy,
        "total_seconds": seconds, "device": "cpu",
    }  # fmt: skip


def _simulate(plan: Any, limit: float, seconds: float, accuracy: Any = lambda job: 0.5, fails: Any = lambda job: False) -> float:
    """Two workers that take so long for each run; when the last run ended."""
    free, busy, now = plan.workers, [], 0.0
    while True:
        while free and limit - now > 0 and (job := plan.next(limit - now)) is not None:
            plan.begin(job)
            busy.append((now + seconds, job))
            free -= 1
        if not busy:
            return now
        busy.sort(key=lambda pair: pair[0])
        now, job = busy.pop(0)
        free += 1
        plan.end(job, None if fails(job) else _run(job, accuracy(job), seconds))


def _counts(module: ModuleType, plan: Any, kind: str) -> list[int]:
    return [sum(run["kind"] == kind and module.cell_of(run) == cell for run in plan.runs) for cell in plan.cells]


@pytest.mark.parametrize("limit", [150.0, 200.0, 260.0, 1000.0])
def test_effort_is_equal_and_finals_are_done_in_time(schedule: ModuleType, limit: float) -> None:
    plan = _made(schedule, [], trials=8)
    ended = _simulate(plan, limit, seconds=10.0)
    trials = _counts(schedule, plan, "trial")
    assert len(set(trials)) == 1
    assert [len(schedule.counted_trials(plan.runs, cell)) for cell in plan.cells] == trials
    assert 1 <= trials[0] <= 8
    assert _counts(schedule, plan, "final") == [schedule.SEEDS] * 4
    assert ended <= limit + schedule.GRACE
    if limit == 1000.0:
        assert trials[0] == 8


def _best_is(number: int) -> Any:
    return lambda job: 0.9 if job.kind == "trial" and job.number == number else 0.5


def test_finals_are_of_the_best_trial_and_a_resumed_schedule_keeps_them(schedule: ModuleType) -> None:
    plan = _made(schedule, [])
    _simulate(plan, 10_000.0, 1.0, _best_is(1))
    chosen = {}
    for cell in plan.cells:
        best = next(run for run in schedule.counted_trials(plan.runs, cell) if run["number"] == 1)
        chosen[cell] = best["changes"]
        assert all(run["changes"] == best["changes"] for run in schedule.counted_finals(plan.runs, cell))
    # With some finals lost: they are done again, with the same choice, and no trial is added.
    kept = [run for run in plan.runs if not (run["kind"] == "final" and run["number"] == 2)]
    again = _made(schedule, kept, trials=9)
    _simulate(again, 10_000.0, 1.0, lambda job: 1.0)
    assert len(again.runs) == len(plan.runs)
    for cell in plan.cells:
        assert [run["changes"] for run in schedule.counted_finals(again.runs, cell)] == [chosen[cell]] * schedule.SEEDS


def test_tuning_again_makes_a_new_choice_only_where_there_is_a_better_one(schedule: ModuleType) -> None:
    plan = _made(schedule, [], trials=2)
    _simulate(plan, 10_000.0, 1.0, _best_is(1))
    better = plan.cells[0]
    more = _made(schedule, plan.runs, trials=4, again=True)
    _simulate(more, 10_000.0, 1.0, lambda job: 1.0 if (job.cell, job.kind, job.number) == (better, "trial", 3) else 0.5)
    assert _counts(schedule, more, "trial") == [4] * 4
    assert _counts(schedule, more, "final") == [2 * schedule.SEEDS, *[schedule.SEEDS] * 3]
    finals = schedule.counted_finals(more.runs, better)
    best = next(run for run in schedule.counted_trials(more.runs, better) if run["number"] == 3)
    assert [(run["choice"], run["changes"]) for run in finals] == [(1, best["changes"])] * schedule.SEEDS


def test_a_trial_that_one_method_lacks_does_not_count_for_the_other(schedule: ModuleType) -> None:
    plan = _made(schedule, [])
    broken, twin = plan.cells[:2]
    assert broken.task == twin.task
    _simulate(plan, 10_000.0, 1.0, _best_is(1), fails=lambda job: (job.cell, job.kind, job.number) == (broken, "trial", 1))
    for cell in (broken, twin):
        assert [run["number"] for run in schedule.counted_trials(plan.runs, cell)] == [0, 2]
        assert all(run["accuracy"] == 0.5 for run in schedule.counted_trials(plan.runs, cell))
        assert len(schedule.counted_finals(plan.runs, cell)) == schedule.SEEDS


def test_what_gained_at_one_budget_is_tried_at_the_other(schedule: ModuleType) -> None:
    at_three, at_ten = (schedule.Cell("mnist", "mlp", "clipless", epsilon) for epsilon in (3.0, 10.0))
    (start,) = STARTS["mnist", "mlp", "clipless"]
    better = {**start, "learning_rate": 7.0}
    known = [
        _run(schedule.Job(at_three, "trial", 0, start, 100), 0.60),
        _run(schedule.Job(at_three, "trial", 1, better, 100), 0.70),
        _run(schedule.Job(at_ten, "trial", 0, start, 100), 0.80),
    ]
    assert schedule.proposed(at_ten, 1, [start], known, (100,)).settings == better
    changed = schedule.proposed(at_three, 2, [start], known, (100,)).settings
    assert changed.keys() == better.keys()
    assert all(changed[name] != better[name] and 0.1 < changed[name] / better[name] < 10 for name in better)
    clipped = schedule.Cell("mnist", "mlp", "bookkeeping", 3.0)
    both = STARTS["mnist", "mlp", "bookkeeping"]
    assert [schedule.proposed(clipped, number, both, known[:number], (100,)).settings for number in range(2)] == both


def test_a_torn_line_is_cut_off(schedule: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    for text, kept in (('{"a": 1}\n{"b', '{"a": 1}\n'), ('{"a": 1}\n', '{"a": 1}\n'), ('{"b', "")):
        file.write_text(text)
        schedule.cut_torn_line(file)
        assert file.read_text() == kept
        assert len(schedule.read_runs(tmp_path)) == len(kept.splitlines())


def test_a_process_that_dies_is_replaced(schedule: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of one cell kills its process, every run of another raises; all others are written down."""
    if "fork" not in multiprocessing.get_all_start_methods():
        pytest.skip("processes can't inherit the patched runs")

    def perform(job: Any, *_: Any) -> str:
        if job.cell.epsilon == 3.0:
            if job.cell.method == "clipless":
                sys.exit(3)
            raise ValueError("unlucky")
        return json.dumps(_run(job, 0.5, 0.01))

    context = multiprocessing.get_context("fork")
    monkeypatch.setattr(schedule, "perform", perform)
    monkeypatch.setattr(schedule.multiprocessing, "get_context", lambda _: context)
    plan = _made(schedule, [], trials=1)
    target = tmp_path / "runs.jsonl"
    settings = schedule.Settings("", "cpu", 1, None, 64)
    ended = list(schedule.work(plan, settings, target, seconds=60.0))
    assert sum(run is None for _, _, run in ended) == 2  # the two trials: cells without a trial have no finals
    written = schedule.read_runs(tmp_path)
    assert {run["budget"] for run in written} == {10.0}
    assert sum(run["kind"] == "final" for run in written) == 2 * schedule.SEEDS
    report = (tmp_path / "failed.txt").read_text()
    assert "unlucky" in report
    assert "ended with 3" in report


@pytest.mark.parametrize("network", ["mlp", "lenet"])
def test_certificates_by_the_constraints_never_exceed_those_by_the_norms(schedule: ModuleType, network: str) -> None:
    """The quick certificates take every layer's norm for 1, the library's measure it: theirs may be larger, never smaller."""
    import out_of_the_box_runs as runs

    draw = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    options: dict[str, Any] = {"hidden": (16,)} if network == "mlp" else {"channels": (4,), "kernel_size": 3, "hidden": 16}
    model = models.create(network, input_shape=(1, 8, 8), classes=3, **options)
    project_(model)
    x = 8 * torch.rand(300, 1, 8, 8, generator=draw)  # far from the centre: there are certificates at all radii
    y = model(x).argmax(1)
    y[::3] = 0
    found = runs.judged(model, TensorDataset(x, y), proved=True)
    exact = certified_accuracy(certify(model, x, y), runs.RADII)
    assert found["accuracy"] == pytest.approx(float((model(x).argmax(1) == y).double().mean()))
    quick = [found[f"certified {radius:g}"] for radius in runs.RADII]
    assert 0 < quick[-1] <= quick[0] <= found["accuracy"]
    assert all(mine <= exact[radius] for mine, radius in zip(quick, runs.RADII, strict=True))
