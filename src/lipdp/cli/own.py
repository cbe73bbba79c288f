"""``lipdp train --images`` and ``--csv``: an estimator on one's own records, and the folder that a report is made from."""

from __future__ import annotations

import codecs
import csv
import json
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipdp.cli.output import console, duration, guarantee, print_json
from lipdp.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from lipdp.estimators.schema import Column

__all__ = ["CsvForm", "train_images", "train_table"]

_FILES = ("plan.json", "history.json", "result.json", "model.lipdp", "report.md")
_SCHEMA = "schema.json"
_SIDE = 32  # pixels that the estimator looks at: each picture is brought to them by itself


@dataclass(frozen=True)
class CsvForm:
    """How a table is written down.

    Attributes:
        separator: between cells.
        decimal: between a number's whole part and the rest.
        encoding: of the file.
    """

    separator: str = ","
    decimal: str = "."
    encoding: str = "utf-8"

    def __post_init__(self) -> None:
        if self.separator.lower() in ("tab", "\\t"):
            object.__setattr__(self, "separator", "\t")
        if len(self.separator) != 1 or self.decimal not in (".", ",") or self.separator == self.decimal:
            raise ConfigurationError(
                f"--separator {self.separator!r} --decimal {self.decimal!r}: one character between cells, a point or a comma in "
                "numbers, and not the same. For example --separator ';' --decimal ','"
            )
        try:
            codecs.lookup(self.encoding)
        except LookupError:
            raise ConfigurationError(f"--encoding {self.encoding!r} is not known: utf-8, latin-1, cp1252, utf-16") from None

    @property
    def words(self) -> list[str]:
        """As given on the command line."""
        usual = CsvForm()
        pairs = [(name, getattr(self, name)) for name in ("separator", "decimal", "encoding")]
        return [word for name, value in pairs if value != getattr(usual, name) for word in (f"--{name}", value)]


def train_images(images: Path, *, test: Path | None, features: str, **common: Any) -> None:
    """Fit :class:`lipdp.PrivateImageClassifier` on a folder or an .npz file, and judge it on what was held out or given."""
    from lipdp.data.images import read_images, read_labels, read_pictures
    from lipdp.estimators import PrivateImageClassifier

    own = _check(common, images, test, "--images")
    x, y = read_images(images, side=_SIDE)
    shape = (1 if x.ndim == 3 else x.shape[-1], *x.shape[1:3])  # in folders; a file holds what it holds
    judged = None if test is None else (read_pictures(test, shape), read_labels(test))
    if common["validation_fraction"] is not None:
        x, y, judged = _split(x, y, common["validation_fraction"])
    command = ["--images", str(images), *([] if features == "auto" else ["--features", features])]
    _finish(PrivateImageClassifier(features=features, **own), images, x, y, judged, test, command, **common)


def train_table(file: Path, *, target: str | None, schema: Path | None, test: Path | None, form: CsvForm, **common: Any) -> None:
    """Fit :class:`lipdp.PrivateClassifier` or PrivateRegressor on a CSV file, by what a schema declares of its columns."""
    from lipdp.estimators import PrivateClassifier, PrivateRegressor
    from lipdp.estimators.schema import Numeric

    own = _check(common, file, test, "--csv")
    columns = _read_csv(file, form)
    if target is None:
        raise ConfigurationError(f"--csv needs the column to predict: --target NAME. '{file}' has {_listed(columns)}")
    if target not in columns:
        raise ConfigurationError(f"--target is {target!r}, and '{file}' has no such column; it has {_listed(columns)}")
    declared = {} if schema is None else _read_schema(schema)
    unknown = [name for name in declared if name not in columns]
    if unknown:
        raise ConfigurationError(f"'{schema}' declares {unknown[0]!r}, and '{file}' has no such column; it has {_listed(columns)}")
    goal = declared.pop(target, None)
    x, y = _frame(columns, target, declared, goal, file, form)
    texts = [name for name in x.columns if name not in declared and x[name].dtype.kind == "O"]
    if texts:
        raise DataError(
            f"column {texts[0]!r} holds texts, and which of them occur is private. Declare those that may occur: --schema "
            f'schema.json: {{{json.dumps(texts[0])}: ["…", "…"]}}; or {{"values": ["…"], "other": true}} for the most usual ones'
        )
    judged = None if test is None else _frame(_read_csv(test, form), target, declared, goal, test, form, list(x.columns))
    if common["validation_fraction"] is not None:
        x, y, judged = _split(x, y, common["validation_fraction"])
    command = ["--csv", str(file), "--target", target, *([] if schema is None else ["--schema", str(schema)]), *form.words]
    if isinstance(goal, Numeric):
        model: Any = PrivateRegressor(schema=declared, target=(goal.low, goal.high), **own)
    else:
        model = PrivateClassifier(schema=declared, classes=None if goal is None else list(goal.values), **own)
    _finish(model, file, x, y, judged, test, command, **common)


