"""Public schemas: what is declared is what is encoded, and nothing is read off the rows."""

from __future__ import annotations

import datetime
import math

import numpy as np
import pytest

from lipdp.errors import ConfigurationError, DataError
from lipdp.estimators.methods import private_ranges, rank_error
from lipdp.estimators.schema import Categorical, Dates, Numeric, Schema, columns_of, read_schema


def test_numbers_are_scaled_and_clipped() -> None:
    encoded = Numeric(0, 10).encode("age", [0, 5, 10, -3, 99])
    assert encoded[:, 0].tolist() == [-1, 0, 1, -1, 1]


def test_a_missing_number_is_an_error_or_has_an_indicator() -> None:
    with pytest.raises(DataError, match=r"'age' has a missing value .*missing=True"):
        Numeric(0, 10).encode("age", [1.0, math.nan])
    with pytest.raises(DataError, match="an infinity"):
        Numeric(0, 10).encode("age", [1.0, math.inf])
    assert Numeric(0, 10, missing=True).encode("age", [10, None]).tolist() == [[1, 0], [0, 1]]


def test_categories_are_blocks() -> None:
    assert Categorical(["a", "b"]).encode("c", ["b", "a"]).tolist() == [[0, 1], [1, 0]]
    with pytest.raises(DataError, match=r"column 'c' has values that are not among its 2 declared categories.*other=True"):
        Categorical(["a", "b"]).encode("c", ["b", "z"])
    assert Categorical(["a"], other=True).encode("c", ["z", None, "a", ["a"]]).tolist() == [[0, 1], [0, 1], [1, 0], [0, 1]]


def test_numbers_of_numpy_are_the_same_categories() -> None:
    assert Categorical(np.array([1, 2])).encode("c", np.array([2, 1])).tolist() == [[0, 1], [1, 0]]


def test_a_row_is_no_longer_than_the_radius_says() -> None:
    """Whatever stands in the columns: k of them, each of norm at most 1."""
    schema = Schema(("a", "b", "c"), (Numeric(0, 1, missing=True), Categorical(["x"], other=True), Numeric(-1e-300, 1e300)))
    rows = schema.encode({"a": [math.nan, 1e308, -1e308], "b": ["x", "?", None], "c": [1e308, -1e308, 0.0]})
    assert rows.shape == (3, schema.width)
    assert np.linalg.norm(rows.astype(np.float64), axis=1).max() <= schema.radius * (1 + 1e-6)


def test_a_constant_column_says_nothing() -> None:
    assert Numeric(3, 3).encode("c", [3.0, 4.0]).tolist() == [[0], [0]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"wight": (0, 1)}, "'wight', which the table does not have; its columns are 'age', 'weight'"),
        ([(0, 1)], "lists 1 columns and the table has 2"),
        ({"age": "0-100"}, r"of column 'age': take lipdp.estimators.numeric"),
        ({"age": (3, 1)}, "the lower one first"),
        ({"age": (0, math.inf)}, "two finite numbers"),
        ({"age": []}, "different values, at least one"),
        ({"age": ["a", "a"]}, "different values"),
        ("numeric", "schema is a str"),
    ],
)
def test_a_schema_that_can_not_be_meant(given, message) -> None:
    with pytest.raises(ConfigurationError, match=message):
        read_schema(given, ["age", "weight"])


def test_ways_to_write_a_schema() -> None:
    assert read_schema(Numeric(0, 1), ["a", "b"]) == {"a": Numeric(0, 1), "b": Numeric(0, 1)}
    assert read_schema([(0, 1), ["x", "y"]], ["a", "b"]) == {"a": Numeric(0, 1), "b": Categorical(["x", "y"])}
    assert read_schema({"a": None}, ["a"]) == {}


