"""Every Python block of the README and of the documentation runs, in the order of its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
WITH_CODE = [page for page in PAGES if BLOCK.search(page.read_text(encoding="utf8"))]


def test_pages_have_examples() -> None:
    assert {page.name for page in WITH_CODE} >= {"README.md", "guide.md", "bounds.md"}


@pytest.mark.parametrize("page", WITH_CODE, ids=lambda page: page.name)
def test_the_examples_of_a_page_run(page: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)  # what an example writes
    torch.manual_seed(0)
    space: dict[str, object] = {"__name__": "example"}
    for number, block in enumerate(BLOCK.findall(page.read_text(encoding="utf8"))):
        exec(compile(block, f"{page.name}, block {number + 1}", "exec"), space)
