"""Hostile files with a secret in a cell, a picture, its tags or its name: no command and no reader tells of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from lipdp.cli import app
from lipdp.data import read_images, unreadable_pictures
from lipdp.data.images import read_labels, read_pictures
from lipdp.errors import LipdpError
from lipdp.estimators.reading import forget_rows
from tests.private.marker import MARKS, NUMBER, TEXT, check, files_of, told

GOOD = "age,job,kind\n" + "".join(
    f"{20 + number % 60},{'clerk' if number % 3 else 'nurse'},{'ab'[number % 2]}\n" for number in range(30)
)
SCHEMA = {"age": [18, 90], "job": ["clerk", "nurse"], "kind": ["a", "b"]}

# What a file of a person may look like; the last line, or the first, holds the secret.
FILES: dict[str, str | bytes] = {
    "no names": f"34,{TEXT},{NUMBER}\n" * 3 + "35,clerk,a\n",
    "no names, texts": f"{TEXT},clerk,a\nben,nurse,b\n",
    "names that are one cell": f"{TEXT};clerk;a\nben;nurse;b\n",
    "names twice": f"{TEXT},{TEXT},kind\n1,2,a\n",
    "names missing": f"{TEXT},,kind\n1,2,a\n",
    "a text for a number": GOOD + f"{TEXT},clerk,a\n",
    "a number with a unit": GOOD + f"{NUMBER} years,clerk,a\n",
    "a number with a comma": GOOD.replace(",", ";") + "7391046,5;clerk;a\n",
    "a number beyond": GOOD + f"{NUMBER},clerk,a\n",
    "a category that nobody declared": GOOD + f"33,{TEXT},a\n",
    "a class that nobody declared": GOOD + f"33,clerk,{TEXT}\n",
    "a class that is missing": GOOD + f"{NUMBER},clerk,\n",
    "a short line": GOOD + f"{TEXT}\n",
    "a long line": GOOD + f"33,clerk,a,{TEXT}\n",
    "a quote": GOOD + f'33,"{TEXT},a\n',
    "a zero byte": GOOD + f"33,{TEXT}\0,a\n",
    "a long cell": GOOD + f"33,{TEXT * 20_000},a\n",
    "not utf-8": (GOOD + f"33,{TEXT}é,a\n").encode("latin-1"),
    "utf-16": (GOOD + f"33,{TEXT},a\n").encode("utf-16"),
    "a missing number": GOOD + f",{TEXT},a\n",
    "infinite": GOOD + f"inf,{TEXT},a\n",
    "nothing but names": f"{TEXT},{NUMBER}\n",
    "a picture": b"\x89PNG" + TEXT.encode() + bytes(range(256)),
}

TRAININGS: dict[str, list[str]] = {
    "with a schema": ["--target", "kind", "--schema", "SCHEMA"],
    "without": ["--target", "kind"],
    "another target": ["--target", "age", "--schema", "SCHEMA"],
    "a number as target": ["--target", "age"],
    "no target": [],
    "an absent target": ["--target", "Kind"],
    "semicolons": ["--target", "kind", "--separator", ";", "--decimal", ","],
    "latin-1": ["--target", "kind", "--encoding", "latin-1", "--schema", "SCHEMA"],
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lipdp.estimators.methods._STEPS", 2)
    monkeypatch.setattr("lipdp.estimators.methods._CLIPPED", {"steps": 2, "clip": 1.0, "share": 0.1, "reach": 3 / 32})
    forget_rows()


def command(*words: str) -> Callable[[], object]:
    """A command of the console script: all that it writes goes to the streams that are searched."""

    def run() -> object:
        done = CliRunner().invoke(app, list(words))
        print(done.output, done.stderr if done.stderr_bytes else "")
        assert done.exit_code in (0, 2, 3), (done.exit_code, done.output)
        return done.exit_code

    return run


def write(folder: Path, name: str) -> Path:
    place, content = folder / "t.csv", FILES[name]
    place.write_bytes(content if isinstance(content, bytes) else content.encode())
    return place


@pytest.mark.parametrize("name", FILES)
def test_a_table_on_the_command_line(tmp_path: Path, name: str) -> None:
    place = write(tmp_path, name)
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    for kind, words in TRAININGS.items():
        own = [str(tmp_path / "schema.json") if word == "SCHEMA" else word for word in words]
        # As JSON the same message is written once more: of two of the ways.
        for more in ([], ["--json"]) if kind in ("with a schema", "without") else ([],):
            check(command("train", "--csv", str(place), "--epsilon", "2", *own, *more), what=(name, kind))


@pytest.mark.parametrize("name", ["a number beyond", "a category that nobody declared", "a missing number"])
def test_a_report_of_a_table(tmp_path: Path, name: str) -> None:
    place = write(tmp_path, name)
    declared = {
        "age": {"low": 18, "high": 90, "missing": True},
        "job": {"values": ["clerk"], "other": True},
        "kind": {"values": ["a", "b"]},
    }
    (tmp_path / "schema.json").write_text(json.dumps(declared))
    run = tmp_path / "run"
    words = ["--target", "kind", "--schema", str(tmp_path / "schema.json"), "--output", str(run), "--validation-fraction", "0.2"]
    heard = check(command("train", "--csv", str(place), "--epsilon", "2", *words))
    assert heard.result == 0
    written = files_of(run)
    assert len(written) >= 7
    assert not [file for file, content in written.items() if any(mark in (file + content).casefold() for mark in MARKS)]


@pytest.mark.parametrize("name", FILES)
def test_answers_about_a_column(tmp_path: Path, name: str) -> None:
    place = write(tmp_path, name)
    for column in ("age", "kind", "absent"):
        words = ["--column", column, "--query", "mean", "--low", "0", "--high", "100", "--quick", "--epsilon", "1", "--adjacency"]
        for more in (["add-remove"], ["add-remove", "--json"], ["add-remove", "--encoding", "utf-8"]):
            check(command("mechanism", "answer", str(place), *words, *more), what=(name, column, more))


# --- pictures ---------------------------------------------------------------------------------------------------------


def picture(file: Path, **options: object) -> None:
    image = pytest.importorskip("PIL.Image")
    file.parent.mkdir(parents=True, exist_ok=True)
    image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 60), dtype=np.uint8)).save(file, **options)


def cut(place: Path) -> None:
    file = place / "a" / f"{TEXT}.png"
    picture(file)
    file.write_bytes(file.read_bytes()[:200])


def tagged(place: Path) -> None:
    """Tags of a camera, and too many of them: what Pillow warns of and logs."""
    image = pytest.importorskip("PIL.Image")
    own = image.Exif()
    own[0x013B] = own[0x010E] = TEXT
    picture(place / "a" / "0.jpg", exif=own.tobytes()[:-9])
    picture(place / "a" / "0.tif", description=TEXT)


def chunked(place: Path) -> None:
    png = pytest.importorskip("PIL.PngImagePlugin")
    info = png.PngInfo()
    info.add_text("Author", TEXT)
    picture(place / "a" / "0.png", pnginfo=info)
    content = (place / "a" / "0.png").read_bytes()
    (place / "a" / "1.png").write_bytes(content.replace(TEXT.encode(), TEXT.upper().encode()))  # its check sum is wrong


def others(place: Path) -> None:
    (place / "a").mkdir(parents=True, exist_ok=True)
    (place / "a" / f"{TEXT}.pdf").write_bytes(b"%PDF")
    (place / f"{TEXT}").mkdir()
    picture(place / f"{TEXT}.png")


def text_file(place: Path) -> None:
    (place / "a").mkdir(parents=True, exist_ok=True)
    (place / "a" / f"{TEXT}.png").write_text(TEXT)


def a_folder(place: Path) -> None:
    (place / "a" / f"{TEXT}.png").mkdir(parents=True)


def a_link(place: Path) -> None:
    (place / "a").mkdir(parents=True, exist_ok=True)
    (place / "a" / f"{TEXT}.png").symlink_to(place / f"nowhere-{TEXT}")


FOLDERS = [cut, tagged, chunked, others, text_file, a_folder, a_link]


@pytest.mark.parametrize("spoil", FOLDERS)
def test_folders_of_pictures(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    place = tmp_path / "photos"
    picture(place / "a" / "00.png")
    picture(place / "b" / "01.png")
    spoil(place)
    for read in (read_images, read_pictures, read_labels):
        check(lambda read=read: type(read(place)), what=(spoil.__name__, read.__name__))  # type: ignore[misc]
    if spoil in (cut, text_file, a_folder, a_link):
        assert [file.name for file in unreadable_pictures(place)] == [f"{TEXT}.png"]


def stored(place: Path, **arrays: object) -> None:
    np.savez(place, **arrays, allow_pickle=True)  # type: ignore[arg-type]


ARRAYS: dict[str, dict[str, object]] = {
    "labels that are objects": {"images": np.zeros((3, 9, 9)), "labels": np.array([TEXT, 1, None], dtype=object)},
    "images that are objects": {"images": np.array([TEXT] * 3, dtype=object), "labels": [0, 1, 0]},
    "images that are texts": {"images": np.array([TEXT] * 3), "labels": [0, 1, 0]},
    "bright images": {"images": np.full((3, 9, 9), NUMBER), "labels": [0, 1, 0]},
    "whole numbers": {"images": np.full((3, 9, 9), int(NUMBER)), "labels": [0, 1, 0]},
    "complex images": {"images": np.full((3, 9, 9), NUMBER * 1j), "labels": [0, 1, 0]},
    "too few labels": {"images": np.zeros((3, 9, 9)), "labels": [TEXT, "a"]},
    "labels that are missing": {"images": np.zeros((3, 9, 9)), "labels": [NUMBER, np.nan, 1.0]},
    "continuous labels": {"images": np.zeros((3, 9, 9)), "labels": [NUMBER, 0.25, 1.0]},
    "labels in two columns": {"images": np.zeros((3, 9, 9)), "labels": [[NUMBER, 1]] * 3},
    "no labels": {"images": np.full((3, 9, 9), NUMBER)},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_of_images(tmp_path: Path, name: str) -> None:
    import lipdp

    stored(tmp_path / "own.npz", **ARRAYS[name])
    heard = check(lambda: lipdp.PrivateImageClassifier(3.0).fit(tmp_path / "own.npz"), what=name)
    assert isinstance(heard.error, LipdpError)
    heard = check(command("train", "--images", str(tmp_path / "own.npz"), "--epsilon", "3"), what=name)
    assert heard.result == 2
    given = {key: np.asarray(value) for key, value in ARRAYS[name].items()}
    model = lipdp.PrivateImageClassifier(3.0)
    heard = check(lambda: model.fit(given["images"], given.get("labels")), what=name)
    assert isinstance(heard.error, LipdpError)
    assert not any(mark in told(vars(model)).casefold() for mark in MARKS)
