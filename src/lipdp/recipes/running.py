"""One way to prepare and run any recipe, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from lipdp.data import DatasetInfo
from lipdp.errors import ConfigurationError
from lipdp.privacy import Accountant, Adjacency
from lipdp.recipes import features, recipe, tabular
from lipdp.recipes.features import FeatureRecipe
from lipdp.recipes.recipe import Prepared, Recipe, Result
from lipdp.recipes.tabular import TabularRecipe
from lipdp.training import Callback

__all__ = ["AnyRecipe", "metric", "prepare", "score", "train"]

AnyRecipe = Recipe | FeatureRecipe


def prepare(
    chosen: AnyRecipe,
    info: DatasetInfo,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    dataset_size: int | None = None,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    seed: int | None = None,
) -> Prepared:
    """Model, loss, plan and optimiser of a recipe, see :func:`lipdp.recipes.recipe.prepare`."""
    arguments: dict[str, Any] = {
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "dataset_size": dataset_size,
        "adjacency": adjacency,
        "accountant": accountant,
        "seed": seed,
    }
    if isinstance(chosen, TabularRecipe):
        return tabular.prepare_table(chosen, info, **arguments)
    if isinstance(chosen, FeatureRecipe):
        return features.prepare_head(chosen, info, **arguments)
    return recipe.prepare(_known(chosen), info, **arguments)


def train(
    chosen: AnyRecipe,
    *,
    epsilon: float | None = 3.0,
    noise_multiplier: float | None = None,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    seed: int | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    validation_fraction: float | None = None,
    callbacks: Iterable[Callback] = (),
    microbatch_size: int | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    evaluations: int = 10,
) -> Result:
    """Run a recipe from the data to the test figure, see :func:`lipdp.recipes.recipe.train`."""
    arguments: dict[str, Any] = {
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "adjacency": adjacency,
        "accountant": accountant,
        "seed": seed,
        "device": device,
        "root": root,
        "validation_fraction": validation_fraction,
        "callbacks": callbacks,
        "microbatch_size": microbatch_size,
        "checkpoint": checkpoint,
        "resume": resume,
    }
    if isinstance(chosen, TabularRecipe):
        return tabular.train_table(chosen, **arguments, evaluations=evaluations)
    if isinstance(chosen, FeatureRecipe):
        return features.train_on_features(chosen, **arguments)
    return recipe.train(_known(chosen), **arguments, evaluations=evaluations)


def _known(chosen: Any) -> Recipe:
    if not isinstance(chosen, Recipe):
        raise ConfigurationError(f"{type(chosen).__name__} is no recipe; take one of lipdp.recipes.get(name)")
    return chosen


def metric(chosen: AnyRecipe) -> str:
    """What the recipe is judged by: "auroc" for tables, "accuracy" for all else."""
    return "auroc" if isinstance(chosen, TabularRecipe) else "accuracy"


def score(chosen: AnyRecipe, result: Result) -> float:
    """That figure of a run."""
    return float(getattr(result, metric(chosen)))
