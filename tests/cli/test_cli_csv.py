"""``lipdp train --csv``: from a file to a report, and what is said where something is wrong."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lipdp.cli import app
from lipdp.errors import DataError
from lipdp.privacy import Budget
from lipdp.report import read_run

SCHEMA = {"age": [18, 90], "job": ["clerk", "nurse"], "hours": {"low": 0, "high": 60, "missing": True}}


@pytest.fixture
def table(tmp_path: Path) -> Path:
    draw = np.random.default_rng(0)
    rows = []
    for _ in range(400):
        age = int(draw.integers(18, 90))
        hours = "" if draw.random() < 0.1 else f"{draw.uniform(0, 60):.1f}"
        rows.append([age, draw.choice(["clerk", "nurse"]), hours, "old" if age > 54 else "young", 1000 * age])
    with (tmp_path / "people.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["age", "job", "hours", "kind", "pay"], *rows])
    return tmp_path / "people.csv"


def train(table: Path, schema: object, *words: str) -> tuple[int, str]:
    file = table.parent / "schema.json"
    file.write_text(schema if isinstance(schema, str) else json.dumps(schema), encoding="utf-8")
    told = CliRunner().invoke(app, ["train", "--csv", str(table), "--schema", str(file), *words])
    return told.exit_code, told.output + (told.stderr if told.stderr_bytes else "")


def test_classes_with_a_report(table: Path) -> None:
    run = table.parent / "run"
    words = ["--target", "kind", "--epsilon", "3", "--validation-fraction", "0.25", "--output", str(run), "--json"]
    code, told = train(table, {**SCHEMA, "pay": [0, 100_000]}, *words)
    assert code == 0, told
    result = json.loads(next(line for line in told.splitlines() if line.startswith('{"dataset"')))
    assert result["records"] == 300
    assert result["accuracy"] > 0.8
    assert result["auroc"] > 0.9
    assert "seed" not in json.loads((run / "result.json").read_text())
    read = read_run(run)
    assert read.contradictions == ()
    assert read.epsilon == pytest.approx(result["epsilon"])
    assert read.epsilon <= 3
    assert sum(map(sum, read.about.evaluation.confusion)) == 100
    assert "--target kind" in read.about.command
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "<h1>Privacy report: " in page
    assert "people.csv</h1>" in page
    assert "ranges or categories of 4 columns, as declared: " in page  # and which: whoever signs has to know
    assert "age, from 18 to 90; job, one of clerk, nurse; hours, from 0 to 60, or missing" in page
    assert json.loads((run / "schema.json").read_text())["job"] == {"values": ["clerk", "nurse"]}
    code, told = train(table, SCHEMA, *words)
    assert code == 2
    assert "of another run" in told


def test_a_model_that_is_not_kept_and_not_judged(table: Path) -> None:
    """Its ε is spent all the same: said before that happens."""
    code, told = train(table, {**SCHEMA, "pay": [0, 100_000]}, "--target", "kind", "--epsilon", "1")
    assert code == 0
    told = " ".join(told.split())
    assert "no --output: the model will not be kept, and its ε is spent all the same" in told
    assert "trained with (ε = 1.000, δ = 1e-05), in " in told
    assert "judged on no records: --test FILE or --validation-fraction 0.2 holds some out" in told


def test_numbers_and_ranges_that_are_paid_for(table: Path) -> None:
    """The report's ε has the ranges in it, although the plan has not; and the account was charged for both."""
    account = Budget(table.parent / "people.budget", epsilon=8.0, delta=1e-4, dataset="people")
    run = table.parent / "run"
    words = ["--target", "pay", "--epsilon", "5", "--validation-fraction", "0.25", "--output", str(run), "--json"]
    declared = {"job": ["clerk", "nurse"], "hours": SCHEMA["hours"], "kind": ["old", "young"], "pay": [0, 1e5]}
    code, told = train(table, declared, *words, "--budget", str(account.path))
    assert code == 0, told
    result = json.loads(next(line for line in told.splitlines() if line.startswith('{"dataset"')))
    assert set(result) >= {"r2", "released"}
    assert result["released"] == pytest.approx(1.0)
    read = read_run(run)
    assert read.epsilon == result["epsilon"]
    assert read.epsilon > 4.5 > read.plan.epsilon
    report = (run / "report.md").read_text(encoding="utf-8")
    assert "ranges of columns | pure ε = 1.000; in the same ε" in report
    assert "R²" in report
    assert "left" in next(line for line in report.splitlines() if line.startswith("| account of the dataset"))
    assert read.plan.epsilon < Budget(account.path).spent <= read.epsilon  # at the account's larger δ


