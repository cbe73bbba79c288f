"""The house as docs/architecture.md describes it: every arrow between packages points downwards."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.doc_tools import DOCS, load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_architecture")


@pytest.fixture(scope="module")
def graph(tool: ModuleType) -> dict[str, set[str]]:
    found: dict[str, set[str]] = tool.imports()
    return found


def test_no_two_packages_import_each_other(tool: ModuleType, graph: dict[str, set[str]]) -> None:
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
        ("planning", {"training", "models", "recipes", "cli", "data"}),
        ("training", {"models", "recipes", "cli", "certify"}),
        ("mechanisms", {"training", "recipes", "cli"}),
    ],
)
def test_what_a_room_does_not_know(graph: dict[str, set[str]], package: str, never: set[str]) -> None:
    assert not graph[package] & never


def test_the_figure_is_drawn_from_the_imports(tool: ModuleType, graph: dict[str, set[str]]) -> None:
    assert tool.FIGURE.read_text() == tool.figure(graph), "run python docs/make_architecture.py"
    assert "architecture.svg" in (DOCS / "architecture.md").read_text()


def test_every_room_is_described(tool: ModuleType, graph: dict[str, set[str]]) -> None:
    text = (DOCS / "architecture.md").read_text()
    missing = [name for name in tool.rooms(graph) if f"`{name}" not in text]
    assert not missing
