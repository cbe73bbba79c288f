"""The pages of docs/reference: every public name of every public package, for mkdocstrings to fill from the docstrings.

python docs/make_reference.py            write docs/reference/*.md
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "reference"
PACKAGES = (
    "lipdp", "audit", "bounds", "clipping", "convert", "data", "diagnose", "errors", "estimators", "export", "features", "losses",
    "mechanisms", "models", "nn", "parametrize", "planning", "privacy", "recipes", "report", "training",
)  # fmt: skip


def names(package: str) -> list[str]:
    """The public functions, classes and values of a package; packages inside it have pages of their own."""
    module = importlib.import_module("lipdp" if package == "lipdp" else f"lipdp.{package}")
    return [name for name in sorted(module.__all__) if not inspect.ismodule(getattr(module, name))]


def entry(path: str, value: object) -> list[str]:
    """What mkdocstrings is to document under a public name.

    Where a module has a function's name (``lipdp.planning.plan``, which ``lipdp.plan`` leads to) the public path means the module
    to it. So such a function is named by where it stands, under its public heading.
    """
    name = path.rpartition(".")[2]
    modules = {info.name.rpartition(".")[2] for info in pkgutil.walk_packages(importlib.import_module("lipdp").__path__, "lipdp.")}
    if name not in modules:
        return [f"::: {path}", ""]
    own = f"{value.__module__}.{value.__qualname__}"  # type: ignore[attr-defined]
    return [f"::: {own}", "    options:", f"      heading: {path}", f"      toc_label: {name}", ""]


def page(package: str) -> str:
    """The page of one package."""
    path = "lipdp" if package == "lipdp" else f"lipdp.{package}"
    module = importlib.import_module(path)
    first = (module.__doc__ or "").strip().splitlines()[0]
    parts = [f"# {path}", "", first, ""]
    for name in names(package):
        value = getattr(module, name)
        if getattr(value, "__name__", name) != name and inspect.isclass(value):
            parts += [f"## `{name}`", "", f"Another name of `{value.__name__}`.", ""]
        elif inspect.isclass(value) or inspect.isfunction(value):
            parts += entry(f"{path}.{name}", value)
        elif isinstance(value, str | int | float | tuple | dict | types.UnionType) or "typing" in type(value).__module__:
            parts += [f"## `{name}`", "", "A value or a type; see the source.", ""]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for own in PACKAGES:
        (FOLDER / f"{own}.md").write_text(page(own), encoding="utf-8")
