"""Recipes: experiments as data, each everything of a training run but the seed, by name.

There is one kind. A setting means the same in each: a learning rate is in units of the whole step's sensitivity, a length is in
epochs, and the budget that a run gets where none is given is the one that the settings were found for.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from lipdp import data, models
from lipdp._checks import match
from lipdp.data import Augmentation, Shifts
from lipdp.errors import ConfigurationError
from lipdp.fields import Count, Positive, Probability, Range, read
from lipdp.losses import CrossEntropy, Loss, Squares
from lipdp.planning.settings import Method
from lipdp.privacy import AdaptiveClip, Allocation

OPTION = "options."
"""What stands before the name of a model's option, where settings are named."""

Front = Literal["computed", "stored"]
Metric = Literal["accuracy", "auroc"]
RateSchedule = Literal["constant", "cosine", "linear"]
TestCopies = Literal["one", "flip", "all"]
Share = Annotated[float, Range(above=0, most=1)]
Decay = Annotated[float, Range(least=0, below=1)]
Factors = tuple[tuple[float, float], ...]
# Kinds of augmentation that a file can name, by the classes of lipdp.data.
_AUGMENTATIONS = ("Flip", "RandomCrop", "Shifts")


@dataclass(frozen=True)
class Recipe:
    """One experiment, with the best settings found for it.

    Attributes:
        name: what ``lipdp train`` calls it.
        dataset: a name of :func:`lipdp.data.load`.
        model: a name of :func:`lipdp.models.create`.
        options: the model's options.
        front: whether the fixed layers in front of the first trained one are "computed" in every step, or their outputs "stored":
            computed once, for all copies of a fixed augmentation. It is the same run, see :mod:`lipdp.training.front`.
        augmentation: train on the mean over each example's copies.
        test_copies: what logits are averaged over for predictions: the image, the image and its mirror, or all fixed copies.
        loss: "cross_entropy" (at the temperature, with the class weights), or "squares": :class:`lipdp.losses.Squares`.
        temperature: τ of the cross-entropy CE(τŷ)/τ.
        class_weights: of the loss, by class. Public constants: never computed from the labels.
        batch_size: expected batch size b.
        epochs: expected passes over the data, T = ⌈epochs·N/b⌉ steps.
        learning_rate: of SGD, in units of the *sensitivity*: the step is lr·(noised sum)/(b·Δ), Δ that of the whole step, so that a
            change of clip or loss leaves it meaningful.
        hidden_rate: factor on it for all weights but the last.
        momentum: of SGD.
        schedule: of the learning rate: "constant", or along half a "cosine" or a line ("linear") to 0 over the run.
        ema_decay: of the weight average, ``None`` for none.
        tail_average: average the weights over this last fraction of the steps instead.
        method: "clipless", or a clipping method of :func:`lipdp.plan`.
        max_grad_norm: C, for clipping methods.
        allocation: of the noise.
        adaptive, clip_schedule, noise_schedule, freeze: of :func:`lipdp.plan`.
        statistics_budget: share of ε for the statistics, where the model has a Standardize.
        epsilon: the ε that the settings were found for: that of a run where none is given.
        delta: δ of the guarantee.
        metric: what it is judged by: "accuracy", or "auroc" for two classes.
        provenance: where the settings come from.
    """

    name: str
    dataset: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    front: Front = "computed"
    augmentation: Augmentation | None = None
    test_copies: TestCopies = "one"
    loss: Literal["cross_entropy", "squares"] = "cross_entropy"
    temperature: Positive = 16.0
    class_weights: tuple[float, ...] | None = None
    batch_size: Count = 2048
    epochs: Positive = 20.0
    learning_rate: Positive = 1.0
    hidden_rate: Positive = 1.0
    momentum: Decay = 0.9
    schedule: RateSchedule = "constant"
    ema_decay: Decay | None = None
    tail_average: Share | None = None
    method: Method = "clipless"
    max_grad_norm: Positive | None = None
    allocation: Allocation = "global"
    adaptive: AdaptiveClip | None = None
    clip_schedule: Factors | None = None
    noise_schedule: Factors | None = None
    freeze: Mapping[str, float] | None = None
    statistics_budget: Share | None = None
    epsilon: Positive = 3.0
    delta: Probability = 1e-5
    metric: Metric = "accuracy"
    provenance: str = ""

    def __post_init__(self) -> None:
        """Refuse what would otherwise only show as a strange training run; spell dataset and model as they are listed."""
        for name, kind in _kinds().items():
            own = _augmentation(getattr(self, name)) if name == "augmentation" else read(kind, getattr(self, name), name)
            object.__setattr__(self, name, own)
        object.__setattr__(self, "options", _plain(self.options))
        for name, known in (("dataset", data.names()), ("model", models.names())):
            object.__setattr__(self, name, match(getattr(self, name), known) or getattr(self, name))
        if self.test_copies == "all" and not isinstance(self.augmentation, Shifts):
            raise ConfigurationError("test_copies='all' averages over the copies of a Shifts augmentation, and there is none")

    def but(self, **changes: Any) -> Recipe:
        """The same recipe with some settings changed. ``steps`` is taken in the place of ``epochs``, for the whole training set."""
        unknown = sorted(set(changes) - set(_kinds()) - {"steps"})
        if unknown:
            raise ConfigurationError(f"a recipe has no setting {', '.join(unknown)}; it has {', '.join(sorted(_kinds()))}")
        steps = changes.pop("steps", None)
        other = dataclasses.replace(self, **changes)
        if steps is None:
            return other
        size = data.info(other.dataset).train_size
        return dataclasses.replace(other, epochs=read(Count, steps, "steps") * other.batch_size / size)

    def changed(self, settings: Mapping[str, Any]) -> Recipe:
        """The recipe with these settings; ``options.NAME`` is an option of its model, the others of which stay."""
        options = {name.removeprefix(OPTION): value for name, value in settings.items() if name.startswith(OPTION)}
        fields = {name: value for name, value in settings.items() if not name.startswith(OPTION)}
        return self.but(**fields, **({"options": {**self.options, **options}} if options else {}))

    @property
    def steps(self) -> int:
        """T, on the whole training set."""
        return math.ceil(self.epochs * data.info(self.dataset).train_size / self.batch_size - 1e-9)

    def batch_for(self, records: int, train_size: int) -> int:
        """The expected batch size for a run on so many records of a training set.

        It is the recipe's; or all of them, where a part of the training set is held out and leaves fewer. A batch that the whole
        training set could not give either is left as it is, for the plan to refuse.
        """
        return min(self.batch_size, records) if self.batch_size <= train_size else self.batch_size

    def make_loss(self) -> Loss:
        """The loss."""
        return Squares() if self.loss == "squares" else CrossEntropy(tau=self.temperature, class_weights=self.class_weights)

    @property
    def views(self) -> Shifts | None:
        """The fixed copies that a prediction is averaged over; ``None`` where it is the example itself."""
        if self.test_copies == "all":
            assert isinstance(self.augmentation, Shifts)
            return self.augmentation
        return Shifts([(0, 0)], flip=True) if self.test_copies == "flip" else None


