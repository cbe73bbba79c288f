"""docs/layers.md and docs/models.md say what the code says."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from lipdp import models, nn

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_layers", DOCS / "make_layers.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    torch.manual_seed(0)
    import sys

    sys.modules["make_layers"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


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