def _check(common: dict[str, Any], place: Path, test: Path | None, option: str) -> dict[str, Any]:
    """What is wrong before a record is read; the estimator's own arguments."""
    if common["epsilon"] is None:
        raise ConfigurationError(f"{option} needs a budget: give --epsilon, e.g. --epsilon 3")
    if test is not None and common["validation_fraction"] is not None:
        raise ConfigurationError("give --test or --validation-fraction, not both")
    if test is not None and _same(place, test):
        raise ConfigurationError(
            f"--test '{test}' holds the records of {option} '{place}': figures of the training records, as they are, would be a "
            "release that nobody has paid for. Give other records, or --validation-fraction 0.2"
        )
    output = common["output"]
    if output is not None and any((output / name).exists() for name in _FILES):
        raise ConfigurationError(f"'{output}' already holds another run. Choose another --output folder.")
    names = ("epsilon", "delta", "reproducible", "device", "budget")
    return {**{name: common[name] for name in names}, "random_state": common["seed"]}


def _same(place: Path, other: Path) -> bool:
    """Whether they are one folder or file, or two files of the same bytes."""
    if not (place.exists() and other.exists()):
        return False
    return place.samefile(other) or (place.is_file() and other.is_file() and place.read_bytes() == other.read_bytes())


def _finish(
    model: Any,
    place: Path,
    x: Any,
    y: Any,
    judged: tuple[Any, Any] | None,
    test: Path | None,
    command: list[str],
    *,
    epsilon: float,
    delta: float | None,
    reproducible: bool,
    device: str,
    budget: Any,
    validation_fraction: float | None,
    output: Path | None,
    as_json: bool,
    **_: Any,
) -> None:
    """Fit, judge, write and tell."""
    from lipdp.privacy.budget import open_budget

    started = time.monotonic()
    model.fit(x, y)
    part = None if judged is None else "test" if test is not None else "validation"
    figures = {} if judged is None else _figures(model, *judged)
    classes = getattr(model, "classes_", None)
    report: dict[str, Any] = {
        "dataset": str(place),
        "model": type(model).__name__,
        "records": len(x),
        **({} if classes is None else {"classes": len(classes)}),
        "chosen": model.choice_.method,
        "why": model.choice_.why,
        "accuracy": None,
        **figures,
        "evaluated_on": part,
        "epsilon": model.epsilon_,
        "delta": model.delta_,
        "steps": model.plan_.steps,
        "seconds": time.monotonic() - started,
        "method": model.plan_.method,
        "noise_multiplier": model.plan_.noise_multiplier,
        "private": model.private_,
        "released": model.released_,
    }
    account = open_budget(budget)
    if account is not None:
        report["budget"] = {"path": str(account.path), "spent": account.spent, "remaining": account.remaining}
    if output is not None:
        words = ["lipdp", "train", *command, "--epsilon", f"{epsilon:g}", *([] if delta is None else ["--delta", f"{delta:g}"])]
        words += [] if test is None else ["--test", str(test)]
        words += [] if validation_fraction is None else ["--validation-fraction", f"{validation_fraction:g}"]
        again = shlex.join([*words, *(["--reproducible", "SEED"] if reproducible else [])])
        report["files"] = _save(model, report, output, again, judged, part, device)
    if as_json:
        print_json(report)
        return
    out = console()
    kinds = "" if classes is None else f" of {len(classes)} classes"
    out.print(f"{len(x):,} records{kinds}; {model.choice_.method}: {model.choice_.why}", markup=False, soft_wrap=True)
    shown = ", ".join(f"{part} {_NAMES[name]} {100 * value:.1f}%" for name, value in figures.items())
    told = shown or "nothing was held out: give --test or --validation-fraction"
    out.print(f"{told}, with {guarantee(model.epsilon_, model.delta_)}, in {duration(report['seconds'])}", soft_wrap=True)
    if not model.private_:
        from lipdp.training.history import NOT_PRIVATE

        out.print(f"[bold red]{NOT_PRIVATE}[/bold red]", soft_wrap=True)
    if output is not None:
        out.print(f"saved {', '.join(report['files'])} in {output}", markup=False, soft_wrap=True)