def settings_of(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data (numbers, texts, lists, mappings): what a file holds. Settings at their defaults are left out."""
    plain: dict[str, Any] = {}
    for own in dataclasses.fields(Recipe):
        value = getattr(recipe, own.name)
        default = own.default_factory() if own.default_factory is not dataclasses.MISSING else own.default
        if value != default:
            plain[own.name] = _as_data(own.name, value)
    return plain


def _as_data(name: str, value: Any) -> Any:
    if name == "adaptive":
        return {key: part for key, part in dataclasses.asdict(value).items() if part is not None}
    if name == "augmentation":
        kind = type(value).__name__
        if kind not in _AUGMENTATIONS:
            raise ConfigurationError(f"augmentation is {value!r}: only {', '.join(_AUGMENTATIONS)} can be written down")
        return {"kind": kind, **{key: getattr(value, key) for key in inspect.signature(type(value)).parameters}}
    return value


def _augmentation(value: Any) -> Augmentation | None:
    """An augmentation as it is, or made of what :func:`settings_of` writes down of one."""
    if not isinstance(value, Mapping):
        if value is not None and not isinstance(value, Augmentation):
            raise ConfigurationError(f"augmentation is {value!r}: it has to be one of lipdp.data, or none")
        return value
    kind, arguments = value.get("kind"), {name: _plain(part) for name, part in value.items() if name != "kind"}
    if kind not in _AUGMENTATIONS:
        raise ConfigurationError(f"augmentation.kind is {kind!r}: it has to be one of {', '.join(_AUGMENTATIONS)}")
    try:
        copies: Augmentation = getattr(data, kind)(**arguments)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"augmentation does not fit {kind}: {error}") from None
    return copies


def _plain(value: Any) -> Any:
    """Lists as tuples, all the way down: a recipe is not changed by its reader."""
    if isinstance(value, Mapping):
        return {key: _plain(part) for key, part in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value


@cache
def _kinds() -> dict[str, Any]:
    return typing.get_type_hints(Recipe, include_extras=True)
