"""The budget ledger: refusals, damage, and two processes at once."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from lipdp.errors import BudgetError, ConfigurationError, DataError
from lipdp.mechanisms.files import BudgetLedger


def test_it_counts_decimals_and_refuses_the_rest(tmp_path: Path) -> None:
    ledger = BudgetLedger(tmp_path / "a", budget=1.0, dataset="survey")
    for _ in range(10):
        ledger.charge(0.1, "mean")
    assert ledger.remaining == 0.0
    assert ledger.spent == 1.0
    before = (tmp_path / "a").read_bytes()
    with pytest.raises(BudgetError, match="has 0 of its epsilon 1 left"):
        ledger.charge(0.001)
    assert (tmp_path / "a").read_bytes() == before
    assert [entry["what"] for entry in ledger.entries()] == ["mean"] * 10


def test_it_is_found_again_and_only_grows(tmp_path: Path) -> None:
    path = tmp_path / "a"
    BudgetLedger(path, budget=2.0, dataset="survey").charge(0.5)
    before = path.read_bytes()
    again = BudgetLedger(path)
    assert (again.budget, again.dataset, again.remaining) == (2.0, "survey", 1.5)
    again.charge(1.5)
    assert path.read_bytes().startswith(before)
    with pytest.raises(BudgetError):
        BudgetLedger(path).charge(0.01)


def test_another_budget_or_name_is_refused(tmp_path: Path) -> None:
    BudgetLedger(tmp_path / "a", budget=1.0, dataset="survey")
    with pytest.raises(ConfigurationError, match="not changed"):
        BudgetLedger(tmp_path / "a", budget=5.0)
    with pytest.raises(ConfigurationError, match="belongs to dataset 'survey'"):
        BudgetLedger(tmp_path / "a", dataset="other")
    with pytest.raises(ConfigurationError, match="give budget"):
        BudgetLedger(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigurationError, match="folder"):
        BudgetLedger(tmp_path / "no" / "a", budget=1.0, dataset="d")
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigurationError):
            BudgetLedger(tmp_path / "bad", budget=bad, dataset="d")
        with pytest.raises(ConfigurationError):
            BudgetLedger(tmp_path / "a").charge(bad)


@pytest.mark.parametrize("damage", ["cut", "edited", "removed", "garbage", "negative"])
def test_damage_is_noticed_and_nothing_is_released(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a"
    ledger = BudgetLedger(path, budget=1.0, dataset="d")
    ledger.charge(0.25)
    ledger.charge(0.5)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {
        "cut": [*lines[:2], lines[2][:-5]],
        "edited": [lines[0], lines[1].replace(b"1/4", b"1/400"), lines[2]],
        "removed": [lines[0], lines[2]],
        "garbage": [*lines, b"hello\n"],
        "negative": [*lines, lines[2].replace(b"1/2", b"-1/2")],
    }[damage]
    assert changed != lines
    path.write_bytes(b"".join(changed))
    with pytest.raises(DataError, match="damaged"):
        BudgetLedger(path).charge(0.01)


def _spend(path: str, start: Any, results: Any) -> None:
    ledger, paid = BudgetLedger(path), 0
    start.wait()
    for _ in range(60):
        try:
            ledger.charge(0.01, "race")
            paid += 1
        except BudgetError:
            break
    results.put(paid)


def test_two_processes_do_not_overspend(tmp_path: Path) -> None:
    """Each could pay 60 times, the budget allows 80 in all: exactly 80 go through."""
    path = tmp_path / "a"
    ledger = BudgetLedger(path, budget=0.8, dataset="d")
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_spend, args=(str(path), start, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    start.set()
    paid = [results.get(timeout=600) for _ in workers]
    for worker in workers:
        worker.join()
    assert sum(paid) == 80
    assert min(paid) >= 20
    assert ledger.remaining == 0.0
