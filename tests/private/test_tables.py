"""Hostile tables and targets with a secret in one cell: nothing that an estimator says, keeps or raises tells of it."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import lipdp
from lipdp.errors import LipdpError
from lipdp.estimators import Numeric, categorical
from lipdp.estimators.reading import forget_rows
from tests.many import examples
from tests.private.marker import NUMBER, TEXT, check

ROWS = 12


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp.estimators.methods._STEPS", 2)
    forget_rows()


class Talkative:
    """A cell that shows itself wherever it is touched."""

    def __repr__(self) -> str:
        return TEXT

    def __float__(self) -> float:
        raise ArithmeticError(TEXT)

    def __eq__(self, other: object) -> bool:
        raise LookupError(TEXT)

    def __hash__(self) -> int:
        raise TypeError(TEXT)


class Mute(Talkative):
    """One that can be compared, and can't be a number."""

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return 3


CELLS: dict[str, Any] = {
    "number": NUMBER,
    "text": TEXT,
    "bytes": TEXT.encode(),
    "number in a text": str(NUMBER),
    "number with a comma": "7391046,5",
    "complex": complex(NUMBER, 1),
    "huge": 7391046 * 10**400,
    "decimal": decimal.Decimal("7391046.5"),
    "list": [TEXT, NUMBER],
    "dict": {TEXT: NUMBER},
    "tuple": (NUMBER,),
    "array": np.array([NUMBER, 1.0]),
    "tensor": torch.tensor([NUMBER, 1.0]),
    "exception": ValueError(TEXT),
    "talkative": Talkative(),
    "mute": Mute(),
    "day": datetime.date(7391, 4, 6) if False else datetime.timedelta(days=7391, microseconds=46),
    "nan beside it": (float("nan"), NUMBER),
    "infinite": (float("inf"), NUMBER),
}


def objects(cell: Any) -> np.ndarray:
    table = np.empty((ROWS, 2), dtype=object)
    table[:] = 0.5
    if isinstance(cell, tuple) and len(cell) == 2:
        table[3, 0], table[3, 1] = cell
    else:
        table[3, 1] = cell
    return table


def frame(cell: Any) -> Any:
    pandas = pytest.importorskip("pandas")
    return pandas.DataFrame({"a": list(objects(cell)[:, 0]), "b": list(objects(cell)[:, 1])})


def one_type(cell: Any) -> Any:
    """An array of whatever numpy makes of it."""
    return np.array(objects(cell).tolist())


def arrow(cell: Any) -> Any:
    return pytest.importorskip("pyarrow").table({"a": objects(cell)[:, 0].tolist(), "b": objects(cell)[:, 1].tolist()})


def category(cell: Any) -> Any:
    return frame(cell).astype("category")


def extension(cell: Any) -> Any:
    return frame(cell).convert_dtypes()


TABLES: dict[str, Callable[[Any], Any]] = {
    "objects": objects,
    "lists": lambda cell: objects(cell).tolist(),
    "one type": one_type,
    "ragged": lambda cell: [[0.5, 0.5]] * 3 + [[cell]] + [[0.5, 0.5]] * 8,
    "one row": lambda cell: objects(cell)[3],
    "scalar": lambda cell: cell,
    "three dimensions": lambda cell: objects(cell).reshape(2, 2, 3, 2),
    "dicts": lambda cell: [{"a": 0.5, "b": cell}] * ROWS,
    "masked": lambda cell: np.ma.masked_array(objects(cell), mask=np.eye(ROWS, 2, dtype=bool)),
    "structured": lambda cell: np.array([(0.5, str(cell))] * ROWS, dtype=[("a", "f8"), ("b", "U40")]),
    "dates": lambda cell: np.full((ROWS, 2), np.datetime64("7391-04-06")),
    "frame": frame,
    "series": lambda cell: frame(cell)["b"],
    "category": category,
    "extension": extension,
    "arrow": arrow,
    "generator": lambda cell: (row for row in objects(cell)),
    "set": lambda cell: {str(cell), "x"},
    "text": lambda cell: str(cell),
}

SCHEMAS: dict[str, Any] = {
    "none": None,
    "range": Numeric(0, 1),
    "range that may miss": Numeric(0, 1, missing=True),
    "short range": (0, 1),
    "categories": categorical([0.5, "x"]),
    "other categories": categorical([0.5, "x"], other=True),
    "by number": {0: (0, 1), 1: (0, 1)},
    "by name": {"a": (0, 1), "b": [0.5]},
    "by name, numbers": {"a": (0, 1), "b": (0, 1)},
    "list": [(0, 1), None],
    "ambiguous": [0, 1],
}

