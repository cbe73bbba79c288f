"""docs/sharp_edges.md: each edge names the test that guards it, and that test is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
ROWS = [
    line.strip("| \n").split(" | ")
    for line in (TESTS.parent / "docs" / "sharp_edges.md").read_text(encoding="utf-8").splitlines()[6:]
    if line.startswith("|")
]


def test_there_are_edges() -> None:
    assert len(ROWS) >= 20
    assert all(len(row) == 4 for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_what_guards_it_is_there(row: list[str]) -> None:
    held = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row[3])
    assert held, "no test is named"
    for file, name in held:
        text = (TESTS / file).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(" if name else r"^def test_", text, re.MULTILINE), f"{file} has no {name}"
