"""The scripts in docs/ that write pages, as modules that tests can call."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

DOCS = Path(__file__).resolve().parents[1] / "docs"


def load_tool(name: str) -> ModuleType:
    """docs/<name>.py, loaded with torch's seed at 0."""
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    torch.manual_seed(0)
    spec.loader.exec_module(module)
    return module
