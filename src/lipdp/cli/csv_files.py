"""CSV files of private records: tables for ``lipdp train --csv``, single columns for ``lipdp mechanism``.

What is said of a file's cells is nothing. Nor of its first row, before one of the names that the user typed was found in it: in a
file without names that row is somebody's record. Lines have no numbers in messages: which one it is depends on the records.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lipdp._checks import discreet
from lipdp.errors import ConfigurationError, DataError

if TYPE_CHECKING:
    from lipdp.estimators.schema import Column


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


class Frame:
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
        return Frame({name: column[which] for name, column in self._values.items()})


_BEGINNINGS = {  # of files that are no texts: what they are, and what to do
    b"PK\x03\x04": "a workbook of a spreadsheet, or an archive: save the sheet as CSV, or unpack it",
    b"\xd0\xcf\x11\xe0": "a workbook of a spreadsheet: save the sheet as CSV",
    b"\x1f\x8b": "compressed: unpack it",
    b"PAR1\x15": "a Parquet file: pandas.read_parquet(…).to_csv(…, index=False) makes a CSV file of it",
}


def _check_kind(path: Path) -> None:
    """Refuse, by name, what is there and is no text."""
    if path.is_dir():
        raise DataError(f"'{path}' is a folder: give the CSV file itself (a folder of pictures goes to `lipdp train --images`)")
    if not path.is_file():
        raise DataError(f"there is no file '{path}'")
    with path.open("rb") as file:
        start = file.read(5)
    found = next((what for mark, what in _BEGINNINGS.items() if start.startswith(mark)), None)
    if found is not None:
        raise DataError(f"'{path}' is no CSV file, but {found}")


@discreet
def read_csv(path: Path, form: CsvForm) -> dict[str, list[str]]:
    """The columns of a file, as texts, by the names in its first row."""
    _check_kind(path)
    try:
        encoding = "utf-8-sig" if form.encoding.lower().replace("_", "-") in ("utf-8", "utf8") else form.encoding
        with path.open(newline="", encoding=encoding) as file:
            lines = [line for line in csv.reader(file, delimiter=form.separator) if line]
    except UnicodeError:
        raise DataError(
            f"'{path}' can't be read as a text in {form.encoding}: give the encoding that it was written in, --encoding latin-1, "
            "cp1252 or utf-16"
        ) from None
    except csv.Error:
        raise DataError(
            f"'{path}' can't be read as a CSV file: quotes that are never closed, or a cell of more than "
            f"{csv.field_size_limit():,} characters"
        ) from None
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
        raise DataError(
            f"the first row of '{path}' has to name each column, and no two alike. Name those without a name "
            "(pandas leaves out that of its index: to_csv(index=False)), and rename what stands there twice"
        )
    if _is_a_record(header):
        raise DataError(
            f"the first row of '{path}' holds numbers where names of columns are expected: is it a record? Put a row with the "
            "names above it; where a name is a number, make a word of it, y2019 for 2019"
        )
    if any(len(row) != len(header) for row in rows):
        raise DataError(
            f"a line of '{path}' has another number of cells than its first row has names, {len(header)}. Cells are parted "
            f"by {form.separator!r}; texts that hold one stand in double quotes (--separator, if they are parted by another)"
        )
    return {name: [row[place].strip() for row in rows] for place, name in enumerate(header)}


@discreet
def frame(
    columns: dict[str, list[str]],
    target: str,
    declared: dict[str, Column],
    goal: Column | None,
    path: Path,
    form: CsvForm,
    names: list[str] | None = None,
    without: Sequence[str] = (),
) -> tuple[Frame, Any]:
    """(columns, targets): numbers where numbers are declared, or where all cells are numbers and nothing is declared."""
    import numpy as np

    from lipdp.estimators.schema import Categorical, for_each

    absent = [name for name in [*(names or ()), target] if name not in columns]
    if absent:
        raise DataError(f"'{path}' has no column {absent[0]!r}: {where_names_stand(columns)}")
    wanted = [name for name in columns if name != target and name not in without] if names is None else names
    if not wanted:
        raise DataError(f"'{path}' has no column but {target!r}: there is nothing to predict it from")
    read = for_each(wanted, lambda name: _values(name, columns[name], declared.get(name), form))
    classes = isinstance(goal, Categorical)  # the estimator looks whether they are the declared ones
    own = goal.values if isinstance(goal, Categorical) else ()
    if any(_is_missing(cell) and cell not in own for cell in columns[target]):
        raise DataError(
            f"the --target {target!r} is missing in some rows (empty cells, NA, null, none): leave such rows out. Where that is a "
            f'class of its own, declare the classes in the schema, {{{quoted(target)}: ["yes", "none"]}}'
        )
    return Frame(read), np.array(columns[target], dtype=object) if classes else _values(target, columns[target], goal, form)


@discreet
def rows(columns: dict[str, list[str]], declared: dict[str, Column], path: Path, form: CsvForm) -> Frame:
    """The declared columns alone, of records that nobody knows the target of."""
    from lipdp.estimators.schema import for_each

    absent = [name for name in declared if name not in columns]
    if absent:
        raise DataError(f"'{path}' has no column {absent[0]!r}, which the model reads: {where_names_stand(columns)}")
    read = for_each(declared, lambda name: _values(name, columns[name], declared[name], form))
    return Frame(read)


_MISSING = ("", "na", "n/a", "nan", "null", "none")


def _is_missing(cell: str) -> bool:
    return cell.lower() in _MISSING


def _values(name: str, cells: list[str], declared: Column | None, form: CsvForm) -> Any:
    """A column's values; what is wrong with them is said in terms of the schema's file."""
    import numpy as np

    from lipdp.estimators.schema import Categorical, Dates, Numeric, days

    if isinstance(declared, Categorical):
        if not declared.other and not set(cells) <= set(declared.values):
            raise DataError(
                f"column {name!r} has cells that are not among its {len(declared.values)} declared categories. List them all in "
                f'the schema, or {{{quoted(name)}: {{"values": […], "other": true}}}}, which gives the rest one category of their '
                f"own{_dates_instead(quoted(name), declared.values)}"
            )
        return np.array(cells, dtype=object)
    absent = [_is_missing(cell) for cell in cells]
    if isinstance(declared, Dates):
        try:
            days(["" if gone else cell for cell, gone in zip(cells, absent, strict=True)])
        except (ValueError, OverflowError):
            raise DataError(
                f"column {name!r} is declared as dates, and has a cell that is none: they are written like 2015-01-31 or "
                "2015-01-31T09:30. A spreadsheet writes them so in the cell format YYYY-MM-DD, pandas after "
                "pandas.to_datetime(…, dayfirst=True)"
            ) from None
        if any(absent) and not declared.missing:
            raise DataError(
                f"column {name!r} has missing dates (empty cells, NA, null). Declare that they may be missing, "
                f'{{{quoted(name)}: {{"from": "{declared.ends[0]}", "to": "{declared.ends[1]}", "missing": true}}}}, '
                "or repair such rows"
            )
        return np.array(["" if gone else cell for cell, gone in zip(cells, absent, strict=True)], dtype=object)
    try:
        numbers = np.array([np.nan if gone else _number(cell, form.decimal) for cell, gone in zip(cells, absent, strict=True)])
    except ValueError:  # without the cell: it is somebody's
        if isinstance(declared, Numeric):
            other, word = ("'.'", "point") if form.decimal == "," else ("','", "comma")
            raise DataError(
                f"column {name!r} is declared as numbers, and has a cell that is none (a unit, a mark between thousands, a sign "
                f"for what is missing): repair it, or give --decimal {other} where numbers have a {word}; missing values are "
                "empty cells"
            ) from None
        return np.array(cells, dtype=object)
    if isinstance(declared, Numeric) and any(absent) and not declared.missing:
        raise DataError(
            f"column {name!r} has missing values (empty cells, NA, null). Declare that they may be missing, "
            f'{{{quoted(name)}: {{"low": {declared.low:g}, "high": {declared.high:g}, "missing": true}}}}, or repair such rows'
        )
    return numbers


def _number(cell: str, decimal: str) -> float:
    """Of a cell; with a decimal comma a point is a mark between thousands, and 1.500 is not one and a half."""
    if "_" in cell or (decimal != "." and "." in cell):
        raise ValueError
    return float(cell.replace(decimal, "."))


def _dates_instead(name: str, values: Sequence[object]) -> str:
    """What to write, where two dates were declared as two categories."""
    if len(values) != 2 or not all(re.match(r"\d{4}-\d\d-\d\d", str(value)) for value in values):
        return ""
    return f'. If it holds dates: {{{name}: {{"from": "{values[0]}", "to": "{values[1]}"}}}}'


def quoted(name: str) -> str:
    """A name as it stands in the schema's file."""
    return json.dumps(name, ensure_ascii=False)


