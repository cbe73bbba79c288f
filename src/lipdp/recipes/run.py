"""From a recipe to a result: prepared without data, then trained and judged."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch.utils.data import TensorDataset

from lipdp import data, models
from lipdp._numerics import Undrawn
from lipdp.data import DatasetInfo, TestTimeAverage
from lipdp.errors import ConfigurationError, DataError
from lipdp.features.front import rows_through
from lipdp.inputs import outputs_in_parts
from lipdp.losses import Loss
from lipdp.planning import Clipping, PrivacyPlan, Schedule, plan
from lipdp.privacy import Accountant, Adjacency
from lipdp.privacy.budget import AnyBudget
from lipdp.privacy.runs import Scheme
from lipdp.recipes.files import get
from lipdp.recipes.recipe import Metric, RateSchedule, Recipe
from lipdp.training import Callback, History, evaluate, fit
from lipdp.training.callbacks import Run

AUROC = "validation_auroc"
"""The name of the validation AUROC in a history."""


@dataclass(frozen=True)
class Prepared:
    """A recipe made concrete: model, loss, optimiser and plan, with no data read yet.

    Attributes:
        recipe: its settings.
        model: with its initial weights.
        loss: as the recipe sets it, one value per example.
        plan: steps, noise and cost.
        optimizer: over the model's weights; its learning rates are the recipe's ÷ the plan's sensitivity.
        scheduler: of the learning rate, over all steps of the plan; ``None`` where it is constant.
    """

    recipe: Recipe
    model: torch.nn.Module
    loss: Loss
    plan: PrivacyPlan
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler | None


@dataclass(frozen=True)
class Result:
    """What a run gave. Figures are on the test set, which nothing else has touched, or on what was held out of the training set.

    A reproducible run is not ``private``. ``auroc`` is there for recipes that are judged by it.

    Attributes:
        recipe: its name.
        accuracy: share of right predictions, from 0 to 1; with the recipe's copies at test time, if it has such.
        epsilon: ε that was spent, at ``delta``.
        delta: δ of the plan.
        steps: those that were made.
        seconds: of the training alone: not of reading the data, planning, or judging the result.
        method: how one record's part of a step is bounded, as the plan says.
        seed: of the initial weights; ``None``: drawn by the system.
        history: metrics and ε along the run.
        model: the trained one.
        plan: what was decided before the first step.
        private: False for a reproducible run.
        auroc: from 0 to 1; ``None`` for recipes that are judged by their accuracy.
    """

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
    auroc: float | None = None

    @property
    def metric(self) -> Metric:
        """What the recipe is judged by."""
        return "accuracy" if self.auroc is None else "auroc"

    @property
    def score(self) -> float:
        """That figure."""
        return self.accuracy if self.auroc is None else self.auroc

    def summary(self) -> dict[str, Any]:
        """The figures, for JSON."""
        names = ("recipe", "accuracy", "epsilon", "delta", "steps", "seconds", "method", "seed", "private")
        return {name: getattr(self, name) for name in names} | ({} if self.auroc is None else {"auroc": self.auroc})


class Drawing(TypedDict, total=False):
    """Arguments of :func:`lipdp.plan` about how records are drawn, and for which neighbours by whom that is analysed."""

    adjacency: Adjacency
    accountant: Accountant
    sampling: Scheme
    largest_batch: int | None


class Budget(Drawing, total=False):
    """Arguments of :func:`lipdp.plan` that a recipe leaves open. With both ε and σ the run is as long as ε allows."""

    epsilon: float | None
    noise_multiplier: float | None


def prepare(
    recipe: Recipe | str,
    info: DatasetInfo | None = None,
    *,
    dataset_size: int | None = None,
    seed: int | None = None,
    **budget: Unpack[Budget],
) -> Prepared:
    """Model, loss, plan and optimiser of a recipe. Only the dataset's public description is used.

    Args:
        recipe: the recipe, or its name.
        info: of the dataset; by default what :func:`lipdp.data.info` says of the recipe's.
        dataset_size: records that are trained on; by default the whole training set.
        seed: of the initial weights.
        budget: ``epsilon`` (by default the recipe's own), ``noise_multiplier``, ``adjacency``, ``accountant``, ``sampling``,
            ``largest_batch``: see :func:`train`.
    """
    chosen = _chosen(recipe, budget.get("epsilon"))
    known = data.info(chosen.dataset) if info is None else info
    if chosen.metric == "auroc" and known.classes != 2:
        raise ConfigurationError(f"{chosen.name}: an AUROC is for two classes, and {known.name} has {known.classes}")
    if budget.get("epsilon") is None and budget.get("noise_multiplier") is None:
        budget["epsilon"] = chosen.epsilon
    if chosen.statistics_budget is not None and budget.get("epsilon") is None:
        raise ConfigurationError(
            f"the recipe {chosen.name} pays for statistics with a share of epsilon: give epsilon, or change its settings to "
            "statistics_budget=none and options.statistics=textures"
        )
    model, loss = seeded_model(chosen, known, seed), chosen.make_loss()
    size = known.train_size if dataset_size is None else dataset_size
    # With both a budget and a noise multiplier, the plan finds the largest number of steps instead of using the recipe's.
    both = budget.get("epsilon") is not None and budget.get("noise_multiplier") is not None
    decided = plan(
        model,
        loss,
        dataset_size=size,
        batch_size=chosen.batch_for(size, known.train_size),
        delta=chosen.delta,
        epochs=None if both else chosen.epochs,
        allocation=chosen.allocation,
        method=chosen.method,
        max_grad_norm=chosen.max_grad_norm,
        statistics_budget=chosen.statistics_budget,
        clipping=Clipping(adaptive=chosen.adaptive),
        schedule=Schedule(chosen.clip_schedule, chosen.noise_schedule, chosen.freeze),
        **budget,
    )
    return Prepared(chosen, model, loss, decided, *optimizer_for(chosen, model, decided))


def train(
    recipe: Recipe | str,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    sampling: Scheme = "poisson",
    largest_batch: int | None = None,
    seed: int | None = None,
    reproducible: bool = False,
    device: torch.device | str | None = None,
    root: str | Path | None = None,
    validation_fraction: float | None = None,
    callbacks: Iterable[Callback] = (),
    microbatch_size: int | None = None,
    checkpoint: str | Path | None = None,
    resume: bool = False,
    evaluations: int = 10,
    budget: AnyBudget = None,
    cache: str | Path | None = None,
) -> Result:
    """Run a recipe from the data to the test figure.

    Args:
        recipe: the recipe, or a name of :func:`get`: "mnist" is the best for MNIST at this ``epsilon``.
        epsilon: target ε; by default the recipe's own, where no ``noise_multiplier`` is given.
        noise_multiplier: σ; with ``epsilon``, the run gets as long as the budget allows.
        adjacency: see :func:`lipdp.plan`.
        accountant: see :func:`lipdp.plan`.
        sampling: see :func:`lipdp.plan`.
        largest_batch: see :func:`lipdp.plan`.
        seed: of the initial weights; the run's noise and samples stay secret, so that no two runs are the same.
        reproducible: draw them from the seed too. The run can then be repeated, and is *not private*; its result says so.
        device: where to compute.
        root: where the datasets are, see :func:`lipdp.data.load`.
        validation_fraction: hold out this part of the *training* set and report its figure instead of the test set's: for
            choosing settings.
        callbacks: see :func:`lipdp.fit`.
        microbatch_size: see :func:`lipdp.fit`.
        checkpoint: see :func:`lipdp.fit`.
        resume: see :func:`lipdp.fit`.
        evaluations: rows of the history.
        budget: see :func:`lipdp.fit`.
        cache: a folder that keeps the outputs of a stored front from one run to the next, see :func:`lipdp.fit`.
    """
    chosen = _chosen(recipe, epsilon)
    learn, test, info = data.load(chosen.dataset, root=root)
    if validation_fraction is not None:
        learn, test = data.split(learn, validation_fraction)
    ready = prepare(
        chosen,
        info,
        dataset_size=len(learn),
        seed=seed,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        adjacency=adjacency,
        accountant=accountant,
        sampling=sampling,
        largest_batch=largest_batch,
    )
    held_out = None if validation_fraction is None else test
    watching = [_ValidationAuroc(test)] if held_out is not None and chosen.metric == "auroc" else []
    started = time.monotonic()
    history = fit_prepared(
        ready,
        learn,
        validation=held_out,
        seed=seed,
        reproducible=reproducible,
        device=device,
        callbacks=[*watching, *callbacks],
        microbatch_size=microbatch_size,
        checkpoint=checkpoint,
        resume=resume,
        evaluations=evaluations,
        budget=budget,
        cache=cache,
    )
    seconds = time.monotonic() - started
    views = chosen.views
    predictor = ready.model if views is None else TestTimeAverage(ready.model, views)
    rows = rows_through(ready.model, 1024, torch.device("cpu" if device is None else device))
    return Result(
        recipe=chosen.name,
        accuracy=evaluate(predictor, ready.loss, test, device=device, batch_size=rows)["accuracy"],
        epsilon=history.epsilon,
        delta=ready.plan.delta,
        steps=int(history.last.get("step", 0)),
        seconds=seconds,
        method=ready.plan.method,
        seed=seed,
        history=history,
        model=ready.model,
        plan=ready.plan,
        private=history.private,
        auroc=None if chosen.metric == "accuracy" else auroc(class_margins(predictor, test.tensors[0]), test.tensors[1] == 1),
    )


def fit_prepared(ready: Prepared, learn: TensorDataset, **options: Any) -> History:
    """:func:`lipdp.fit` with what the recipe says of it; ``options`` are its other arguments."""
    recipe, cache, device = ready.recipe, options.pop("cache", None), options.get("device")
    stored = recipe.front == "stored"
    if stored and device is not None:
        # The outputs of the front are kept where its inputs are: every step reads them.
        learn = TensorDataset(*(tensor.to(device) for tensor in learn.tensors))
    return fit(
        ready.model,
        ready.loss,
        ready.optimizer,
        ready.plan,
        learn,
        scheduler=ready.scheduler,
        ema_decay=recipe.ema_decay,
        tail_average=recipe.tail_average,
        augmentation=recipe.augmentation,
        settle=stored,
        cache=cache if stored else None,
        **options,
    )


def _chosen(recipe: Recipe | str, epsilon: float | None) -> Recipe:
    chosen = get(recipe, epsilon) if isinstance(recipe, str) else recipe
    if not isinstance(chosen, Recipe):
        raise ConfigurationError(f"{type(chosen).__name__} is no recipe; take one of lipdp.recipes.get(name)")
    return chosen


def seeded_model(recipe: Recipe, info: DatasetInfo, seed: int | None) -> torch.nn.Module:
    """The recipe's network with initial weights drawn from ``seed``; the caller's generator stays where it is.

    Args:
        recipe: its settings.
        info: the public description of the data.
        seed: of the initial weights; ``None``: drawn by the system.
    """
    with Undrawn():
        if seed is not None:
            torch.manual_seed(seed)
        else:
            torch.seed()
        return models.create(recipe.model, input_shape=info.shape, classes=info.classes, **recipe.options)


def optimizer_for(
    recipe: Recipe, model: torch.nn.Module, decided: PrivacyPlan
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    """SGD in units of the step's sensitivity, all weights but the last at the hidden rate; and its schedule over the plan's steps.

    Args:
        recipe: its settings.
        model: what is trained: the recipe's whole network, or its head on stored outputs of the front.
        decided: the plan of that training.
    """
    *hidden, last = (weight for weight in model.parameters() if weight.requires_grad)
    rate = recipe.learning_rate / decided.sensitivity
    groups: Any = model.parameters()
    if recipe.hidden_rate != 1 and hidden:
        groups = [{"params": hidden, "lr": rate * recipe.hidden_rate}, {"params": [last], "lr": rate}]
    optimizer = torch.optim.SGD(groups, lr=rate, momentum=recipe.momentum)
    return optimizer, _scheduler(recipe.schedule, optimizer, decided.steps)


def _scheduler(kind: RateSchedule, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LambdaLR | None:
    """The learning rate over a run of ``steps``: constant, or along half a cosine or a line down to 0."""
    if kind == "constant":
        return None

    def factor(step: int) -> float:
        done = min(step, steps) / steps
        return 0.5 * (1 + math.cos(math.pi * done)) if kind == "cosine" else 1 - done

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def auroc(scores: torch.Tensor, positive: torch.Tensor) -> float:
    """The chance that a random positive row scores above a random negative one, ties counting half.

    By ranks (Mann & Whitney): (Σ ranks of the positives − p(p + 1)/2)/(p·n), equal scores sharing their mean rank.
    """
    if scores.ndim != 1 or scores.shape != positive.shape:
        raise DataError(f"auroc takes a score and a label for each row, not shapes {tuple(scores.shape)}, {tuple(positive.shape)}")
    labels = positive.bool()
    p, n = int(labels.sum()), int((~labels).sum())
    if p == 0 or n == 0:
        raise DataError("auroc needs rows of both classes")
    if bool(torch.isnan(scores).any()):
        raise DataError("a score is NaN: it has no rank")
    _, place, counts = torch.unique(scores.double(), sorted=True, return_inverse=True, return_counts=True)
    ranks = (counts.cumsum(0).double() - (counts.double() - 1) / 2)[place]
    return float((ranks[labels].sum() - p * (p + 1) / 2) / (p * n))


def class_margins(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """How much each row looks like the second class: ŷ₁ − ŷ₀."""
    outputs = outputs_in_parts(model, rows, 8192)
    return outputs[:, 1] - outputs[:, 0]


class _ValidationAuroc(Callback):
    """Adds the AUROC on the held-out rows to each row of the history, before other callbacks see it."""

    def __init__(self, rows: TensorDataset) -> None:
        self._rows = rows

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        """Compute it with the averaged weights, as the other metrics."""
        inputs, labels = self._rows.tensors
        with run.engine.averaged() as model:
            row[AUROC] = auroc(class_margins(model, inputs), labels.cpu() == 1)
        rows = len(run.history.metrics["step"])
        column = run.history.metrics.setdefault(AUROC, [math.nan] * rows)
        column[rows - 1 :] = [row[AUROC]]
