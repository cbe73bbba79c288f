"""What every kind of recipe can be run with, named once."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import torch
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.data import DatasetInfo
from lipdp.privacy import Accountant, Adjacency
from lipdp.privacy.budget import AnyBudget
from lipdp.training import Callback

__all__ = ["FitOptions", "PlanOptions", "RunOptions", "fit_options", "load_parts", "plan_options"]


class PlanOptions(TypedDict, total=False):
    """The budget: arguments of :func:`lipdp.plan` that a recipe leaves open. With both ε and σ the run is as long as ε allows."""

    epsilon: float | None
    noise_multiplier: float | None
    adjacency: Adjacency
    accountant: Accountant


class FitOptions(TypedDict, total=False):
    """Arguments that :func:`lipdp.fit` gets as they are."""

    seed: int | None
    reproducible: bool
    device: torch.device | str | None
    callbacks: Iterable[Callback]
    microbatch_size: int | None
    checkpoint: str | Path | None
    resume: bool
    evaluations: int
    budget: AnyBudget


class RunOptions(PlanOptions, FitOptions, total=False):
    """All of them, and where the data are; :func:`lipdp.recipes.train` documents each."""

    root: str | Path | None
    validation_fraction: float | None


def plan_options(options: RunOptions) -> PlanOptions:
    """The budget of a run."""
    return {name: options[name] for name in PlanOptions.__annotations__ if name in options}  # type: ignore[literal-required,return-value]


def fit_options(options: RunOptions) -> FitOptions:
    """What :func:`lipdp.fit` gets of a run's options."""
    return {name: options[name] for name in FitOptions.__annotations__ if name in options}  # type: ignore[literal-required,return-value]


def load_parts(dataset: str, options: RunOptions) -> tuple[TensorDataset, TensorDataset, TensorDataset | None, DatasetInfo]:
    """(to learn from, to judge by, to watch during training, description): what is judged by is the test set, or held out."""
    learn, test, info = data.load(dataset, root=options.get("root"))
    fraction = options.get("validation_fraction")
    if fraction is None:
        return learn, test, None, info
    learn, held_out = data.split(learn, fraction)
    return learn, held_out, held_out, info
