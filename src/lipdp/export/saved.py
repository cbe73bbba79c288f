"""A model in a file: how it was made and its weights, as plain data that runs no code when read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lipdp import models
from lipdp.errors import CheckpointError, ConfigurationError
from lipdp.training.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load", "save_model"]

_KIND = "lipdp model 1"


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

    The file is data: reading it runs no code. One that is damaged, or that holds something else, is an error.

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
    config = content.get("config")
    if content.get("kind") != _KIND or not isinstance(config, dict):
        raise CheckpointError(
            f"'{path}' holds something else than a model (a checkpoint of a training run?). lipdp.load reads what "
            "lipdp.save_model wrote; a run's checkpoint is read by lipdp.fit or PrivacyEngine.load_state_dict."
        )
    model = models.create(config["name"], input_shape=config["input_shape"], classes=config["classes"], **config["options"])
    try:
        model.load_state_dict(content["state"], assign=True)  # assign: the type and place of what was saved
    except RuntimeError as error:
        raise CheckpointError(
            f"the weights in '{path}' do not fit the model {config['name']!r} as this version builds it: {error}"
        ) from error
    for name in content["frozen"]:
        model.get_parameter(name).requires_grad_(False)
    return model.eval()


def _plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _plain(entry) for key, entry in value.items())
    if isinstance(value, tuple | list):
        return all(map(_plain, value))
    return value is None or type(value) in (bool, int, float, str)
