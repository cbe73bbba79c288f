"""Recipes for tables of two classes, scored by the area under the ROC curve."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Unpack

import torch
from torch.utils.data import TensorDataset

from lipdp.data import DatasetInfo
from lipdp.errors import ConfigurationError, DataError
from lipdp.losses import CrossEntropy
from lipdp.recipes.options import PlanOptions, RunOptions, fit_options, load_parts, plan_options
from lipdp.recipes.parts import seeded_model
from lipdp.recipes.recipe import Prepared, Recipe, Result, fit_recipe, outcome, plan_recipe, scheduled
from lipdp.training import Callback, evaluate
from lipdp.training.callbacks import Run

__all__ = ["AUROC", "TabularRecipe", "TabularResult", "auroc", "prepare_table", "train_table", "worth_settling"]

AUROC = "validation_auroc"
"""The name of the validation AUROC in a history."""

_MOST_STORED = 2**30  # bytes of features that are kept for a run


@dataclass(frozen=True)
class TabularRecipe(Recipe):
    """A recipe for a table.

    Its ``learning_rate`` is in units of *each weight's* sensitivity: that weight's step is lr·(noised sum)/(b·Δ).

    Attributes:
        class_weights: of the loss, by class. Public constants: never computed from the labels.
    """

    class_weights: tuple[float, float] | None = None


@dataclass(frozen=True)
class TabularResult(Result):
    """What a run gave. ``auroc`` is on the test set, or on what was held out of the training set."""

    auroc: float = field(kw_only=True)

    def summary(self) -> dict[str, Any]:
        """The figures, for JSON."""
        return {**super().summary(), "auroc": self.auroc}


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


def table_scores(model: torch.nn.Module, rows: torch.Tensor, *, batch_size: int = 8192) -> torch.Tensor:
    """How much each row looks like the second class: ŷ₁ − ŷ₀."""
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = torch.cat([model(part.to(place)) for part in torch.split(rows, batch_size)]).double().cpu()
    finally:
        model.train(was)
    return outputs[:, 1] - outputs[:, 0]


class _ValidationAuroc(Callback):
    """Adds the AUROC on the held-out rows to each row of the history, before other callbacks see it."""

    def __init__(self, rows: TensorDataset) -> None:
        self._rows = rows

    def on_evaluation(self, run: Run, row: dict[str, float]) -> None:
        """Compute it with the averaged weights, as the other metrics."""
        inputs, labels = self._rows.tensors
        with run.engine.averaged() as model:
            row[AUROC] = auroc(table_scores(model, inputs), labels.cpu() == 1)
        rows = len(run.history.metrics["step"])
        column = run.history.metrics.setdefault(AUROC, [math.nan] * rows)
        column[rows - 1 :] = [row[AUROC]]


def prepare_table(
    recipe: TabularRecipe,
    info: DatasetInfo,
    *,
    dataset_size: int | None = None,
    seed: int | None = None,
    **budget: Unpack[PlanOptions],
) -> Prepared:
    """Model, loss, plan and optimiser. Only the table's public description is used."""
    if info.classes != 2:
        raise ConfigurationError(f"{recipe.name}: tabular recipes are for two classes, and {info.name} has {info.classes}")
    model = seeded_model(recipe.model, recipe.options, info, seed)
    loss = CrossEntropy(tau=recipe.temperature, class_weights=recipe.class_weights)
    size = info.train_size if dataset_size is None else dataset_size
    # Small tables are taken whole, also when a part of them is held out.
    made = plan_recipe(recipe, model, loss, size, batch_size=min(recipe.batch_size, size), **budget)
    groups = [
        {"params": [weight], "lr": recipe.learning_rate / made.sensitivities.get(name, made.sensitivity)}
        for name, weight in model.named_parameters()
    ]
    optimizer = torch.optim.SGD(groups, momentum=recipe.momentum)
    return Prepared(recipe, model, loss, made, optimizer, scheduled(recipe, optimizer, made.steps))


def worth_settling(recipe: TabularRecipe, model: torch.nn.Module, rows: int) -> bool:
    """Whether to compute the fixed features of all rows once: if each is used more than once, and if they fit in memory."""
    width = next(layer.in_features for layer in model.modules() if isinstance(layer, torch.nn.Linear))
    return recipe.epochs > 1.5 and 4 * rows * width <= _MOST_STORED


def train_table(recipe: TabularRecipe, **options: Unpack[RunOptions]) -> TabularResult:
    """Run a recipe from the table to the AUROC; the options are those of :func:`lipdp.recipes.train`."""
    options = {"epsilon": 1.0, **options}
    seed = options.get("seed")
    learn, test, validation, info = load_parts(recipe.dataset, options)
    if validation is not None:
        options["callbacks"] = [_ValidationAuroc(test), *options.get("callbacks", ())]
    ready = prepare_table(recipe, info, dataset_size=len(learn), seed=seed, **plan_options(options))
    settle = worth_settling(recipe, ready.model, len(learn))
    history, seconds = fit_recipe(ready, learn, validation, fit_options(options), settle=settle)
    figures = evaluate(ready.model, ready.loss, test, device=options.get("device"), batch_size=8192)
    inputs, labels = test.tensors
    return TabularResult(
        **outcome(ready, ready.model, history, figures["accuracy"], seconds, seed),
        auroc=auroc(table_scores(ready.model, inputs), labels == 1),
    )
