"""The API reference: every public name is on its page, has a docstring, and the main ones say what their arguments are."""

from __future__ import annotations

import importlib
import inspect
import re
from types import ModuleType

import pytest

from tests.doc_tools import DOCS, load_tool

# Packages all of whose names say what each argument is. The others are counted, and may only get better.
COMPLETE = ("lipdp", "estimators", "report")
STILL_WITHOUT = 0


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_reference")


def _public(tool: ModuleType, package: str) -> list[tuple[str, object]]:
    module = importlib.import_module("lipdp" if package == "lipdp" else f"lipdp.{package}")
    return [(f"{module.__name__}.{name}", getattr(module, name)) for name in tool.names(package)]


def _unsaid(value: object) -> list[str]:
    """Arguments that the docstring does not name."""
    if not (inspect.isclass(value) or inspect.isfunction(value)) or (inspect.isclass(value) and issubclass(value, BaseException)):
        return []
    text = inspect.getdoc(value) or ""
    if inspect.isclass(value):
        text += "\n" + (inspect.getdoc(vars(value).get("__init__")) or "")
    named = {name.strip("`* ") for line in re.findall(r"^ *([\w`*, ]+):", text, re.MULTILINE) for name in line.split(",")}
    named |= set(re.findall(r"``?(\w+)``?", text))
    skipped = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in inspect.signature(value).parameters.values() if p.kind not in skipped and p.name not in named]


def test_the_pages_are_made_from_the_names(tool) -> None:
    for package in tool.PACKAGES:
        page = (DOCS / "reference" / f"{package}.md").read_text(encoding="utf-8")
        assert page == tool.page(package), "run python docs/make_reference.py"
    assert f"reference/{tool.PACKAGES[-1]}.md" in (DOCS.parent / "mkdocs.yml").read_text()


def test_a_function_is_not_taken_for_the_module_of_its_name(tool) -> None:
    """mkdocstrings takes ``lipdp.plan`` for the module ``lipdp.planning.plan``: the page said nothing of the function."""
    page = tool.page("lipdp")
    for name in ("plan", "fit", "certify", "convert", "export"):
        value = getattr(importlib.import_module("lipdp"), name)
        assert f"::: {value.__module__}.{name}\n    options:\n      heading: lipdp.{name}\n" in page


def test_every_public_package_has_a_page(tool) -> None:
    import lipdp

    packages = {name for name in lipdp.__all__ if inspect.ismodule(getattr(lipdp, name))}
    assert packages <= set(tool.PACKAGES)


def test_every_public_name_has_a_docstring(tool) -> None:
    public = [pair for package in tool.PACKAGES for pair in _public(tool, package)]
    assert len(public) > 300
    bare = [name for name, value in public if (inspect.isclass(value) or inspect.isfunction(value)) and not inspect.getdoc(value)]
    assert bare == []


@pytest.mark.parametrize("package", COMPLETE)
def test_names_that_say_what_each_argument_is(tool, package) -> None:
    assert {name: unsaid for name, value in _public(tool, package) if (unsaid := _unsaid(value))} == {}


def test_the_others_get_better(tool) -> None:
    without = sorted({name for package in tool.PACKAGES for name, value in _public(tool, package) if _unsaid(value)})
    assert len(without) <= STILL_WITHOUT, without
