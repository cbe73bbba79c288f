"""``lipdp train --images`` and ``--csv``: an estimator on one's own records, and the folder that a report is made from.

``lipdp predict`` reads that folder, for new records.
"""

from __future__ import annotations

import csv
import json
import shlex
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from lipdp._checks import discreet
from lipdp._texts import REPRODUCIBLE, guarantee
from lipdp.cli import options
from lipdp.cli.csv_files import CsvForm, as_json, frame, quoted, read_csv, read_schema, rows, where_names_stand
from lipdp.cli.options import again
from lipdp.cli.output import check_new_file, console, duration, make_run_folder, print_json
from lipdp.errors import ConfigurationError, DataError

_SIDE = 32  # pixels that the estimator looks at: each picture is brought to them by itself


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


def train_table(
    file: Path,
    *,
    target: str | None,
    schema: Path | None,
    without: list[str] | None,
    test: Path | None,
    form: CsvForm,
    **common: Any,
) -> None:
    """Fit :class:`lipdp.PrivateClassifier` or PrivateRegressor on a CSV file, by what a schema declares of its columns."""
    from lipdp.estimators import PrivateClassifier, PrivateRegressor
    from lipdp.estimators.schema import Dates, Numeric

    own = _check(common, file, test, "--csv")
    columns = read_csv(file, form)
    if target is None:
        raise ConfigurationError(f"--csv needs the column to predict, --target NAME: {where_names_stand(columns)}")
    if target not in columns:
        raise ConfigurationError(f"--target is {target!r}, and '{file}' has no such column: {where_names_stand(columns)}")
    left_out = without or []
    absent = [name for name in left_out if name not in columns]
    if absent or target in left_out:
        what = f"{absent[0]!r}, and '{file}' has no such column" if absent else f"{target!r}, which is the --target"
        what += " (one column each: --without a --without b)" if absent and "," in absent[0] else ""
        raise ConfigurationError(f"--without is {what}: {where_names_stand(columns)}")
    declared = {name: column for name, column in ({} if schema is None else read_schema(schema)).items() if name not in left_out}
    unknown = [name for name in declared if name not in columns]
    if unknown:
        raise ConfigurationError(
            f"'{schema}' declares {unknown[0]!r}, and '{file}' has no such column: {where_names_stand(columns)}"
        )
    goal = declared.pop(target, None)
    if isinstance(goal, Dates):
        raise ConfigurationError(f"'{schema}' declares the target {target!r} as dates: what is predicted is a number or a class")
    x, y = frame(columns, target, declared, goal, file, form, without=left_out)
    _check_declared(x, y, declared, target, goal, form)
    judged = None if test is None else frame(read_csv(test, form), target, declared, goal, test, form, list(x.columns))
    if common["validation_fraction"] is not None:
        x, y, judged = _split(x, y, common["validation_fraction"])
    command = ["--csv", str(file), "--target", target, *([] if schema is None else ["--schema", str(schema)])]
    command += [word for name in left_out for word in ("--without", name)] + form.words
    if isinstance(goal, Numeric):
        model: Any = PrivateRegressor(schema=declared, target=(goal.low, goal.high), **own)
    else:
        model = PrivateClassifier(schema=declared, classes=None if goal is None else list(goal.values), **own)
    _finish(model, file, x, y, judged, test, command, **common)


