"""The figures of docs/theory.md are what the calculus says now, and are all there."""

from __future__ import annotations

import re
from types import ModuleType

import pytest

from tests.doc_tools import DOCS, load_tool

PAGE = (DOCS / "theory.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_calculus")


def test_the_figure_is_the_calculus_of_today(tool) -> None:
    assert tool.FIGURE.read_text(encoding="utf-8") == tool.figure(tool.analysis()), "run python docs/make_calculus.py"


def test_what_the_page_says_of_the_figure(tool) -> None:
    result = tool.analysis()
    assert [row.sensitivity for row in result.parameters] == pytest.approx([0.15] * 3)
    assert [row.norm for row in result.layers[1:]] == pytest.approx([1.0] * 9)  # from the bounded input on
    assert result.loss_lipschitz == pytest.approx(2**0.5)


def test_every_formula_is_drawn_and_shown_with_words(tool) -> None:
    shown = re.findall(r"!\[([^\]]+)\]\(formulas/(\w+)\.svg\)", PAGE)
    assert {name for _, name in shown} == set(tool.FORMULA) == {file.stem for file in tool.FORMULAS.glob("*.svg")}
    assert len(shown) == len(tool.FORMULA) == 8
    assert all(len(words) > 20 for words, _ in shown)


def test_formulas_are_valid(tool, tmp_path) -> None:
    pytest.importorskip("matplotlib")
    tool.draw_formulas(tmp_path / "formulas")
    for name in tool.FORMULA:
        assert "<path" in (tmp_path / "formulas" / f"{name}.svg").read_text(encoding="utf-8")
