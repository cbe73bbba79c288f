"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from lipdp._names import choose
from lipdp.errors import ConfigurationError

__all__ = ["create", "names", "option_names", "register"]

Builder = Callable[..., torch.nn.Module]
B = TypeVar("B", bound=Builder)
_builders: dict[str, Builder] = {}


def register(name: str) -> Callable[[B], B]:
    """Make the decorated constructor available as ``create(name, input_shape=…, classes=…, **options)``.

    Args:
        name: what :func:`create` will know it by; one that is taken is replaced.
    """

    def add(builder: B) -> B:
        _builders[name] = builder
        return builder

    return add


def names() -> tuple[str, ...]:
    """The models that :func:`create` knows."""
    return tuple(sorted(_builders))


def option_names(name: str) -> tuple[str, ...]:
    """The options that a model names in its signature."""
    parameters = inspect.signature(_builders[choose("model", name, names())]).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY)


def create(name: str, *, input_shape: Sequence[int], classes: int, **options: Any) -> torch.nn.Module:
    """Build a model by name.

    Args:
        name: one of :func:`names`.
        input_shape: shape of one example.
        classes: number of outputs.
        options: the constructor's other arguments; an unknown one is an error.

    Example:
        >>> import lipdp
        >>> model = lipdp.models.create("mlp", input_shape=(1, 8, 8), classes=10, hidden=(32,))
        >>> sum(p.numel() for p in model.parameters())
        2368
    """
    name = choose("model", name, names())
    if classes < 1:
        raise ConfigurationError(f"classes must be at least 1, not {classes}")
    try:
        model = _builders[name](tuple(input_shape), classes, **options)
    except TypeError as error:
        named = ", ".join(option_names(name)) or "none by name"
        raise ConfigurationError(f"model {name!r} does not accept these options: {error}. It has: {named}") from error
    # How it was made, so that lipdp.save_model can write it and lipdp.load build it again.
    vars(model)["lipdp_config"] = {"name": name, "input_shape": tuple(input_shape), "classes": classes, "options": dict(options)}
    return model