_NAMES = {"accuracy": "accuracy", "auroc": "AUROC", "r2": "R²"}


def _figures(model: Any, x: Any, y: Any) -> dict[str, float]:
    """Accuracy, and for two classes the AUROC; of numbers R²."""
    from sklearn.metrics import roc_auc_score

    if not hasattr(model, "classes_"):
        return {"r2": float(model.score(x, y))}
    found = {"accuracy": float(model.score(x, y))}
    if len(model.classes_) == 2 and len(set(y)) == 2:
        found["auroc"] = float(roc_auc_score(y == model.classes_[1], model.decision_function(x)))
    return found


def _save(
    model: Any, report: dict[str, Any], folder: Path, command: str, judged: tuple[Any, Any] | None, part: str | None, device: str
) -> list[str]:
    """The folder of a run, as `lipdp train RECIPE --output` fills it: what `lipdp report` reads."""
    import numpy as np

    from lipdp.report import About, Evaluation, read_run, this_environment, write, write_about
    from lipdp.saved import save_model

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(model.plan_.to_json() + "\n", encoding="utf-8")
    (folder / "history.json").write_text(json.dumps(model.history_.state_dict(), indent=2) + "\n", encoding="utf-8")
    (folder / "result.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    save_model(model.model_, folder / "model.lipdp")
    written = list(_FILES[:4])
    if hasattr(model, "schema_"):
        (folder / _SCHEMA).write_text(json.dumps(_as_json(model.schema_), indent=2) + "\n", encoding="utf-8")
        written.append(_SCHEMA)
    evaluation = None
    if judged is not None and part is not None and hasattr(model, "classes_") and len(model.classes_) <= 30:
        places = {name: number for number, name in enumerate(model.classes_.tolist())}
        counts = np.zeros((len(places), len(places)), dtype=int)
        pairs = zip(np.asarray(judged[1]).tolist(), model.predict(judged[0]).tolist(), strict=True)
        for true, said in pairs:
            if true in places:
                counts[places[true], places[said]] += 1
        evaluation = Evaluation(part, tuple(map(str, places)), tuple(map(tuple, counts.tolist())))
    chosen = f"how it was chosen, from public numbers: {model.choice_.method}, as {model.choice_.why}"
    about = About(command, this_environment(device), (*model.public_, chosen), evaluation)
    return [*written, write_about(about, folder), *write([read_run(folder)], folder)]


def _split(x: Any, y: Any, share: float) -> tuple[Any, Any, tuple[Any, Any]]:
    """A part held out, by a fixed shuffle."""
    import numpy as np

    order = np.random.default_rng(0).permutation(len(x))
    held = max(1, round(share * len(x)))
    if held >= len(x):
        raise ConfigurationError(f"--validation-fraction {share:g} of {len(x)} records leaves none to learn from")
    return x[order[held:]], y[order[held:]], (x[order[:held]], y[order[:held]])


# Tables --------------------------------------------------------------------------------------------------------------------


class _Frame:
    """Columns by name, as much of a DataFrame as the estimators look at; pandas is not needed."""

    def __init__(self, columns: dict[str, Any]) -> None:
        self._values = columns
        self.columns = list(columns)
        self.dtypes = [column.dtype for column in columns.values()]
        self.shape = (len(next(iter(columns.values()))), len(columns))
        self.iloc = self

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        import numpy as np

        return np.stack([column.astype(object) for column in self._values.values()], axis=1)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, str):
            return self._values[which]
        return _Frame({name: column[which] for name, column in self._values.items()})


