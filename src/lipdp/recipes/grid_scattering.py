"""Heads on scattering features for every dataset of images: linear or with a hidden layer, proved or clipped, at ε = 3.

``cifar10-scattering-linear`` is the best recipe found for that dataset and budget under its name in the grid; see
:mod:`lipdp.recipes.scattering` for the other budgets. The other three are what it becomes with another head or method.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lipdp.recipes.features import FeatureRecipe
from lipdp.recipes.grid import DATASETS, grid_name
from lipdp.recipes.scattering import scattering_recipe

__all__ = ["SCATTERING_GRID"]

# Options and settings of the best hidden layers tried at ε = 3 (benchmarks/results/accuracy/search), and how many were tried. They
# were tried on other fronts than the linear recipes have now.
_HIDDEN: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "mnist": (2, {"clip": 0.2, "hidden_clip": 0.2}, {"temperature": 8.0, "learning_rate": 8.0, "hidden_rate": 2.0}),
    "fashion_mnist": (8, {"clip": 0.15, "hidden_clip": 0.1}, {"temperature": 8.0, "learning_rate": 3.0, "hidden_rate": 5.0}),
    "cifar10": (14, {"clip": 0.2, "hidden_clip": 0.05}, {"temperature": 16.0, "learning_rate": 1.0, "hidden_rate": 1.0}),
}
_FOUND = "head: best of {} trials with a hidden layer at epsilon=3, a tenth of the training held out; front: {}'s; untried together"


def _clipped(recipe: FeatureRecipe, max_grad_norm: float) -> FeatureRecipe:
    """Per-example clipping in the place of boundaries. Behind features of norm 1 it is the same for a linear head and one copy."""
    unbounded = {name: None for name in ("clip", "hidden_clip") if name in recipe.options}
    return recipe.but(
        name=f"{recipe.name}-bookkeeping",
        options={**recipe.options, **unbounded, "normalise": False},
        allocation="global",
        max_grad_norm=max_grad_norm,
        provenance=f"untried: the settings of {recipe.name}",
    )


def _all() -> Iterator[FeatureRecipe]:
    for dataset in DATASETS:
        best = scattering_recipe(dataset, 3.0)
        linear = best.but(
            name=grid_name(dataset, "scattering-linear"), provenance=f"the settings of {best.name}: {best.provenance}"
        )
        yield linear
        yield _clipped(linear, linear.options["clip"])
        trials, options, settings = _HIDDEN[dataset]
        hidden = linear.but(
            name=grid_name(dataset, "scattering-mlp"),
            model="scattering-mlp",
            options={**linear.options, **options, "hidden": (512,), "normalise": False},
            provenance=_FOUND.format(trials, best.name),
            **settings,
        )
        yield hidden
        yield _clipped(hidden, 0.2)


SCATTERING_GRID = tuple(_all())
