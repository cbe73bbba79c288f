"""The house as docs/architecture.md describes it: every arrow between packages points downwards."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.doc_tools import DOCS, load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_architecture")


def test_no_two_packages_import_each_other(tool: ModuleType) -> None:
    graph = tool.imports()
    assert {"bounds", "training", "nn", "cli"} <= graph.keys()
    assert len(tool.levels(graph)) > 5


def test_a_cycle_is_named(tool: ModuleType) -> None:
    with pytest.raises(ValueError, match="b → c → b"):
        tool.levels({"a": {"b"}, "b": {"c"}, "c": {"b"}})


@pytest.mark.parametrize(
    ("package", "never"),
    [
        ("bounds", {"graphs", "training", "nn", "clipping", "privacy", "data"}),
        ("clipping", {"training", "nn", "bounds", "privacy", "data"}),
        ("privacy", {"training", "nn", "bounds", "clipping", "losses", "models", "program"}),
        ("program", {"training", "nn", "bounds", "clipping", "privacy"}),
        ("certify", {"training", "recipes", "cli"}),
        ("export", {"training", "nn", "models", "recipes", "cli"}),
        ("convert", {"training", "recipes", "cli"}),
        ("nn", {"training", "models", "recipes", "cli", "data"}),
        ("training", {"models", "recipes", "cli", "certify"}),
        ("mechanisms", {"training", "recipes", "cli"}),
    ],
)
def test_what_a_room_does_not_know(tool: ModuleType, package: str, never: set[str]) -> None:
    assert not tool.imports()[package] & never


def test_the_figure_is_drawn_from_the_imports(tool: ModuleType) -> None:
    assert tool.FIGURE.read_text() == tool.figure(tool.imports()), "run python docs/make_architecture.py"
    assert "architecture.svg" in (DOCS / "architecture.md").read_text()


def test_every_room_is_described(tool: ModuleType) -> None:
    text = (DOCS / "architecture.md").read_text()
    missing = [name for name in tool.rooms(tool.imports()) if f"`{name}" not in text]
    assert not missing