WRONG = [
    (SCHEMA, ["--target", "kind"], "--epsilon"),
    (SCHEMA, ["--epsilon", "1"], "--target NAME"),
    (SCHEMA, ["--epsilon", "1", "--target", "Kind"], "stand in its first row"),
    ({**SCHEMA, "wage": [0, 1]}, ["--epsilon", "1", "--target", "kind"], "declares 'wage'"),
    ({"age": [18, 90]}, ["--epsilon", "1", "--target", "kind"], "column 'job' holds texts"),
    ({**SCHEMA, "age": [90, 18]}, ["--epsilon", "1", "--target", "kind"], "lower one first"),
    ({**SCHEMA, "age": "numbers"}, ["--epsilon", "1", "--target", "kind"], 'says "numbers" of column'),
    ({**SCHEMA, "job": ["clerk"]}, ["--epsilon", "1", "--target", "kind"], "not among its 1 declared"),
    ({**SCHEMA, "job": [0, 1]}, ["--epsilon", "1", "--target", "kind"], "has a cell that is none"),
    (SCHEMA, ["--epsilon", "1", "--target", "kind", "--separator", "::"], "one character"),
    (SCHEMA, ["--epsilon", "1", "--target", "kind", "--decimal", ","], "not the same"),
    (SCHEMA, ["--epsilon", "1", "--target", "kind", "--encoding", "utf-88"], "is not known"),
    ({**SCHEMA, "kind": ["old"]}, ["--epsilon", "1", "--target", "kind"], "classes"),
    ({**SCHEMA, "hours": [0, 60]}, ["--epsilon", "1", "--target", "kind"], "missing"),
    ("{", ["--epsilon", "1", "--target", "kind"], "is no JSON"),
    ("[]", ["--epsilon", "1", "--target", "kind"], "by its name"),
    (SCHEMA, ["--epsilon", "1", "--target", "kind", "--epochs", "3"], "is for recipes"),
    (SCHEMA, ["--epsilon", "1", "--target", "kind", "--features", "small"], "for images"),
    (SCHEMA, ["--epsilon", "1", "--target", "kind", "--test", "nowhere.csv"], "no file"),
    (SCHEMA, ["--epsilon", "1", "--target", "kind", "--validation-fraction", "0.9999"], "none to learn from"),
]


@pytest.mark.parametrize(("schema", "words", "said"), WRONG)
def test_mistakes_are_told(table: Path, schema: object, words: list[str], said: str) -> None:
    code, told = train(table, schema, *words)
    assert code == 2, told
    assert said in told.replace("\n", " ")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a,b\n", "no rows"),
        ("a,a\n1,2\n", "no two alike"),
        ("a,b\n1\n", "a line of"),
        ("a;b\n1;2\n", "--separator ';'"),
        ("a\tb\n1\t2\n", "--separator tab"),
        ("b\n1\n2\n", "no column but 'b'"),
    ],
)
def test_files_that_are_no_tables(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "t.csv").write_text(content)
    told = CliRunner().invoke(app, ["train", "--csv", str(tmp_path / "t.csv"), "--target", "b", "--epsilon", "1"])
    assert told.exit_code == 2
    assert said in told.output + (told.stderr if told.stderr_bytes else "")


@pytest.mark.parametrize(
    "words",
    [
        ["digits", "--csv", "x.csv"],
        ["digits", "--target", "y"],
        ["digits", "--separator", ";"],
        ["--images", "x", "--csv", "y"],
        [],
    ],
)
def test_one_source_of_records(words: list[str]) -> None:
    told = CliRunner().invoke(app, ["train", *words])
    assert told.exit_code == 2
    if {"--csv", "--images"} <= set(words):
        assert "--images and --csv are given" in told.output


