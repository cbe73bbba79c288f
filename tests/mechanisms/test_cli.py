"""``lipdp mechanism``: learn, release from a CSV column, compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from lipdp.cli.csv_files import read_column
from lipdp.cli.mechanism import app as mechanism
from lipdp.cli.output import FriendlyGroup
from lipdp.errors import ConfigurationError, DataError
from lipdp.privacy import Budget
from tests.mechanisms.common import compared

app = typer.Typer(cls=FriendlyGroup)
app.add_typer(mechanism, name="mechanism")
run = CliRunner()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    compared("mean").chosen.save(tmp_path / "mean.mechanism")
    (tmp_path / "data.csv").write_text("name,age\n" + "".join(f"p{i},{i % 10}\n" for i in range(20)))
    return tmp_path


def invoke(*words: object) -> tuple[int, str]:
    result = run.invoke(app, ["mechanism", *map(str, words)])
    return result.exit_code, result.output


def test_learn_writes_a_mechanism(tmp_path: Path) -> None:
    target = tmp_path / "m"
    code, text = invoke(
        "learn", "mean", "--epsilon", 1, "--size", 20, "--low", 0, "--high", 10, "--quick", "--output", target, "--json"
    )
    assert code == 0, text
    said = json.loads(text.strip().splitlines()[-1])
    assert said["query"] == "mean"
    assert said["epsilon"] == 1.0
    assert said["returned"] in ("learned", "expert")
    assert target.is_file()


def test_release_pays_until_the_budget_is_spent(files: Path) -> None:
    words = ("release", files / "mean.mechanism", files / "data.csv", "--column", "age", "--ledger", files / "l")
    code, text = invoke(*words, "--budget", 2, "--dataset", "people", "--json")
    assert code == 0, text
    said = json.loads(text.strip().splitlines()[-1])
    assert 0 <= said["answer"] <= 10
    assert said["remaining"] == 1.0
    assert invoke(*words)[0] == 0
    code, text = invoke(*words)
    assert code == 3
    assert "left" in text


def test_release_refuses_what_it_should(files: Path) -> None:
    begin = ("release", files / "mean.mechanism")
    ledger = ("--ledger", files / "l", "--budget", 2, "--dataset", "people")
    outside = files / "outside.csv"
    outside.write_text("age\n" + "50\n" * 20)
    code, text = invoke(*begin, outside, "--column", "age", *ledger)
    assert code == 2
    assert "outside of the bounds" in text
    assert not (files / "l").exists()
    assert invoke(*begin, outside, "--column", "age", *ledger, "--clamp")[0] == 0
    mistakes = (
        ("age\n1\n\n,\nx\n", "no number"),
        ("age;pay\n1,5;2\n", "1.5, not 1,5"),
        ("age\n1\n", "shape"),
        ("years\n1\n", "no column 'age'"),
    )
    for content, words in mistakes:
        (files / "bad.csv").write_text(content)
        code, text = invoke(*begin, files / "bad.csv", "--column", "age", "--no-ledger")
        assert code == 2
        assert words in " ".join(text.split())
    assert invoke(*begin, files / "data.csv", "--column", "age")[0] == 2  # neither a ledger nor --no-ledger
    assert invoke(*begin, files / "none.csv", "--column", "age", "--no-ledger")[0] == 2
    assert invoke("release", files / "data.csv", files / "data.csv", "--column", "age", "--no-ledger")[0] == 2


def test_compare(tmp_path: Path) -> None:
    words = ("compare", "variance", "--epsilon", 1, "--size", 20, "--low", 0, "--high", 10, "--quick")
    code, text = invoke(*words, "--json")
    assert code == 0, text
    said = json.loads(text.strip().splitlines()[-1])
    assert said["learned_loss"] / said["expert_loss"] == pytest.approx(said["learned_to_expert"])
    code, text = invoke(*words)
    assert "learned ÷ expert" in text
    assert invoke("compare", "mode", "--epsilon", 1, "--size", 20, "--low", 0, "--high", 10)[0] == 2
    assert invoke("learn", "mean", "--epsilon", 1, "--size", 9, "--low", 0, "--high", 1, "--output", tmp_path / "no" / "m")[0] == 2


def test_files_in_other_encodings_are_read(tmp_path: Path) -> None:
    text = "größe;Straße\n1.5;a\n2;ß\n"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "latin-1"):
        (tmp_path / encoding).write_bytes(text.encode(encoding))
        assert read_column(tmp_path / encoding, "größe") == [1.5, 2.0]
    (tmp_path / "koi").write_bytes("рост,b\n1,2\n".encode("koi8-r"))
    assert read_column(tmp_path / "koi", "рост", "koi8-r") == [1.0]
    with pytest.raises(DataError, match="--encoding names another"):
        read_column(tmp_path / "koi", "рост")
    with pytest.raises(DataError, match="can't be read as utf-8"):
        read_column(tmp_path / "latin-1", "größe", "utf-8")
    with pytest.raises(ConfigurationError, match="no such encoding"):
        read_column(tmp_path / "koi", "b", "klingon")


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    (tmp_path / "twice").write_text("age,b,age\n1,2,3\n")
    assert read_column(tmp_path / "twice", "b") == [2.0]
    with pytest.raises(DataError, match="2 columns named 'age'"):
        read_column(tmp_path / "twice", "age")
    (tmp_path / "short").write_text("a,b\n1,2\n3\n")
    with pytest.raises(DataError, match="a line is too short"):
        read_column(tmp_path / "short", "b")


def test_answer_plans_charges_and_releases(files: Path) -> None:
    ages = "name,age,pay\n" + "".join(f"p{i},{20 + i % 50},{i % 7 * 1000}\n" for i in range(200))
    (files / "people.csv").write_text(ages)
    Budget(files / "b", epsilon=10.0, delta=0.0, dataset="people", adjacency="replace_one")
    words = ("answer", files / "people.csv", "--low", 0, "--high", 120, "--quick", "--column", "age")
    asked = ("--query", "median", "--query", "std", "--query", "histogram:0,40,120", "--query", "p90")
    code, text = invoke(*words, *asked, "--epsilon", 4, "--budget", files / "b", "--json")
    assert code == 0, text
    said = json.loads(text.strip().splitlines()[-1])
    assert said["remaining"] == 6.0
    median, std, histogram, p90 = said["answers"]
    assert 35 < median["value"] < 55
    assert median["value"] <= p90["value"] < 75
    assert std["interval"][0] <= 14.43 <= std["interval"][1]
    assert abs(sum(histogram["value"]) - 200) < 60
    code, text = invoke(*words, "--query", "mean", "--epsilon", 7, "--budget", files / "b")
    assert code == 3, text  # too much
    two = ("--column", "pay", "--low", 0, "--high", 10_000, "--query", "mean", "--epsilon", 2, "--budget", files / "b")
    code, text = invoke(*words, *two)
    assert code == 0, text
    assert "planning pay" in text
    assert "95% of the noise" in text
    assert Budget(files / "b").remaining == pytest.approx(4.0)
    belief = ("--belief", files / "people.csv", "--query", "mean", "--epsilon", 1)
    code, text = invoke(*words, *belief)
    assert code == 0, text
    assert "none was given" in text


def test_answer_refuses_before_anything_is_paid(files: Path) -> None:
    Budget(files / "b", epsilon=1.0, delta=0.0, dataset="people", adjacency="replace_one")
    words = ("answer", files / "data.csv", "--column", "age", "--epsilon", 1, "--quick", "--budget", files / "b")
    for more, said in (
        (("--query", "mode", "--low", 0, "--high", 10), "unknown"),
        (("--query", "mean", "--low", 5, "--high", 10), "outside of the bounds"),
        (("--query", "mean", "--low", 0, "--low", 1, "--high", 10), "2 times for 1"),
        (("--query", "histogram:3,1", "--low", 0, "--high", 10), "rising order"),
        (("--query", "histogram:0,1", "--low", 0, "--high", 10), "span the bounds"),
        (("--query", "mean", "--query", "mean", "--low", 0, "--high", 10), "different"),
    ):
        code, text = invoke(*words, *more)
        assert code == 2
        assert said in " ".join(text.split())
    assert Budget(files / "b").remaining == 1.0


def test_describe_checks_the_file(files: Path) -> None:
    code, text = invoke("describe", files / "mean.mechanism", "--json")
    assert code == 0, text
    assert json.loads(text.strip().splitlines()[-1])["epsilon"] == 1.0
    (files / "mean.mechanism").write_bytes((files / "mean.mechanism").read_bytes()[:-40])
    assert invoke("describe", files / "mean.mechanism")[0] == 2


def test_answer_with_a_private_number_of_rows(files: Path) -> None:
    (files / "people.csv").write_text("age\n" + "".join(f"{20 + i % 50}\n" for i in range(2000)))
    Budget(files / "b", epsilon=10.0, delta=0.0, dataset="people")
    words = ("answer", files / "people.csv", "--low", 0, "--high", 120, "--column", "age", "--adjacency", "add-remove")
    asked = ("--query", "count", "--query", "mean", "--query", "median", "--query", "p90", "--epsilon", 5)
    code, text = invoke(*words, *asked, "--budget", files / "b", "--json")
    assert code == 0, text
    said = json.loads(text.strip().splitlines()[-1])
    assert (said["remaining"], said["adjacency"]) == (5.0, "add_remove")
    count, mean, median, p90 = (one["value"] for one in said["answers"])
    assert (count, mean, median, p90) == pytest.approx((2000, 44.5, 44.5, 65), abs=12)
    code, text = invoke(*words, *asked)
    assert code == 0, text
    assert "adding or removing one record" in text
    code, text = invoke(*words, *asked[:-2], "--rho", 0.5, "--json")
    assert code == 0, text
    concentrated = json.loads(text.strip().splitlines()[-1])["answers"]
    assert [one["value"] for one in concentrated] == pytest.approx([2000, 44.5, 44.5, 65], abs=12)
    assert concentrated[0]["epsilon"] is None
    assert invoke(*words[:-1], "both", *asked)[0] == 2
    assert invoke(*words, *asked, "--belief", files / "people.csv")[0] == 2


def test_it_says_what_it_does_and_for_how_long_but_not_between_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp.cli.mechanism._EVERY", 0.05)
    words = ("compare", "mean", "--epsilon", 1, "--size", 20, "--low", 0, "--high", 10, "--quick")
    code, text = invoke(*words)
    assert code == 0, text
    assert text.startswith("learning mean of 20 records")
    assert "still at it after" in text
    code, text = invoke(*words, "--json")
    assert code == 0, text
    assert json.loads(text)["query"] == "mean"


def test_a_column_may_be_called_what_looks_like_markup(tmp_path: Path) -> None:
    (tmp_path / "d.csv").write_text("[/b]age\n" + "".join(f"{i % 90}\n" for i in range(40)))
    words = ("--query", "mean", "--low", 0, "--high", 90, "--epsilon", 1, "--quick")
    code, text = invoke("answer", tmp_path / "d.csv", "--column", "[/b]age", *words)
    assert code == 0, text
    assert "planning [/b]age: mean" in text
