"""The benchmark's bookkeeping: seeds of their own for each purpose, every cell and point of the figures there."""

from __future__ import annotations

import argparse
import importlib
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks" / "learned"


@pytest.fixture
def benchmark_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("mechanisms")


def test_no_purpose_shares_a_seed_with_another(benchmark_module: ModuleType) -> None:
    purposes = product(("test", "tuning"), range(1, 10), ("learn", "datasets", "noise"), range(20))
    seeds = [benchmark_module.stream(*labels) for labels in purposes]
    assert len(set(seeds)) == len(seeds)
    assert benchmark_module.stream("test", 5, "learn", 0) == benchmark_module.stream("test", 5, "learn", 0)


def test_jobs_cover_the_table_and_the_figures(benchmark_module: ModuleType) -> None:
    given = argparse.Namespace(cells=None, seeds=[0, 1, 2], split="test", scale=1, runs=5, only=None)
    jobs = benchmark_module.jobs(given)
    names = [name for name, _, _ in jobs]
    assert len(set(names)) == len(names) == 24 * 3 + 4 * 2 * 6 + 4
    assert [cost for _, _, cost in jobs] == sorted((cost for _, _, cost in jobs), reverse=True)
    given.only = ["fig4"]
    assert [name for name, _, _ in benchmark_module.jobs(given)] == ["fig4"]
