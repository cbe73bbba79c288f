"""What people give as records and targets, as arrays; what can't be taken is refused in terms of types, shapes and names.

No text of numpy's, pandas' or scikit-learn's is passed on: they show the cells that they stumbled over. Phrases of theirs that
people search for (and that scikit-learn's own checks of estimators look for) are kept.

Rows that were fitted before (folds of a cross-validation, a grid of settings) are noticed: a help, and no account. Of each fit, the
64 rows with the smallest keyed hashes are remembered (their hashes, under a key of this process). Two sets of rows that share a
part p of their rows share about that part of the 64 too (a bottom-k sketch), so that folds are recognised, and other data are not.
"""

from __future__ import annotations

import numbers
import os
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d
from torch.utils.data import DataLoader, Dataset

from lipdp._checks import kind_of, shown
from lipdp._texts import brief, upwards
from lipdp.errors import ConfigurationError, DataError, LipdpWarning, RepeatedRunWarning
from lipdp.training.account import are_expected

_FEW = 20  # records up to which nearly all labels may differ by chance
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
    if isinstance(table, Dataset | DataLoader):
        raise DataError(
            f"X is a {type(table).__name__}, and {kind} takes arrays: X, y = dataset.tensors of a TensorDataset, or the path of a "
            "folder of pictures. lipdp.fit takes datasets"
        )
    if first is not table and isinstance(first, str | os.PathLike):
        raise DataError(
            "X is a list of texts or paths. For pictures, give the folder that holds a folder of them for each class, or the "
            "pictures as arrays; of a table, give rows of several columns"
        )
    if getattr(getattr(table, "dtype", None), "names", None):
        raise DataError("X is an array of records (its type has fields): pandas.DataFrame(X) makes a table of it")


def as_table(table: Any, *, declared: bool) -> Array:
    """(rows, columns) of numbers; with a schema (``declared``) also texts and objects, and numbers that are missing.

    Args:
        table: an array, tensor or nested list.
        declared: whether a schema looks at the columns, one by one, later.
    """
    rows = _array("X", table)
    if rows.ndim == 0:
        raise DataError(
            f"X is {kind_of(table)}: Expected 2D array, got scalar array instead. Give an array (rows, columns), or a DataFrame"
        )
    if rows.ndim != 2:
        raise DataError(
            f"Expected 2D array, got {rows.ndim}D array instead: X has shape "
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
    if isinstance(given, torch.Tensor) and given.layout is not torch.strided:
        raise DataError(f"Sparse data was passed for {name}, but dense data is required: {name}.to_dense() is dense")
    _refuse_masked(name, given)
    try:
        return np.asarray(_of_numpy(given))
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{name} is {kind_of(given)} that makes no array: its rows have different lengths, perhaps (setting an array "
            "element with a sequence). Give an array (rows, columns), or a DataFrame"
        ) from None


def _of_numpy(given: Any) -> Any:
    """A tensor as numpy has it (bfloat16 as float32, which holds all of its numbers); anything else as it is."""
    if not isinstance(given, torch.Tensor):
        return given
    held = given.detach().cpu()
    return (held.float() if held.dtype == torch.bfloat16 else held).numpy()


def _refuse_masked(name: str, given: Any) -> None:
    """What lies under a mask would be taken for values."""
    if isinstance(given, np.ma.MaskedArray):
        raise DataError(
            f"{name} is a masked array, and what its mask hides would be read: {name}.astype(float).filled(numpy.nan) has NaN "
            "there, which columns that are declared with missing=True may hold"
        )


def _numeric(name: str, given: Array, texts: str) -> Array:
    """Numbers as they are, others as float64."""
    if given.dtype.kind in "mM":
        raise DataError(
            f"{name} holds dates or durations: declare columns of dates, schema={{column: lipdp.estimators.dates(first, last)}}, "
            "and make numbers of durations (seconds, say)"
        )
    if given.dtype.kind == "S":
        raise DataError(f"{name} holds bytes: make texts of them first, {name}.astype(str), or numbers, {name}.astype(float)")
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
    _refuse_masked("y", y)
    try:
        column = np.asarray(y.to_numpy(na_value=None) if _is_of_pandas(y) else _of_numpy(y))
        if column.dtype.kind == "c":
            raise DataError("y holds complex numbers: give real ones, or the names of classes")
        return np.asarray(column_or_1d(column, warn=True))
    except DataError:
        raise
    except (TypeError, ValueError):
        raise DataError(f"y is no column, but {kind_of(y)}: y should be a 1d array, a label or a number for each record") from None


def _is_of_pandas(y: Any) -> bool:
    """Whether it is a column of a type of pandas' own (nullable, Arrow's, categories), whose missing values have no order."""
    kind = getattr(y, "dtype", None)
    return hasattr(y, "to_numpy") and hasattr(kind, "na_value")


def declared_classes(classes: Any) -> npt.NDArray[Any]:
    """The labels that a user declared, sorted: two or more, all different, all of one kind, none missing."""
    advice = f"classes is {shown(classes)}: a list of at least two different labels, all texts or all numbers"
    try:
        given = list(classes) if isinstance(classes, set | frozenset) else classes
        listed = np.asarray(given)
        labels = np.unique(listed)
    except (TypeError, ValueError):  # no order among them, or lists in it
        raise ConfigurationError(advice) from None
    if listed.dtype.kind == "U" and not all(isinstance(label, str) for label in given):  # numpy makes texts of numbers
        raise ConfigurationError(advice)
    if listed.ndim != 1 or len(labels) < max(2, len(listed)) or bool((labels != labels).any()):
        raise ConfigurationError(advice)
    return labels


def check_labels(given: npt.NDArray[Any], each: str) -> None:
    """Refuse labels that are none, in the words that scikit-learn's users look for."""
    if given.dtype.kind == "S" or (given.dtype.kind == "O" and any(isinstance(label, bytes) for label in given.tolist())):
        raise DataError("y holds bytes: make texts of the labels first, y.astype(str)")
    if given.dtype.kind == "O":
        if any(_is_missing(label) for label in given.tolist()):
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


def _is_missing(label: Any) -> bool:
    return label is None or type(label).__name__ == "NAType" or bool(label != label)  # pandas' NA equals nothing, not even by half


def codes_of(given: Array, labels: Array, declared: bool) -> npt.NDArray[np.int64]:
    """The place of each label among the sorted classes.

    Args:
        given: the labels, checked.
        labels: the classes.
        declared: whether somebody declared them; else those that occur are taken to be public, and they must not be records' own.
    """
    if not declared and len(given) >= _FEW and 2 * len(labels) > len(given):
        raise DataError(
            f"y has {len(labels)} different labels in {len(given)} records: classes that nobody declared are taken to be public, "
            "and these would tell of single records. Declare those that may occur, classes=[…]; for numbers, take "
            "lipdp.PrivateRegressor"
        )
    try:
        codes = np.searchsorted(labels, given)
        known = labels[np.minimum(codes, len(labels) - 1)] == given
    except TypeError:  # texts and numbers have no order
        known = np.asarray(False)
    if not np.all(known):
        kinds = [_kind_of_labels(labels), _kind_of_labels(given)]
        differ = f": those are {kinds[0]}, and y holds {kinds[1]}" if kinds[0] != kinds[1] else ""
        raise DataError(f"y has labels that are not among the {len(labels)} declared classes{differ}. Declare all that may occur")
    return codes.astype(np.int64)


def _kind_of_labels(labels: Array) -> str:
    kind = labels.dtype.kind
    if kind == "O":
        kind = "U" if all(isinstance(label, str) for label in labels.tolist()) else "O"
    return {"U": "texts", "O": "objects", "b": "booleans", "M": "dates"}.get(kind, "numbers")


def note_pairing(table: Any, y: Any) -> None:
    """Warn where a frame holds its own target, or where pandas would pair its rows with others of ``y`` than their order does."""
    columns, own = getattr(table, "columns", ()), getattr(y, "columns", None)
    name = getattr(y, "name", None) if own is None else own[0] if len(own) == 1 else None
    if isinstance(name, str) and name in list(columns):
        warnings.warn(
            f"y is the column {name!r}, and X has a column of that name too: a model that sees its answer learns nothing else. "
            f"Leave it out, X.drop(columns=[{name!r}])",
            LipdpWarning,
            stacklevel=4,
        )
    ours: Any = getattr(table, "index", None)
    theirs: Any = getattr(y, "index", None)
    both = hasattr(ours, "equals") and hasattr(theirs, "equals") and len(ours) == len(theirs)
    if both and not ours.equals(theirs) and set(ours) == set(theirs):
        warnings.warn(
            "X and y have the same index in another order, and rows are paired by their place, not by the index: bring y into the "
            "order of X, y.loc[X.index], or drop both indices if they mean nothing",
            LipdpWarning,
            stacklevel=4,
        )


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


_KEPT, _SHARED = 64, 4  # hashes of a fit; as many in common are no accident

Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True)
class _Fit:
    sketch: frozenset[int]
    epsilon: float
    delta: float
    budget: str | None