def _check_declared(x: Any, y: Any, declared: dict[str, Any], target: str, goal: Any, form: CsvForm) -> None:
    """Refuse columns of texts that nobody declared, and numbers to predict that have no range."""
    texts = [name for name in x.columns if name not in declared and x[name].dtype.kind == "O"]
    if texts:
        plural = len(texts) > 1
        comma = "" if form.decimal == "," else "; --decimal , reads numbers with a comma"
        raise DataError(
            f"column{'s' * plural} {', '.join(map(repr, texts))} hold{'s' * (not plural)} texts, and which of them occur is "
            f'private. Declare those that may occur: --schema schema.json: {{{quoted(texts[0])}: ["…", "…"]}}; or '
            '{"values": ["…"], "other": true} for the most usual ones; {"from": "2015-01-31", "to": "2024-12-31"} for dates'
            f"{comma}; or leave it out, --without {shlex.quote(texts[0])}"
        )
    if goal is None and y.dtype.kind == "f" and bool((y % 1 != 0).any()):
        raise DataError(
            f"the --target {target!r} holds numbers that are not whole, and so no classes. To predict numbers, declare the range "
            f"that they can have: --schema schema.json: {{{quoted(target)}: [0, 1000]}}"
        )


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
    if common["output"] is not None:
        make_run_folder(common["output"])
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

    kind = command[0]
    started = time.monotonic()
    console(stderr=True).print(
        f"training on {len(x):,} records{'' if test is None and judged is None else ', then judging'}: {_HOW_LONG[kind]}"
    )
    if judged is None:
        console(stderr=True).print(
            "neither --test nor --validation-fraction: nothing will say how good the model is, and a second run costs its ε again",
            style="yellow",
        )
    if output is None:
        console(stderr=True).print("no --output: the model will not be kept, and its ε is spent all the same", style="yellow")
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
        "predicts": _what_is_predicted(model),
    }
    account = open_budget(budget)
    if account is not None:
        report["budget"] = {"path": str(account.path), "spent": account.spent, "remaining": account.remaining}
    if output is not None:
        decided = {"epsilon": epsilon, "delta": delta, "test": None if test is None else str(test)}
        decided |= {"validation_fraction": validation_fraction, "reproducible": "SEED" if reproducible else None}
        report["files"] = _save(model, report, output, again(command, decided), judged, part, device)
    if as_json:
        print_json(report)
        return
    out = console()
    of = "" if classes is None else f" of {len(classes)} classes"
    out.print(f"{len(x):,} records{of}; {model.choice_.method}: {model.choice_.why}", soft_wrap=True)
    shown = ", ".join(f"{part} {_NAMES[name]} {100 * value:.1f}%" for name, value in figures.items())
    promise = f"({guarantee(model.epsilon_, model.delta_)}), in {duration(report['seconds'])}"
    unjudged = f"trained with {promise}; judged on no records: --test FILE or --validation-fraction 0.2 holds some out"
    out.print(f"{shown}, with {promise}" if shown else unjudged, soft_wrap=True)
    if not model.private_:
        out.print(REPRODUCIBLE, style="bold red", soft_wrap=True)
    if output is not None:
        out.print(f"saved {', '.join(report['files'])} in {output}", soft_wrap=True)


_HOW_LONG = {
    "--images": "on a processor a tenth of a second or so a picture, for its features; a GPU takes minutes for many thousands",
    "--csv": "seconds, or minutes for hundreds of thousands of rows",
}

_NAMES = {"accuracy": "accuracy", "auroc": "AUROC", "r2": "R²"}


def _what_is_predicted(model: Any) -> dict[str, Any]:
    """What `lipdp predict` needs beside the network, all of it public."""
    if not hasattr(model, "classes_"):
        return {"range": [model.target_.low, model.target_.high]}
    shape = {"shape": list(model.shape_)} if hasattr(model, "shape_") else {}
    return {"classes": model.classes_.tolist(), **shape}


@discreet
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

    from lipdp.report import About, Evaluation, this_environment, write_run
    from lipdp.report.run import MODEL, SCHEMA, confusion_of
    from lipdp.saved import save_model

    save_model(model.model_, folder / MODEL)
    written = [MODEL]
    if hasattr(model, "schema_"):
        (folder / SCHEMA).write_text(json.dumps(as_json(model.schema_), indent=2) + "\n", encoding="utf-8")
        written.append(SCHEMA)
    evaluation = None
    if judged is not None and part is not None and hasattr(model, "classes_"):
        places = {name: number for number, name in enumerate(model.classes_.tolist())}
        pairs = zip(np.asarray(judged[1]).tolist(), model.predict(judged[0]).tolist(), strict=True)
        counts = confusion_of(((places[true], places[said]) for true, said in pairs if true in places), len(places))
        evaluation = Evaluation(part, tuple(map(str, places)), counts) if counts else None
    chosen = f"how it was chosen, from public numbers: {model.choice_.method}, as {model.choice_.why}"
    about = About(command, this_environment(device), (*model.public_, chosen), evaluation)
    return [*written, *write_run(folder, model.plan_, model.history_, report, about)]