def _read_csv(path: Path, form: CsvForm) -> dict[str, list[str]]:
    """The columns of a file, as texts, by the names in its first row."""
    if not path.is_file():
        raise DataError(f"there is no file '{path}'")
    try:
        encoding = "utf-8-sig" if form.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else form.encoding
        with path.open(newline="", encoding=encoding) as file:
            lines = [line for line in csv.reader(file, delimiter=form.separator) if line]
    except UnicodeError:
        raise DataError(
            f"'{path}' can't be read as a text in {form.encoding}: give the encoding that it was written in, --encoding latin-1, "
            "cp1252 or utf-16"
        ) from None
    except csv.Error as error:
        raise DataError(f"'{path}' can't be read as a CSV file: {error}") from None
    if len(lines) < 2:
        raise DataError(f"'{path}' has no rows: a first row with the names of the columns is expected, and records below it")
    other = next((mark for mark in (",", ";", "\t", "|") if mark != form.separator and mark in lines[0][0]), None)
    if len(lines[0]) == 1 and other is not None:
        raise DataError(
            f"the first row of '{path}' is one cell with {other!r} in it, where cells are to be parted by {form.separator!r}: give "
            f"--separator {'tab' if other == chr(9) else shlex.quote(other)}"
        )
    header, rows = [name.strip() for name in lines[0]], lines[1:]
    if len(set(header)) < len(header) or "" in header:
        raise DataError(f"the first row of '{path}' has to name each column, and no two alike; it is {header[:8]}")
    short = next((number for number, row in enumerate(rows, 2) if len(row) != len(header)), None)
    if short is not None:
        raise DataError(
            f"line {short} of '{path}' has another number of cells than its first row has names, {len(header)}. Cells are parted "
            f"by {form.separator!r}; texts that hold one stand in double quotes (--separator, if they are parted by another)"
        )
    return {name: [row[place].strip() for row in rows] for place, name in enumerate(header)}


def _frame(
    columns: dict[str, list[str]],
    target: str,
    declared: dict[str, Column],
    goal: Column | None,
    path: Path,
    form: CsvForm,
    names: list[str] | None = None,
) -> tuple[_Frame, Any]:
    """(columns, targets): numbers where numbers are declared, or where all cells are numbers and nothing is declared."""
    import numpy as np

    from lipdp.estimators.schema import Categorical

    absent = [name for name in [*(names or ()), target] if name not in columns]
    if absent:
        raise DataError(f"'{path}' has no column {absent[0]!r}; it has {_listed(columns)}")
    wanted = [name for name in columns if name != target] if names is None else names
    if not wanted:
        raise DataError(f"'{path}' has no column but {target!r}: there is nothing to predict it from")
    read = {name: _values(name, columns[name], declared.get(name), form) for name in wanted}
    classes = isinstance(goal, Categorical)  # the estimator looks whether they are the declared ones
    return _Frame(read), np.array(columns[target], dtype=object) if classes else _values(target, columns[target], goal, form)