_fits: list[_Fit] = []
_key = np.random.default_rng(secrets.randbits(128))
_FACTORS: dict[int, Hashes] = {}


def note_rows(rows: Any, epsilon: float, delta: float, budget: str | None) -> None:
    """Remember a fit; warn if some of its rows were fitted before without an account that adds both up."""
    fit = _Fit(_sketch(rows), epsilon, delta, budget)
    few = min(_SHARED, len(fit.sketch))
    before = [
        other for other in _fits if len(other.sketch & fit.sketch) >= max(1, few) and (budget is None or other.budget != budget)
    ]
    _fits.append(fit)
    if before and not are_expected():
        together = epsilon + sum(other.epsilon for other in before)
        warnings.warn(
            f"this is fit {len(before) + 1} on some of the same rows in this process (folds, a grid, a repetition), and no budget "
            f"adds them up: for a row that is in all of them ε is up to {upwards(together)} at δ = "
            f"{brief(delta + sum(o.delta for o in before))}, not {upwards(epsilon)}. Give all of them one account, "
            "budget=lipdp.privacy.Budget(…), or report the sum.",
            RepeatedRunWarning,
            stacklevel=4,
        )


def forget_rows() -> None:
    """Forget all fits of this process (for tests, and for data that are public)."""
    _fits.clear()


def _sketch(rows: Any) -> frozenset[int]:
    return frozenset(np.partition(hashes, _KEPT)[:_KEPT].tolist() if len(hashes := _hashes(rows)) > _KEPT else hashes.tolist())


def _hashes(rows: Any) -> Hashes:
    """One keyed number for each row: sums of its words times secret odd numbers; texts and objects by their own hashes first."""
    words = _words(rows)
    width = words.shape[1]
    if width not in _FACTORS:
        _FACTORS[width] = _key.integers(0, 2**63, size=(width,), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    sums: Hashes = (words ^ (words >> np.uint64(29))) @ _FACTORS[width]
    mixed: Hashes = (sums ^ (sums >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    return mixed


def _words(rows: Any) -> Hashes:
    """(rows, words): numbers as they lie in memory; one word for a row with anything else in it."""
    held = np.asarray(rows)
    if held.dtype.kind in "biuf":
        return np.ascontiguousarray(held.reshape(len(held), -1), dtype=np.float64).view(np.uint64)
    return np.array([[hash(repr(row)) % 2**64] for row in held.tolist()], dtype=np.uint64)
