"""What runs of all kinds of recipes have in common."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

from lipdp import data, models
from lipdp._names import match
from lipdp.data import DatasetInfo

__all__ = ["Schedule", "batch_of", "rate_schedule", "seeded_model", "spell_names"]

Schedule = Literal["constant", "cosine", "linear"]


def spell_names(recipe: Any) -> None:
    """Give a new recipe's dataset and model the names under which they are listed, however they were typed."""
    for field, known in (("dataset", data.names()), ("model", models.names())):
        object.__setattr__(recipe, field, match(getattr(recipe, field), known) or getattr(recipe, field))


def batch_of(recipe: Any, records: int) -> int:
    """The expected batch size for a run on so many records.

    It is the recipe's; or all of them, where a part of the training set is held out and leaves fewer. A batch that the whole
    training set could not give either is left as it is, for the plan to refuse.
    """
    known = recipe.dataset in data.names()
    all_records = data.info(recipe.dataset).train_size if known else records
    batch: int = recipe.batch_size
    return min(batch, records) if batch <= all_records else batch


def seeded_model(name: str, options: Mapping[str, Any], info: DatasetInfo, seed: int | None) -> torch.nn.Module:
    """A model with initial weights drawn from ``seed`` (``None``: from the system); the caller's generator stays where it is."""
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        else:
            torch.seed()
        return models.create(name, input_shape=info.shape, classes=info.classes, **options)


def rate_schedule(optimizer: torch.optim.Optimizer, kind: Schedule, steps: int) -> torch.optim.lr_scheduler.LambdaLR:
    """The learning rate over a run of ``steps``: constant, or along half a cosine or a line down to 0."""

    def factor(step: int) -> float:
        done = min(step, steps) / steps
        return {"constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done}[kind]

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
