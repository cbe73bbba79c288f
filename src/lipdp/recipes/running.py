"""One way to prepare and run any recipe, whatever its kind."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Unpack

import torch

from lipdp.data import DatasetInfo
from lipdp.errors import ConfigurationError
from lipdp.privacy import Accountant, Adjacency
from lipdp.privacy.budget import AnyBudget
from lipdp.recipes import features, recipe, tabular
from lipdp.recipes.features import FeatureRecipe
from lipdp.recipes.options import PlanOptions, RunOptions
from lipdp.recipes.recipe import Prepared, Recipe, Result
from lipdp.recipes.tabular import TabularRecipe
from lipdp.training import Callback

__all__ = ["AnyRecipe", "metric", "prepare", "score", "train"]

AnyRecipe = Recipe | FeatureRecipe


def prepare(
    chosen: AnyRecipe,
    info: DatasetInfo,
    *,
    dataset_size: int | None = None,
    seed: int | None = None,
    **budget: Unpack[PlanOptions],
) -> Prepared:
    """Model, loss, plan and optimiser of a recipe: arguments of :func:`train`. Only the dataset's public description is used."""
    if isinstance(chosen, TabularRecipe):
        return tabular.prepare_table(chosen, info, dataset_size=dataset_size, seed=seed, **budget)
    if isinstance(chosen, FeatureRecipe):
        return features.prepare_head(chosen, info, dataset_size=dataset_size, seed=seed, **budget)
    return recipe.prepare(_known(chosen), info, dataset_size=dataset_size, seed=seed, **budget)


def train(
    chosen: AnyRecipe,
    *,
    epsilon: float | None = 3.0,
    noise_multiplier: float | None = None,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    seed: int | None = None,
    reproducible: bool = False,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    validation_fraction: float | None = None,
    callbacks: Iterable[Callback] = (),
    microbatch_size: int | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    evaluations: int = 10,
    budget: AnyBudget = None,
) -> Result:
    """Run a recipe from the data to the test figure.

    Args:
        chosen: the recipe.
        epsilon: target ε.
        noise_multiplier: σ; with ``epsilon``, the run gets as long as the budget allows.
        adjacency: see :func:`lipdp.plan`.
        accountant: see :func:`lipdp.plan`.
        seed: of the initial weights; the run's noise and samples stay secret, so that no two runs are the same.
        reproducible: draw them from the seed too. The run can then be repeated, and is *not private*; its result says so.
        device: where to compute.
        root: where the datasets are, see :func:`lipdp.data.load`.
        validation_fraction: hold out this part of the *training* set and report its figure instead of the test set's: for
            choosing settings.
        callbacks: see :func:`lipdp.fit`.
        microbatch_size: see :func:`lipdp.fit`.
        checkpoint: see :func:`lipdp.fit`.
        resume: see :func:`lipdp.fit`.
        evaluations: rows of the history; runs on fixed features have one.
        budget: see :func:`lipdp.fit`.
    """
    options: RunOptions = {
        "epsilon": epsilon,
        "noise_multiplier": noise_multiplier,
        "adjacency": adjacency,
        "accountant": accountant,
        "seed": seed,
        "reproducible": reproducible,
        "device": device,
        "root": root,
        "validation_fraction": validation_fraction,
        "callbacks": callbacks,
        "microbatch_size": microbatch_size,
        "checkpoint": checkpoint,
        "resume": resume,
        "budget": budget,
    }
    if isinstance(chosen, FeatureRecipe):
        return features.train_on_features(chosen, **options)
    options["evaluations"] = evaluations
    if isinstance(chosen, TabularRecipe):
        return tabular.train_table(chosen, **options)
    return recipe.train(_known(chosen), **options)


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
