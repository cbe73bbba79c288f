"""Files as newcomers have them: tables that a spreadsheet wrote, pictures of every kind, options that meet, files in wrong places.

Each is read rightly, or refused by name, with what to do, and without a cell, a label or a file's name of the records.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lipdp
from lipdp import losses
from lipdp.cli import app
from lipdp.data.images import read_pictures
from lipdp.errors import ConfigurationError, DataError, LipdpError, LipdpWarning, RepeatedStepError
from lipdp.estimators import categorical, dates, numeric
from lipdp.estimators.reading import forget_rows

N = 40
AGES, AGE = ["20", "35"], {"age": [18, 90]}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lipdp.estimators.methods._STEPS", 3)
    monkeypatch.setattr("lipdp.estimators.images._STEPS", 3)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("LIPDP_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    forget_rows()


def ran(*words: object) -> tuple[int, str]:
    told = CliRunner().invoke(app, [str(word) for word in words], prog_name="lipdp")
    assert told.exception is None or isinstance(told.exception, SystemExit), told.exception
    return told.exit_code, " ".join((told.stdout + " " + told.stderr).split())


def table(cells: list[str], labels: tuple[str, ...] = ("a", "b"), name: str = "age", mark: str = ",", end: str = "\n") -> bytes:
    rows = [f"{cells[i % len(cells)]}{mark}{labels[i % len(labels)]}" for i in range(N)]
    return end.join([f"{name}{mark}y", *rows, ""]).encode()


def trained(content: bytes, schema: object = AGE, *words: object, name: str = "t.csv") -> tuple[int, str]:
    Path(name).write_bytes(content)
    Path("s.json").write_bytes(schema if isinstance(schema, bytes) else json.dumps(schema).encode())
    return ran("train", "--csv", name, "--schema", "s.json", "--target", "y", "--epsilon", 1, *words)


READ: dict[str, tuple[bytes, Any]] = {
    "a mark of the byte order": (b"\xef\xbb\xbf" + table(AGES), AGE),
    "a line break in quotes": (table(['"secret\nnote"'], name="note"), {"note": ["secret\nnote"]}),
    "a separator in quotes": (table(['"Ulm, city"', "Bonn"], name="town"), {"town": ["Ulm, city", "Bonn"]}),
    "lines of a Mac": (table(AGES, end="\r"), AGE),
    "lines of Windows": (table(AGES, end="\r\n"), AGE),
    "empty lines": (b"\n\n" + table(AGES) + b"\n\n", AGE),
    "spaces around names and cells": (table([" 20", "35 "], name=" age "), AGE),
    "numbers beyond all range": (table(["1" + 60 * "0", "2"]), {"age": [0, 10]}),
    "a schema of Notepad's": (table(AGES), b"\xef\xbb\xbf" + json.dumps(AGE).encode()),
    "names that a file of another kind begins with": (table(AGES, name="PAR1"), {"PAR1": [18, 90]}),
    "a class that is called none": (table(AGES, ("some", "none")), {**AGE, "y": ["some", "none"]}),
    "true and false": (table(["True", "False"], name="paid"), {"paid": [True, False]} | {"paid": ["True", "False"]}),
}


@pytest.mark.parametrize("name", READ)
def test_a_table_is_read(name: str) -> None:
    content, schema = READ[name]
    code, told = trained(content, schema)
    assert code == 0, told
    assert "40 records of 2 classes" in told


REFUSED: dict[str, tuple[bytes, Any, list[object], str]] = {
    "numbers and words": (table(["20", "secret"]), AGE, [], "has a cell that is none"),
    "marks between thousands": (table(['"1,234"', "2"]), AGE, [], "a mark between thousands"),
    "a point between thousands": (
        table(["1.500", "20,5"], mark=";"),
        {"age": [0, 2000]},
        ["--separator", ";", "--decimal", ","],
        "a mark between thousands",
    ),
    "digits in groups": (table(["1_500", "2"]), {"age": [0, 2000]}, [], "a mark between thousands"),
    "a sign for what is missing": (table(["20", "?"]), AGE, [], "missing values are empty cells"),
    "percents": (table(["12%"]), AGE, [], "a unit"),
    "money": (table(["$12"]), AGE, [], "a unit"),
    "an infinity": (table(["1e999", "2"]), AGE, [], "an infinity"),
    "a zero byte": (table(["2\0", "3"]), AGE, [], "has a cell that is none"),
    "dates of a continent": (table(["03.01.2020"]), {"age": {"from": "2015-01-01", "to": "2023-12-31"}}, [], "like 2015-01-31"),
    "dates as a list": (table(["2020-01-03"]), {"age": ["2015-01-01", "2023-12-31"]}, [], '"from": "2015-01-01"'),
    "numbers with a comma": (table(['"1,5"', '"2,5"'], name="Größe"), {}, [], '"Größe": ["…", "…"]'),
    "numbers with a comma, and what reads them": (table(['"1,5"', '"2,5"']), {}, [], "--decimal , reads numbers with a comma"),
    "numbers to predict without a range": (table(AGES, ("1.5", "2.5")), AGE, [], '{"y": [0, 1000]}'),
    "dates that nobody declared": (table(["2020-01-03"]), {}, [], "for dates"),
    "some labels missing": (table(AGES, ("a", "b", "")), AGE, [], "the --target 'y' is missing in some rows"),
    "some declared labels missing": (table(AGES, ("a", "b", "NA")), {**AGE, "y": ["a", "b"]}, [], "leave such rows out"),
    "some numbers to predict missing": (table(AGES, ("1", "2", "")), {**AGE, "y": [0, 3]}, [], "leave such rows out"),
    "another encoding": ("age,y\n20,ä\n".encode("utf-16"), AGE, [], "--encoding"),
    "a schema that says a column twice": (table(AGES), b'{"age": [18, 90], "age": [0, 1]}', [], "has the field 'age' twice"),
    "a schema with a comma too many": (table(AGES), b'{"age": [18, 90],}', [], "is no JSON"),
    "a range without an end": (table(AGES), {"age": [0, float("inf")]}, [], "two finite numbers"),
    "missing in words": (table(AGES), {"age": {"low": 0, "high": 9, "missing": "no"}}, [], "true or false"),
    "other in words": (table(AGES), {"age": {"values": ["1"], "other": "no"}}, [], "true or false"),
    "a workbook": (b"PK\x03\x04secret", AGE, [], "save the sheet as CSV"),
    "an old workbook": (b"\xd0\xcf\x11\xe0secret", AGE, [], "save the sheet as CSV"),
    "a compressed file": (b"\x1f\x8bsecret", AGE, [], "unpack it"),
    "a Parquet file": (b"PAR1\x15secret", AGE, [], "read_parquet"),
    "the target left out": (table(AGES), AGE, ["--without", "y"], "which is the --target"),
    "two ways to judge": (table(AGES), AGE, ["--test", "t.csv", "--validation-fraction", "0.2"], "not both"),
    "a file as the folder": (table(AGES), AGE, ["--output", "t.csv"], "a file is in its place"),
    "the table as the budget": (table(AGES), AGE, ["--budget", "t.csv"], "is it the right file?"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_table_is_refused(name: str) -> None:
    content, schema, words, said = REFUSED[name]
    code, told = trained(content, schema, *words)
    assert code == 2, told
    assert said in told
    assert "secret" not in told
    assert Path("t.csv").read_bytes() == content


def _a_column() -> Path:
    Path("m.csv").write_text("age\n" + "1\n2\n" * 20)
    return Path("m.csv")


def _answered(*words: object, query: str = "mean", data: object = None) -> tuple[int, str]:
    ends = ["--low", 0, "--high", 9, "--epsilon", 1]
    return ran("mechanism", "answer", data or _a_column(), "--column", "age", "--query", query, *ends, *words)


def _learned(output: str) -> tuple[int, str]:
    return ran("mechanism", "learn", "median", "--epsilon", 1, "--size", 30, "--low", 0, "--high", 9, "--output", output)


def _begun(file: str = "own.budget") -> str:
    assert ran("budget", "create", file, "--epsilon", 1, "--delta", 1e-6, "--dataset", "own")[0] == 0
    return file


def _made(name: str, content: str = "") -> str:
    Path(name).parent.mkdir(parents=True, exist_ok=True)
    Path(name).write_text(content)
    return name


COMMANDS: dict[str, tuple[Callable[[], tuple[int, str]], str]] = {
    "a folder as a table": (lambda: ran("train", "--csv", ".", "--target", "y", "--epsilon", 1), "is a folder"),
    "a folder as a column's file": (lambda: _answered(data=Path()), "is a folder"),
    "a workbook as a column's file": (lambda: _answered(data=_made("a.xlsx", "PK\x03\x04")), "save the sheet as CSV"),
    "a question with a typo": (lambda: _answered(query="meen"), "'std'"),
    "a percentile above 100": (lambda: _answered(query="p101"), "from p0 to p100"),
    "a quantile above 1": (lambda: _answered(query="quantile:90"), "quantile:0 to quantile:1"),
    "values beyond the bounds": (lambda: _answered(data=_made("b.csv", "age\n1\n12\n")), "--clamp"),
    "edges that fall": (lambda: _answered(query="histogram:9,5,0"), "in rising order"),
    "ε and ρ": (lambda: _answered("--rho", 0.1), "one of the two"),
    "a mechanism as the budget": (lambda: _answered("--budget", _made("a.mechanism", "text")), "is it the right file?"),
    "a table as the place of a mechanism": (lambda: _learned(_made("people.csv", "age\n1\n")), "nothing is overwritten"),
    "a mechanism in a folder that is not there": (lambda: _learned("no/such.mechanism"), "does not exist"),
    "a table as the place of a plan": (
        lambda: ran("plan", "digits", "--epsilon", 3, "--output", _made("people.csv", "age\n1\n")),
        "nothing is overwritten",
    ),
    "a plan in a folder that is not there": (
        lambda: ran("plan", "digits", "--epsilon", 3, "--output", "no/p.json"),
        "does not exist",
    ),
    "a table as the place of an export": (
        lambda: ran("budget", "export", _begun(), "--output", _made("people.csv", "age\n1\n")),
        "nothing is overwritten",
    ),
    "a budget's head": (lambda: ran("budget", "show", f"{_begun()}.head"), "is own.budget meant"),
    "a budget begun twice": (
        lambda: ran("budget", "create", _begun(), "--epsilon", 2, "--delta", 1e-6, "--dataset", "d"),
        "begun once",
    ),
    "a budget in a folder that is not there": (
        lambda: ran("budget", "create", "no/own.budget", "--epsilon", 1, "--delta", 1e-6, "--dataset", "d"),
        "make it first",
    ),
    "recipes of a file that is not there": (lambda: ran("train", "mine.toml:best"), "there is no file of recipes 'mine.toml'"),
    "a front of an empty folder": (lambda: ran("pareto", str(Path(_made("em/.x")).parent)), "there is no 'em/result.json'"),
    "a decimal comma": (lambda: ran("train", "digits", "--epsilon", "1,5"), "valid number"),
    "options of tables for pictures": (lambda: ran("train", "--images", ".", "--epsilon", 3, "--target", "y"), "are for tables"),
    "a checkpoint of another run": (
        lambda: ran("train", "digits", "--epsilon", 3, "--epochs", 1, "--checkpoint", _made("r.ckpt", "text")),
        "--resume",
    ),
    "resume from no file": (lambda: ran("train", "digits", "--epsilon", 3, "--resume"), "--checkpoint FILE"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_refused(name: str) -> None:
    act, said = COMMANDS[name]
    code, told = act()
    assert code == 2, told
    assert said in told
    for file in Path().glob("people.csv"):
        assert file.read_text() == "age\n1\n"


def test_values_beyond_the_bounds_are_told_before_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp.mechanisms.answering.plan", None)
    with pytest.raises(DataError, match="outside of the bounds"):
        lipdp.mechanisms.answer([1.0, 12.0], "median", (0, 9), 1.0)
    code, told = _answered(query="median", data=_made("b.csv", "age\n1\n12\n"))
    assert (code, "planning" in told) == (2, False)


def test_there_are_many() -> None:
    assert len(READ) + len(REFUSED) + len(COMMANDS) >= 60


# ---------------------------------------------------------------------- pictures


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    image, draw = pytest.importorskip("PIL.Image"), np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "pictures" / label).mkdir(parents=True)
        for number in range(3):
            pixels = draw.integers(0, 255, (12, 12)).astype(np.uint8)
            image.fromarray(pixels).save(tmp_path / "pictures" / label / f"{number}.png")
    return tmp_path / "pictures"


def _last(folder: Path, name: str, picture: Any, **options: Any) -> Any:
    """What is read of a picture that is saved behind the others."""
    picture.save(folder / "cat" / name, **options)
    return read_pictures(folder / "cat")[-1]


def test_a_palette_is_read_as_its_colours(folder) -> None:
    image = pytest.importorskip("PIL.Image")
    colours = image.fromarray(np.random.default_rng(1).integers(0, 255, (12, 12, 3)).astype(np.uint8)).quantize(16)
    assert np.array_equal(_last(folder, "p.png", colours), np.asarray(colours.convert("RGB")))


def test_a_colour_of_a_palette_that_nobody_sees_is_white(folder) -> None:
    image = pytest.importorskip("PIL.Image")
    red = image.new("P", (12, 12))
    red.putpalette([255, 0, 0] + 765 * [0])
    assert (_last(folder, "p.png", red, transparency=0) == 255).all()


def test_grey_with_transparency_one_bit_and_print_colours(folder) -> None:
    image = pytest.importorskip("PIL.Image")
    clear = np.dstack([np.full((12, 12), 100, np.uint8), np.zeros((12, 12), np.uint8)])
    assert (_last(folder, "a.png", image.fromarray(clear)) == 255).all()
    assert (_last(folder, "b.png", image.fromarray(np.full((12, 12), True))) == 255).all()
    assert (_last(folder, "c.jpg", image.new("CMYK", (12, 12))) == 255).all()


@pytest.mark.parametrize("name", ["p.gif", "p.tiff"])
def test_of_several_frames_the_first_counts_and_it_is_said(folder, name) -> None:
    image = pytest.importorskip("PIL.Image")
    first, second = (image.new("L", (12, 12), value) for value in (10, 200))
    with pytest.warns(LipdpWarning, match="several frames"):
        found = _last(folder, name, first, save_all=True, append_images=[second])
    assert (found == 10).all()


def test_a_warning_that_is_made_an_error_says_the_same(folder) -> None:
    image = pytest.importorskip("PIL.Image")
    first, second = (image.new("L", (12, 12), value) for value in (10, 200))
    with warnings.catch_warnings():
        warnings.simplefilter("error", LipdpWarning)
        with pytest.raises(LipdpWarning, match="several frames"):
            _last(folder, "p.gif", first, save_all=True, append_images=[second])


def test_one_frame_is_no_animation(folder, recwarn) -> None:
    image = pytest.importorskip("PIL.Image")
    assert (_last(folder, "p.gif", image.new("L", (12, 12), 10)) == 10).all()
    assert not [one for one in recwarn if issubclass(one.category, LipdpWarning)]


def test_a_telephone_s_picture_is_no_animation(folder, recwarn) -> None:
    image = pytest.importorskip("PIL.Image")
    whole, preview = (image.new("L", (12, 12), value) for value in (10, 200))
    assert (_last(folder, "p.jpg", whole, format="MPO", save_all=True, append_images=[preview]) == 10).all()
    assert not [one for one in recwarn if issubclass(one.category, LipdpWarning)]


def test_of_an_animation_that_is_cut_off_the_first_frame_is_read(folder) -> None:
    image, draw = pytest.importorskip("PIL.Image"), np.random.default_rng(0)
    first, *others = (image.fromarray(draw.integers(0, 255, (12, 12)).astype(np.uint8)) for _ in range(6))
    place = folder / "cat" / "p.gif"
    first.save(place, save_all=True, append_images=others)
    content = place.read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LipdpWarning)
        for end in range(1, len(content), 7):  # wherever it ends: read, or named
            place.write_bytes(content[:end])
            broken = lipdp.data.unreadable_pictures(folder)
            assert broken in ([], [place])
            if end > len(content) // 2:
                assert (read_pictures(folder / "cat")[-1] == np.asarray(first)[..., None]).all()


@pytest.mark.parametrize("name", ["empty", "text", "link to nothing", "link to itself", "far too large"])
def test_what_is_no_picture_is_refused_without_its_name(folder, name) -> None:
    file = folder / "cat" / "secret.png"
    if name in ("empty", "text"):
        file.write_text("" if name == "empty" else "no picture")
    elif name == "far too large":
        pytest.importorskip("PIL.Image").new("1", (20_000, 20_000)).save(file)
    else:
        file.symlink_to(file if name == "link to itself" else folder / "nowhere.png")
    with pytest.raises(DataError, match="unreadable_pictures") as told:
        lipdp.PrivateClassifier(3.0).fit(folder)
    assert "secret" not in str(told.value)
    assert lipdp.data.unreadable_pictures(folder) == [file]


@pytest.mark.parametrize("where", ["cat/loop", "loop"])
def test_links_that_lead_back_are_not_followed(folder, where) -> None:
    (folder / where).symlink_to(folder if where == "loop" else folder / "cat")
    with pytest.warns(LipdpWarning, match="passed over"):
        fitted = lipdp.PrivateClassifier(3.0).fit(folder)
    assert fitted.classes_.tolist() == ["cat", "dog"]
    assert "the number of images, 6" in fitted.public_[0]


def test_names_in_capitals_and_of_another_kind_are_pictures(folder) -> None:
    (folder / "cat" / "0.png").rename(folder / "cat" / "0.PNG")
    (folder / "dog" / "0.png").rename(folder / "dog" / "0.jpg")  # a PNG all the same: it is read by what it holds
    assert read_pictures(folder).shape == (6, 12, 12)


def test_pictures_below_a_class_are_passed_over_and_it_is_said(folder) -> None:
    (folder / "cat" / "more").mkdir()
    (folder / "cat" / "0.png").rename(folder / "cat" / "more" / "0.png")
    with pytest.warns(LipdpWarning, match="1 files or folders that are no pictures"):
        assert "the number of images, 5" in lipdp.PrivateClassifier(3.0).fit(folder).public_[0]


# ---------------------------------------------------------------------- in Python

ROWS, LABELS = np.random.default_rng(0).uniform(size=(N, 2)), np.array(["no", "yes"] * (N // 2))
IN_PYTHON: dict[str, tuple[Callable[[], object], str]] = {
    "a flag in words": (lambda: numeric(0, 1, missing="no"), "true or false"),  # type: ignore[arg-type]
    "clamping in words": (lambda: _mean(ROWS[:, 0], clamp="no"), "True or False"),
    "a table for a column": (lambda: _mean(ROWS), "one column is asked for"),
    "a flag of dates in words": (lambda: dates("2020-01-01", "2021-01-01", missing="no"), "true or false"),  # type: ignore[arg-type]
    "a flag of categories in words": (lambda: categorical(["a"], other="no"), "true or false"),  # type: ignore[arg-type]
    "no numbers to predict": (lambda: lipdp.PrivateRegressor(schema=(0, 1), target=(0, 1)).fit(ROWS), "requires y"),
    "a folder for numbers": (lambda: lipdp.PrivateRegressor(target=(0, 1)).fit("."), "PrivateClassifier"),
    "a schema's range in texts": (lambda: _classify(schema=("0", "1")), "numeric(low, high)"),
    "a schema of too few columns": (lambda: _classify(schema=[(0, 1)]), "give one for each"),
    "a category twice": (lambda: categorical(["a", "b", "a"]), "different values"),
    "no rows to predict": (lambda: _classify().predict(ROWS[:0]), "0 sample(s)"),
    "a budget as a number": (lambda: _classify(budget=3.0), "the path of its file"),
    "a budget as a dict": (lambda: _classify(budget={"epsilon": 3}), "the path of its file"),
    "a budget's folder": (lambda: _classify(budget="."), "is no file"),
    "a budget beside another folder": (lambda: _classify(budget="there/own.budget"), "there is no budget"),
    "a pure budget": (lambda: _classify(budget=lipdp.privacy.Budget("p.budget", epsilon=9, delta=0, dataset="d")), "pure epsilon"),
}


def _mean(x: Any, **options: Any) -> Any:
    return lipdp.mechanisms.answer(x, "mean", (0, 1), 1.0, **options)


def _classify(**options: Any) -> Any:
    return lipdp.PrivateClassifier(3.0, **{"schema": (0, 1), **options}).fit(ROWS, LABELS)


@pytest.mark.parametrize("name", IN_PYTHON)
def test_a_mistake_in_python_is_told(name: str) -> None:
    act, said = IN_PYTHON[name]
    with pytest.raises(LipdpError) as told:
        act()
    assert said in str(told.value)


def test_flags_of_numpy_are_flags() -> None:
    (found,) = _mean(2 * ROWS[:, 0], clamp=np.True_)
    assert 0 <= found.value <= 1
    assert numeric(0, 1, missing=np.True_).missing


def test_frames_whose_names_are_numbers_or_of_several_levels() -> None:
    pandas = pytest.importorskip("pandas")
    rows = pandas.DataFrame(ROWS)
    assert _classify_frame(rows, {0: (0, 1), 1: (0, 1)}).predict(rows).shape == (N,)
    rows.columns = pandas.MultiIndex.from_tuples([("a", "x"), ("a", "y")])
    with pytest.raises(ConfigurationError, match=r"its columns are \('a', 'x'\)"):
        _classify_frame(rows, {"x": (0, 1), "y": (0, 1)})
    rows.columns = ["x", "y"]
    with pytest.raises(ConfigurationError, match="its columns are 'y'"):
        _classify_frame(rows.set_index("x"), {"x": (0, 1), "y": (0, 1)})
    with pytest.raises(DataError, match=r"shape \(0, 2\)"):
        _classify_frame(rows, {"x": (0, 1), "y": (0, 1)}).predict(rows.iloc[:0])


def test_columns_of_exact_numbers_times_and_categories() -> None:
    from decimal import Decimal
    from fractions import Fraction

    pandas = pytest.importorskip("pandas")
    days = pandas.date_range("2020-01-01", periods=N, tz="Europe/Berlin")
    rows = pandas.DataFrame({"d": [Decimal("0.5")] * N, "f": [Fraction(1, 2)] * N, "t": days, "big": [10**30] * N})
    rows["month"] = pandas.period_range("2020-01", periods=N, freq="M")
    rows["size"] = pandas.Categorical(["S", "L"] * (N // 2))
    whole = dates("2015-01-01", "2024-12-31")
    schema = {"d": (0, 1), "f": (0, 1), "t": whole, "big": (0, 1), "month": whole, "size": ["S", "L"]}
    assert _classify_frame(rows, schema).predict(rows).shape == (N,)
    with pytest.raises(DataError, match="is no number"):
        _classify_frame(pandas.DataFrame({"d": pandas.cut(np.arange(N), 4)}), {"d": (0, 1)})


def _classify_frame(rows: Any, schema: Any) -> Any:
    forget_rows()
    return lipdp.PrivateClassifier(3.0, schema=schema).fit(rows, LABELS)


def _two_columns(first: list[str], second: list[str]) -> bytes:
    return "\n".join(
        ["a,b,y", *(f"{first[n % len(first)]},{second[n % len(second)]},{'uv'[n % 2]}" for n in range(N)), ""]
    ).encode()


def test_all_columns_that_are_wrong_are_named_at_once() -> None:
    content = _two_columns(["1", ""], ["2", "secret"])
    code, told = trained(content, {"a": [0, 9], "b": [0, 9]})
    assert code == 2
    assert "column 'a' has missing values" in told
    assert "(and column 'b': look there, too)" in told
    code, told = trained(_two_columns(["Ulm"], ["secret"]), {})
    assert "columns 'a', 'b' hold texts" in told
    assert "secret" not in told
    x = np.array([[1, np.nan], [np.nan, 2.0]] * N, dtype=object)
    with pytest.raises(DataError, match=r"column '0' has a missing value.*\(and column 1: look there, too\)") as refused:
        lipdp.PrivateClassifier(schema=numeric(0, 9)).fit(x, ["u", "v"] * N)
    assert refused.value.__context__ is None


def test_columns_to_leave_out_are_given_one_by_one() -> None:
    code, told = trained(table(AGES), AGE, "--without", "id,name")
    assert code == 2
    assert "--without a --without b" in told


def test_that_nothing_will_judge_a_model_is_said_before_its_budget_is_spent() -> None:
    _, told = trained(table(AGES))
    assert "a second run costs its ε again" in told
    _, told = trained(table(AGES), AGE, "--validation-fraction", 0.2)
    assert "a second run costs its ε again" not in told


def test_what_convert_gives_is_no_model_yet() -> None:
    made = lipdp.convert(torch.nn.Sequential(torch.nn.Linear(4, 2)), (4,))
    with pytest.raises(ConfigurationError, match=r"of what lipdp\.convert gave, its \.model"):
        lipdp.plan(made, losses.CrossEntropy(), dataset_size=100, batch_size=10, epsilon=1.0, delta=1e-5, steps=5)


def test_one_record_is_no_batch_and_what_makes_one_is_said() -> None:
    layer = lipdp.nn.BoundedInput((1, 8, 8))
    with pytest.raises(DataError, match=r"x\[None\] is a batch of one"):
        layer(torch.zeros(1, 8, 8))
    with pytest.raises(DataError, match=r"\(2, 1, 8, 9\)$"):
        layer(torch.zeros(2, 1, 8, 9))


def test_a_loop_that_is_resumed_without_its_scheduler_is_told_what_differs() -> None:
    train = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.arange(64) % 2)
    torch.manual_seed(0)
    start = torch.nn.Linear(4, 2).state_dict()

    def begun() -> tuple[lipdp.PrivacyEngine, Any]:
        model, loss = torch.nn.Linear(4, 2), torch.nn.CrossEntropyLoss(reduction="none")
        model.load_state_dict(start)
        plan = lipdp.plan(model, loss, dataset_size=64, batch_size=64, epsilon=3.0, delta=1e-3, steps=6, method="bookkeeping",
                          max_grad_norm=1.0, input_shape=(4,))  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return lipdp.PrivacyEngine(model, loss, optimizer, plan), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 6)

    engine, scheduler = begun()
    for x, y in engine.batches(train):
        engine.step(x, y)
        scheduler.step()
        if engine.steps == 2:
            saved = engine.state_dict(), scheduler.state_dict()
        if engine.steps == 4:
            break
    for kept in (True, False):
        again, scheduler = begun()
        again.load_state_dict(saved[0])
        if kept:
            scheduler.load_state_dict(saved[1])
        batches = again.batches(train)
        again.step(*next(batches))
        scheduler.step()
        if kept:
            again.step(*next(batches))
            assert again.steps == 4
        else:
            with pytest.raises(RepeatedStepError, match="a scheduler that starts anew has another rate"):
                again.step(*next(batches))
