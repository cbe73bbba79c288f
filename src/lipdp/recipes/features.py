"""Recipes for heads on fixed features: the front's outputs are computed once, for all copies, and the head is trained on them."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
from torch.utils.data import TensorDataset

from lipdp import data
from lipdp.data import DatasetInfo, PrecomputedCopies, Shifts, TestTimeAverage
from lipdp.errors import ConfigurationError
from lipdp.losses import CrossEntropy, Loss, Squares
from lipdp.models.features import extract_features, front_digest, split_front
from lipdp.privacy import Allocation
from lipdp.recipes.options import PlanOptions, RunOptions, fit_options, load_parts, plan_options
from lipdp.recipes.parts import Schedule, batch_of, rate_schedule, seeded_model, spell_names
from lipdp.recipes.recipe import Prepared, Result, outcome
from lipdp.training import PrivacyPlan, evaluate, fit, plan
from lipdp.training.plan import Method

__all__ = ["FeatureRecipe", "head_optimizer", "plan_head", "prepare_head", "train_on_features", "whole_batch_recipe"]

TestCopies = Literal["one", "flip", "all"]
HeadLoss = Literal["cross_entropy", "squares"]


@dataclass(frozen=True)
class FeatureRecipe:
    """One experiment on fixed features, with the best settings found for it.

    Attributes:
        name: what it is called.
        dataset: a name of :func:`lipdp.data.load`.
        model: a name of :func:`lipdp.models.create`, of a model with a fixed front.
        options: the model's options.
        shifts: copies of every image, moved (down, right); an example's gradient is the mean over its copies.
        flip: mirrored copies, too.
        test_copies: what logits are averaged over for predictions: the image, the image and its mirror, or all copies.
        temperature: τ of the cross-entropy CE(τŷ)/τ.
        batch_size: expected batch size b.
        steps: T.
        learning_rate: of SGD, in units of each weight's sensitivity: its step is lr·(noised sum)/(b·Δ).
        hidden_rate: factor on it for all layers but the last.
        momentum: of SGD.
        schedule: of the learning rate: "constant", or "cosine" or "linear" to 0.
        ema_decay: of the weight average.
        allocation: of the noise.
        statistics_budget: share of ε for the statistics, where the model has a Standardize.
        delta: δ.
        provenance: where the settings come from.
        max_grad_norm: C, for a head whose examples' gradients are clipped by book-keeping; ``None`` where bounds are proved.
        loss: "cross_entropy" (at the temperature), or "squares": :class:`lipdp.losses.Squares`, for heads with a clip.
    """

    name: str
    dataset: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    shifts: tuple[tuple[int, int], ...] = ((0, 0),)
    flip: bool = False
    test_copies: TestCopies = "one"
    temperature: float = 1.0
    batch_size: int = 8192
    steps: int = 350
    learning_rate: float = 15.0
    hidden_rate: float = 1.0
    momentum: float = 0.9
    schedule: Schedule = "cosine"
    ema_decay: float | None = 0.95
    allocation: Allocation = "per_layer"
    statistics_budget: float | None = None
    delta: float = 1e-5
    provenance: str = ""
    max_grad_norm: float | None = None
    loss: HeadLoss = "cross_entropy"

    def __post_init__(self) -> None:
        """Refuse what would otherwise only show as a strange training run."""
        spell_names(self)
        for name in ("temperature", "learning_rate", "hidden_rate"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} must be a positive finite number, not {value!r}")
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ConfigurationError(f"schedule must be 'constant', 'cosine' or 'linear', not {self.schedule!r}")
        if self.loss not in ("cross_entropy", "squares"):
            raise ConfigurationError(f"loss must be 'cross_entropy' or 'squares', not {self.loss!r}")
        if self.test_copies not in ("one", "flip", "all"):
            raise ConfigurationError(f"test_copies must be 'one', 'flip' or 'all', not {self.test_copies!r}")
        if self.shifts[:1] != ((0, 0),):
            raise ConfigurationError(f"the first of the shifts is the image itself, (0, 0), not {self.shifts[:1]}")

    def but(self, **changes: Any) -> FeatureRecipe:
        """The same recipe with some settings changed."""
        known = {f.name for f in dataclasses.fields(self)}
        unknown = sorted(set(changes) - known - {"epochs"})
        if unknown:
            raise ConfigurationError(f"a recipe has no setting {', '.join(unknown)}; it has {', '.join(sorted(known))}")
        epochs = changes.pop("epochs", None)
        if epochs is not None:
            batch, size = changes.get("batch_size", self.batch_size), data.info(changes.get("dataset", self.dataset)).train_size
            changes["steps"] = max(1, math.ceil(epochs * size / batch - 1e-9))
        return dataclasses.replace(self, **changes)

    @property
    def epochs(self) -> float:
        """Expected passes over the whole training set; :meth:`but` takes it in place of steps."""
        return self.steps * self.batch_size / data.info(self.dataset).train_size

    @property
    def method(self) -> Method:
        """Sensitivities are proved, unless there is a norm to clip to."""
        return "clipless" if self.max_grad_norm is None else "bookkeeping"

    def make_loss(self) -> Loss:
        """The loss of the head."""
        return Squares() if self.loss == "squares" else CrossEntropy(tau=self.temperature)

    @property
    def copies(self) -> Shifts:
        """What an example is trained on."""
        return Shifts(self.shifts, flip=self.flip)

    @property
    def views(self) -> Shifts:
        """What a prediction is averaged over."""
        if self.test_copies == "all":
            return self.copies
        return Shifts(self.shifts[:1], flip=self.test_copies == "flip")


def whole_batch_recipe(
    name: str,
    dataset: str,
    options: Mapping[str, Any],
    *,
    epsilon: float,
    time: float,
    steps: int = 150,
    momentum: float = 0.9,
    ema_decay: float = 0.9,
    provenance: str = "",
) -> FeatureRecipe:
    """A linear head on blocks of features (``patches-linear``) for which every step takes the whole training set.

    T such steps and a release of means are one Gaussian mechanism, so T matters to the optimiser only. What the head learns
    depends on the ``time``: the learning rate times the steps, in units of the clip and of the sum of the momentum's weights.
    The means get the same noise at every ε: 0.16/ε of the budget.
    """
    return FeatureRecipe(
        name,
        dataset,
        "patches-linear",
        options,
        batch_size=data.info(dataset).train_size,
        steps=steps,
        learning_rate=time / steps * (1 - momentum),
        momentum=momentum,
        schedule="linear",
        ema_decay=ema_decay,
        statistics_budget=round(0.16 / epsilon, 4),
        provenance=provenance,
    )


def plan_head(recipe: FeatureRecipe, head: torch.nn.Module, dataset_size: int, **budget: Unpack[PlanOptions]) -> PrivacyPlan:
    """The plan for the head. No data are read. With both ε and σ it finds the largest number of steps."""
    paid, epsilon = recipe.statistics_budget, budget.get("epsilon")
    if paid is not None and epsilon is None:
        raise ConfigurationError(
            f"the recipe {recipe.name} pays for statistics with a share of epsilon: give epsilon, or change its settings to "
            "statistics_budget=none and options.statistics=textures"
        )
    return plan(
        head,
        recipe.make_loss(),
        dataset_size=dataset_size,
        batch_size=batch_of(recipe, dataset_size),
        delta=recipe.delta,
        steps=None if epsilon is not None and budget.get("noise_multiplier") is not None else recipe.steps,
        allocation=recipe.allocation,
        method=recipe.method,
        max_grad_norm=recipe.max_grad_norm,
        statistics_budget=paid,
        **budget,
    )


def prepare_head(
    recipe: FeatureRecipe,
    info: DatasetInfo,
    *,
    dataset_size: int | None = None,
    seed: int | None = None,
    **budget: Unpack[PlanOptions],
) -> Prepared:
    """The head of a recipe's model with its loss, plan and optimiser. Only the dataset's public description is used."""
    head = split_front(_model(recipe, info, seed))[1]
    return _prepared(recipe, head, plan_head(recipe, head, info.train_size if dataset_size is None else dataset_size, **budget))


def _model(recipe: FeatureRecipe, info: DatasetInfo, seed: int | None) -> torch.nn.Sequential:
    model = seeded_model(recipe.model, recipe.options, info, seed)
    assert isinstance(model, torch.nn.Sequential)
    return model


def _prepared(recipe: FeatureRecipe, head: torch.nn.Module, made: PrivacyPlan) -> Prepared:
    optimizer, scheduler = head_optimizer(recipe, head, made)
    # Prepared names the common kind of recipe; all that is read of it is there in this kind too.
    return Prepared(recipe, head, recipe.make_loss(), made, optimizer, scheduler)  # type: ignore[arg-type]


def head_optimizer(
    recipe: FeatureRecipe, head: torch.nn.Module, made: PrivacyPlan
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """SGD whose rate for each weight is in units of that weight's sensitivity, and its schedule."""
    weights = dict(head.named_parameters())
    last = list(weights)[-1]
    groups = [
        {
            "params": [weight],
            "lr": recipe.learning_rate
            * (1.0 if name == last else recipe.hidden_rate)
            / made.sensitivities.get(name, made.sensitivity),
        }
        for name, weight in weights.items()
    ]
    optimizer = torch.optim.SGD(groups, momentum=recipe.momentum)
    return optimizer, rate_schedule(optimizer, recipe.schedule, made.steps)