def test_dates_and_columns_that_are_left_out(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    days = draw.integers(0, 3000, 500)
    dates = [str(np.datetime64("2015-01-01") + int(day)) for day in days]
    dates[3] = ""
    with (tmp_path / "t.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["name", "joined", "kind"], *zip([f"n{i}" for i in days], dates, days > 1500, strict=True)])
    joined = {"from": "2015-01-01", "to": "2023-12-31"}
    words = ["--epsilon", "3", "--target", "kind"]
    code, told = train(tmp_path / "t.csv", {"joined": {**joined, "missing": True}}, *words)
    assert code == 2
    assert "--without name" in " ".join(told.split())
    words += ["--without", "name"]
    code, told = train(tmp_path / "t.csv", {"joined": joined}, *words)
    assert code == 2
    assert "column 'joined' has missing dates" in " ".join(told.split())
    code, told = train(tmp_path / "t.csv", {"joined": {**joined, "to": "gone"}}, *words)
    assert code == 2
    assert "two dates like" in told
    code, told = train(tmp_path / "t.csv", {"joined": joined, "kind": joined}, *words)
    assert code == 2
    assert "is a number or a class" in " ".join(told.split())
    run = tmp_path / "run"
    words += ["--validation-fraction", "0.2", "--output", str(run), "--json"]
    code, told = train(tmp_path / "t.csv", {"joined": {**joined, "missing": True}}, *words)
    assert code == 0, told
    assert json.loads((run / "result.json").read_text())["accuracy"] > 0.85
    assert "--without name" in read_run(run).about.command
    again = json.loads((run / "schema.json").read_text())
    assert again == {"joined": {**joined, "missing": True}}
    code, told = train(tmp_path / "t.csv", again, *words[:6])
    assert code == 0, told
    code, told = train(tmp_path / "t.csv", again, *words[:4], "--without", "nam")
    assert code == 2
    assert "no such column" in " ".join(told.split())


def test_own_records_are_certified_in_python_alone(table: Path) -> None:
    run = table.parent / "run"
    train(table, {**SCHEMA, "pay": [0, 1e5]}, "--epsilon", "1", "--target", "kind", "--output", str(run))
    told = CliRunner().invoke(app, ["certify", str(run)])
    assert told.exit_code == 2
    assert "records of your own" in " ".join(told.stderr.split())


def test_training_records_are_not_judged_on(table: Path, tmp_path: Path) -> None:
    """Their figures would be in the report as they are."""
    (tmp_path / "copy.csv").write_bytes(table.read_bytes())
    for test in (table, tmp_path / "copy.csv"):
        code, told = train(table, SCHEMA, "--epsilon", "1", "--target", "kind", "--test", str(test))
        assert code == 2
        assert "nobody has paid for" in " ".join(told.split())


def test_other_ways_to_write_a_table(tmp_path: Path) -> None:
    from lipdp.cli.csv_files import CsvForm, _values, read_csv
    from lipdp.estimators import numeric

    (tmp_path / "t.csv").write_text("straße;größe\nÄußere;1,5\nInnere;NA\n", encoding="cp1252")
    with pytest.raises(DataError, match="--encoding"):
        read_csv(tmp_path / "t.csv", CsvForm(";"))
    form = CsvForm(";", ",", "cp1252")
    columns = read_csv(tmp_path / "t.csv", form)
    assert columns["straße"] == ["Äußere", "Innere"]
    assert np.array_equal(_values("größe", columns["größe"], numeric(0, 2, missing=True), form), [1.5, np.nan], equal_nan=True)
    with pytest.raises(DataError, match=r'\{"größe": \{"low": 0, "high": 2, "missing": true\}\}'):
        _values("größe", columns["größe"], numeric(0, 2), form)
    assert form.words == ["--separator", ";", "--decimal", ",", "--encoding", "cp1252"]