def _split(x: Any, y: Any, share: float) -> tuple[Any, Any, tuple[Any, Any]]:
    """A part held out, by a fixed shuffle."""
    import numpy as np

    order = np.random.default_rng(0).permutation(len(x))
    held = max(1, round(share * len(x)))
    if held >= len(x):
        raise ConfigurationError(f"--validation-fraction {share:g} of {len(x)} records leaves none to learn from")
    return x[order[held:]], y[order[held:]], (x[order[:held]], y[order[:held]])


PREDICT_EXAMPLE = """Example: lipdp predict run/ new.csv --output predicted.csv

Example: lipdp predict run/ photos/new"""


def predict(
    run: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="A folder of `lipdp train --csv … --output RUN`, or of --images.", show_default=False),
    ],
    records: Annotated[
        Path,
        typer.Argument(
            metavar="RECORDS",
            help="New records: a CSV file, a folder of pictures, an .npz file; no targets needed.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(metavar="FILE.csv", help="Where to write the predictions; printed, where it is left out.")
    ] = None,
    separator: Annotated[str, typer.Option(metavar="CHARACTER", help="Of a table: what parts its cells; or tab.")] = ",",
    decimal: Annotated[str, typer.Option(metavar="CHARACTER", help="Of a table: the decimal point of its numbers.")] = ".",
    encoding: Annotated[str, typer.Option(help="Of a table: utf-8, latin-1, utf-16, …")] = "utf-8",
    as_json: options.Json = False,
) -> None:
    """Predict for new records with a model of your own images or table: a line for each, in the order of the records."""
    from lipdp.data import picture_files
    from lipdp.report import read_run

    if output is not None:
        check_new_file(output, "--output")
    model, schema = _restored(run, read_run(run).result)
    files: list[Path] = []
    if schema is None:
        given: Any = records
        files = picture_files(records) if records.is_dir() else []
    else:
        form = CsvForm(separator, decimal, encoding)
        given = rows(read_csv(records, form), schema, records, form)
    said = model.predict(given).tolist()
    if as_json:
        named = {"files": list(map(str, files))} if files else {}
        print_json({"run": str(run), "records": len(said), "predictions": said, **named})
        return
    with ExitStack() as held:
        to = sys.stdout if output is None else held.enter_context(output.open("x", newline="", encoding="utf-8"))
        lines = csv.writer(to, lineterminator="\n")
        lines.writerow(["file", "prediction"] if files else ["prediction"])
        lines.writerows(zip(files, said, strict=True) if files else ([one] for one in said))
    if output is not None:
        console().print(f"{len(said):,} predictions in {output}", soft_wrap=True)


def _restored(folder: Path, said: dict[str, Any]) -> tuple[Any, dict[str, Any] | None]:
    """The fitted estimator of a run's folder, and what is public of its columns; ``None`` for images."""
    import numpy as np

    from lipdp import PrivateClassifier, PrivateImageClassifier, PrivateRegressor, load
    from lipdp.estimators.schema import Numeric, Schema
    from lipdp.report.run import MODEL, SCHEMA

    kinds = {kind.__name__: kind for kind in (PrivateClassifier, PrivateImageClassifier, PrivateRegressor)}
    kind, predicts = kinds.get(str(said.get("model"))), said.get("predicts")
    if kind is None or not isinstance(predicts, dict):
        raise ConfigurationError(
            f"'{folder}' holds no model of your own images or table that says what it predicts: `lipdp predict` reads what `lipdp "
            f"train --csv` or `--images` has written. For other models, in Python: lipdp.load('{folder / MODEL}')"
        )
    model: Any = kind()
    model.model_ = load(folder / MODEL)
    if kind is PrivateRegressor:
        model.target_ = Numeric(*predicts["range"])
    else:
        model.classes_ = np.array(predicts["classes"])
    if kind is PrivateImageClassifier:
        model.shape_ = tuple(predicts["shape"])
        return model, None
    schema = read_schema(folder / SCHEMA)
    model.schema_ = Schema(tuple(schema), tuple(schema.values()))
    model.n_features_in_ = len(schema)
    return model, schema
