"""For all tests."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest


def pytest_configure() -> None:
    """What is imported stays: nothing of it has to be looked at for garbage, neither now nor in every gc.collect() of a test.

    And what one process that a test starts has compiled, the next need not compile again.
    """
    gc.disable()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


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