def test_dates_in_every_form_are_the_same_numbers() -> None:
    texts = ["2020-01-01", "2020-12-31", "2020-07-01 12:00", "1999-01-01"]
    column = Dates("2020-01-01", "2020-12-31")
    expected = [-1, 1, 2 * 182.5 / 365 - 1, -1]
    zone = datetime.timezone(datetime.timedelta(hours=2))
    stamps = [datetime.datetime.fromisoformat(text) for text in texts]
    for values in (
        texts,
        np.array(texts, dtype="datetime64[m]"),
        np.array(stamps, dtype=object),
        [stamp.replace(tzinfo=datetime.UTC).astimezone(zone) for stamp in stamps],
    ):
        assert np.allclose(column.encode("joined", values)[:, 0], expected)
    pandas = pytest.importorskip("pandas")
    series = pandas.Series(pandas.to_datetime(stamps))
    for values in (series, series.dt.tz_localize("UTC").dt.tz_convert("Europe/Berlin"), series.astype(object)):
        assert np.allclose(column.encode("joined", values)[:, 0], expected)
    assert read_schema({"a": (stamps[0], stamps[1])}, ["a"]) == {"a": Dates("2020-01-01", "2020-12-31T00:00")}


def test_a_missing_date_is_an_error_or_has_an_indicator() -> None:
    for gone in (None, "", np.datetime64("NaT"), float("nan")):
        values = np.array(["2020-01-01", gone], dtype=object)
        with pytest.raises(DataError, match="column 'joined' has a missing date"):
            Dates("2020-01-01", "2020-12-31").encode("joined", values)
        assert np.array_equal(Dates("2020-01-01", "2020-12-31", missing=True).encode("joined", values), [[-1, 0], [0, 1]])


@pytest.mark.parametrize("cell", ["31.12.2020", "secret", 20200101, 3.5, [2020], "2020-13-01"])
def test_what_is_no_date_is_refused_without_showing_it(cell) -> None:
    values = np.empty(1, dtype=object)
    values[0] = cell
    with pytest.raises(DataError, match="column 'joined' is declared as dates") as told:
        Dates("2020-01-01", "2020-12-31").encode("joined", values)
    assert str(cell) not in str(told.value)


@pytest.mark.parametrize("ends", [("2021-01-01", "2020-01-01"), ("a", "b"), (2020, 2021), (None, "2020-01-01"), ([], ())])
def test_dates_that_are_no_range(ends) -> None:
    with pytest.raises(ConfigurationError, match="a column of dates has a public range"):
        Dates(*ends)


def test_columns_with_one_name_are_refused() -> None:
    pandas = pytest.importorskip("pandas")
    with pytest.raises(DataError, match="same name"):
        columns_of(pandas.DataFrame([[1, 2]], columns=["a", "a"]))


def test_ranges_are_about_right_and_warn_where_they_can_not_be() -> None:
    values = np.random.default_rng(0).normal(1000, 10, 20_000)
    (found,) = private_ranges({"a": values}, 1.0, adjacency="add_remove", budget=None, size=len(values)).values()
    assert 950 < found.low < 990
    assert 1010 < found.high < 1050
    assert rank_error(0.5) < 0.01 * len(values)
    with pytest.warns(UserWarning, match="off by 100 % of the records. Declare what is public"):
        private_ranges(dict.fromkeys(range(10), values[:50]), 0.1, adjacency="add_remove", budget=None, size=50)


def test_ranges_of_strange_columns() -> None:
    mixed = np.array([math.nan, math.inf, -math.inf, 0.0] * 125)
    columns = {"constant": np.full(500, 7.0), "huge": np.full(500, 1e300), "mixed": mixed}
    found = private_ranges(columns, 300.0, adjacency="add_remove", budget=None, size=500)
    assert all(math.isfinite(column.low) and math.isfinite(column.high) for column in found.values())
    assert found["constant"].low == pytest.approx(7, rel=0.01)


def test_a_column_of_many_zeros_keeps_the_scale_of_the_rest() -> None:
    values = np.where(np.arange(5000) % 5 == 0, np.linspace(1, 100, 5000), 0.0)
    (found,) = private_ranges({"a": values}, 1.0, adjacency="add_remove", budget=None, size=5000).values()
    assert -40 < found.low < 1
    assert 40 < found.high < 150


@pytest.mark.parametrize("ends", [(-1e308, 1e308), (0, float("nan")), (1, 0), (0, True)])
def test_a_range_that_is_none(ends) -> None:
    with pytest.raises(ConfigurationError, match="public range"):
        Numeric(*ends)
