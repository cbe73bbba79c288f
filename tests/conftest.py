"""For all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lipdp.training.account import forget_runs, several_runs


@pytest.fixture(autouse=True)
def _runs_of_other_tests_are_forgotten(request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests train on the same toy data again and again. Those marked ``counts_runs`` are about noticing it."""
    forget_runs()
    if request.node.get_closest_marker("counts_runs"):
        yield
        return
    with several_runs():
        yield
