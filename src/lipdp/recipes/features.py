"""Recipes for heads on fixed features: the front's outputs are computed once, for all copies, and the head is trained on them."""

from __future__ import annotations

import dataclasses
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from lipdp import data, models
from lipdp.data import PrecomputedCopies, Shifts, TestTimeAverage
from lipdp.errors import ConfigurationError
from lipdp.losses import CrossEntropy
from lipdp.models.features import extract_features, split_front
from lipdp.privacy import Accountant, Adjacency, Allocation
from lipdp.recipes.recipe import Result
from lipdp.training import Callback, PrivacyPlan, evaluate, fit, plan

__all__ = ["FeatureRecipe", "head_optimizer", "plan_head", "train_on_features"]

TestCopies = Literal["one", "flip", "all"]


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
    schedule: Literal["constant", "cosine", "linear"] = "cosine"
    ema_decay: float | None = 0.95
    allocation: Allocation = "per_layer"
    statistics_budget: float | None = None
    delta: float = 1e-5
    provenance: str = ""

    def __post_init__(self) -> None:
        """Refuse what would otherwise only show as a strange training run."""
        for name in ("temperature", "learning_rate", "hidden_rate"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value > 0):
                raise ConfigurationError(f"{name} must be a positive finite number, not {value!r}")
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ConfigurationError(f"schedule must be 'constant', 'cosine' or 'linear', not {self.schedule!r}")
        if self.test_copies not in ("one", "flip", "all"):
            raise ConfigurationError(f"test_copies must be 'one', 'flip' or 'all', not {self.test_copies!r}")
        if self.shifts[:1] != ((0, 0),):
            raise ConfigurationError(f"the first of the shifts is the image itself, (0, 0), not {self.shifts[:1]}")

    def but(self, **changes: Any) -> FeatureRecipe:
        """The same recipe with some settings changed."""
        unknown = sorted(set(changes) - {f.name for f in dataclasses.fields(self)})
        if unknown:
            raise ConfigurationError(f"a feature recipe has no setting {', '.join(unknown)}")
        return dataclasses.replace(self, **changes)

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


def plan_head(
    recipe: FeatureRecipe,
    head: torch.nn.Module,
    dataset_size: int,
    *,
    epsilon: float,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
) -> PrivacyPlan:
    """The plan for the head. No data are read."""
    return plan(
        head,
        CrossEntropy(tau=recipe.temperature),
        dataset_size=dataset_size,
        batch_size=recipe.batch_size,
        delta=recipe.delta,
        epsilon=epsilon,
        steps=recipe.steps,
        allocation=recipe.allocation,
        statistics_budget=recipe.statistics_budget,
        adjacency=adjacency,
        accountant=accountant,
    )


def head_optimizer(
    recipe: FeatureRecipe, head: torch.nn.Module, made: PrivacyPlan
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """SGD whose rate for each weight is in units of that weight's sensitivity, and its schedule."""
    weights = dict(head.named_parameters())
    last = list(weights)[-1]
    groups = [
        {
            "params": [weight],
            "lr": recipe.learning_rate * (1.0 if name == last else recipe.hidden_rate) / made.sensitivities[name],
        }
        for name, weight in weights.items()
    ]
    optimizer = torch.optim.SGD(groups, momentum=recipe.momentum)
    total, kind = made.steps, recipe.schedule

    def factor(step: int) -> float:
        done = min(step, total) / total
        if kind == "cosine":
            return 0.5 * (1 + math.cos(math.pi * done))
        return 1 - done if kind == "linear" else 1.0

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def train_on_features(
    recipe: FeatureRecipe,
    *,
    epsilon: float,
    seed: int | None = None,
    device: torch.device | str | None = None,
    adjacency: Adjacency = "add_remove",
    accountant: Accountant = "pld",
    root: str | Path | None = None,
    validation_fraction: float | None = None,
    cache: str | os.PathLike[str] | None = None,
    callbacks: Iterable[Callback] = (),
    microbatch_size: int | None = None,
) -> Result:
    """Run a feature recipe from the data to the test accuracy.

    Args:
        recipe: the recipe.
        epsilon: target ε.
        seed: of the initial weights and of the run's noise (then it is a secret).
        device: where to compute.
        adjacency: see :func:`lipdp.plan`.
        accountant: see :func:`lipdp.plan`.
        root: where the datasets are, see :func:`lipdp.data.load`.
        validation_fraction: hold out this part of the *training* set and report its accuracy instead of the test set's.
        cache: a folder for the features, see :func:`lipdp.models.extract_features`.
        callbacks: see :func:`lipdp.fit`.
        microbatch_size: see :func:`lipdp.fit`.
    """
    learn, test, info = data.load(recipe.dataset, root=root)
    if validation_fraction is not None:
        learn, test = data.split(learn, validation_fraction)
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        else:
            torch.seed()
        model = models.create(recipe.model, input_shape=info.shape, classes=info.classes, **recipe.options)
    assert isinstance(model, torch.nn.Sequential)
    front, head = split_front(model)
    made = plan_head(recipe, head, len(learn), epsilon=epsilon, adjacency=adjacency, accountant=accountant)
    place = torch.device("cpu" if device is None else device)
    started = time.monotonic()
    count = recipe.copies.copies
    copies = recipe.copies if count > 1 else None
    features = extract_features(front, learn, device=place, copies=copies, keep=place, cache=cache)
    optimizer, scheduler = head_optimizer(recipe, head, made)
    history = fit(
        head,
        CrossEntropy(tau=recipe.temperature),
        optimizer,
        made,
        features,
        callbacks=callbacks,
        seed=seed,
        device=place,
        microbatch_size=microbatch_size,
        scheduler=scheduler,
        ema_decay=recipe.ema_decay,
        augmentation=PrecomputedCopies(count) if count > 1 else None,
        evaluations=1,
    )
    seconds = time.monotonic() - started
    averaged = TestTimeAverage(model.to(place), recipe.views)
    figures = evaluate(averaged, CrossEntropy(tau=recipe.temperature), test, device=place, batch_size=256)
    return Result(
        recipe=recipe.name,
        accuracy=figures["accuracy"],
        epsilon=history.epsilon,
        delta=made.delta,
        steps=made.steps,
        seconds=seconds,
        method=made.method,
        seed=seed,
        history=history,
        model=model,
        plan=made,
    )
