"""From options to a recipe: names looked up, texts made values, contradictions refused."""

from __future__ import annotations

import ast
import types
import typing
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lipdp.errors import ConfigurationError

if TYPE_CHECKING:
    from lipdp.data import DatasetInfo
    from lipdp.recipes.running import AnyRecipe

__all__ = ["DEFAULT_EPSILON", "budget", "configured", "dataset_info", "training_size"]

DEFAULT_EPSILON = 3.0
_WORDS: dict[str, Any] = {"none": None, "null": None, "true": True, "false": False}


def configured(
    name: str,
    settings: Sequence[str] | None,
    *,
    delta: float | None = None,
    epochs: float | None = None,
    batch_size: int | None = None,
    learning_rate: float | None = None,
    validation_fraction: float | None = None,
    epsilon: float | None = None,
) -> AnyRecipe:
    """The recipe of this name with what the command line changes. An option of its own beats ``--set``.

    Where a name stands for several recipes, one for each budget, ``epsilon`` chooses.
    """
    from lipdp import recipes

    recipe = recipes.get(name, epsilon)
    changes, options = _assignments(settings or (), recipe)
    flags = {"delta": delta, "epochs": epochs, "batch_size": batch_size, "learning_rate": learning_rate}
    changes.update({key: value for key, value in flags.items() if value is not None})
    if options:
        changes["options"] = {**recipe.options, **options}
    made = recipe.but(**changes)
    size = training_size(dataset_info(made.dataset), validation_fraction)
    if "batch_size" in changes and made.batch_size > size:
        raise ConfigurationError(
            f"batch_size={made.batch_size} is larger than the {size} training records of {made.dataset}: the sampling rate "
            f"would exceed 1. Use at most {size}."
        )
    return made


def budget(epsilon: float | None, noise_multiplier: float | None, *, epochs: float | None) -> tuple[float | None, float | None]:
    """(ε, σ) to plan with: ε = 3 where neither is given."""
    if epsilon is not None and noise_multiplier is not None and epochs is not None:
        raise ConfigurationError(
            "give two of --epsilon, --noise-multiplier and --epochs: the third follows from them. Leave out the one to be found."
        )
    if epsilon is None and noise_multiplier is None:
        return DEFAULT_EPSILON, None
    return epsilon, noise_multiplier


def dataset_info(name: str) -> DatasetInfo:
    """What is public about a dataset; reads none of it."""
    from lipdp.data import info

    return info(name)


def training_size(info: DatasetInfo, validation_fraction: float | None) -> int:
    """Records that are trained on."""
    if validation_fraction is None:
        return info.train_size
    if not 0 < validation_fraction < 1:
        raise ConfigurationError(f"--validation-fraction must lie between 0 and 1, not {validation_fraction!r}; try 0.1")
    return info.train_size - round(validation_fraction * info.train_size)


def _assignments(settings: Sequence[str], recipe: AnyRecipe) -> tuple[dict[str, Any], dict[str, Any]]:
    """The changes that ``--set`` asks for: of the recipe, and of its model's options."""
    hints = typing.get_type_hints(type(recipe))
    changes: dict[str, Any] = {}
    options: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = (part.strip() for part in setting.partition("="))
        if not (key and separator):
            raise ConfigurationError(f"--set takes KEY=VALUE, e.g. --set momentum=0.8, not {setting!r}")
        if key.startswith("options."):
            option = key.removeprefix("options.")
            value = _literal(text)
            # 64 for a setting that is a list in the recipe is a list of one.
            listed = isinstance(recipe.options.get(option), list | tuple) and not isinstance(value, list | tuple)
            options[option] = (value,) if listed and value is not None else value
        elif key == "options":
            raise ConfigurationError("set the model's options one by one: --set options.NAME=VALUE")
        else:
            # An unknown name is refused by the recipe itself, with the list of those that it has.
            changes[key] = _converted(key, text, hints.get(key, str))
    return changes, options


def _converted(key: str, text: str, hint: Any) -> Any:
    """``text`` as the type that the recipe declares."""
    choices = typing.get_args(hint) if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union else (hint,)
    if type(None) in choices and _WORDS.get(text.lower(), text) is None:
        return None
    for choice in choices:
        if typing.get_origin(choice) is typing.Literal:
            allowed = typing.get_args(choice)
            if text not in allowed:
                raise ConfigurationError(f"{key} must be one of {', '.join(map(str, allowed))}, not {text!r}")
            return text
        if choice in (int, float):
            try:
                return choice(text)
            except ValueError:
                kind = "whole number" if choice is int else "number"
                raise ConfigurationError(f"{key} must be a {kind}, not {text!r}") from None
    return text


def _literal(text: str) -> Any:
    """A value of a model's option: a number, true, false, none, a list like 64,64; anything else is a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
