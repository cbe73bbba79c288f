"""Recipes in files: those that come with the package, by name, and one's own.

They are tables of TOML in the files of ``catalog/``. A file holds recipes by name, with the settings that differ from
:class:`~lipdp.recipes.Recipe`'s defaults. Its ``best`` lists those that a dataset's name alone means, one for each budget. TOML has
no ``None``: options that are ``None`` are named in ``without``. ``lipdp sweep --save FILE`` writes such files, :func:`read_recipes`
reads them. What the recipes gave when they were run is beside there too: measured.json, which benchmarks/accuracy/catalogue.py
makes of the results.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from lipdp._checks import choose
from lipdp._files import PUBLIC, written_whole
from lipdp.errors import ConfigurationError, LipdpError
from lipdp.fields import read
from lipdp.recipes.recipe import Recipe, settings_of

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
