"""The recipes, by name."""

from __future__ import annotations

from lipdp._names import choose
from lipdp.data import RandomCrop
from lipdp.recipes.adbench import ADBENCH_RECIPES
from lipdp.recipes.clipping_paper import CLIPPING_PAPER
from lipdp.recipes.features import FeatureRecipe
from lipdp.recipes.grid import GRID
from lipdp.recipes.grid_scattering import SCATTERING_GRID
from lipdp.recipes.handwriting import HANDWRITING
from lipdp.recipes.mixtures import LARGE, MIXTURES
from lipdp.recipes.patches import PATCHES
from lipdp.recipes.recipe import Recipe
from lipdp.recipes.scattering import SCATTERING, nearest_budget

__all__ = ["best_recipe", "get", "names"]

_SEARCH = "best of {} random trials (benchmarks/search.py, epsilon=3) on a sixth of the training set, held out"

_RECIPES = (
    Recipe(
        "digits-mlp",
        "digits",
        "mlp",
        {"hidden": (128,), "clip": 0.4},
        temperature=20.0,
        batch_size=1000,
        epochs=40,
        learning_rate=0.4,
        schedule="cosine",
        ema_decay=0.9,
        delta=1e-4,
        provenance="best of 40 random trials (epsilon=3, two seeds each) on a quarter of the training set, held out",
    ),
    Recipe(
        "mnist-mlp",
        "mnist",
        "mlp",
        {"hidden": (128,), "clip": 0.3},
        temperature=40.0,
        batch_size=8192,
        epochs=60,
        learning_rate=0.85,
        schedule="cosine",
        ema_decay=0.95,
        allocation="optimal",
        provenance=_SEARCH.format(66),
    ),
    Recipe(
        "mnist-lenet",
        "mnist",
        "lenet",
        {"channels": (16,), "kernel_size": 5, "hidden": 64, "clip": 0.15},
        temperature=130.0,
        batch_size=8192,
        epochs=30,
        learning_rate=5.6,
        schedule="cosine",
        ema_decay=0.98,
        allocation="optimal",
        provenance=_SEARCH.format(54),
    ),
    Recipe(
        "mnist-dpsgd",
        "mnist",
        "tanh-cnn",
        {"width": 16, "hidden": 32, "centre": 0.1307, "spread": 0.3081},
        temperature=1.0,
        batch_size=4096,
        epochs=500 * 4096 / 60_000,
        learning_rate=0.6,
        schedule="constant",
        ema_decay=0.95,
        method="bookkeeping",
        max_grad_norm=0.1,
        augmentation=RandomCrop(1, 4, mode="zeros", flip=False),
        provenance="best of 25 trials (benchmarks/dpsgd_mnist.py, epsilon=3) on a sixth of the training set, held out",
    ),
)

# The dataset's name alone means a recipe for it; those on fixed features depend on the budget.
_DEFAULTS = {"digits": "digits-mlp"}
_BY_BUDGET = tuple(dict.fromkeys(dataset for dataset, _ in (*PATCHES, *SCATTERING)))
_ALL: tuple[Recipe | FeatureRecipe, ...] = (
    *GRID,
    *SCATTERING_GRID,
    *_RECIPES,  # behind the grid: those of the same name had longer searches
    *SCATTERING.values(),
    *PATCHES.values(),
    *MIXTURES.values(),
    *LARGE.values(),
    *HANDWRITING.values(),
    *CLIPPING_PAPER,
    *ADBENCH_RECIPES,
)
_BY_NAME = {recipe.name: recipe for recipe in _ALL}


def names() -> tuple[str, ...]:
    """All recipes, the short names included."""
    return (*_DEFAULTS, *_BY_BUDGET, *_BY_NAME)


def best_recipe(dataset: str, epsilon: float) -> FeatureRecipe:
    """The best on fixed features that two cores can compute in minutes; later families were better where they were tried."""
    return nearest_budget({**SCATTERING, **PATCHES, **MIXTURES, **HANDWRITING}, dataset, epsilon)


def get(name: str, epsilon: float | None = None) -> Recipe | FeatureRecipe:
    """A recipe by name; a dataset's name means the best recipe for it, at the budget nearest to ``epsilon`` (by default 3)."""
    short = ", ".join((*_DEFAULTS, *_BY_BUDGET))
    count = len(names())
    choices = f"{short} mean the best recipe for the dataset; `lipdp recipes` (or lipdp.recipes.names()) lists all {count}."
    meant = choose("recipe", name, names(), choices)
    if meant in _BY_BUDGET:
        return best_recipe(meant, 3.0 if epsilon is None else epsilon)
    return _BY_NAME[_DEFAULTS.get(meant, meant)]
