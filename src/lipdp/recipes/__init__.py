"""Experiments as named configurations: ``lipdp.recipes.train(lipdp.recipes.get("mnist"), epsilon=3)``."""

from lipdp.recipes.catalog import get, names
from lipdp.recipes.recipe import Prepared, Recipe, Result
from lipdp.recipes.running import prepare, train

__all__ = ["Prepared", "Recipe", "Result", "get", "names", "prepare", "train"]
