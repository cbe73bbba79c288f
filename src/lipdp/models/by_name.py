"""Models by name."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch

from lipdp._checks import choose, instance, whole
from lipdp.errors import ConfigurationError, LipdpError

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


def image(input_shape: tuple[int, ...], name: str, least: int = 1, patch: int = 1) -> tuple[int, int, int]:
    """Channels, rows and columns, counted in patches of so many pixels a side, of images that a network of this name can take."""
    if len(input_shape) != 3 or min(input_shape[1:]) < least:
        raise ConfigurationError(
            f"{name} needs images (channels, height, width) of at least {least} pixels a side, not {input_shape}"
        )
    channels, height, width = input_shape
    if patch < 1 or height % patch or width % patch:
        raise ConfigurationError(f"{name} needs images whose sides are multiples of the patch, not {input_shape} and {patch}")
    return channels, height // patch, width // patch


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
    classes = whole("classes", classes)
    instance("input_shape", input_shape, Iterable, "the shape of one example, such as (1, 28, 28), or (40,) for a row")
    try:
        model = _builders[name](tuple(input_shape), classes, **options)
    except LipdpError:
        raise
    except (TypeError, ValueError, AssertionError, RuntimeError) as error:  # from torch's own constructors, among others
        raise ConfigurationError(_refusal(name, options, tuple(input_shape), error)) from error
    # How it was made, so that lipdp.save_model can write it and lipdp.load build it again.
    vars(model)["lipdp_config"] = {"name": name, "input_shape": tuple(input_shape), "classes": classes, "options": dict(options)}
    return model


def _refusal(name: str, options: dict[str, Any], input_shape: tuple[int, ...], error: Exception) -> str:
    """What was wrong with a model's options, and which it has."""
    fixed = re.search(r"multiple values for (?:keyword )?argument '(\w+)'", str(error))
    if fixed is not None:
        return f"the {fixed[1]} of model {name!r} goes with its name: leave out {fixed[1]}=, or take another model"
    named = ", ".join(option_names(name)) or "none by name"
    parameters = inspect.signature(_builders[name]).parameters
    if isinstance(error, TypeError):
        strange = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if strange is not None:
            return f"model {name!r} does not accept these options: {strange[1]!r}. It has: {named}"
        kinds = {option: parameters[option].annotation for option in options if option in parameters}
        takes = ", ".join(f"{option}: {getattr(kind, '__name__', kind)}" for option, kind in kinds.items())
        given = ", ".join(f"{option}={value!r}" for option, value in options.items())
        return f"model {name!r} can't be built with {given}: a value is not of the option's type ({takes or named})"
    given = ", ".join(f"{option}={value!r}" for option, value in options.items()) or "its defaults"
    return f"model {name!r} can't be built with {given} for inputs of shape {input_shape}: {error}. Its options: {named}"
