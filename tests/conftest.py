"""For all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """What is imported stays: nothing of it has to be looked at for garbage, neither now nor in every gc.collect() of a test.

    And what one process that a test starts has compiled, the next need not compile again. The library's warnings are errors; their
    classes are not named in pyproject.toml, or the process that only hands out tests would import all of torch before the others
    can start. Tests repeat runs on the same toy data all the time; tests/training/test_repeats.py is about that warning itself.
    """
    gc.disable()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.addinivalue_line("filterwarnings", "error::lipdp.errors.LipdpWarning")
        config.addinivalue_line("filterwarnings", "ignore::lipdp.errors.RepeatedRunWarning")


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _runs_of_other_tests_are_forgotten(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests train on the same toy data again and again. Those marked ``counts_runs`` are about noticing it."""
    from lipdp.training.account import forget_runs, several_runs  # here: the process that hands out tests has no need of torch

    forget_runs()
    if request.node.get_closest_marker("counts_runs"):
        yield
        return
    with several_runs():
        yield