def train_on_features(
    recipe: FeatureRecipe,
    *,
    cache: str | os.PathLike[str] | None = None,
    made: PrivacyPlan | None = None,
    store: MutableMapping[str, tuple[TensorDataset, TensorDataset]] | None = None,
    **options: Unpack[RunOptions],
) -> Result:
    """Run a feature recipe from the data to the test accuracy.

    Args:
        recipe: the recipe.
        cache: a folder for the features, see :func:`lipdp.models.extract_features`.
        made: the plan, if it was made before (:func:`plan_head`); the engine checks it again.
        store: keeps features in memory from one run to the next.
        options: those of :func:`lipdp.recipes.train`; the history has one row where ``evaluations`` is not given.
    """
    options = {"epsilon": 3.0, "evaluations": 1, **options}
    seed, validation_fraction, device = options.get("seed"), options.get("validation_fraction"), options.get("device")
    learn, test, _, info = load_parts(recipe.dataset, options)
    model = _model(recipe, info, seed)
    front, head = split_front(model)
    if made is None:
        made = plan_head(recipe, head, len(learn), **plan_options(options))
    ready = _prepared(recipe, head, made)
    place = torch.device("cpu" if device is None else device)
    started = time.monotonic()
    count, copies = recipe.copies.copies, recipe.copies if recipe.copies.copies > 1 else None
    views = recipe.views if recipe.views.copies > 1 else None
    key = f"{recipe.dataset} {validation_fraction} {place} {front_digest(front)} {copies!r} {views!r}"
    kept = {} if store is None else store
    if key not in kept:
        kept[key] = (
            extract_features(front, learn, device=place, copies=copies, keep=place, cache=cache),
            extract_features(front, test, device=place, copies=views, keep=place, cache=cache),
        )
    features, test_features = kept[key]
    history = fit(
        ready.model,
        ready.loss,
        ready.optimizer,
        ready.plan,
        features,
        validation=None if validation_fraction is None or views is not None or copies is not None else test_features,
        scheduler=ready.scheduler,
        ema_decay=recipe.ema_decay,
        augmentation=PrecomputedCopies(count) if count > 1 else None,
        # Features that are kept for another run stay as they are.
        settle="in_place" if store is None else True,
        **fit_options({**options, "device": place}),
    )
    seconds = time.monotonic() - started
    predictor = ready.model if views is None else TestTimeAverage(ready.model, PrecomputedCopies(views.copies))
    figures = evaluate(predictor, ready.loss, test_features, device=place)
    model.to(place)
    return Result(**outcome(ready, model, history, figures["accuracy"], seconds, seed))
