"""A model in a file: how it was made and its weights, as plain data that runs no code when read."""

from __future__ import annotations

import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lipdp.errors import CheckpointError, ConfigurationError, LipdpError, LipdpWarning
from lipdp.fields import Count, check_weights, read
from lipdp.parametrize import project_outside_
from lipdp.training.checkpoint import load_checkpoint, save_checkpoint

_KIND = "lipdp model 1"
_LARGE = 1 << 27  # entries of one tensor that any model may have while it is built
_LARGEST_SIZE = 1 << 24  # of whole numbers among a model's options


def save_model(model: torch.nn.Module, path: str | Path) -> None:
    """Write a model that :func:`lipdp.models.create` made, for :func:`load`.

    The file holds the arguments of ``create`` and the weights, nothing of the training run: no data, no noise, no keys. It is
    written whole or not at all, with a digest; the file that was there before stays as ``path.previous``.

    Args:
        model: made by :func:`lipdp.models.create` (:mod:`lipdp.recipes` does). Of another model, save ``model.state_dict()``,
            or ``lipdp.export(model)`` with :func:`torch.export.save`.
        path: the file.
    """
    config = getattr(model, "lipdp_config", None)
    if not isinstance(config, dict):
        raise ConfigurationError(
            f"this {type(model).__name__} was not made by lipdp.models.create, so a file could not say how to build it again. Save "
            "its weights (torch.save(model.state_dict(), path)) and load them into a model that your own code builds, or save the "
            "plain torch module: torch.export.save(torch.export.export(lipdp.export(model), (x,)), path)."
        )
    if not _plain(config):
        raise ConfigurationError(
            f"the model {config['name']!r} was made with options that are not plain data ({config['options']}); only numbers, "
            "texts and lists of them can be written to a file. Save model.state_dict() instead."
        )
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    save_checkpoint({"kind": _KIND, "config": config, "frozen": frozen, "state": state}, path)


def load(path: str | Path, *, device: torch.device | str = "cpu") -> torch.nn.Module:
    """The model that :func:`save_model` wrote to ``path``, in evaluation mode.

    The file is data: reading it runs no code, and what it says is checked field by field. One that is damaged, or that holds
    something else, is an error. Weights that are not certainly inside their constraint sets are projected, with a warning.

    Args:
        path: the file.
        device: where to put the model.

    Example:
        >>> import tempfile, pathlib, lipdp
        >>> model = lipdp.models.create("mlp", input_shape=(1, 8, 8), classes=10, hidden=(32,))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_model(model, pathlib.Path(folder) / "model.lipdp")
        ...     again = load(pathlib.Path(folder) / "model.lipdp")
        >>> all(bool((a == b).all()) for a, b in zip(model.parameters(), again.parameters()))
        True
    """
    content = load_checkpoint(path, device)
    if not isinstance(content.get("kind"), str) or content["kind"] != _KIND:
        raise CheckpointError(
            f"'{path}' holds something else than a model (a checkpoint of a training run?). lipdp.load reads what "
            "lipdp.save_model wrote; a run's checkpoint is read by lipdp.fit or PrivacyEngine.load_state_dict."
        )
    try:
        saved: _Saved = read(_Saved, content, "the file")
    except LipdpError as error:
        raise CheckpointError(f"'{path}' holds no model that can be built: {error}") from error
    model = _build(saved, path)
    try:
        check_weights(_typed(model, saved.state), saved.state, "the state")
    except LipdpError as error:
        raise CheckpointError(
            f"the weights in '{path}' do not fit the model {saved.config.name!r} as this version builds it: {error}"
        ) from error
    model.load_state_dict(saved.state, assign=True)  # assign: the type and place of what was saved
    parameters = dict(model.named_parameters())
    for name in saved.frozen:
        if name not in parameters:
            raise CheckpointError(f"'{path}' says that {name!r} is frozen, and the model has no such parameter")
        parameters[name].requires_grad_(False)
    outside = project_outside_(model)
    if outside:
        warnings.warn(
            f"the weights of {', '.join(outside[:3])} in '{path}' were outside of their constraint sets: saved without projecting, "
            "or changed since. They were projected: bounds and certificates rest on that.",
            LipdpWarning,
            stacklevel=2,
        )
    return model.eval()


@dataclass(frozen=True)
class _Config:
    name: str
    input_shape: tuple[Count, ...]
    classes: Count
    options: dict[str, Any]


@dataclass(frozen=True)
class _Saved:
    kind: str
    config: _Config
    frozen: list[str]
    state: dict[str, Any]


def _build(saved: _Saved, path: str | Path) -> torch.nn.Module:
    """The model as it was made, without the weights; nothing in it may be far larger than what the file holds."""
    from lipdp import models  # whose layers bring their rules for export

    config = saved.config
    if not _plain(config.options) or not _moderate(config.options):
        raise CheckpointError(
            f"'{path}' makes the model {config.name!r} with options that are no plain data, or with numbers that no model has: "
            f"{config.options}"
        )
    entries = sum(value.numel() for value in saved.state.values() if isinstance(value, torch.Tensor))
    try:
        with _Limited(max(_LARGE, 4 * entries)):
            return models.create(config.name, input_shape=config.input_shape, classes=config.classes, **config.options)
    except Exception as error:  # what a constructor does with arguments that nobody meant is anybody's guess
        raise CheckpointError(
            f"the model {config.name!r} can't be built with the arguments that '{path}' gives: {error}"
        ) from error


class _Limited(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses to make a tensor of more than so many entries: numbers in a file must not fill up the memory."""

    def __init__(self, entries: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entries = entries

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Looks at the sizes that factory functions are given, before anything is made."""
        sizes = [math.prod(arg) for arg in args if isinstance(arg, list | tuple) and all(isinstance(size, int) for size in arg)]
        if sizes and max(sizes) > self._entries:
            raise CheckpointError(f"it would have a tensor of {max(sizes):,} entries, far more than the file holds")
        return func(*args, **(kwargs or {}))


def _typed(model: torch.nn.Module, state: dict[str, Any]) -> dict[str, Any]:
    """The model's own state, in the one floating-point type that was saved, where there is one."""
    saved = {value.dtype for value in state.values() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    own = model.state_dict()
    if len(saved) != 1:
        return own
    (dtype,) = saved
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in own.items()}


def _moderate(value: Any) -> bool:
    """Sizes that a model can have, and numbers that float32 can hold; seeds may be any."""
    if isinstance(value, dict):
        return all("seed" in name or _moderate(part) for name, part in value.items())
    if isinstance(value, tuple | list):
        return all(map(_moderate, value))
    return not isinstance(value, int | float) or abs(value) <= (_LARGEST_SIZE if isinstance(value, int) else 1e30)


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(entry) for key, entry in value.items())
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return value is None or type(value) in (bool, int, float, str)