_FORMS = (
    '{"age": [18, 90], "job": ["clerk", "nurse"], "income": {"low": 0, "high": 1e5, "missing": true}, '
    '"city": {"values": ["Ulm", "Bonn"], "other": true}, "joined": {"from": "2015-01-31", "to": "2024-12-31"}}'
)


def read_schema(path: Path) -> dict[str, Column]:
    """What is public of the columns, from a JSON file."""
    from lipdp.fields import parse_json

    try:
        given = parse_json(path.read_text(encoding="utf-8-sig"), f"'{path}'", constants=True)
    except FileNotFoundError:
        raise ConfigurationError(f"there is no schema '{path}'. Write one: {_FORMS}") from None
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}. Expected is something like {_FORMS}") from None
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"'{path}' can't be read ({type(error).__name__}). Expected is something like {_FORMS}") from None
    if not isinstance(given, dict):
        raise ConfigurationError(f"'{path}' has to hold what is public of each column by its name, like {_FORMS}")
    return {name: _column(name, value, path) for name, value in given.items()}


def _column(name: str, value: Any, path: Path) -> Column:
    from lipdp.estimators.schema import Categorical, Dates, Numeric

    numbers = (int, float)
    if isinstance(value, list) and len(value) == 2 and all(isinstance(end, numbers) and not isinstance(end, bool) for end in value):
        return Numeric(*value)
    if isinstance(value, list):
        return Categorical([_cell(entry) for entry in value])
    if isinstance(value, dict) and set(value) <= {"values", "other"} and isinstance(value.get("values"), list):
        return Categorical([_cell(entry) for entry in value["values"]], other=value.get("other", False))
    if isinstance(value, dict) and {"low", "high"} <= set(value) <= {"low", "high", "missing"}:
        return Numeric(value["low"], value["high"], missing=value.get("missing", False))
    if isinstance(value, dict) and {"from", "to"} <= set(value) <= {"from", "to", "missing"}:
        return Dates(value["from"], value["to"], missing=value.get("missing", False))
    raise ConfigurationError(f"'{path}' says {json.dumps(value)[:80]} of column {name!r}; expected is something like {_FORMS}")


