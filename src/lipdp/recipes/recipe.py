"""Recipes: experiments as data, each everything of a training run but the seed, by name.

There is one kind. A setting means the same in each: a learning rate is in units of the whole step's sensitivity, a length is in
epochs, and the budget that a run gets where none is given is the one that the settings were found for.

They are tables of TOML in the files of ``catalog/``. A file holds recipes by name, with the settings that differ from
:class:`~lipdp.recipes.Recipe`'s defaults. Its ``best`` lists those that a dataset's name alone means, one for each budget. TOML has
no ``None``: options that are ``None`` are named in ``without``. ``lipdp sweep --save FILE`` writes such files, :func:`read_recipes`
reads them. What the recipes gave when they were run is beside there too: measured.json, which benchmarks/accuracy/catalogue.py
makes of the results.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import tomllib
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from lipdp import data, models
from lipdp._checks import choose, match
from lipdp._files import PUBLIC, written_whole
from lipdp.data import Augmentation, Shifts
from lipdp.errors import ConfigurationError, LipdpError
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


_BEST, _WITHOUT = "best", "without"
_BARE = re.compile(r"[A-Za-z0-9_-]+")
_WIDTH = 120
_CATALOG = resources.files("lipdp.recipes").joinpath("catalog")
_IN_FILE = re.compile(r"(.*\.toml)(?::(.*))?", re.DOTALL)


def names() -> tuple[str, ...]:
    """All recipes, the short names included."""
    tables, best = _shipped()
    return (*best, *tables)


def get(name: str, epsilon: float | None = None) -> Recipe:
    """A recipe by name; a dataset's name means the best recipe for it, at the budget nearest to ``epsilon`` (by default 3).

    ``FILE.toml:NAME`` is a recipe of a file, and ``FILE.toml`` its only one.

    Args:
        name: of a recipe, a dataset or a file; case, dashes and underscores of the first two do not matter.
        epsilon: the budget that a dataset's recipe is wanted for; a recipe that is named itself does not change with it.
    """
    if isinstance(name, str) and (place := _IN_FILE.fullmatch(name)):
        return _of_file(place[1], place[2])
    best = _shipped()[1]
    short = ", ".join(best)
    choices = f"{short} mean the best recipe for the dataset; `lipdp recipes` (or lipdp.recipes.names()) lists all {len(names())}."
    meant = choose("recipe", name, names(), choices)
    if meant not in best:
        return _shipped_recipe(meant)
    return nearest_budget([_shipped_recipe(own) for own in best[meant]], Recipe.epsilon if epsilon is None else epsilon)


def _of_file(file: str, name: str | None) -> Recipe:
    known = read_recipes(file)
    if name is None and len(known) == 1:
        return next(iter(known.values()))
    return known[choose(f"recipe in '{file}'", name, known)]


def nearest_budget(recipes: Iterable[Recipe], epsilon: float) -> Recipe:
    """Of these recipes the one whose own ε is nearest to ``epsilon``, on a scale of factors."""
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ConfigurationError(f"epsilon must be positive, not {epsilon!r}")
    return min(recipes, key=lambda recipe: max(recipe.epsilon / epsilon, epsilon / recipe.epsilon))


@dataclass(frozen=True)
class Measured:
    """Figures of a recipe at the budget that its settings were found for.

    Attributes:
        score: in %: accuracy, or AUROC where the recipe is judged by it; the mean over the runs.
        deviation: standard deviation over the runs, in %; ``None`` for one run.
        runs: how many.
        part: what it was judged on: the "test" set, or records of the training set that were "held out".
        epsilon: ε of the runs.
        seconds: of one run, features included, data and planning not; ``None`` where no one took it down.
        machine: where that was.
        memory_gb: what the program held at most; on a GPU, of the GPU's. ``None`` where no one took it down.
    """

    score: float
    deviation: float | None
    runs: int
    part: Literal["test", "held out"]
    epsilon: float
    seconds: float | None = None
    machine: str | None = None
    memory_gb: float | None = None


def measured(recipe: str) -> Measured | None:
    """The figures of a shipped recipe; ``None`` for one that none are known of.

    Args:
        recipe: its full name.
    """
    return _figures().get(recipe)


@cache
def _figures() -> dict[str, Measured]:
    text = _CATALOG.joinpath("measured.json").read_text(encoding="utf-8")
    return {name: Measured(**figures) for name, figures in json.loads(text).items()}


@cache
def _shipped() -> tuple[dict[str, tuple[Any, str]], dict[str, tuple[str, ...]]]:
    """The package's tables of settings by name, each with its file, and the names of the best recipes by dataset."""
    tables: dict[str, tuple[Any, str]] = {}
    best: dict[str, tuple[str, ...]] = {}
    files = [file for file in _CATALOG.iterdir() if file.name.endswith(".toml")]
    for file in sorted(files, key=lambda file: file.name):
        own, chosen = _parsed(file.read_text(encoding="utf-8"), file.name)
        tables |= {name: (settings, file.name) for name, settings in own.items()}
        best |= {own[name]["dataset"]: chosen for name in chosen}
    return tables, best


