"""docs/layers.md and docs/models.md say what the code says."""

from __future__ import annotations

from types import ModuleType

import pytest

from lipdp import models, nn
from tests.doc_tools import DOCS, load_tool


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_tool("make_layers")


def test_layers_page_is_up_to_date(tool: ModuleType) -> None:
    text = (DOCS / "layers.md").read_text()
    assert tool.page(False, tool.known_tightness(text)) == text, "run python docs/make_layers.py"


def test_every_layer_is_on_the_page_and_no_bound_was_beaten(tool: ModuleType) -> None:
    text = (DOCS / "layers.md").read_text()
    missing = [name for name in nn.__all__ if f"`{name}(" not in text]
    assert not missing
    measured = [float(cell) for cell in tool.known_tightness(text).values() if cell != "–"]
    assert max(measured) <= 1 + 1e-9
    assert min(measured) > 0.2


def test_models_page_lists_every_model() -> None:
    """Parameter counts of the small ones are compared; building all of them takes too long here (--check does)."""
    text = (DOCS / "models.md").read_text()
    for name in models.names():
        assert f"| `{name}` |" in text
    for name in ("mlp", "lenet", "mixer", "transformer", "resnet6", "plain-cnn"):
        model = models.create(name, input_shape=(1, 28, 28), classes=10)
        line = next(line for line in text.splitlines() if line.startswith(f"| `{name}` |"))
        assert f" {sum(p.numel() for p in model.parameters()):,} " in line
