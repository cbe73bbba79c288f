"""The examples in docstrings run as they are written."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

import lipdp

# Modules that are only imported where another package is installed.
NEEDS = {"lipdp.clipping.triton_kernels": "triton", "lipdp.privacy.noise_kernels": "triton"}
LEFT_OUT = {name for name, package in NEEDS.items() if importlib.util.find_spec(package) is None}
FOUND = {info.name for info in pkgutil.walk_packages(lipdp.__path__, "lipdp.") if not info.name.endswith("__main__")}
MODULES = sorted(FOUND - LEFT_OUT)


def test_all_modules_are_found():
    assert {"lipdp.training.plan", "lipdp.data.registry", "lipdp.bounds.analysis"} <= set(MODULES)


@pytest.mark.parametrize("name", ["lipdp", *MODULES])
def test_examples(name):
    module = importlib.import_module(name)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    text = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=text.append)
    assert runner.failures == 0, "".join(text)


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    assert sum(len(t.examples) for n in MODULES for t in finder.find(importlib.import_module(n), n)) > 10
