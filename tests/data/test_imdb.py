"""IMDB: hashing, both layouts on disk, damaged files, and the real reviews where they are."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import os
import tarfile

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.many import examples

from lipdp import data
from lipdp.data.text import BUCKETS, IMDB, LENGTH, hashed_words
from lipdp.errors import ConfigurationError, DataError

REAL = os.environ.get("LIPDP_DATA")
REVIEWS = [
    ("pos", 0, 10, "Great film.<br /><br />GREAT cast"),
    ("pos", 1, 7, "tab\there"),
    ("neg", 0, 1, "bad"),
    ("neg", 1, 4, "Café"),
]


def small(sha256="0" * 64):
    info = dataclasses.replace(IMDB.info, train_size=4, test_size=4)
    return dataclasses.replace(IMDB, info=info, archive=dataclasses.replace(IMDB.archive, sha256=sha256, mirrors=()))


def lines(reviews=REVIEWS):
    return "".join(f"{stars}\t{text}\n" for _, _, stars, text in reviews)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "imdb").mkdir()
    for part in ("train", "test"):
        (tmp_path / "imdb" / f"{part}.tsv").write_text(lines(), encoding="utf8", newline="\n")
    return tmp_path


def test_words_not_marks_case_or_markup():
    numbers = hashed_words(["Great, GREAT film!<br />great-film", "it's its", ""], length=6)
    great, film = int(numbers[0, 0]), int(numbers[0, 2])
    assert numbers[0].tolist() == [great, great, film, great, film, 0]
    assert great != film
    assert numbers[1, 0] != numbers[1, 1]  # an inner apostrophe is part of a word
    assert numbers[2].tolist() == [0] * 6


@settings(max_examples=examples(25), deadline=None)
@given(st.lists(st.text(max_size=60), max_size=4), st.integers(1, 8), st.integers(2, 50))
def test_any_text(texts, length, buckets):
    numbers = hashed_words(texts, length, buckets)
    assert numbers.shape == (len(texts), length)
    assert numbers.dtype == torch.int64
    assert bool(((numbers >= 0) & (numbers < buckets)).all())
    for number, text in enumerate(texts):  # a text's numbers depend on no other text
        assert torch.equal(hashed_words([text], length, buckets)[0], numbers[number])
    ended = numbers == 0
    assert torch.equal(ended, ended.cummax(1).values)  # zeros only at the end


def test_numbers_are_the_same_in_every_process():
    """Python's own hash is not: it is salted."""
    assert hashed_words(["A public hash"], 4).tolist() == [[4551, 15757, 13785, 0]]


def test_words_spread_over_the_buckets():
    words = [f"word{i}" for i in range(20_000)]
    counts = torch.bincount(hashed_words(words, 1, 1001)[:, 0], minlength=1001)[1:]
    assert int(counts.min()) > 0
    chi = float(((counts - 20.0) ** 2 / 20.0).sum())  # 999 degrees of freedom: mean 999, deviation 45
    assert chi < 999 + 6 * 45


def test_what_can_not_be_meant():
    for length, buckets in ((0, 10), (3, 1)):
        with pytest.raises(ConfigurationError, match="length"):
            hashed_words(["a"], length, buckets)


def test_tables(folder):
    train, test, info = small().load(folder, download=False)
    assert info.name == "imdb"
    for part in (train, test):
        tokens, labels = part.tensors
        assert tokens.shape == (4, LENGTH)
        assert labels.tolist() == [1, 1, 0, 0]
        assert torch.equal(tokens, hashed_words([text for *_, text in REVIEWS]))
    assert int((tokens[1] > 0).sum()) == 2  # a tab in the text is no second column


def test_the_archive_gives_the_same(folder):
    expected = small().load(folder, download=False)
    for part in ("train", "test"):
        (folder / "imdb" / f"{part}.tsv").unlink()
    archive = folder / "imdb" / IMDB.archive.name
    with tarfile.open(archive, "w:gz") as tar:
        for part in ("test", "train"):
            for kind, number, stars, text in reversed(REVIEWS):
                _add(tar, f"aclImdb/{part}/{kind}/{number}_{stars}.txt", text)
        _add(tar, "aclImdb/train/unsup/0_0.txt", "no label")
        _add(tar, "aclImdb/README", "how to cite")
    source = small(hashlib.sha256(archive.read_bytes()).hexdigest())
    assert source.availability(folder).on_disk
    found = source.load(folder, download=False)
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    assert sorted(path.name for path in (folder / "imdb").iterdir()) == [IMDB.archive.name, "test.tsv", "train.tsv"]


def _add(tar, name, text):
    content = text.encode()
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (lines(REVIEWS[:3]), "3 reviews"),
        (lines([*REVIEWS[:3], ("neg", 1, 8, "x")]), "half of each"),
        (lines([*REVIEWS[:3], ("neg", 1, 0, "x")]), "1 to 10"),
        ("no stars\n", "can't be read"),
        ("x\ty\n", "can't be read"),
        ("", "can't be read"),
    ],
)
def test_damaged_tables(folder, text, match):
    (folder / "imdb" / "train.tsv").write_text(text, encoding="utf8")
    with pytest.raises(DataError, match=match):
        small().load(folder, download=False)


def test_bytes_that_are_no_text(folder):
    (folder / "imdb" / "test.tsv").write_bytes(b"7\t\xff\xfe\n")
    with pytest.raises(DataError, match="can't be read"):
        small().load(folder, download=False)


def test_a_damaged_archive(tmp_path):
    (tmp_path / "imdb").mkdir()
    archive = tmp_path / "imdb" / IMDB.archive.name
    archive.write_bytes(b"no archive")
    with pytest.raises(DataError, match="sha256"):
        IMDB.load(tmp_path, download=False)
    with pytest.raises(DataError, match="corrupt"):
        small(hashlib.sha256(b"no archive").hexdigest()).load(tmp_path, download=False)


def test_missing(tmp_path):
    assert not IMDB.availability(tmp_path).on_disk
    with pytest.raises(DataError, match=r"aclImdb_v1\.tar\.gz"):
        data.load("imdb", root=tmp_path, download=False)


@pytest.mark.skipif(not REAL or not IMDB.availability(data.datasets.data_root(REAL)).on_disk, reason="needs the real reviews")
def test_the_real_reviews():
    train, test, info = data.load("imdb", root=REAL, download=False)
    for part in (train, test):
        tokens, labels = part.tensors
        assert tokens.shape == (25_000, LENGTH)
        assert int(labels.sum()) == 12_500
        assert int(tokens.max()) < BUCKETS
        assert 0.4 < float((tokens > 0).float().mean()) < 0.9
    assert info.class_names[1] == "positive"
