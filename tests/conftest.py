"""For all tests.

What passes once passes always: the secrets and the random numbers of a test follow from its name, not from chance and not from the
tests before it (:mod:`tests.chance`).
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests import chance


def pytest_configure(config: pytest.Config) -> None:
    """What is imported stays: nothing of it has to be looked at for garbage, neither now nor in every gc.collect() of a test.

    And what one process that a test starts has compiled, the next need not compile again. The library's warnings are errors; their
    classes are not named in pyproject.toml, or the process that only hands out tests would import all of torch before the others
    can start. Tests repeat runs on the same toy data all the time; tests/training/test_repeats.py is about that warning itself.
    """
    gc.disable()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell leaves it to what it starts in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)
    hypothesis.settings.register_profile("suite", derandomize=not chance.ROTATION)
    hypothesis.settings.load_profile("suite")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.addinivalue_line("filterwarnings", "error::lipdp.errors.LipdpWarning")
        config.addinivalue_line("filterwarnings", "ignore::lipdp.errors.RepeatedRunWarning")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests make many short-lived objects: looked for every 700 of them, garbage took up to a seventh of their time."""
    if hasattr(session.config, "workerinput"):  # of the whole suite: what a plan and a step import need not be looked at either
        for name in ("dp_accounting.pld.privacy_loss_distribution", "dp_accounting.rdp", "torch._dynamo"):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 20)
    gc.enable()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    with chance.following_from(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> Iterator[Any]:
    """What several tests share is the same, whichever of them comes first."""
    if fixturedef.scope == "function":
        return (yield)
    with chance.following_from(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param', None)!r}"):
        return (yield)


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