LABELS = ["a", "b"] * (ROWS // 2)
VALUES = list(np.linspace(0, 1, ROWS))


def attempt(kind: type, table: Any, labels: Any, schema: Any, what: object, **options: Any) -> None:
    """Fit; on success also predict and score. Nothing tells; what fails leaves the estimator as it was."""
    model = kind(epsilon=2.0, schema=schema, **options)
    before = set(vars(model))
    heard = check(lambda: model.fit(table, labels), what=what)
    kept = {name: value for name, value in vars(model).items() if name not in ("schema", "classes")}
    if heard.error is not None:
        assert set(vars(model)) == before, what
        check(lambda: None, repr(model), kept, what=what)
        return
    released = {"model_", "schema_", "target_", "history_", "plan_", "images_"}  # what the plan pays for
    told = {name: value for name, value in kept.items() if name not in released | {"classes_"}}
    check(lambda: None, repr(model), told, model.report(), what=what)
    for method in ("predict", "predict_proba", "decision_function"):
        if hasattr(model, method):
            check(lambda method=method: getattr(model, method)(table) is None, what=(*what, method))  # type: ignore[misc]
    check(lambda: model.score(table, labels), what=(*what, "score"))


@pytest.mark.parametrize("form", TABLES)
def test_a_cell_is_not_told(form: str) -> None:
    draw = np.random.default_rng(abs(hash(form)) % 2**32)
    pairs = [(cell, schema) for cell in CELLS for schema in SCHEMAS]
    chosen = draw.permutation(len(pairs))[: examples(24)]
    for number in chosen:
        cell, schema = pairs[number]
        try:
            table = TABLES[form](CELLS[cell])
        except Exception:  # numpy, pandas or pyarrow make no such table
            continue
        what = (form, cell, schema)
        if draw.random() < 0.5:
            attempt(lipdp.PrivateClassifier, table, LABELS, SCHEMAS[schema], what, method="linear")
        else:
            attempt(lipdp.PrivateRegressor, table, VALUES, SCHEMAS[schema], what, method="linear", target=(0, 1))


def labels_of(cell: Any) -> np.ndarray:
    labels = np.array(LABELS, dtype=object)
    labels[5] = cell
    return labels


TARGETS: dict[str, Callable[[Any], Any]] = {
    "objects": labels_of,
    "list": lambda cell: labels_of(cell).tolist(),
    "numbers": lambda cell: [0.5] * 5 + [cell] + [1.0] * 6,
    "one type": lambda cell: np.array([1, 2] * 5 + [1, cell]),
    "two columns": lambda cell: [[1, cell]] * ROWS,
    "ragged": lambda cell: [[1, cell]] * 3 + [[2]] * 9,
    "series": lambda cell: frame(cell)["b"],
    "frame": frame,
    "scalar": lambda cell: cell,
    "short": lambda cell: [cell, "a"],
    "dict": lambda cell: {TEXT: cell},
    "set": lambda cell: {str(cell), "x"},
}


@pytest.mark.parametrize("form", TARGETS)
def test_a_target_is_not_told(form: str) -> None:
    table = np.random.default_rng(0).uniform(0, 1, (ROWS, 2))
    for cell, value in CELLS.items():
        try:
            given = TARGETS[form](value)
        except Exception:
            continue
        what = (form, cell)
        for kind, options in (
            (lipdp.PrivateClassifier, {"classes": ["a", "b"]}),
            (lipdp.PrivateClassifier, {"classes": [0, 1]}),
            (lipdp.PrivateRegressor, {"target": (0, 1)}),
        ):
            attempt(kind, table, given, Numeric(0, 1), what, method="linear", **options)
        # Without declared classes, those that occur are taken to be public: what fails tells nothing all the same.
        model = lipdp.PrivateClassifier(2.0, schema=Numeric(0, 1), method="linear")
        heard = check(lambda model=model, given=given: model.fit(table, given) is None, what=what)  # type: ignore[misc]
        assert heard.error is None or not check(lambda: None, repr(model), vars(model), what=what).error


@pytest.mark.parametrize(
    "name", ["epsilon", "delta", "schema", "classes", "method", "ranges_share", "random_state", "device", "budget"]
)
def test_records_in_the_place_of_an_argument(name: str) -> None:
    table = np.random.default_rng(0).uniform(0, 1, (ROWS, 2))
    for cell in ("number", "text", "mute"):
        for given in (
            objects(CELLS[cell]),
            objects(CELLS[cell]).tolist(),
            frame(CELLS[cell]),
            frame(CELLS[cell])["b"],
            labels_of(CELLS[cell]),
        ):
            model = lipdp.PrivateClassifier(**{name: given})
            heard = check(lambda model=model: model.fit(table, LABELS), repr(model), what=(name, cell, type(given)))  # type: ignore[misc]
            assert isinstance(heard.error, LipdpError), name
            check(lambda model=model: None, repr(model))  # type: ignore[misc]


def test_a_name_that_is_no_argument_is_python_s_own_error() -> None:
    with pytest.raises(TypeError, match="sample_weight"):
        lipdp.PrivateClassifier().fit(np.zeros((9, 2)), [0, 1, 0] * 3, sample_weight=np.ones(9))  # type: ignore[call-arg]


def test_the_search_finds_what_is_there() -> None:
    """The search itself: texts of numpy, chains, attributes, warnings, prints."""

    def raw() -> None:
        try:
            float(TEXT)
        except ValueError:
            raise LipdpError("nothing") from None

    with pytest.raises(AssertionError, match="exception 1"):
        check(raw)
    with pytest.raises(AssertionError, match="stdout"):
        check(lambda: print(NUMBER))
    with pytest.raises(AssertionError, match="ValueError"):
        check(lambda: int("x"))
    with pytest.raises(AssertionError, match="value 0"):
        check(lambda: None, {"a": np.array([1.0, NUMBER])})
