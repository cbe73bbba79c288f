"""What a sweep searches: named spaces of settings, those of the papers' tables among them.

A setting is a field of a recipe (``learning_rate``) or, as ``options.NAME``, an option of its model (``options.clip``). Spaces say
nothing of the data but their number of records, which is public: no batch is larger. They are fixed before the first run.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from lipdp import data
from lipdp._checks import choose
from lipdp.errors import ConfigurationError
from lipdp.models import by_name
from lipdp.recipes.recipe import OPTION, Recipe


class Suggester(Protocol):
    """What proposes values: an Optuna trial."""

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """A number of the interval."""

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        """A whole number of the interval."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of the choices."""


class RandomSuggester:
    """Proposes values at random, whatever came of others: what private tuning needs."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def suggest_float(self, name: str, low: float, high: float, *, log: bool = False) -> float:
        """A number of the interval."""
        if not log:
            return self._draw.uniform(low, high)
        return min(max(math.exp(self._draw.uniform(math.log(low), math.log(high))), low), high)

    def suggest_int(self, name: str, low: int, high: int, *, log: bool = False) -> int:
        """A whole number of the interval."""
        return round(self.suggest_float(name, low, high, log=log)) if log else self._draw.randint(low, high)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        """One of the choices."""
        return self._draw.choice(choices)


@dataclass(frozen=True)
class Range:
    """Numbers from ``low`` to ``high``, by default evenly in their logarithm: most settings matter by their order of magnitude."""

    name: str
    low: float
    high: float
    scale: Literal["log", "linear"] = "log"
    whole: bool = False

    def suggest(self, trial: Suggester) -> float:
        """One of them."""
        if self.whole:
            return trial.suggest_int(self.name, int(self.low), int(self.high), log=self.scale == "log")
        return trial.suggest_float(self.name, self.low, self.high, log=self.scale == "log")

    def restore(self, stored: float) -> float:
        """The value from what Optuna has stored of it."""
        return stored

    def at_most(self, limit: int) -> Range:
        """The same up to ``limit``; from its usual share of the end on, where that leaves less than a factor 2."""
        high = min(self.high, limit)
        low = self.low if 2 * self.low <= high else high * self.low / self.high
        return self if high == self.high else dataclasses.replace(self, low=max(1, round(low)) if self.whole else low, high=high)


@dataclass(frozen=True)
class Choice:
    """A few alternatives; with ``model``, for that model only."""

    name: str
    values: tuple[Any, ...]
    model: str | None = None

    def suggest(self, trial: Suggester) -> Any:
        """One of them. Stored by its text: Optuna keeps numbers, texts and None only, and values can be tuples."""
        return self.restore(trial.suggest_categorical(self.name, [repr(value) for value in self.values]))

    def restore(self, stored: str) -> Any:
        """The value from what Optuna has stored of it."""
        return {repr(value): value for value in self.values}[stored]

    def at_most(self, limit: int) -> Choice:
        """The same with ``limit`` for all that is above it; where that leaves one only, all of them, scaled down to end at it."""
        if not all(isinstance(value, int | float) for value in self.values):
            return self  # for the recipe to refuse
        kept = tuple(dict.fromkeys(min(value, limit) for value in self.values))
        if len(kept) < min(2, len(self.values)):
            kept = tuple(dict.fromkeys(max(1, round(limit * value / max(self.values))) for value in self.values))
        return self if kept == self.values else dataclasses.replace(self, values=kept)


Parameter = Range | Choice


@dataclass(frozen=True)
class Space:
    """A named set of parameters.

    Attributes:
        name: what ``lipdp sweep --space`` calls it.
        source: where it comes from, and where it differs from there.
        parameters: all of them. Those that a recipe, or its model, does not have are left out for it.
    """

    name: str
    source: str
    parameters: tuple[Parameter, ...]

    def fitting(self, recipe: Recipe) -> tuple[Parameter, ...]:
        """The parameters that this recipe has; batches are no larger than the training set."""
        kept = tuple(p for p in self.parameters if _has(recipe, p.name) and getattr(p, "model", None) in (None, recipe.model))
        if not kept:
            raise ConfigurationError(f"space {self.name!r} has no setting that recipe {recipe.name!r} knows; choose another")
        if recipe.dataset not in data.names():
            return kept
        records = data.info(recipe.dataset).train_size
        return tuple(p.at_most(records) if p.name == "batch_size" else p for p in kept)

    def without(self, names: Collection[str]) -> Space:
        """The same space, but for the settings of these names."""
        return dataclasses.replace(self, parameters=tuple(p for p in self.parameters if p.name not in names))

    def settings(self, trial: Suggester, recipe: Recipe) -> dict[str, Any]:
        """Settings for this recipe, by name."""
        return {parameter.name: parameter.suggest(trial) for parameter in self.fitting(recipe)}


def _has(recipe: Recipe, name: str) -> bool:
    if not name.startswith(OPTION):
        settings = {field.name for field in dataclasses.fields(recipe)}
        return name in settings and not (name == "max_grad_norm" and recipe.method == "clipless")
    option = name.removeprefix(OPTION)
    return option in recipe.options or option in by_name.option_names(recipe.model)


# The papers' tables. Batches are in records; the temperature of the "CCE" rows is ours; the learning rate, which the image tables
# leave out, is in units of the sensitivity. The tables' "automatic (90th percentile)" loss-gradient clip is searched as a constant.
_IMAGE = (
    Range("options.clip", 1e-2, 1.0),
    Range("learning_rate", 1e-1, 1e1),
    Choice("epochs", (10, 20, 40, 80)),
)
_SPACES = (
    Space(
        "paper-mnist",
        "clipless paper, D.2.1",
        (
            Range("options.input_norm", 1e-1, 1.0),
            Range("batch_size", 512, 10_000, whole=True),
            Range("temperature", 1e-2, 18.0),
            *_IMAGE,
        ),
    ),
    Space(
        "paper-fashion-mnist",
        "clipless paper, D.2.2",
        (
            Range("options.input_norm", 1e-1, 1.0),
            Range("batch_size", 5_000, 10_000, whole=True),
            Range("temperature", 1e-2, 40.0),
            *_IMAGE,
        ),
    ),
    Space(
        "paper-cifar10",
        "clipless paper, D.2.3",
        (
            Range("options.input_norm", 1e-2, 1.0),
            Range("batch_size", 512, 10_000, whole=True),
            Range("temperature", 1e-3, 32.0),
            *_IMAGE,
        ),
    ),
    Space(
        "paper-tabular",
        "clipless paper, Table 8 (its learning rates are in other units, so they span the same five decades here)",
        (
            Range("batch_size", 512, 10_000, whole=True),
            Range("temperature", 1e-2, 100.0),
            Range("learning_rate", 1e-3, 1e2),
            Range("options.clip", 1e-2, 1.0),
        ),
    ),
    Space(
        "paper-dpsgd",
        "clipless paper, its grid for DP-SGD in D.2.3",
        (
            Range("batch_size", 500, 5_000, whole=True),
            Range("epochs", 1, 400, whole=True),
            Range("max_grad_norm", 1e-2, 1e2),
            Range("learning_rate", 1e-5, 1.0),
        ),
    ),
    Space(
        "clipless",
        "ours: around what worked for Lipschitz networks",
        (
            Range("options.clip", 0.025, 1.0),
            Choice("options.centre", (True, False)),
            Choice("options.hidden", ((64,), (128,), (256,), (128, 64)), model="mlp"),
            Choice("options.channels", ((8, 16), (16, 32), (16,), (32,)), model="lenet"),
            Choice("options.kernel_size", (3, 5, 7), model="lenet"),
            Range("temperature", 8.0, 180.0),
            Choice("batch_size", (2048, 4096, 8192)),
            Choice("epochs", (10, 20, 40, 60)),
            Range("learning_rate", 0.2, 10.0),
            Choice("schedule", ("constant", "cosine")),
            Choice("ema_decay", (None, 0.9, 0.95, 0.98)),
            Choice("allocation", ("global", "per_layer", "optimal")),
        ),
    ),
    Space(
        "clipping",
        "ours: around what worked for DP-SGD",
        (
            Range("temperature", 0.5, 4.0),
            Choice("batch_size", (1024, 2048, 4096, 8192)),
            Choice("epochs", (20, 30, 40, 60)),
            Range("learning_rate", 0.05, 3.0),
            Choice("schedule", ("constant", "cosine")),
            Choice("ema_decay", (None, 0.9, 0.95, 0.98)),
            Range("max_grad_norm", 0.03, 2.0),
            Choice("options.activation", ("relu", "tanh")),
        ),
    ),
    Space(
        "features",
        "ours: heads on fixed features",
        (
            Range("options.clip", 0.03, 1.0),
            Range("temperature", 0.5, 16.0),
            Choice("batch_size", (4096, 8192, 16384)),
            Choice("epochs", (35, 50, 70, 95)),
            Range("learning_rate", 2.0, 60.0),
            Choice("ema_decay", (0.9, 0.95, 0.98)),
        ),
    ),
    Space(
        "tabular",
        "ours: random Fourier features or small boundary networks on the columns of a table",
        (
            Range("options.clip", 0.03, 0.7),
            Choice("options.fourier", (200, 400, 800)),
            Choice("options.each", (None, 2, 3)),
            Range("options.scale", 0.3, 8.0),
            Range("temperature", 1.0, 8.0),
            Choice("batch_size", (2048, 4096, 8192)),
            Choice("epochs", (10, 20, 40, 80)),
            Range("learning_rate", 1.0, 40.0),
            Choice("class_weights", (None, (0.3, 1.0), (0.1, 1.0))),
            Choice("ema_decay", (0.9, 0.95)),
        ),
    ),
    Space(
        "tabular-small",
        "ours: whitened kernel features of a table of about a thousand rows, few steps on large parts of it or all",
        (
            Range("options.clip", 0.1, 0.7),
            Choice("options.landmarks", (200, 400, 800)),
            Range("options.scale", 1.0, 6.0),
            Range("options.ridge", 1e-5, 1e-3),
            Range("temperature", 2.0, 16.0),
            Choice("batch_size", (512, 1024, 4096)),
            Choice("epochs", (2, 3, 4, 6, 10)),
            Range("learning_rate", 3.0, 30.0),
            Choice("class_weights", (None, (0.5, 1.0), (0.3, 1.0))),
        ),
    ),
)
_BY_NAME = {space.name: space for space in _SPACES}


def space_names() -> tuple[str, ...]:
    """All spaces."""
    return tuple(_BY_NAME)


def get_space(name: str) -> Space:
    """A space by name."""
    return _BY_NAME[choose("search space", name, _BY_NAME)]


def default_space(recipe: Recipe) -> Space:
    """Ours for a recipe like this: a table, fixed features, a network whose bounds are proved, or one that is clipped."""
    if recipe.dataset.startswith("adbench/"):
        return _BY_NAME["tabular" if data.info(recipe.dataset).train_size > 10_000 else "tabular-small"]
    if recipe.front == "stored":
        return _BY_NAME["features"]
    return _BY_NAME["clipless" if recipe.method == "clipless" else "clipping"]
