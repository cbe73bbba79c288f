"""The examples in docstrings run as they are written."""

from __future__ import annotations

import doctest
import importlib
import importlib.util
import pathlib
import pkgutil

import pytest

import lipdp


# Kernels are only imported where Triton is installed.
def needs_triton(name):
    text = pathlib.Path(importlib.util.find_spec(name).origin).read_text()
    return "\nimport triton" in text


FOUND = {info.name for info in pkgutil.walk_packages(lipdp.__path__, "lipdp.") if not info.name.endswith("__main__")}
HAS_TRITON = importlib.util.find_spec("triton") is not None
MODULES = sorted(name for name in FOUND if HAS_TRITON or not needs_triton(name))


def test_all_modules_are_found():
    assert {"lipdp.planning.plan", "lipdp.data.datasets", "lipdp.bounds.analysis"} <= set(MODULES)


@pytest.mark.parametrize("name", ["lipdp", *MODULES])
def test_examples(name, monkeypatch):
    module = importlib.import_module(name)
    if name == "lipdp.estimators.images":  # one block of features of three and short runs: docs/images.md has them all
        blocks = module._blocks
        monkeypatch.setattr(module, "_blocks", lambda *given: (blocks(*given)[0][-1:], 3328))
        monkeypatch.setattr(module, "_STEPS", 30)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE, verbose=False)
    text = []
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(test, out=text.append)
    assert runner.failures == 0, "".join(text)


def test_there_are_examples():
    finder = doctest.DocTestFinder()
    assert sum(len(t.examples) for n in MODULES for t in finder.find(importlib.import_module(n), n)) > 10
