"""``lipdp predict``: what was trained on the command line says of new records what the estimator itself would."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import lipdp
from lipdp.cli import app
from lipdp.data import picture_files
from lipdp.estimators import categorical, numeric

ROWS = [(18 + n % 60, ["Ulm", "Bonn", ""][n % 3]) for n in range(90)]
SCHEMA = {"age": [18, 90], "city": {"values": ["Ulm", "Bonn"], "other": True}}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("lipdp.estimators.methods._STEPS", 5)
    monkeypatch.setattr("lipdp.estimators.images._STEPS", 3)
    monkeypatch.chdir(tmp_path)


def ran(*words: object, code: int = 0) -> str:
    told = CliRunner().invoke(app, [str(word) for word in words], prog_name="lipdp")
    assert told.exit_code == code, told.stderr
    return told.stdout if code == 0 else " ".join(told.stderr.split())


def write(name: str, header: list[str], rows: list[tuple]) -> None:
    with Path(name).open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows])


def trained(targets: list[str], target: object) -> None:
    write("people.csv", ["city", "age", "id", "y"], [(city, age, n, targets[n]) for n, (age, city) in enumerate(ROWS)])
    Path("s.json").write_text(json.dumps(SCHEMA | {"y": target}))
    own = ["--csv", "people.csv", "--target", "y", "--schema", "s.json", "--without", "id"]
    ran("train", *own, "--epsilon", 8, "--reproducible", 3, "--output", "run")
    write("new.csv", ["age", "note", "city"], [(age, "x", city) for age, city in ROWS])  # in another order, without a target


def table() -> np.ndarray:
    return np.array([(city, age) for age, city in ROWS], dtype=object)


def test_classes_are_those_of_the_estimator() -> None:
    targets = ["old" if age > 45 else "young" for age, _ in ROWS]
    trained(targets, ["young", "old"])
    ran("predict", "run", "new.csv", "--output", "said.csv")
    header, *said = Path("said.csv").read_text().splitlines()
    own = lipdp.PrivateClassifier(
        epsilon=8, schema=[categorical(["Ulm", "Bonn"], other=True), numeric(18, 90)], classes=["young", "old"],
        reproducible=True, random_state=3,
    )  # fmt: skip
    assert header == "prediction"
    assert said == own.fit(table(), np.array(targets, dtype=object)).predict(table()).tolist()
    assert set(said) == {"young", "old"}


def test_numbers_lie_in_the_declared_range() -> None:
    trained([str(2 * age) for age, _ in ROWS], [36, 180])
    said = json.loads(ran("predict", "run", "new.csv", "--json").splitlines()[-1])["predictions"]
    assert len(said) == len(ROWS)
    assert all(36 <= value <= 180 for value in said)
    assert np.corrcoef(said, [age for age, _ in ROWS])[0, 1] > 0.5


def test_pictures_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    blocks = lipdp.estimators.images._blocks
    monkeypatch.setattr("lipdp.estimators.images._blocks", lambda *given: (blocks(*given)[0][-1:], 3328))
    draw = np.random.default_rng(0)
    for n in range(24):
        for place in (f"train/{'dark' if n % 2 else 'light'}", "new"):
            Path(place).mkdir(parents=True, exist_ok=True)
            pixels = draw.integers(0, 60, (20, 30, 3)) + 150 * (1 - n % 2)
            image.fromarray(pixels.astype(np.uint8)).save(f"{place}/{n:02}.png")
    ran("train", "--images", "train", "--epsilon", 50, "--output", "run")
    header, *lines = ran("predict", "run", "new").splitlines()
    assert header == "file,prediction"
    assert [Path(line.split(",")[0]) for line in lines] == picture_files("new")
    right = ["dark" if n % 2 else "light" for n in range(24)]
    assert np.mean([line.split(",")[1] == answer for line, answer in zip(lines, right, strict=True)]) > 0.8


def test_what_does_not_fit_is_said() -> None:
    trained(["old" if age > 45 else "young" for age, _ in ROWS], ["young", "old"])
    write("other.csv", ["age", "town"], [(20, "Ulm")])
    assert "has no column 'city', which the model reads" in ran("predict", "run", "other.csv", code=2)
    write("gone.csv", ["age", "city"], [("", "Ulm")])
    assert "column 'age' has missing values" in ran("predict", "run", "gone.csv", code=2)
    assert "nothing is overwritten" in ran("predict", "run", "new.csv", "--output", "new.csv", code=2)
    ran("train", "digits", "--epsilon", 1, "--epochs", 1, "--output", "recipe")
    assert "lipdp.load('recipe/model.lipdp')" in ran("predict", "recipe", "new.csv", code=2)