@cache
def _shipped_recipe(name: str) -> Recipe:
    return _recipe(name, *_shipped()[0][name])


def read_recipes(file: str | Path) -> dict[str, Recipe]:
    """The recipes of a file, by name; what it holds is checked field by field.

    Args:
        file: TOML, as :func:`save_recipe` writes it.
    """
    try:
        text = Path(file).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigurationError(f"there is no file of recipes {str(file)!r}: `lipdp sweep NAME --save FILE` writes one") from None
    except (OSError, ValueError, TypeError) as error:  # no such file, no text, no name that a file can have
        raise ConfigurationError(f"{str(file)!r} can't be read: {error}") from None
    return _recipes(text, str(file))


def _recipes(text: str, file: str) -> dict[str, Recipe]:
    return {name: _recipe(name, settings, file) for name, settings in _parsed(text, file)[0].items()}


def _parsed(text: str, file: str) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The tables of a file by name, and the names that ``best`` lists."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # no TOML, numbers or tables that are too long
        raise ConfigurationError(f"'{file}' is no TOML that can be read: {error}") from None
    best: tuple[str, ...] = read(tuple[str, ...], content.pop(_BEST, []), f"'{file}': {_BEST}")
    unknown = [name for name in best if name not in content]
    if unknown:
        raise ConfigurationError(f"'{file}': {_BEST} lists {unknown[0]!r}, which is no recipe of the file")
    return content, best


def _recipe(name: str, settings: Any, file: str) -> Recipe:
    where = f"'{file}', recipe {name!r}"
    if not isinstance(settings, Mapping):
        raise ConfigurationError(f"{where} is {settings!r}: it has to be a table of settings, [{name}]")
    own = dict(settings)
    without = read(tuple[str, ...], own.pop(_WITHOUT, []), f"{where}: {_WITHOUT}")
    missing = [needed for needed in ("dataset", "model", "provenance") if needed not in own]
    if missing:
        raise ConfigurationError(f"{where} lacks the field {missing[0]!r}")
    known = Recipe.__dataclass_fields__
    strange = [field for field in own if field not in known or field == "name"]
    if strange:
        raise ConfigurationError(f"{where} has a field {strange[0]!r}: a recipe has {', '.join(known)}")
    given = own.get("options", {})
    if not isinstance(given, Mapping):
        raise ConfigurationError(f"{where}: options is {given!r}: it has to be a table of the model's options")
    own["options"] = {**given, **dict.fromkeys(without)}
    try:
        return Recipe(name, **own)
    except LipdpError as error:
        raise type(error)(f"{where}: {error}") from None


def save_recipe(recipe: Recipe, file: str | Path) -> None:
    """Add the recipe to a file, which is made where there is none. A recipe of its name there is an error: nothing is lost.

    The file is written whole, next to its place, and then moved into it.

    Args:
        recipe: what to add, under its own name.
        file: TOML; recipes that it holds already stay as they are.
    """
    path = Path(file)
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    if recipe.name in (read_recipes(path) if before else {}):
        raise ConfigurationError(f"'{path}' already holds a recipe {recipe.name!r}: rename this one, or take another file")
    after = f"{before.rstrip()}\n\n{to_toml(recipe)}".lstrip()
    if settings_of(_recipes(after, str(path))[recipe.name]) != settings_of(recipe):
        raise ConfigurationError(f"the recipe {recipe.name!r} has a setting that a file can't hold: {settings_of(recipe)}")
    with written_whole(path, PUBLIC) as stream:
        stream.write(after.encode())


def to_toml(recipe: Recipe) -> str:
    """The recipe as a table of TOML."""
    settings = settings_of(recipe)
    name, options = settings.pop("name"), settings.pop("options", {})
    without = [key for key, value in options.items() if value is None]
    given = {key: value for key, value in options.items() if value is not None}
    lines = [f"[{_key(name)}]", *(f"{_key(key)} = {_value(value)}" for key, value in settings.items())]
    lines += [f"{_WITHOUT} = {_value(without)}"] if without else []
    lines += ["", f"[{_key(name)}.options]", *(f"{_key(key)} = {_value(value)}" for key, value in given.items())] if given else []
    return "\n".join(lines) + "\n"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else _text(name)


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML's basic strings have JSON's escapes


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value)  # Python's shortest digits that read back as the same number
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(key)} = {_value(part)}" for key, part in value.items()) + " }"
    if isinstance(value, list | tuple):
        parts = [_value(part) for part in value]
        flat = f"[{', '.join(parts)}]"
        return flat if len(flat) <= _WIDTH else "[\n" + "".join(f"  {part},\n" for part in parts) + "]"
    raise ConfigurationError(f"a file of recipes can't hold {value!r}: numbers, texts, lists and tables only")