def _cell(value: Any) -> str:
    """A category as it stands in the file."""
    return json.dumps(value) if isinstance(value, bool) or not isinstance(value, str) else value.strip()


def as_json(schema: Any) -> dict[str, Any]:
    """What is public of the columns, as :func:`read_schema` reads it."""
    return {str(name): _said(column) for name, column in zip(schema.names, schema.columns, strict=True)}


def _said(column: Column) -> dict[str, Any]:
    from lipdp.estimators.schema import Categorical, Dates

    if isinstance(column, Categorical):
        return {"values": list(column.values), **({"other": True} if column.other else {})}
    missing = {"missing": True} if column.missing else {}
    if isinstance(column, Dates):
        return {"from": column.ends[0], "to": column.ends[1], **missing}
    return {"low": column.low, "high": column.high, **missing}


def where_names_stand(names: Any) -> str:
    """How many columns there are; which ones is not said, for nobody knows yet whether the first row holds names."""
    return f"the names of its {len(names)} columns stand in its first row, and are told apart by case"


def _is_a_record(header: list[str]) -> bool:
    """Whether names are numbers, and not those that pandas gives columns without names: 0, 1, 2, …"""
    numbered = [name for name in header if re.fullmatch(r"[-+]?[\d.,]*\d[\d.,]*(e[-+]?\d+)?", name, re.IGNORECASE)]
    return bool(numbered) and numbered != [str(number) for number in range(len(numbered))]


@discreet
def read_column(path: Path, column: str, encoding: str | None = None) -> list[float]:
    """The numbers of a CSV column; empty and non-numeric cells are refused, and so is a name that stands twice."""
    _check_kind(path)
    text, used = _decoded(path, encoding)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=_delimiter(text))
    names = next(reader, [])
    if column not in names:
        guessed = f" (read as {used}; --encoding names another)" if encoding is None and used != "utf-8-sig" else ""
        raise DataError(f"{path} has no column {column!r}: {where_names_stand(names)}{guessed}")
    if names.count(column) > 1:
        raise DataError(f"{path} has {names.count(column)} columns named {column!r}: rename all but the one that is meant")
    place, values = names.index(column), []
    for row in reader:
        if not row:
            continue  # an empty line is no record
        try:
            values.append(float(row[place]))
        except (IndexError, ValueError):
            raise DataError(
                f"column {column!r} of {path} has a cell that holds no number, or a line is too short for it. Fill such cells in "
                "(1.5, not 1,5), or drop these records before"
            ) from None
    return values


def _decoded(path: Path, encoding: str | None) -> tuple[str, str]:
    """The file's text, and the encoding that it was read with: the one given, that of its byte order mark, UTF-8, or Latin-1.

    Latin-1 reads every file, and digits are the same in all of these: at worst, a column's name looks odd.
    """
    raw = path.read_bytes()
    marked = "utf-16" if raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) else "utf-8-sig"
    for name in (encoding,) if encoding is not None else (marked, "latin-1"):
        try:
            return raw.decode(name), name
        except LookupError:
            raise ConfigurationError(f"--encoding {name}: no such encoding; utf-8, utf-16, latin-1 and cp1252 are common") from None
        except UnicodeError:
            continue
    raise DataError(f"{path} can't be read as {encoding}. Give the --encoding that it was written in")


def _delimiter(text: str) -> str:
    """What separates the header's names: a comma, a semicolon or a tab, whichever stands there most often."""
    header = text.split("\n", 1)[0]
    return max(",;\t", key=header.count)
