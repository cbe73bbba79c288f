"""The recipes, by name."""

from __future__ import annotations

from lipdp.errors import ConfigurationError
from lipdp.recipes.recipe import Recipe

__all__ = ["get", "names"]

_PROTOTYPE = "not tuned yet"

_RECIPES = (
    Recipe(
        "digits-mlp",
        "digits",
        "mlp",
        {"hidden": (64,), "clip": 0.5},
        batch_size=256,
        epochs=40,
        delta=1e-4,
        provenance=_PROTOTYPE,
    ),
    Recipe("mnist-mlp", "mnist", "mlp", {"hidden": (256, 256), "clip": 0.5}, provenance=_PROTOTYPE),
    Recipe("mnist-lenet", "mnist", "lenet", {"clip": 0.5}, provenance=_PROTOTYPE),
)

# The dataset's name alone means the best recipe for it.
_DEFAULTS = {"digits": "digits-mlp", "mnist": "mnist-mlp"}
_BY_NAME = {recipe.name: recipe for recipe in _RECIPES}


def names() -> tuple[str, ...]:
    """All recipes, the short names included."""
    return (*_DEFAULTS, *_BY_NAME)


def get(name: str) -> Recipe:
    """A recipe by name; a dataset's name means the best recipe for it."""
    found = _BY_NAME.get(_DEFAULTS.get(name, name))
    if found is None:
        raise ConfigurationError(f"there is no recipe named {name!r}; there are {', '.join(names())}")
    return found
