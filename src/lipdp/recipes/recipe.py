"""A recipe: everything of a training run but the privacy budget and the seed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lipdp import data
from lipdp.data import Augmentation, DatasetInfo
from lipdp.errors import ConfigurationError
from lipdp.losses import CrossEntropy, Loss
from lipdp.privacy import Accountant, AdaptiveClip, Adjacency, Allocation
from lipdp.recipes.parts import rate_schedule, seeded_model
from lipdp.training import Callback, History, PrivacyPlan, evaluate, fit, plan
from lipdp.training.plan import Method

__all__ = ["Prepared", "Recipe", "Result", "outcome", "prepare", "train"]


@dataclass(frozen=True)
class Recipe:
    """One experiment, with the best settings found for it.

    Attributes:
        name: what ``lipdp train`` calls it.
        dataset: a name of :func:`lipdp.data.load`.
        model: a name of :func:`lipdp.models.create`.
        options: the model's options.
        temperature: τ of the cross-entropy CE(τŷ)/τ.
        batch_size: expected batch size b.
        epochs: expected passes over the data.
        learning_rate: of SGD, in units of the *sensitivity*: the step is lr·(noised sum)/(b·Δ_total), so that a change of
            clip or loss leaves it meaningful.
        momentum: of SGD.
        schedule: "constant", or "cosine" to 0 over the run.
        ema_decay: of the weight average, ``None`` for none.
        allocation: of the noise.
        delta: δ of the guarantee.
        method: "clipless", or a clipping method of :func:`lipdp.plan`.
        max_grad_norm: C, for clipping methods.
        tail_average: average the weights over this last fraction of the steps instead.
        augmentation: train on the mean over each example's copies.
        statistics_budget, adaptive, clip_schedule, noise_schedule, freeze: of :func:`lipdp.plan`.
        provenance: where the settings come from.
    """

    name: str
    dataset: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    temperature: float = 16.0
    batch_size: int = 2048
    epochs: float = 20.0
    learning_rate: float = 1.0
    momentum: float = 0.9
    schedule: Literal["constant", "cosine"] = "constant"
    ema_decay: float | None = None
    allocation: Allocation = "global"
    delta: float = 1e-5
    method: Method = "clipless"
    max_grad_norm: float | None = None
    tail_average: float | None = None
    augmentation: Augmentation | None = None
    statistics_budget: float | None = None
    adaptive: AdaptiveClip | None = None
    clip_schedule: tuple[tuple[float, float], ...] | None = None
    noise_schedule: tuple[tuple[float, float], ...] | None = None
    freeze: Mapping[str, float] | None = None
    provenance: str = ""

    def __post_init__(self) -> None:
        """Refuse what would otherwise only show as a strange training run."""
        for name in ("temperature", "learning_rate", "epochs"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} must be a positive finite number, not {value!r}")
        if not (isinstance(self.momentum, int | float) and 0 <= self.momentum < 1):
            raise ConfigurationError(f"momentum must lie in [0, 1), not {self.momentum!r}")
        if self.ema_decay is not None and not 0 <= self.ema_decay < 1:
            raise ConfigurationError(f"ema_decay must lie in [0, 1), or be None, not {self.ema_decay!r}")
        if self.schedule not in ("constant", "cosine"):
            raise ConfigurationError(f"schedule must be 'constant' or 'cosine', not {self.schedule!r}")

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some settings changed."""
        known = {f.name for f in dataclasses.fields(self)}
        unknown = sorted(set(changes) - known)
        if unknown:
            raise ConfigurationError(f"a recipe has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True)
class Prepared:
    """A recipe made concrete: model, loss, optimiser and plan, with no data read yet."""

    recipe: Recipe
    model: torch.nn.Module
    loss: Loss
    plan: PrivacyPlan
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None


@dataclass(frozen=True)
class Result:
    """What a run gave. ``accuracy`` is on the test set, which nothing else has touched."""

    recipe: str
    accuracy: float
    epsilon: float
    delta: float
    steps: int
    seconds: float
    method: str
    seed: int | None
    history: History = field(repr=False)
    model: torch.nn.Module = field(repr=False)
    plan: PrivacyPlan = field(repr=False)

    def summary(self) -> dict[str, Any]:
        """The figures, for JSON."""
        names = ("recipe", "accuracy", "epsilon", "delta", "steps", "seconds", "method", "seed")
        return {name: getattr(self, name) for name in names}


def prepare(
    recipe: Recipe,
    info: DatasetInfo,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    dataset_size: int | None = None,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    seed: int | None = None,
) -> Prepared:
    """Model, loss, plan and optimiser of a recipe. Only the dataset's public description is used."""
    model = seeded_model(recipe.model, recipe.options, info, seed)
    loss = CrossEntropy(tau=recipe.temperature)
    size = info.train_size if dataset_size is None else dataset_size
    # With both a budget and a noise multiplier, the plan finds the largest number of steps instead of using the recipe's.
    length = None if epsilon is not None and noise_multiplier is not None else recipe.epochs
    made = plan(
        model,
        loss,
        dataset_size=size,
        batch_size=recipe.batch_size,
        delta=recipe.delta,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        epochs=length,
        allocation=recipe.allocation,
        method=recipe.method,
        max_grad_norm=recipe.max_grad_norm,
        statistics_budget=recipe.statistics_budget,
        adaptive=recipe.adaptive,
        clip_schedule=recipe.clip_schedule,
        noise_schedule=recipe.noise_schedule,
        freeze=recipe.freeze,
        adjacency=adjacency,
        accountant=accountant,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate / made.sensitivity, momentum=recipe.momentum)
    scheduler = None if recipe.schedule == "constant" else rate_schedule(optimizer, recipe.schedule, made.steps)
    return Prepared(recipe, model, loss, made, optimizer, scheduler)


def train(
    recipe: Recipe,
    *,
    epsilon: float | None = 3.0,
    noise_multiplier: float | None = None,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    seed: int | None = None,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    validation_fraction: float | None = None,
    callbacks: Iterable[Callback] = (),
    microbatch_size: int | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    evaluations: int = 10,
) -> Result:
    """Run a recipe from the data to the test accuracy.

    Args:
        recipe: the recipe.
        epsilon: target ε.
        noise_multiplier: σ; with ``epsilon``, the run gets as long as the budget allows.
        adjacency: see :func:`lipdp.plan`.
        accountant: see :func:`lipdp.plan`.
        seed: of the initial weights and of the run's noise (then it is a secret).
        device: where to compute.
        root: where the datasets are, see :func:`lipdp.data.load`.
        validation_fraction: hold out this part of the *training* set and report its accuracy instead of the test set's: for
            choosing settings.
        callbacks: see :func:`lipdp.fit`.
        microbatch_size: see :func:`lipdp.fit`.
        checkpoint: see :func:`lipdp.fit`.
        resume: see :func:`lipdp.fit`.
        evaluations: rows of the history.
    """
    learn, test, info = data.load(recipe.dataset, root=root)
    validation = None
    if validation_fraction is not None:
        learn, test = data.split(learn, validation_fraction)
        validation = test
    ready = prepare(
        recipe,
        info,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        dataset_size=len(learn),
        adjacency=adjacency,
        accountant=accountant,
        seed=seed,
    )
    started = time.monotonic()
    history = fit(
        ready.model,
        ready.loss,
        ready.optimizer,
        ready.plan,
        learn,
        validation=validation,
        callbacks=callbacks,
        seed=seed,
        device=device,
        microbatch_size=microbatch_size,
        scheduler=ready.scheduler,
        ema_decay=recipe.ema_decay,
        tail_average=recipe.tail_average,
        augmentation=recipe.augmentation,
        evaluations=evaluations,
        checkpoint=checkpoint,
        resume=resume,
    )
    seconds = time.monotonic() - started
    figures = evaluate(ready.model, ready.loss, test, device=device)
    return Result(**outcome(ready, ready.model, history, figures["accuracy"], seconds, seed))


def outcome(
    ready: Prepared, model: torch.nn.Module, history: History, accuracy: float, seconds: float, seed: int | None
) -> dict[str, Any]:
    """The fields of a :class:`Result` that runs of all kinds of recipes have."""
    return {
        "recipe": ready.recipe.name,
        "accuracy": accuracy,
        "epsilon": history.epsilon,
        "delta": ready.plan.delta,
        "steps": int(history.last.get("step", 0)),
        "seconds": seconds,
        "method": ready.plan.method,
        "seed": seed,
        "history": history,
        "model": model,
        "plan": ready.plan,
    }
