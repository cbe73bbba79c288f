"""A recipe: everything of a training run but the privacy budget and the seed."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
from torch.utils.data import TensorDataset

from lipdp.data import Augmentation, DatasetInfo
from lipdp.errors import ConfigurationError
from lipdp.losses import CrossEntropy, Loss
from lipdp.privacy import AdaptiveClip, Allocation
from lipdp.recipes.options import FitOptions, PlanOptions, RunOptions, fit_options, load_parts, plan_options
from lipdp.recipes.parts import batch_of, rate_schedule, seeded_model, spell_names
from lipdp.training import History, PrivacyPlan, evaluate, fit, plan
from lipdp.training.plan import Method

__all__ = ["Prepared", "Recipe", "Result", "fit_recipe", "outcome", "plan_recipe", "prepare", "scheduled", "train"]


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
        spell_names(self)
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
    """What a run gave. ``accuracy`` is on the test set, which nothing else has touched; a reproducible run is not ``private``."""

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
    private: bool = True

    def summary(self) -> dict[str, Any]:
        """The figures, for JSON."""
        names = ("recipe", "accuracy", "epsilon", "delta", "steps", "seconds", "method", "seed", "private")
        return {name: getattr(self, name) for name in names}


def prepare(
    recipe: Recipe,
    info: DatasetInfo,
    *,
    dataset_size: int | None = None,
    seed: int | None = None,
    **budget: Unpack[PlanOptions],
) -> Prepared:
    """Model, loss, plan and optimiser of a recipe. Only the dataset's public description is used."""
    model = seeded_model(recipe.model, recipe.options, info, seed)
    loss = CrossEntropy(tau=recipe.temperature)
    made = plan_recipe(recipe, model, loss, info.train_size if dataset_size is None else dataset_size, **budget)
    optimizer = torch.optim.SGD(model.parameters(), lr=recipe.learning_rate / made.sensitivity, momentum=recipe.momentum)
    return Prepared(recipe, model, loss, made, optimizer, scheduled(recipe, optimizer, made.steps))


def plan_recipe(
    recipe: Recipe,
    model: torch.nn.Module,
    loss: Loss,
    size: int,
    *,
    batch_size: int | None = None,
    **budget: Unpack[PlanOptions],
) -> PrivacyPlan:
    """The plan for a training set of this size, in batches of :func:`~lipdp.recipes.parts.batch_of` it; no data are read."""
    # With both a budget and a noise multiplier, the plan finds the largest number of steps instead of using the recipe's.
    both = budget.get("epsilon") is not None and budget.get("noise_multiplier") is not None
    return plan(
        model,
        loss,
        dataset_size=size,
        batch_size=batch_of(recipe, size) if batch_size is None else batch_size,
        delta=recipe.delta,
        epochs=None if both else recipe.epochs,
        allocation=recipe.allocation,
        method=recipe.method,
        max_grad_norm=recipe.max_grad_norm,
        statistics_budget=recipe.statistics_budget,
        adaptive=recipe.adaptive,
        clip_schedule=recipe.clip_schedule,
        noise_schedule=recipe.noise_schedule,
        freeze=recipe.freeze,
        **budget,
    )


def scheduled(recipe: Recipe, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler | None:
    """The recipe's schedule of the learning rate."""
    return None if recipe.schedule == "constant" else rate_schedule(optimizer, recipe.schedule, steps)


def fit_recipe(
    ready: Prepared, learn: TensorDataset, validation: TensorDataset | None, options: FitOptions, *, settle: bool = False
) -> tuple[History, float]:
    """Train what was prepared; the history, and the seconds it took."""
    recipe, started = ready.recipe, time.monotonic()
    history = fit(
        ready.model,
        ready.loss,
        ready.optimizer,
        ready.plan,
        learn,
        validation=validation,
        scheduler=ready.scheduler,
        ema_decay=recipe.ema_decay,
        tail_average=recipe.tail_average,
        augmentation=recipe.augmentation,
        settle=settle,
        **options,
    )
    return history, time.monotonic() - started


def train(recipe: Recipe, **options: Unpack[RunOptions]) -> Result:
    """Run a recipe from the data to the test accuracy; the options are those of :func:`lipdp.recipes.train`."""
    options = {"epsilon": 3.0, **options}
    seed = options.get("seed")
    learn, test, validation, info = load_parts(recipe.dataset, options)
    ready = prepare(recipe, info, dataset_size=len(learn), seed=seed, **plan_options(options))
    history, seconds = fit_recipe(ready, learn, validation, fit_options(options))
    figures = evaluate(ready.model, ready.loss, test, device=options.get("device"))
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
        "private": history.private,
    }
