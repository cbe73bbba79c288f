"""Pictures as people have them: each is read by itself, and what is passed over is told."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import pytest

from lipdp.data.images import read_images, read_pictures, unreadable_pictures
from lipdp.errors import DataError, LipdpWarning

Image = pytest.importorskip("PIL.Image")


def _folder(place: Path, *pictures: tuple[str, np.ndarray]) -> Path:
    for name, pixels in pictures:
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(place / name)
    return place


GREY = np.full((9, 12), 60, np.uint8)
COLOUR = np.dstack([GREY, GREY // 2, GREY // 3])


def test_one_size_whatever_the_others_are(tmp_path) -> None:
    alone = read_pictures(_folder(tmp_path / "one", ("a/0.png", COLOUR)), side=16)
    beside = read_pictures(_folder(tmp_path / "two", ("a/0.png", COLOUR), ("a/1.png", np.zeros((40, 7), np.uint8))), side=16)
    assert alone.shape == (1, 16, 16, 3)
    assert np.array_equal(alone[0], beside[0])


def test_transparency_16_bits_and_turned_cameras(tmp_path) -> None:
    clear = np.dstack([COLOUR, np.zeros((9, 12), np.uint8)])  # colours that nobody sees
    deep = np.full((9, 12), 40_000, np.uint16)
    place = _folder(tmp_path, ("a/0.png", clear), ("a/1.png", deep))
    seen = read_pictures(place)
    assert (seen[0] == 255).all()
    assert (seen[1] == 40_000 // 257).all()
    turned = Image.fromarray(COLOUR)
    about = turned.getexif()
    about[0x0112] = 6  # a quarter turn
    turned.save(tmp_path / "a" / "2.jpg", exif=about)
    with Image.open(tmp_path / "a" / "2.jpg") as stored:
        assert stored.size == (12, 9)
    (tmp_path / "a" / "0.png").unlink()
    (tmp_path / "a" / "1.png").unlink()
    assert read_pictures(tmp_path).shape == (1, 12, 9, 3)


def test_nothing_is_passed_over_in_silence(tmp_path) -> None:
    place = _folder(tmp_path, ("a/0.png", GREY), ("b/0.png", GREY))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (place / "a" / ".hidden").write_text("")
        assert read_images(place)[0].shape == (2, 9, 12)
    (place / "empty").mkdir()
    (place / "a" / "photo.heic").write_text("")
    _folder(place, ("loose.png", GREY))
    with pytest.warns(LipdpWarning, match=r"1 folders without a picture.*1 pictures that lie in no folder.*1 files or folders"):
        _, labels = read_images(place)
    assert labels.tolist() == ["a", "b"]


def test_a_file_that_can_not_be_read_is_told_to_its_holder_alone(tmp_path) -> None:
    place = _folder(tmp_path, ("a/0.png", np.random.default_rng(0).integers(0, 255, (60, 60), dtype=np.uint8)))
    (place / "a" / "0.png").write_bytes((place / "a" / "0.png").read_bytes()[:200])
    with pytest.raises(DataError, match=r"can't be read.*lipdp\.data\.unreadable_pictures") as told:
        read_pictures(place)
    assert "0.png" not in str(told.value)
    assert unreadable_pictures(place) == [place / "a" / "0.png"]
