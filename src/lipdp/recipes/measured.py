"""What recipes gave when they were run: accuracy, time and memory.

The figures are in a file beside the recipes, which benchmarks/accuracy/catalogue.py makes of the results.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

__all__ = ["Measured", "measured"]


@dataclass(frozen=True)
class Measured:
    """Figures of a recipe at the budget that its settings were found for.

    Attributes:
        score: in %: accuracy, or AUROC where the recipe is judged by it; the mean over the runs.
        deviation: standard deviation over the runs, in %; ``None`` for one run.
        runs: how many.
        part: what it was judged on: the "test" set, or records of the training set that were "held out".
        epsilon: ε of the runs.
        seconds: of one run, features included, data and planning not; ``None`` where no one took it down.
        machine: where that was.
        memory_gb: what the program held at most; on a GPU, of the GPU's. ``None`` where no one took it down.
    """

    score: float
    deviation: float | None
    runs: int
    part: Literal["test", "held out"]
    epsilon: float
    seconds: float | None = None
    machine: str | None = None
    memory_gb: float | None = None


def measured(recipe: str) -> Measured | None:
    """The figures of a shipped recipe; ``None`` for one that none are known of.

    Args:
        recipe: its full name.
    """
    return _figures().get(recipe)


@cache
def _figures() -> dict[str, Measured]:
    text = resources.files("lipdp.recipes.catalog").joinpath("measured.json").read_text(encoding="utf-8")
    return {name: Measured(**figures) for name, figures in json.loads(text).items()}