_MISSING = ("", "na", "n/a", "nan", "null", "none")


def _values(name: str, cells: list[str], declared: Column | None, form: CsvForm) -> Any:
    """A column's values; what is wrong with them is said in terms of the schema's file."""
    import numpy as np

    from lipdp.estimators.schema import Categorical, Numeric

    quoted = json.dumps(name, ensure_ascii=False)
    if isinstance(declared, Categorical):
        if not declared.other and not set(cells) <= set(declared.values):
            raise DataError(
                f"column {name!r} has cells that are not among its {len(declared.values)} declared categories. List them all in "
                f'the schema, or {{{quoted}: {{"values": […], "other": true}}}}, which gives the rest one category of their own'
            )
        return np.array(cells, dtype=object)
    absent = [cell.lower() in _MISSING for cell in cells]
    try:
        numbers = np.array(
            [np.nan if gone else float(cell.replace(form.decimal, ".")) for cell, gone in zip(cells, absent, strict=True)]
        )
    except ValueError:  # without the cell: it is somebody's
        if isinstance(declared, Numeric):
            raise DataError(
                f"column {name!r} is declared as numbers, and has a cell that is none: repair it, or give --decimal ',' where "
                "numbers have a comma"
            ) from None
        return np.array(cells, dtype=object)
    if isinstance(declared, Numeric) and any(absent) and not declared.missing:
        raise DataError(
            f"column {name!r} has missing values (empty cells, NA, null). Declare that they may be missing, "
            f'{{{quoted}: {{"low": {declared.low:g}, "high": {declared.high:g}, "missing": true}}}}, or repair such rows'
        )
    return numbers


_FORMS = (
    '{"age": [18, 90], "job": ["clerk", "nurse"], "income": {"low": 0, "high": 1e5, "missing": true}, '
    '"city": {"values": ["Ulm", "Bonn"], "other": true}}'
)


def _read_schema(path: Path) -> dict[str, Column]:
    """What is public of the columns, from a JSON file."""
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigurationError(f"there is no schema '{path}'. Write one: {_FORMS}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"'{path}' is no JSON file: {error}. Expected is something like {_FORMS}") from None
    if not isinstance(given, dict):
        raise ConfigurationError(f"'{path}' has to hold what is public of each column by its name, like {_FORMS}")
    return {name: _column(name, value, path) for name, value in given.items()}


def _column(name: str, value: Any, path: Path) -> Column:
    from lipdp.estimators.schema import Categorical, Numeric

    numbers = (int, float)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(end, numbers) and not isinstance(end, bool) for end in value):
        return Numeric(*value)
    if isinstance(value, list):
        return Categorical([_cell(entry) for entry in value])
    if isinstance(value, dict) and set(value) <= {"values", "other"} and isinstance(value.get("values"), list):
        return Categorical([_cell(entry) for entry in value["values"]], other=bool(value.get("other", False)))
    if isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "missing"}:
        return Numeric(value["low"], value["high"], missing=bool(value.get("missing", False)))
    raise ConfigurationError(f"'{path}' says {json.dumps(value)} of column {name!r}; expected is something like {_FORMS}")


def _cell(value: Any) -> str:
    """A category as it stands in the file."""
    return json.dumps(value) if isinstance(value, bool) or not isinstance(value, str) else value.strip()


def _as_json(schema: Any) -> dict[str, Any]:
    from lipdp.estimators.schema import Numeric

    return {
        str(name): {"low": column.low, "high": column.high, **({"missing": True} if column.missing else {})}
        if isinstance(column, Numeric)
        else {"values": list(column.values), **({"other": True} if column.other else {})}
        for name, column in zip(schema.names, schema.columns, strict=True)
    }


def _listed(columns: dict[str, Any]) -> str:
    names = list(columns)
    return ", ".join(map(repr, names[:8])) + ("…" if len(names) > 8 else "")
