"""Experiments as named configurations: ``lipdp.recipes.train("mnist", epsilon=3)``."""

from lipdp.recipes.files import Measured, get, measured, names, read_recipes, save_recipe
from lipdp.recipes.recipe import Recipe
from lipdp.recipes.run import Prepared, Result, prepare, train

__all__ = [
    "Measured",
    "Prepared",
    "Recipe",
    "Result",
    "get",
    "measured",
    "names",
    "prepare",
    "read_recipes",
    "save_recipe",
    "train",
]
