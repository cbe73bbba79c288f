"""One way to run any recipe, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lipdp.errors import ConfigurationError
from lipdp.recipes.features import FeatureRecipe, train_on_features
from lipdp.recipes.recipe import Recipe, Result
from lipdp.recipes.recipe import train as train_recipe
from lipdp.recipes.tabular import TabularRecipe, train_table
from lipdp.training import Callback

__all__ = ["AnyRecipe", "metric", "run", "score"]

AnyRecipe = Recipe | FeatureRecipe


def run(
    recipe: AnyRecipe,
    *,
    epsilon: float,
    seed: int | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    validation_fraction: float | None = None,
    callbacks: Iterable[Callback] = (),
    evaluations: int = 10,
) -> Result:
    """Train by the function for this kind of recipe; the arguments are those of :func:`lipdp.recipes.train`."""
    common: dict[str, Any] = {
        "epsilon": epsilon,
        "seed": seed,
        "device": device,
        "root": root,
        "validation_fraction": validation_fraction,
        "callbacks": callbacks,
    }
    if isinstance(recipe, TabularRecipe):
        return train_table(recipe, **common, evaluations=evaluations)
    if isinstance(recipe, FeatureRecipe):
        return train_on_features(recipe, **common)
    if isinstance(recipe, Recipe):
        return train_recipe(recipe, **common, evaluations=evaluations)
    raise ConfigurationError(f"{type(recipe).__name__} is no recipe; take one of lipdp.recipes.get(name)")


def metric(recipe: AnyRecipe) -> str:
    """What the recipe is judged by: "auroc" for tables, "accuracy" for all else."""
    return "auroc" if isinstance(recipe, TabularRecipe) else "accuracy"


def score(recipe: AnyRecipe, result: Result) -> float:
    """That figure of a run."""
    return float(getattr(result, metric(recipe)))
