"""What people give as records and targets, as arrays; what can't be taken is refused in terms of types, shapes and names.

No text of numpy's, pandas' or scikit-learn's is passed on: they show the cells that they stumbled over. Phrases of theirs that
people search for (and that scikit-learn's own checks of estimators look for) are kept.
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from lipdp._discreet import kind_of, shown
from lipdp.errors import ConfigurationError, DataError

__all__ = ["as_numbers", "as_table", "check_form", "check_labels", "check_lengths", "declared_classes", "is_place", "one_column"]

_FILES_OF_TABLES = (".csv", ".tsv", ".txt", ".parquet", ".feather", ".xlsx", ".xls", ".json", ".jsonl")

Array = npt.NDArray[Any]


def check_form(table: Any, kind: str) -> None:
    """Refuse what is neither an array, nor a DataFrame, nor images, without showing what stands in it."""
    if is_place(table) and str(table).lower().endswith(_FILES_OF_TABLES):
        raise DataError(
            f"X is the path of a table, and {kind} takes the table itself: pandas.read_csv({str(table)!r}), or "
            f"`lipdp train --csv {table!s} --target COLUMN --epsilon 1`"
        )
    first = table[0] if isinstance(table, list | tuple) and table else table
    if isinstance(first, Mapping) and not hasattr(first, "shape"):  # some sparse matrices are mappings
        raise DataError("X is made of dicts: pandas.DataFrame(X) makes a table of it")
    if getattr(table, "ndim", 2) == 1 and hasattr(table, "index"):
        raise DataError("X is one column (a Series); Expected 2D array. Reshape your data: X.to_frame() is a table of one column")


def as_table(table: Any, *, declared: bool) -> Array:
    """(rows, columns) of numbers; with a schema (``declared``) also texts and objects, and numbers that are missing.

    Args:
        table: an array, tensor or nested list.
        declared: whether a schema looks at the columns, one by one, later.
    """
    rows = _array("X", table)
    if rows.ndim != 2:
        raise DataError(
            f"Expected 2D array, got {'scalar' if rows.ndim == 0 else f'{rows.ndim}D'} array instead: X has shape "
            f"{rows.shape}, a table (rows, columns). Reshape your data either using X.reshape(-1, 1) if it has a single "
            f"feature or X.reshape(1, -1) if it contains a single sample. Found array with dim {rows.ndim}"
        )
    for number, what in zip(rows.shape, ("sample", "feature"), strict=True):
        if number == 0:
            raise DataError(
                f"Found array with 0 {what}(s) (shape={rows.shape}) while a minimum of 1 is required: nothing to learn from"
            )
    if declared and rows.dtype.kind in "OUS":
        return rows
    rows = _numeric(
        "X", rows, "X holds texts: could not convert them to numbers (dtype='numeric'). Declare their categories in schema="
    )
    if not declared:
        _check_finite("X", rows, "Declare such columns, schema={column: numeric(low, high, missing=True)}, or repair such rows")
    return rows


def as_numbers(y: Any) -> npt.NDArray[np.float64]:
    """A regressor's target: a finite number for each record."""
    given = one_column(y)
    if given.dtype.kind in "mM":
        raise DataError("the target y holds dates or durations: make numbers of them first (days since a fixed date, say)")
    texts = "the target y holds something that is no number: PrivateRegressor predicts numbers, PrivateClassifier classes"
    values = _numeric("the target y", given, texts).astype(np.float64)
    if len(values) == 0:
        raise DataError("Found array with 0 sample(s): the target y is empty while a minimum of 1 is required")
    _check_finite("y", values, "The target y has to be a number for each row")
    return values


def _array(name: str, given: Any) -> Array:
    if hasattr(given, "toarray") and hasattr(given, "nnz"):
        raise DataError(f"Sparse data was passed for {name}, but dense data is required: {name}.toarray() is dense")
    try:
        return np.asarray(given.detach().cpu().numpy() if isinstance(given, torch.Tensor) else given)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{name} is {kind_of(given)} that makes no array: its rows have different lengths, perhaps (setting an array "
            "element with a sequence). Give an array (rows, columns), or a DataFrame"
        ) from None


def _numeric(name: str, given: Array, texts: str) -> Array:
    """Numbers as they are, others as float64."""
    if given.dtype.kind == "c" or (given.dtype.kind == "O" and any(isinstance(cell, complex) for cell in given.flat)):
        raise DataError(f"Complex data not supported: {name} holds complex numbers. Give real and imaginary parts as two columns")
    if given.dtype.kind in "biuf":
        return given
    if given.dtype.kind == "O":
        try:
            return given.astype(np.float64)
        except (TypeError, ValueError):
            raise DataError(texts) from None
    raise DataError(texts)


def _check_finite(name: str, values: Array, advice: str) -> None:
    if values.dtype.kind != "f" or bool(np.isfinite(values).all()):
        return
    what = "NaN" if bool(np.isnan(values).any()) else f"infinity or a value too large for {values.dtype!r}"
    raise DataError(f"Input {name} contains {what}. {advice}")


def one_column(y: Any) -> npt.NDArray[Any]:
    """Labels or numbers as an array of one dimension; scikit-learn's words where they are none."""
    try:
        return np.asarray(column_or_1d(y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else y, warn=True))
    except (TypeError, ValueError):
        raise DataError(f"y is no column, but {kind_of(y)}: y should be a 1d array, a label or a number for each record") from None


def declared_classes(classes: Any) -> npt.NDArray[Any]:
    """The labels that a user declared, sorted: two or more, all different, all of one kind, none missing."""
    advice = f"classes is {shown(classes)}: a list of at least two different labels, all texts or all numbers"
    try:
        listed = np.asarray(list(classes) if isinstance(classes, set | frozenset) else classes)
        labels = np.unique(listed)
    except (TypeError, ValueError):  # no order among them, or lists in it
        raise ConfigurationError(advice) from None
    if listed.ndim != 1 or len(labels) < max(2, len(listed)) or bool((labels != labels).any()):
        raise ConfigurationError(advice)
    return labels


def check_labels(given: npt.NDArray[Any], each: str) -> None:
    """Refuse labels that are none, in the words that scikit-learn's users look for."""
    if given.dtype.kind == "O":
        if any(label is None or label != label for label in given.tolist()):
            raise DataError(
                f"y has missing labels (None): Input y contains NaN. Leave such {each}s out, or give them a class of their own"
            )
        kinds = {type(label) for label in given.tolist()}
        if len(kinds) > 1 and not all(issubclass(kind, numbers.Number) for kind in kinds):
            names = ", ".join(sorted(kind.__name__ for kind in kinds))
            raise DataError(f"Unknown label type: y has labels of several types, {names}. Make texts or numbers of all of them")
    elif given.dtype.kind == "f" and np.isnan(given).any():
        raise DataError(f"y has missing labels: Input y contains NaN. Leave such {each}s out, or give them a class of their own")
    try:
        check_classification_targets(given)
    except ValueError:
        raise DataError(
            f"Unknown label type: y holds values of type {given.dtype} that are no classes (continuous ones). For numbers, take "
            "lipdp.PrivateRegressor"
        ) from None


def is_place(given: Any) -> bool:
    """Whether records are given by where they are: a folder or a file."""
    return isinstance(given, str | os.PathLike)


def check_lengths(kind: str, records: int, targets: npt.NDArray[Any]) -> None:
    """One target for each record, in the words that scikit-learn's users look for."""
    if len(targets) != records:
        raise DataError(
            f"X has {records} {kind} and y has {len(targets)} labels or numbers: Found input variables with inconsistent numbers "
            "of samples"
        )
