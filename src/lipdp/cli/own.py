"""``lipdp train --images`` and ``--csv``: an estimator on one's own records, and the folder that a report is made from."""

from __future__ import annotations

import json
import shlex
import time
from pathlib import Path
from typing import Any

from lipdp._checks import discreet
from lipdp._texts import REPRODUCIBLE, guarantee
from lipdp.cli.csv_files import CsvForm, as_json, frame, read_csv, read_schema, where_names_stand
from lipdp.cli.options import again
from lipdp.cli.output import console, duration, make_run_folder, print_json
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
    texts = [name for name in x.columns if name not in declared and x[name].dtype.kind == "O"]
    if texts:
        raise DataError(
            f"column {texts[0]!r} holds texts, and which of them occur is private. Declare those that may occur: --schema "
            f'schema.json: {{{json.dumps(texts[0])}: ["…", "…"]}}; or {{"values": ["…"], "other": true}} for the most usual ones; '
            f'{{"from": "2015-01-31", "to": "2024-12-31"}} for dates; or leave it out, --without {shlex.quote(texts[0])}'
        )
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
